"""What is odd about samples beside the others: they lack a member that nearly all others have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from loaders.check_findings import MemberTable, Place

NEARLY_ALL = 0.95


def find_partnerless(table: MemberTable) -> Iterator[tuple[int, list[Place]]]:
    """Yield (samples, first places) of samples without a member that ``NEARLY_ALL`` of the others have.

    Only members of a known kind count, and a member of the same kind with a suffix of its own stands in for
    it: a `png` among `jpg`.
    """
    counts: Counter[str] = Counter()
    for pattern, tally in table.patterns.items():
        counts.update(dict.fromkeys(pattern, tally.count))
    modality = {word: tally.modality for word, tally in table.suffixes.items()}
    others = max(1, table.num_samples - 1)
    common = {word for word, count in counts.items() if modality.get(word) and count >= NEARLY_ALL * others}
    for pattern, tally in table.patterns.items():
        stand_ins = {modality.get(word) for word in pattern - common}
        lacking = sorted(word for word in common - pattern if modality[word] not in stand_ins)
        if lacking:
            has = ", ".join(sorted(word or "(none)" for word in pattern))
            what = f"no member {', '.join(map(repr, lacking))}; it has {has}"
            yield tally.count, [replace(place, what=what) for place in tally.places]


def find_rare_suffixes(table: MemberTable) -> Iterator[tuple[int, list[Place]]]:
    """Yield (members, first places) of suffixes like `final.jpg` where nearly all members are `jpg`."""
    for word, tally in table.suffixes.items():
        ending = word.rpartition(".")[2]
        plain = table.suffixes.get(ending)
        if ending == word or plain is None or not tally.modality:
            continue
        if tally.count <= (1 - NEARLY_ALL) * plain.count:
            what = f"suffix {word!r}; {plain.count} members have {ending!r}"
            yield tally.count, [replace(place, what=what) for place in tally.places]
