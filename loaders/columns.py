"""Index rows to sized flat columns: which member fills a field, and how large it is for the model.

Everything is worked out per shard with whole arrays, each distinct raw size once. A row that cannot be used
gets a reason instead of a size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from loaders.index import ShardIndex
from omni_pipeline.core.errors import SampleError
from omni_pipeline.core.sample import Modality, RawSize
from omni_pipeline.core.sizes import ModelSizes, media_grid, media_rows

MODALITIES = tuple(Modality)
_RAW_NAMES = ("height", "width", "num_frames", "duration_s", "sample_rate", "num_samples")

Reasons = npt.NDArray[np.object_]
"""object [rows]: why a row cannot be used; empty for those that can."""


@dataclass(frozen=True)
class SegmentColumns:
    """One field of many samples: arrays of equal length, a place per sample.

    Args:
        modality: Place in ``MODALITIES``; -1 for none.
        suffix: Place in the caller's list of suffixes.
        offset: First byte of the payload in its shard.
        length: Payload bytes.
        grid: [samples, 3]; as in ``core.sample.Segment``.
        num_rows: Embedding rows.
        num_tokens: Sequence positions.
    """

    modality: npt.NDArray[np.int8]
    suffix: npt.NDArray[np.int16]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    grid: npt.NDArray[np.int32]
    num_rows: npt.NDArray[np.int32]
    num_tokens: npt.NDArray[np.int64]

    def take(self, places: npt.NDArray[np.int64]) -> SegmentColumns:
        """Return the columns of these samples."""
        return SegmentColumns(*(getattr(self, field.name)[places] for field in fields(self)))


def concatenate(parts: Sequence[SegmentColumns]) -> SegmentColumns:
    """Return the samples of all ``parts``, in order."""
    names = [field.name for field in fields(SegmentColumns)]
    return SegmentColumns(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def find_members(index: ShardIndex, suffixes: Sequence[str], reasons: Reasons) -> npt.NDArray[np.int64]:
    """Return int64 [rows]: the member of each row that has the first of ``suffixes`` it has; -1 for none.

    Rows without one, or with a bad one, get their reason in ``reasons`` if they have none yet.
    """
    spelled = pc.utf8_lower(index.suffixes)
    row_of = np.repeat(np.arange(index.num_samples), np.diff(index.starts))
    found = np.full(index.num_samples, -1, dtype=np.int64)
    for suffix in reversed(suffixes):
        members = np.flatnonzero(_truth(pc.equal(spelled, suffix)))
        found[row_of[members]] = members
    reasons[(found < 0) & (reasons == "")] = f"no member {'|'.join(suffixes)!r}"
    is_bad = np.append(_truth(pc.not_equal(index.errors, "")), False)
    for row in np.flatnonzero(is_bad[found] & (reasons == "")):
        member = int(found[row])
        reasons[row] = f"member {index.suffixes[member].as_py()!r}: {index.errors[member].as_py()}"
    return found


def size_members(
    index: ShardIndex,
    members: npt.NDArray[np.int64],
    reasons: Reasons,
    *,
    sizes: ModelSizes,
    tokenizer_fingerprint: str,
    suffix_codes: dict[str, int],
) -> SegmentColumns:
    """Return the columns of one field; ``members`` is the result of ``find_members``.

    Rows that cannot be sized get their reason; ``suffix_codes`` grows by the suffixes met.
    """
    num_samples = len(members)
    grid = np.zeros((num_samples, 3), dtype=np.int32)
    num_rows = np.zeros(num_samples, dtype=np.int32)
    num_tokens = np.zeros(num_samples, dtype=np.int64)
    modality = _modality_codes(index)[members]
    for code, kind in enumerate(MODALITIES):
        rows = np.flatnonzero((modality == code) & (reasons == ""))
        if kind is Modality.TEXT:
            counts = index.tokens[tokenizer_fingerprint][members[rows]]
            grid[rows] = 1
            grid[rows, 0] = counts
            num_tokens[rows] = counts
        elif len(rows):
            _size_media(kind, index, members[rows], rows, sizes, (grid, num_rows, reasons))
            num_tokens[rows] = num_rows[rows] + 2
    return SegmentColumns(
        modality=modality,
        suffix=_suffix_codes(index, suffix_codes)[members],
        offset=np.append(index.numbers["offset"], 0)[members],
        length=np.append(index.numbers["length"], 0)[members],
        grid=grid,
        num_rows=num_rows,
        num_tokens=num_tokens,
    )


def _size_media(
    kind: Modality,
    index: ShardIndex,
    members: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    sizes: ModelSizes,
    out: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], Reasons],
) -> None:
    """Fill grid, embedding rows, or reason, of the samples at ``rows``."""
    grid, num_rows, reasons = out
    raw = np.stack([index.numbers[name][members].astype(np.float64) for name in _RAW_NAMES], axis=1)
    distinct, inverse = np.unique(raw, axis=0, return_inverse=True)
    grids = np.zeros((len(distinct), 3), dtype=np.int32)
    counts = np.zeros(len(distinct), dtype=np.int32)
    problems = np.full(len(distinct), "", dtype=object)
    for place, values in enumerate(distinct.tolist()):
        height, width, frames, duration_s, rate, samples = values
        size = RawSize(int(height), int(width), int(frames), duration_s, int(rate), int(samples))
        try:
            patches = media_grid(kind, size, sizes)
            grids[place], counts[place] = patches, media_rows(kind, patches, sizes)
        except SampleError as error:
            problems[place] = error.what
    inverse = inverse.reshape(-1)
    grid[rows], num_rows[rows], reasons[rows] = grids[inverse], counts[inverse], problems[inverse]


def _modality_codes(index: ShardIndex) -> npt.NDArray[np.int8]:
    """Return int8 [members + 1]; the last, for "no member", is -1."""
    places = pc.index_in(index.modalities, pa.array([str(kind) for kind in MODALITIES]))
    return np.append(np.asarray(pc.fill_null(places, -1)), -1).astype(np.int8)


def _suffix_codes(index: ShardIndex, codes: dict[str, int]) -> npt.NDArray[np.int16]:
    """Return int16 [members + 1], in the caller's codes; the last, for "no member", is 0."""
    encoded = index.suffixes.dictionary_encode()
    local = [codes.setdefault(suffix, len(codes)) for suffix in encoded.dictionary.to_pylist()]
    table = np.array([*local, 0], dtype=np.int16)
    picked: npt.NDArray[np.int16] = table[np.append(np.asarray(encoded.indices), len(local))]
    return picked


def _truth(values: Any) -> npt.NDArray[np.bool_]:
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.bool_)
