"""The members of one shard, judged one by one and as samples of a layout."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from loaders.check_findings import SHOWN_PLACES, Findings, MemberTable, Place
from loaders.check_kinds import kind_of
from loaders.columns import SizedBatch, Sizing
from loaders.decode.image import check_pixels
from loaders.decode.segment import DecodeRequest, DecodeSettings
from loaders.fitting import USABLE, Oversize, fit, misfit
from loaders.index import member_name
from loaders.index_rows import RAW_TYPES, ShardIndex, codes_of
from loaders.packing import Budgets
from loaders.source_config import FieldsLayout
from omni_pipeline.core.errors import SampleError
from omni_pipeline.core.media import KINDS
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.sizes import media_grids

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """What a check holds shards against.

    Args:
        decode: Sizes of the model, largest picture, tokenizer, encoders.
        budgets: Of a pack of the run; None without a run.
        oversize: What the run does with samples above them.
        wants_unusable: Whether the samples that cannot be used are listed.
        wants_hashes: Whether keys are hashed, to be compared with those of other shards.
        wants_requests: Whether members are to be decoded.
    """

    decode: DecodeSettings = field(default_factory=DecodeSettings)
    budgets: Budgets | None = None
    oversize: Oversize = "drop"
    wants_unusable: bool = False
    wants_hashes: bool = False
    wants_requests: bool = False


@dataclass(frozen=True, slots=True)
class ShardJob:
    """One shard to check, and the layouts of the sources that have it; none where that is not known."""

    shard: str
    layouts: tuple[FieldsLayout, ...] = ()


def wanted_suffixes(layouts: Sequence[FieldsLayout]) -> frozenset[str] | None:
    """Return the suffixes in lower case that fields of ``layouts`` take; None, for all, without layouts."""
    if not layouts:
        return None
    return frozenset(suffix for layout in layouts for field in layout.fields for suffix in field.suffixes)


class Members:
    """The members of a shard as columns, and which of them turned out bad.

    Without layouts every member is wanted, else those that a field may take.

    Args:
        index: Of the shard, as measured.
        layouts: Of the sources that have it.
        settings: What it is held against.
    """

    def __init__(self, index: ShardIndex, layouts: Sequence[FieldsLayout], settings: CheckSettings) -> None:
        self.index = index
        self._layouts = layouts
        self._settings = settings
        self._codes, self._suffixes = codes_of(index.suffixes)
        self._rows = index.rows
        known = {str(kind): kind for kind in KINDS.modalities}
        kinds, names = codes_of(index.modalities)
        self._modalities = [known.get(names[code]) for code in kinds.tolist()]
        wanted = wanted_suffixes(layouts)
        is_wanted = [wanted is None or word.lower() in wanted for word in self._suffixes]
        self._wanted = np.array(is_wanted, dtype=np.bool_)[self._codes]
        self._errors = index.errors.to_pylist()
        self._grids = np.zeros((len(self._codes), 3), dtype=np.int64)
        self._bad: dict[int, str] = {}
        self._used: Counter[int] = Counter()
        self._tracks: dict[int, int] = {}

    def judge(self, found: Findings) -> None:
        """Add what is wrong or odd with members one by one; to be called before the other methods."""
        for place in np.flatnonzero(self._wanted).tolist():
            error, modality = self._errors[place], self._modalities[place]
            if error:
                self._leave(place, kind_of(error, modality), error, found)
            elif modality in (None, Modality.TEXT) and not self.index.numbers["length"][place]:
                found.add("empty_text", self._at(place))
        for modality in KINDS.modalities:
            self._size(modality, found)
        wanted = wanted_suffixes(self._layouts)
        for code, suffix in enumerate(self._suffixes):
            places = np.flatnonzero(self._codes == code)
            parts = suffix.split(".")
            # Of a name with dots the last part is what the layout may have meant.
            if not len(places) or (wanted is not None and parts[-1].lower() not in wanted):
                continue
            what = f"suffix {suffix!r}" if suffix else "no suffix"
            firsts = [self._at(place, what) for place in places[:SHOWN_PLACES].tolist()]
            if len(parts) > 1 and not all(_WORD.fullmatch(part) for part in parts):
                found.add("dotted_name", *firsts, count=len(places))
            elif self._modalities[places[0]] is None:
                found.add("unknown_suffix", *firsts, count=len(places))

    def unusable(self, found: Findings) -> dict[str, str]:
        """Return by key why no run can use the sample; add the samples that do not fit their layouts.

        Without layouts, those with a bad member of any known kind.
        """
        if not self._layouts:
            bad = sorted(self._bad.items())
            return {
                self._key(place): reason
                for place, reason in reversed(bad)
                if self._modalities[place] is not None
            }
        told: set[int] = set()
        by_layout = [self._fit_layout(layout, found, told) for layout in self._layouts]
        first = by_layout[0]
        rows = [row for row in sorted(first) if all(row in problems for problems in by_layout)]
        return {self._key_of_row(row): first[row] for row in rows}

    def table(self) -> MemberTable:
        """Return which suffixes there are, and which of them samples have together."""
        table = MemberTable()
        words = [word.lower() for word in self._suffixes]
        for code, word in enumerate(words):
            places = np.flatnonzero(self._codes == code)
            if len(places):
                modality = self._modalities[places[0]]
                firsts = [self._at(place) for place in places[:SHOWN_PLACES].tolist()]
                table.add_suffix(word, str(modality or ""), len(places), firsts)
        patterns: dict[frozenset[str], list[int]] = {}
        codes = self._codes.tolist()
        ends = self.index.starts.tolist()
        for row in range(self.index.num_samples):
            pattern = frozenset([words[code] for code in codes[ends[row] : ends[row + 1]]])
            patterns.setdefault(pattern, []).append(row)
        for pattern, rows in patterns.items():
            table.add_pattern(pattern, len(rows), [self._sample_at(row) for row in rows[:SHOWN_PLACES]])
        return table

    def requests(self) -> Iterator[tuple[str | None, DecodeRequest]]:
        """Yield what can be decoded, and the key of the sample that no run can use if that fails.

        With layouts, what fills a field of a usable sample; so ``unusable`` must be called before. The key is
        None where another layout can do without the member. Nothing of what is decoded comes back.
        """
        for place in np.flatnonzero(self._wanted).tolist():
            modality = self._modalities[place]
            if modality is None or place in self._bad or (self._layouts and place not in self._used):
                continue
            key = self._key(place) if self._used[place] == len(self._layouts) else None
            time, height, width = self._grids[place].tolist()
            request = DecodeRequest(
                url=self.index.shard,
                offset=int(self.index.numbers["offset"][place]),
                length=int(self.index.numbers["length"][place]),
                modality=modality,
                member=self._name(place),
                grid=(time, height, width),
                where=f"{self.index.shard}, member {self._name(place)}",
                units=(0, 0),
            )
            yield key, request
            if frames := self._tracks.get(place):
                grid = (frames, 1, 1)
                yield key, replace(request, modality=Modality.AUDIO, grid=grid, is_track=True)

    def _fit_layout(self, layout: FieldsLayout, found: Findings, told: set[int]) -> dict[int, str]:
        """Return by row why a run with ``layout`` cannot use it; ``told`` are rows that were reported."""
        settings, tokenizer = self._settings, next(iter(self.index.tokens))
        fields = tuple(item.suffixes for item in layout.fields)
        sounds = frozenset(place for place, item in enumerate(layout.fields) if item.sound)
        batch = Sizing(fields, settings.decode.sizes, tokenizer, sounds=sounds)(self.index)
        self._tell_unsized(batch.problems, found, told)
        problems = dict(batch.problems)
        for place in self._take(batch):
            if place in self._bad:
                problems.setdefault(int(self._rows[place]), self._bad[place])
        if settings.budgets is not None:
            _, fits = fit(batch.sizes, settings.budgets, oversize=settings.oversize)
            for row in np.flatnonzero(~fits & (batch.sizes.status == USABLE)).tolist():
                if row not in problems and row not in told:
                    reason = misfit(batch.sizes, row, budgets=settings.budgets, oversize=settings.oversize)
                    found.add("fits_no_pack", self._sample_at(row, reason))
                    told.add(row)
        return problems

    def _tell_unsized(self, problems: Mapping[int, str], found: Findings, told: set[int]) -> None:
        """Report the rows that have no size, but for those with a bad member, which was reported."""
        rows_of_bad = {int(self._rows[place]) for place in self._bad}
        for row, reason in sorted(problems.items()):
            if row in told:
                continue
            if reason.startswith("no member "):
                has = ", ".join(self._suffixes_of(row))
                found.add("missing_member", self._sample_at(row, f"{reason}; it has {has}"))
            elif row not in rows_of_bad:
                found.add("no_size", self._sample_at(row, reason))  # the sound of a clip
            told.add(row)

    def _take(self, batch: SizedBatch) -> set[int]:
        """Return the members that fill fields of good rows, and keep in mind that they are used."""
        places = {offset: place for place, offset in enumerate(self.index.numbers["offset"].tolist())}
        good = [row for row in range(self.index.num_samples) if row not in batch.problems]
        taken = {places[segments["offset"].item(row)] for segments in batch.segments for row in good}
        self._used.update(taken)
        for track in batch.tracks.values():
            for row in good:
                if track["modality"].item(row) >= 0:
                    self._tracks[places[track["offset"].item(row)]] = track["time"].item(row)
        return taken

    def _size(self, modality: Modality, found: Findings) -> None:
        """Size the good members of a modality for the model."""
        places = [
            place
            for place in np.flatnonzero(self._wanted).tolist()
            if self._modalities[place] == modality and not self._errors[place]
        ]
        numbers, settings = self.index.numbers, self._settings.decode
        if modality is Modality.TEXT:
            tokens = next(iter(self.index.tokens.values()))[places]
            self._grids[places] = np.stack([tokens, np.ones_like(tokens), np.ones_like(tokens)], axis=1)
            return
        if not places:
            return
        raw = {name: numbers[name][places] for name in RAW_TYPES}
        grids, problems = media_grids(modality, raw, settings.sizes)
        self._grids[places] = grids
        for which, problem in sorted(problems.items()):
            self._leave(places[which], "no_size", problem.what, found)
        if modality in (Modality.IMAGE, Modality.VIDEO):
            for place in places:
                try:
                    check_pixels(
                        int(numbers["width"][place]), int(numbers["height"][place]), settings.max_image_pixels
                    )
                except SampleError as error:
                    self._leave(place, "too_many_pixels", error.what, found)

    def _leave(self, place: int, kind: str, what: str, found: Findings) -> None:
        found.add(kind, self._at(place, what))
        self._bad.setdefault(place, f"member {self._suffixes[self._codes[place]]!r}: {what}")

    def _at(self, place: int, what: str = "") -> Place:
        return Place(self.index.shard, self._name(place), int(self.index.numbers["offset"][place]), what)

    def _sample_at(self, row: int, what: str = "") -> Place:
        byte = int(self.index.numbers["offset"][self.index.starts[row]])
        return Place(self.index.shard, self._key_of_row(row), byte, what)

    def _suffixes_of(self, row: int) -> list[str]:
        held = self._codes[self.index.starts[row] : self.index.starts[row + 1]].tolist()
        return [self._suffixes[code] or "(none)" for code in held]

    def _name(self, place: int) -> str:
        return member_name(self._key(place), self._suffixes[self._codes[place]])

    def _key(self, place: int) -> str:
        return self._key_of_row(int(self._rows[place]))

    def _key_of_row(self, row: int) -> str:
        return str(self.index.keys[row].as_py())
