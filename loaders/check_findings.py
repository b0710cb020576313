"""Findings of a check: exact counts, the first places of each kind, and tables of bounded size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from loaders.check_kinds import KINDS_OF_FINDING, NOTE, PROBLEM

SHOWN_PLACES = 5
MAX_WORDS = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """Where something was found.

    Args:
        shard: Path or URL.
        member: Member of it, or key of a sample; empty for the whole shard.
        byte: First byte of it in the shard; -1 where it has none.
        what: What is wrong there; empty where the kind says it all.
    """

    shard: str
    member: str = ""
    byte: int = -1
    what: str = ""


@dataclass
class Findings:
    """By name of the kind: how often it was found, and the first places."""

    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[Place]] = field(default_factory=dict)

    def add(self, kind: str, *places: Place, count: int = 1) -> None:
        """Count ``count`` more of ``kind``; keep ``places`` as far as there is room.

        Raises:
            ValueError: There is no such kind.
        """
        if kind not in KINDS_OF_FINDING:
            raise ValueError(f"no kind of finding is called {kind!r}")
        self.counts[kind] = self.counts.get(kind, 0) + count
        kept = self.places.setdefault(kind, [])
        kept.extend(places[: SHOWN_PLACES - len(kept)])

    def merge(self, other: Findings) -> None:
        """Add what was found later."""
        for kind, count in other.counts.items():
            self.add(kind, *other.places[kind], count=count)

    def total(self, level: str) -> int:
        """Return how many of this level were found."""
        return sum(count for kind, count in self.counts.items() if KINDS_OF_FINDING[kind].level == level)

    @property
    def num_problems(self) -> int:
        """How many problems were found."""
        return self.total(PROBLEM)

    @property
    def num_notes(self) -> int:
        """How many notes there are."""
        return self.total(NOTE)


@dataclass
class Tally:
    """How many of one sort there are, and the first places; of a suffix also the modality of its members."""

    modality: str = ""
    count: int = 0
    places: list[Place] = field(default_factory=list)

    def add(self, count: int, places: Iterable[Place]) -> None:
        """Add ``count`` more."""
        self.count += count
        self.places.extend(list(places)[: max(0, SHOWN_PLACES - len(self.places))])


@dataclass
class MemberTable:
    """Which suffixes there are, and which of them samples have together.

    Both tables hold ``MAX_WORDS`` entries: what comes first is kept, the rest is only counted.
    """

    num_samples: int = 0
    suffixes: dict[str, Tally] = field(default_factory=dict)
    patterns: dict[frozenset[str], Tally] = field(default_factory=dict)

    def add_suffix(self, suffix: str, modality: str, count: int, places: Iterable[Place]) -> None:
        """Count members of ``suffix``."""
        if suffix in self.suffixes or len(self.suffixes) < MAX_WORDS:
            self.suffixes.setdefault(suffix, Tally(modality)).add(count, places)

    def add_pattern(self, suffixes: frozenset[str], count: int, places: Iterable[Place]) -> None:
        """Count samples that have members of exactly these ``suffixes``."""
        self.num_samples += count
        if suffixes in self.patterns or len(self.patterns) < MAX_WORDS:
            self.patterns.setdefault(suffixes, Tally()).add(count, places)

    def merge(self, other: MemberTable) -> None:
        """Add the members of later shards."""
        for word, suffix in other.suffixes.items():
            self.add_suffix(word, suffix.modality, suffix.count, suffix.places)
        for suffixes, pattern in other.patterns.items():
            self.add_pattern(suffixes, pattern.count, pattern.places)
        self.num_samples += other.num_samples - sum(pattern.count for pattern in other.patterns.values())
