"""Index rows to sized samples: which member fills a field, and how large it is for the model.

All is worked out with whole arrays, a batch of rows at a time. A row that cannot be used gets a reason in
place of a size, one that may not be used a status: ``Screen`` is the place for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from loaders.fitting import DENIED, UNUSABLE, USABLE, PackSizes
from loaders.index_rows import ShardIndex, codes_of
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.sizes import IntArray, ModelSizes, grid_rows, media_grids

MODALITIES = tuple(Modality)
SEGMENT = np.dtype(
    [
        ("modality", "i1"),  # place in MODALITIES; -1 for no member
        ("suffix", "i4"),  # place in SizedBatch.suffixes
        ("offset", "i8"),
        ("length", "i8"),
        ("time", "i4"),
        ("rows", "i4"),
        ("columns", "i4"),
        ("num_rows", "i8"),
        ("num_tokens", "i8"),
    ],
    align=True,
)
"""One field of one sample; the names are those of ``core.sample.Segment``, its grid in three parts."""
SegmentArray = npt.NDArray[np.void]
StatusArray = npt.NDArray[np.int8]
RAW_NAMES = ("height", "width", "num_frames", "duration_s", "sample_rate", "num_samples")
_PLACES = {str(kind): place for place, kind in enumerate(MODALITIES)}
TEXT, AUDIO = MODALITIES.index(Modality.TEXT), MODALITIES.index(Modality.AUDIO)


@dataclass(frozen=True, slots=True)
class SizedBatch:
    """Some consecutive rows of a shard, sized.

    Args:
        shard: Path or URL.
        keys: Arrow string [rows].
        suffixes: What ``segments["suffix"]`` counts in, as spelled in the shard.
        segments: Of each field, ``SEGMENT`` [rows].
        sizes: What each row takes of a pack, with its status.
        problems: By row: why it is ``UNUSABLE``.
    """

    shard: str
    keys: pa.StringArray
    suffixes: tuple[str, ...]
    segments: tuple[SegmentArray, ...]
    sizes: PackSizes
    problems: dict[int, str]


Screen = Callable[[ShardIndex, Sequence[IntArray], SizedBatch], StatusArray]
"""Which rows a run leaves out though they could be used.

Called with the rows as indexed, the member that fills each field (int64 [rows], -1 for none), and the rows as
sized; returns a status per row. DENIED counts for every row, others for those that are not UNUSABLE."""


@dataclass(frozen=True)
class Sizing:
    """How rows become sized samples.

    Args:
        fields: Suffixes of each field in lower case, alternatives in order of preference.
        sizes: Of the model.
        tokenizer: Fingerprint of the one whose counts are used.
        screen: Leaves rows out; None leaves none out.
    """

    fields: tuple[tuple[str, ...], ...]
    sizes: ModelSizes
    tokenizer: str
    screen: Screen | None = None

    def __call__(self, index: ShardIndex) -> SizedBatch:
        """Return the rows of ``index``, sized; about 0.2 ms per thousand."""
        rows = _Rows(index)
        members = [rows.find_members(wanted) for wanted in self.fields]
        segments = tuple(self._size(rows, found) for found in members)
        sizes = _pack_sizes(segments, rows.is_good)
        batch = SizedBatch(index.shard, index.keys, tuple(rows.suffixes), segments, sizes, rows.problems)
        if self.screen is None:
            return batch
        status = self.screen(index, members, batch)
        status[~rows.is_good & (status != DENIED)] = UNUSABLE
        return replace(batch, sizes=replace(sizes, status=status))

    def _size(self, rows: _Rows, members: IntArray) -> SegmentArray:
        """Return the segments that ``members`` fill; those of rows that are not good mean nothing."""
        index = rows.index
        segments = np.zeros(len(members), dtype=SEGMENT)
        held = np.maximum(members, 0)
        modality = np.where(members >= 0, rows.modalities[held], -1)
        segments["modality"] = modality
        segments["suffix"] = rows.suffix_codes[held]
        segments["offset"] = index.numbers["offset"][held]
        segments["length"] = index.numbers["length"][held]
        for code, kind in enumerate(MODALITIES):
            picked = np.flatnonzero((modality == code) & rows.is_good)
            if not len(picked):
                continue
            # All rows are of one modality in most batches, and a slice is many times faster.
            places: slice | IntArray = slice(None) if len(picked) == len(members) else picked
            wanted = held[places]
            if kind is Modality.TEXT:
                tokens = index.tokens[self.tokenizer][wanted].astype(np.int64)
                _fill(segments, places, (tokens, 1, 1), 0, tokens)
                continue
            raw = {name: index.numbers[name][wanted] for name in RAW_NAMES}
            grids, failed = media_grids(kind, raw, self.sizes)
            num_rows = grid_rows(kind, grids, self.sizes)
            _fill(segments, places, (grids[:, 0], grids[:, 1], grids[:, 2]), num_rows, num_rows + 2)
            for place, error in failed.items():
                rows.leave(picked[place], error.what)
        return segments


class _Rows:
    """The rows of a batch while they are sized: the columns of their members, and which are good so far."""

    def __init__(self, index: ShardIndex) -> None:
        self.index = index
        self.is_good = np.ones(index.num_samples, dtype=np.bool_)
        self.problems: dict[int, str] = {}
        self.row_of = index.rows
        self.suffix_codes, self.suffixes = codes_of(index.suffixes)
        self.error_codes, self.errors = codes_of(index.errors)
        codes, words = codes_of(index.modalities)
        self.modalities = np.array([_PLACES.get(word, -1) for word in words], dtype=np.int8)[codes]

    def leave(self, row: int, problem: str) -> None:
        """Take a row out of the good ones."""
        self.problems[int(row)] = problem
        self.is_good[row] = False

    def find_members(self, wanted: Sequence[str]) -> IntArray:
        """Return int64 [rows]: the member of each row that has the first of ``wanted`` it has; -1 for none.

        Rows without one, or with a bad one, leave the good ones.
        """
        found = np.full(self.index.num_samples, -1, dtype=np.int64)
        for suffix in reversed(wanted):
            is_it = np.array([spelled.lower() == suffix for spelled in self.suffixes], dtype=np.bool_)
            members = np.flatnonzero(is_it[self.suffix_codes])
            found[self.row_of[members]] = members
        missing = np.flatnonzero((found < 0) & self.is_good)
        self.problems.update(dict.fromkeys(missing.tolist(), f"no member {'|'.join(wanted)!r}"))
        self.is_good[missing] = False
        is_bad = np.array([error != "" for error in self.errors], dtype=np.bool_)
        is_unfit = np.append(is_bad[self.error_codes] | (self.modalities < 0), False)
        for row in np.flatnonzero(is_unfit[found] & self.is_good).tolist():
            member = int(found[row])
            error = self.errors[self.error_codes[member]] or "indexed as no kind of media; index it again"
            self.leave(row, f"member {self.suffixes[self.suffix_codes[member]]!r}: {error}")
        return found


def _fill(
    segments: SegmentArray,
    places: slice | IntArray,
    grid: tuple[IntArray, IntArray | int, IntArray | int],
    num_rows: IntArray | int,
    num_tokens: IntArray,
) -> None:
    for name, values in zip(("time", "rows", "columns"), grid, strict=True):
        segments[name][places] = values
    segments["num_rows"][places] = num_rows
    segments["num_tokens"][places] = num_tokens


def _pack_sizes(segments: Sequence[SegmentArray], is_good: npt.NDArray[np.bool_]) -> PackSizes:
    """Return what each row takes of a pack: its segments and one end-of-sample token."""
    tokens = np.ones(len(is_good), dtype=np.int64)
    patches, mel_frames = np.zeros_like(tokens), np.zeros_like(tokens)
    for segment in segments:
        modality = segment["modality"]
        tokens += segment["num_tokens"]
        is_text = modality == TEXT
        if is_text.all():
            continue
        units = segment["time"].astype(np.int64) * segment["rows"] * segment["columns"]
        is_audio = modality == AUDIO
        mel_frames += units * is_audio
        patches += units * ~(is_audio | is_text)
    last = segments[-1]
    cut = np.maximum(last["num_tokens"] - 1, 0) * (last["modality"] == TEXT)
    status = np.where(is_good, USABLE, UNUSABLE).astype(np.int8)
    return PackSizes(tokens, tokens - cut, patches, mel_frames, status)
