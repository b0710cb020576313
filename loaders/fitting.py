"""Which rows of an index a pack can hold, as whole arrays, and cutting what may be cut.

Samples are whole or not at all. One larger than a whole budget is dropped and recorded, or, where only
tokens are too many and it ends in text, that text is cut at its end; media are never cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from loaders.packing import Budgets
from omni_pipeline.core.sample import Modality, Sample, SampleId

IntArray = npt.NDArray[np.int64]
Oversize = Literal["drop", "cut"]

USABLE, FILTERED, DENIED, UNUSABLE = 0, 1, 2, 3
"""Status of a row: free to be drawn; left out by ``where``; left out by a deny-list; bad in the index."""


@dataclass(frozen=True, slots=True)
class PackSizes:
    """What rows of a source take of a pack: int64 [rows] each, and their status.

    Args:
        tokens: Sequence positions.
        cut_tokens: The least of them where ``oversize`` cuts: all but one token of a text at the end gone.
        patches: Vision patches.
        mel_frames: Mel frames of audio.
        status: int8 [rows]; USABLE, FILTERED, DENIED or UNUSABLE, whose sizes mean nothing.
    """

    tokens: IntArray
    cut_tokens: IntArray
    patches: IntArray
    mel_frames: IntArray
    status: npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that no pack can hold, and why."""

    id: SampleId
    key: str
    shard: str
    lane: int
    reason: str


def fit(sizes: PackSizes, budgets: Budgets, *, oversize: Oversize) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Return (tokens after cutting, whether a pack can hold the row) of every row."""
    least = sizes.cut_tokens if oversize == "cut" else sizes.tokens
    fits = (
        (sizes.status == USABLE)
        & (sizes.tokens >= 1)
        & (least <= budgets.tokens)
        & (sizes.patches <= budgets.patches)
        & (sizes.mel_frames <= budgets.mel_frames)
    )
    return np.minimum(sizes.tokens, budgets.tokens), fits


def misfit(sizes: PackSizes, place: int, *, budgets: Budgets, oversize: Oversize) -> str:
    """Return why no pack can hold the usable row at ``place``, "" if one can; agrees with ``fit``."""
    tokens, cut_tokens, patches, mel_frames = (
        int(column[place]) for column in (sizes.tokens, sizes.cut_tokens, sizes.patches, sizes.mel_frames)
    )
    if patches > budgets.patches:
        return f"{patches} patches, limit {budgets.patches} (order.max_patches)"
    if mel_frames > budgets.mel_frames:
        return f"{mel_frames} mel frames, limit {budgets.mel_frames} (order.max_mel_frames)"
    if tokens < 1:
        return "no tokens"
    if tokens <= budgets.tokens:
        return ""
    reason = f"{tokens} tokens, limit {budgets.tokens} (order.seq_len)"
    if oversize == "drop":
        return reason
    return f"{reason}; no text at its end that could be cut" if cut_tokens > budgets.tokens else ""


def sizes_of(samples: Sequence[Sample]) -> PackSizes:
    """Return the sizes of ``samples``, all usable; the plain version of what sources do with columns."""
    units = np.array([media_units(sample) for sample in samples], dtype=np.int64).reshape(-1, 2)
    tokens = np.array([sample.num_tokens for sample in samples], dtype=np.int64)
    ends = [sample.segments[-1] if sample.segments else None for sample in samples]
    cut = [0 if end is None or end.is_media else max(0, end.num_tokens - 1) for end in ends]
    return PackSizes(
        tokens=tokens,
        cut_tokens=tokens - np.array(cut, dtype=np.int64),
        patches=units[:, 0],
        mel_frames=units[:, 1],
        status=np.full(len(samples), USABLE, dtype=np.int8),
    )


def media_units(sample: Sample) -> tuple[int, int]:
    """Return (vision patches, mel frames) of a sample."""
    patches = mel_frames = 0
    for segment in sample.segments:
        if segment.modality is Modality.AUDIO:
            mel_frames += segment.num_units
        elif segment.modality in (Modality.IMAGE, Modality.VIDEO):
            patches += segment.num_units
    return patches, mel_frames


def cut_text(sample: Sample, *, max_tokens: int) -> Sample:
    """Return the sample with its trailing text cut to make it ``max_tokens`` long, or as it is if it fits.

    At least one token of the segment stays, and the end-of-sample token is kept. Its ``offset`` and
    ``length`` are those of the whole text: the loader decodes it and keeps the first ``grid[0]`` tokens.

    Raises:
        ValueError: It does not end in a text of enough tokens; ``fit`` says so beforehand.
    """
    excess = sample.num_tokens - max_tokens
    if excess <= 0:
        return sample
    last = sample.segments[-1] if sample.segments else None
    if last is None or last.is_media or last.num_tokens <= excess:
        raise ValueError(f"sample {sample.key!r} of {sample.num_tokens} tokens cannot be cut to {max_tokens}")
    kept = last.num_tokens - excess
    return replace(
        sample,
        segments=(*sample.segments[:-1], replace(last, grid=(kept, 1, 1), num_tokens=kept)),
        num_tokens=max_tokens,
        num_labels=sample.num_labels - (excess if last.loss else 0),
    )
