"""Progress on a terminal; nothing on a pipe."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self


class ProgressBar:
    """A progress bar on standard error; as a context manager, called with (done, of all).

    Args:
        what: What is being done.
        after_s: Seconds before it shows, so that what is quick shows none.
    """

    def __init__(self, what: str, *, after_s: float = 0.0) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=after_s > 0,
        )
        self._task = self._bar.add_task("", total=None)
        self._show_at = time.monotonic() + after_s
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        if not self._shown:
            if time.monotonic() < self._show_at:
                return
            self._bar.start()
            self._shown = True
        self._bar.update(self._task, completed=done, total=total)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
