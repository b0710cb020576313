"""Index rows to sized samples: which member fills a field, and how large it is for the model.

All is worked out with whole arrays, a batch of rows at a time. A row that cannot be used gets a reason in
place of a size, one that may not be used a status: ``Screen`` is the place for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from loaders.fitting import DENIED, UNUSABLE, USABLE, PackSizes
from loaders.index_rows import RAW_TYPES, ShardIndex, codes_of
from omni_pipeline.core.media import KINDS
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.sizes import IntArray, ModelSizes, grid_rows, media_grids

MODALITIES = KINDS.modalities
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
TEXT, VIDEO, AUDIO = (MODALITIES.index(kind) for kind in (Modality.TEXT, Modality.VIDEO, Modality.AUDIO))
_PICTURES = (Modality.IMAGE, Modality.VIDEO)
_RAW = {
    Modality.IMAGE: ("height", "width"),
    Modality.VIDEO: ("height", "width", "num_frames", "duration_s"),
    Modality.AUDIO: ("num_samples", "sample_rate"),
}


@dataclass(frozen=True, slots=True)
class SizedBatch:
    """Some consecutive rows of a shard, sized.

    Args:
        shard: Path or URL.
        keys: Arrow string [rows].
        suffixes: What ``segments["suffix"]`` counts in, as spelled in the shard.
        segments: Of each field, ``SEGMENT`` [rows].
        tracks: By place of a field whose clips bring their sound, ``SEGMENT`` [rows]; no member where silent.
        sizes: What each row takes of a pack, with its status.
        problems: By row: why it is ``UNUSABLE``.
    """

    shard: str
    keys: pa.StringArray
    suffixes: tuple[str, ...]
    segments: tuple[SegmentArray, ...]
    tracks: dict[int, SegmentArray]
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
        sounds: Places of the fields whose clips bring their sound.
    """

    fields: tuple[tuple[str, ...], ...]
    sizes: ModelSizes
    tokenizer: str
    screen: Screen | None = None
    sounds: frozenset[int] = frozenset()

    def __call__(self, index: ShardIndex) -> SizedBatch:
        """Return the rows of ``index``, sized; about 0.15 ms per thousand that have the same members."""
        rows = _Rows(index)
        found = [rows.find(wanted) for wanted in self.fields]
        segments: list[SegmentArray] = []
        tracks: dict[int, SegmentArray] = {}
        for place, members in enumerate(found):
            segments.append(self._size(rows, members))
            if place in self.sounds:
                tracks[place] = self._size_tracks(rows, members, segments[-1])
        batch = SizedBatch(
            shard=index.shard,
            keys=index.keys,
            suffixes=tuple(rows.suffixes),
            segments=tuple(segments),
            tracks=tracks,
            sizes=rows.pack_sizes(),
            problems=rows.problems,
        )
        if self.screen is None:
            return batch
        status = self.screen(index, [item.members for item in found], batch)
        status[~rows.is_good & (status != DENIED)] = UNUSABLE
        return replace(batch, sizes=replace(batch.sizes, status=status))

    def _size(self, rows: _Rows, found: _Found) -> SegmentArray:
        """Return the segments that ``found`` fills; those of rows that are not good mean nothing."""
        numbers, held = rows.index.numbers, found.held
        segments = np.zeros(len(found.members), dtype=SEGMENT)
        segments["modality"] = found.modality
        segments["suffix"] = rows.suffix_codes[held]
        segments["offset"] = numbers["offset"][held]
        segments["length"] = numbers["length"][held]
        rows.cut[:] = 0
        for kind, places in found.by_modality(rows.is_good):
            wanted = held if isinstance(places, slice) else found.members[places]
            if kind is Modality.TEXT:
                tokens = rows.index.tokens[self.tokenizer][wanted].astype(np.int64)
                _fill(segments, places, (tokens, 1, 1), 0, tokens)
                rows.tokens[places] += tokens
                rows.cut[places] = np.maximum(tokens - 1, 0)
                continue
            grids, failed = media_grids(
                kind, {name: numbers[name][wanted] for name in _RAW.get(kind, RAW_TYPES)}, self.sizes
            )
            time, height, width = grids.T
            num_rows = grid_rows(kind, grids, self.sizes)
            _fill(segments, places, (time, height, width), num_rows, num_rows + 2)
            rows.tokens[places] += num_rows + 2
            if kind is Modality.AUDIO:
                rows.mel_frames[places] += time
            elif kind in _PICTURES:
                rows.patches[places] += time * height * width
            for place, error in failed.items():
                rows.leave(place if isinstance(places, slice) else places[place], error.what)
        return segments

    def _size_tracks(self, rows: _Rows, found: _Found, clips: SegmentArray) -> SegmentArray:
        """Return the sound of the ``clips`` that ``found`` fills; their bytes hold both."""
        numbers = rows.index.numbers
        tracks = clips.copy()
        tracks["modality"] = -1
        has_sound = (clips["modality"] == VIDEO) & rows.is_good
        has_sound &= np.append(numbers["num_samples"], 0)[found.members] > 0
        places = np.flatnonzero(has_sound)
        wanted = found.members[places]
        raw = {name: numbers[name][wanted] for name in _RAW[Modality.AUDIO]}
        grids, failed = media_grids(Modality.AUDIO, raw, self.sizes)
        num_rows = grid_rows(Modality.AUDIO, grids, self.sizes)
        tracks["modality"][places] = AUDIO
        _fill(tracks, places, (grids[:, 0], 1, 1), num_rows, num_rows + 2)
        rows.tokens[places] += num_rows + 2
        rows.mel_frames[places] += grids[:, 0]
        for place, error in failed.items():
            rows.leave(places[place], f"sound of the clip: {error.what}")
        return tracks


@dataclass(frozen=True, slots=True)
class _Found:
    """The members that fill a field.

    Args:
        members: int64 [rows]; -1 for none.
        held: Picks from a column of members what fills the field; anything where there is none.
        modality: Place in MODALITIES, int8 [rows], or one for all rows; -1 for no member.
    """

    members: IntArray
    held: slice | IntArray
    modality: npt.NDArray[np.int8] | int

    def by_modality(self, is_good: npt.NDArray[np.bool_]) -> Iterator[tuple[Modality, slice | IntArray]]:
        """Yield each modality with its good rows; all rows where they are of one modality."""
        if isinstance(self.modality, int):
            yield MODALITIES[self.modality], slice(None)
            return
        for code, kind in enumerate(MODALITIES):
            picked = np.flatnonzero((self.modality == code) & is_good)
            if len(picked) == len(is_good):
                yield kind, slice(None)
            elif len(picked):
                yield kind, picked


class _Rows:
    """The rows of a batch while they are sized: the columns of their members, and which are good so far."""

    def __init__(self, index: ShardIndex) -> None:
        self.index = index
        self.is_good = np.ones(index.num_samples, dtype=np.bool_)
        self.problems: dict[int, str] = {}
        self.tokens = np.ones(index.num_samples, dtype=np.int64)  # the end-of-sample token
        self.patches, self.mel_frames, self.cut = np.zeros((3, index.num_samples), dtype=np.int64)
        self.suffix_codes, self.suffixes = codes_of(index.suffixes)
        self.words = [suffix.lower() for suffix in self.suffixes]
        self.error_codes, self.errors = codes_of(index.errors)
        self.is_bad = np.array([error != "" for error in self.errors], dtype=np.bool_)[self.error_codes]
        codes, words = codes_of(index.modalities)
        known = {str(kind): place for place, kind in enumerate(MODALITIES)}
        places = [known.get(word, -1) for word in words]
        self.modalities = np.array(places, dtype=np.int8)[codes]
        self.pattern = self._find_pattern()

    def leave(self, row: int, problem: str) -> None:
        """Take a row out of the good ones, unless it is out."""
        if self.is_good[row]:
            self.problems[int(row)] = problem
            self.is_good[row] = False

    def pack_sizes(self) -> PackSizes:
        """Return what each row takes of a pack: the segments sized so far and one end-of-sample token."""
        status = np.where(self.is_good, USABLE, UNUSABLE).astype(np.int8)
        return PackSizes(self.tokens, self.tokens - self.cut, self.patches, self.mel_frames, status)

    def find(self, wanted: Sequence[str]) -> _Found:
        """Return the member of each row that has the first of ``wanted`` it has.

        Rows without one, or with a bad one, leave the good ones.
        """
        place = next((self.pattern.index(suffix) for suffix in wanted if suffix in self.pattern), -1)
        if place >= 0 and self.modalities[place] >= 0:
            # Most batches: a slice is many times faster than picking.
            held = slice(place, None, len(self.pattern))
            return _Found(self.index.starts[:-1] + place, held, int(self.modalities[place]))
        members = self._find_one_by_one(wanted)
        picked = np.maximum(members, 0)
        return _Found(members, picked, np.where(members >= 0, self.modalities[picked], -1).astype(np.int8))

    def _find_pattern(self) -> list[str]:
        """Return the suffixes that every row has, in this order; none if rows differ or one is bad."""
        num_rows, num_members = self.index.num_samples, len(self.suffix_codes)
        if not num_rows or not num_members or num_members % num_rows or self.is_bad.any():
            return []
        each = num_members // num_rows
        if not (self.index.starts == np.arange(0, num_members + 1, each)).all():
            return []
        for codes in (self.suffix_codes, self.modalities):
            if not (codes[each:] == codes[:-each]).all():
                return []
        pattern = [self.words[code] for code in self.suffix_codes[:each].tolist()]
        return pattern if len(set(pattern)) == each else []

    def _find_one_by_one(self, wanted: Sequence[str]) -> IntArray:
        found = np.full(self.index.num_samples, -1, dtype=np.int64)
        row_of = self.index.rows
        for suffix in reversed(wanted):
            is_it = np.array([word == suffix for word in self.words], dtype=np.bool_)
            members = np.flatnonzero(is_it[self.suffix_codes])
            found[row_of[members]] = members
        missing = np.flatnonzero((found < 0) & self.is_good)
        self.problems.update(dict.fromkeys(missing.tolist(), f"no member {'|'.join(wanted)!r}"))
        self.is_good[missing] = False
        is_unfit = np.append(self.is_bad | (self.modalities < 0), False)
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
