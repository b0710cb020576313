"""Where numbers about a run go. Names are ``package/quantity_unit``, e.g. ``loader/wait_s``."""

from __future__ import annotations

from typing import Protocol


class Metrics(Protocol):
    """Takes named numbers of a step."""

    def record(self, name: str, value: float, step: int) -> None:
        """Keep ``value`` under ``name`` for ``step``."""
        ...


class MemoryMetrics:
    """Keeps everything in a dictionary; for tests and short evaluations."""

    def __init__(self) -> None:
        self.values: dict[str, dict[int, float]] = {}

    def record(self, name: str, value: float, step: int) -> None:
        """Keep ``value`` under ``name`` for ``step``; a second call replaces the first."""
        self.values.setdefault(name, {})[step] = value
