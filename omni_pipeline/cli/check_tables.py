"""How ``omni data check`` prints what it found."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from loaders.check import CheckReport
from loaders.check_findings import Place
from loaders.check_kinds import KINDS_OF_FINDING, Kind
from omni_pipeline.cli.tables import count, make_table, say

JSON_VERSION = 1


def print_check(report: CheckReport) -> None:
    """Print what was looked at, a table of what was found, and of each kind the first places and the mend."""
    console = Console()
    found = report.found
    how = "headers only" if report.num_decoded is None else f"{count(report.num_decoded, 'member')} decoded"
    say(
        console,
        f"{count(report.num_shards, 'shard')}: {count(report.num_samples, 'sample')}, "
        f"{count(report.num_members, 'member')}, {report.num_bytes / 1e6:.1f} MB, {how}",
    )
    kinds = [kind for kind in KINDS_OF_FINDING.values() if kind.name in found.counts]
    if kinds:
        table = make_table("", ("", "what"), ("count",))
        table.add_column("of")
        for kind in kinds:
            table.add_row(kind.level, kind.title, str(found.counts[kind.name]), kind.counts)
        console.print(table)
    for kind in kinds:
        _print_kind(console, kind, found.counts[kind.name], found.places[kind.name])
    _print_end(console, report)


def to_dict(report: CheckReport) -> dict[str, Any]:
    """Return the report as plain data, for ``--json``."""
    found = report.found
    return {
        "version": JSON_VERSION,
        "shards": report.num_shards,
        "samples": report.num_samples,
        "members": report.num_members,
        "bytes": report.num_bytes,
        "decoded": report.num_decoded,
        "problems": found.num_problems,
        "notes": found.num_notes,
        "kinds": [
            {
                "kind": name,
                "level": kind.level,
                "count": found.counts[name],
                "of": kind.counts,
                "title": kind.title,
                "mend": kind.mend,
                "places": [_place_dict(place) for place in found.places[name]],
            }
            for name, kind in KINDS_OF_FINDING.items()
            if name in found.counts
        ],
        "deny_list": None if report.deny_list is None else str(report.deny_list),
        "denied": report.num_denied,
        "not_listed": report.num_unlisted,
    }


def _place_dict(place: Place) -> dict[str, Any]:
    byte = None if place.byte < 0 else place.byte
    return {"shard": place.shard, "member": place.member or None, "byte": byte, "what": place.what}


def _print_kind(console: Console, kind: Kind, number: int, places: list[Place]) -> None:
    say(console, f"\n{kind.level.upper()} {number} {_of(kind, number)}: {kind.title}")
    for place in places:
        say(console, f"  {_place(place)}")
    if number > len(places):
        say(console, f"  and {number - len(places)} more")
    say(console, f"  mend: {kind.mend}")


def _of(kind: Kind, number: int) -> str:
    return kind.counts[:-1] if number == 1 else kind.counts


def _place(place: Place) -> str:
    byte = f"byte {place.byte}"
    parts = [place.shard, place.member, "" if place.byte < 0 or byte in place.what else byte]
    where = ", ".join(part for part in parts if part)
    return f"{where}: {place.what}" if place.what else where


def _print_end(console: Console, report: CheckReport) -> None:
    problems, notes = report.found.num_problems, report.found.num_notes
    if not problems:
        say(console, "no problems" + (f", {count(notes, 'note')}" if notes else ""))
    else:
        say(console, f"\n{count(problems, 'problem')}, {count(notes, 'note')}")
    if report.deny_list is not None:
        say(console, f"{count(report.num_denied, 'sample')} that cannot be used: {report.deny_list}")
        if report.num_denied:
            say(console, f'  to leave them out write into the run file: deny = ["{report.deny_list}"]')
    if report.num_unlisted:
        say(
            console,
            f"{count(report.num_unlisted, 'sample')} more cannot be used, and no list can name them: "
            "the name holds a line break or ends in a space; rename, or remove them",
        )
