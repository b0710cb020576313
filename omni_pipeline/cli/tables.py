"""How commands print: tables that fold and never cut, prose that can be copied."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def make_table(title: str, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Return an empty table; columns named in ``right`` are numbers."""
    table = Table(title=title or None, title_justify="left")
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", overflow="fold")
    return table


def say(console: Console, text: str) -> None:
    """Print prose: wrapped by the terminal, so that it can be copied, and never taken for markup."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)


def count(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'' if number == 1 else plural}"
