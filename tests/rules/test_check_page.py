"""The page on checking lists every kind of finding, as the code has it."""

from __future__ import annotations

from pathlib import Path

from loaders.check_kinds import KINDS_OF_FINDING, NOTE, PROBLEM

PAGE = Path(__file__).parents[2] / "docs" / "check.md"


def table(level: str) -> str:
    """Return the table of one level, to be pasted into the page."""
    kinds = [kind for kind in KINDS_OF_FINDING.values() if kind.level == level]
    rows = [f"| `{kind.name}` | {kind.counts} | {kind.title} | {kind.mend} |" for kind in kinds]
    return "\n".join(["| kind | of | what | mend |", "|---|---|---|---|", *rows]) + "\n"


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for level in (PROBLEM, NOTE):
        assert table(level) in page, f"paste into {PAGE.name}:\n{table(level)}"
