"""Samples to packs of one lane: best fit over a bounded look-ahead buffer, several budgets at once.

The oldest buffered sample always goes first, so a sample waits for at most ``look_ahead`` packs: nothing
starves. Then the largest sample (in tokens; ties: the oldest) that fits what is left of *every* budget is
added, the buffer is topped up, and so on until none fits. Best fit keeps the buffer sorted by size: one
pick is a bisection, plus a step down for each candidate that another budget refuses.

Samples are whole or not at all. One larger than a whole budget is dropped and recorded, or, where only
tokens are too many and it ends in text, that text is cut at its end; media are never cut.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from omni_pipeline.core.sample import Modality, Sample, SampleId

UNLIMITED = 1 << 62
_TEXT, _AUDIO = Modality.TEXT, Modality.AUDIO
_ARRIVAL_BITS = 48
_LAST_ARRIVAL = (1 << _ARRIVAL_BITS) - 1


@dataclass(frozen=True, slots=True)
class Budgets:
    """The most that one pack may hold.

    Args:
        tokens: Sequence positions.
        patches: Vision patches, images and videos together.
        mel_frames: Mel frames of audio.
    """

    tokens: int
    patches: int = UNLIMITED
    mel_frames: int = UNLIMITED


@dataclass(frozen=True, slots=True)
class PackSizes:
    """What each sample of a source takes of a pack, by ordinal: int64 [samples] each.

    Args:
        tokens: Sequence positions.
        cut_tokens: The least of them where ``oversize`` cuts: all but one token of a text at the end gone.
        patches: Vision patches.
        mel_frames: Mel frames of audio.
    """

    tokens: npt.NDArray[np.int64]
    cut_tokens: npt.NDArray[np.int64]
    patches: npt.NDArray[np.int64]
    mel_frames: npt.NDArray[np.int64]


@dataclass(slots=True)
class Entry:
    """A drawn sample with its sizes, and where it was drawn: source index and position in the lane."""

    source: int
    position: int
    sample: Sample
    tokens: int
    patches: int
    mel_frames: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A sample that no pack can hold, and why."""

    id: SampleId
    key: str
    shard: str
    lane: int
    reason: str


def media_units(sample: Sample) -> tuple[int, int]:
    """Return (vision patches, mel frames) of a sample."""
    patches = mel_frames = 0
    for segment in sample.segments:
        modality = segment.modality
        if modality is _TEXT:
            continue
        first, second, third = segment.grid
        if modality is _AUDIO:
            mel_frames += first * second * third
        else:
            patches += first * second * third
    return patches, mel_frames


def admit(
    sample: Sample, budgets: Budgets, *, oversize: Literal["drop", "cut"], source: int, position: int
) -> Entry | str:
    """Return the sample as a pack may hold it, or the reason to drop it.

    Args:
        sample: As drawn.
        budgets: Of one pack.
        oversize: What to do with too many tokens; too many patches or mel frames always drop the sample.
        source: Index of the source it was drawn from.
        position: Position it was drawn at.
    """
    patches, mel_frames = media_units(sample)
    tokens = sample.num_tokens
    if patches > budgets.patches:
        return f"{patches} patches, limit {budgets.patches} (order.max_patches)"
    if mel_frames > budgets.mel_frames:
        return f"{mel_frames} mel frames, limit {budgets.mel_frames} (order.max_mel_frames)"
    if tokens < 1:
        return "no tokens"
    if tokens > budgets.tokens:
        reason = f"{tokens} tokens, limit {budgets.tokens} (order.seq_len)"
        if oversize == "drop":
            return reason
        shorter = cut_text(sample, max_tokens=budgets.tokens)
        if shorter is None:
            return f"{reason}; no text at its end that could be cut"
        sample, tokens = shorter, budgets.tokens
    return Entry(source, position, sample, tokens, patches, mel_frames)


def cut_text(sample: Sample, *, max_tokens: int) -> Sample | None:
    """Return the sample with its trailing text cut to make it ``max_tokens`` long, None if it cannot be.

    At least one token of the segment stays, and the end-of-sample token is kept. Its ``offset`` and
    ``length`` are those of the whole text: the loader decodes it and keeps the first ``grid[0]`` tokens.
    """
    excess = sample.num_tokens - max_tokens
    last = sample.segments[-1] if sample.segments else None
    if last is None or last.is_media or last.num_tokens <= excess:
        return None
    kept = last.num_tokens - excess
    return replace(
        sample,
        segments=(*sample.segments[:-1], replace(last, grid=(kept, 1, 1), num_tokens=kept)),
        num_tokens=max_tokens,
        num_labels=sample.num_labels - (excess if last.loss else 0),
    )


class PackBuffer:
    """The look-ahead buffer of one lane.

    Args:
        budgets: Of one pack.
        look_ahead: Most samples buffered.
    """

    def __init__(self, budgets: Budgets, *, look_ahead: int) -> None:
        self._budgets = budgets
        self._look_ahead = look_ahead
        # A key orders entries by tokens, then oldest last; the dictionary keeps them by arrival.
        self._keys: list[int] = []
        self._entries: dict[int, Entry] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries, oldest first."""
        return iter(self._entries.values())

    def add(self, entry: Entry) -> None:
        """Put a drawn sample into the buffer; it must fit an empty pack."""
        key = (entry.tokens << _ARRIVAL_BITS) | (_LAST_ARRIVAL - self._arrivals)
        self._arrivals += 1
        insort(self._keys, key)
        self._entries[key] = entry

    def next_pack(self, draw: Callable[[], Entry | None]) -> list[Entry]:
        """Return the next pack's entries in sequence order; none if no sample is left.

        Args:
            draw: Gives the next sample of the lane, or None when there is none.
        """
        self._fill(draw)
        if not self._keys:
            return []
        first = next(iter(self._entries))
        entry = self._pop(bisect_left(self._keys, first))
        pack = [entry]
        tokens = self._budgets.tokens - entry.tokens
        patches = self._budgets.patches - entry.patches
        mel_frames = self._budgets.mel_frames - entry.mel_frames
        while True:
            self._fill(draw)
            best = self._best_fit(tokens, patches, mel_frames)
            if best < 0:
                return pack
            entry = self._pop(best)
            pack.append(entry)
            tokens -= entry.tokens
            patches -= entry.patches
            mel_frames -= entry.mel_frames

    def _fill(self, draw: Callable[[], Entry | None]) -> None:
        while len(self._keys) < self._look_ahead:
            entry = draw()
            if entry is None:
                return
            self.add(entry)

    def _best_fit(self, tokens: int, patches: int, mel_frames: int) -> int:
        """Index in ``_keys`` of the largest entry that fits, -1 if none does."""
        index = bisect_left(self._keys, (tokens + 1) << _ARRIVAL_BITS) - 1
        while index >= 0:
            entry = self._entries[self._keys[index]]
            if entry.patches <= patches and entry.mel_frames <= mel_frames:
                return index
            index -= 1
        return -1

    def _pop(self, index: int) -> Entry:
        return self._entries.pop(self._keys.pop(index))
