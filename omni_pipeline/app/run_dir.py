"""The files of a run and how to read them: one place that knows their names.

``metrics.jsonl`` (one object per step), ``quarantine.jsonl``, ``events.jsonl`` (what happened to the run),
``checkpoints/``, ``settings.json`` (resolved), ``summary.json``, ``gallery.json``, ``report.html``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Event:
    """Something that happened to a run at a step: started, killed, resumed, stopped."""

    step: int
    text: str


class RunDir:
    """The folder of a run; made when missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    @property
    def metrics_path(self) -> Path:
        """JSONL, one object per step; steps done again after a resume appear again."""
        return self.path / "metrics.jsonl"

    @property
    def quarantine_path(self) -> Path:
        """JSONL of bad samples."""
        return self.path / "quarantine.jsonl"

    @property
    def settings_path(self) -> Path:
        """The resolved settings."""
        return self.path / "settings.json"

    @property
    def gallery_path(self) -> Path:
        """Media of some packs, for the report."""
        return self.path / "gallery.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def add_event(self, event: Event) -> None:
        """Append an event."""
        self._append("events.jsonl", asdict(event))

    def events(self) -> list[Event]:
        """Return all events, oldest first."""
        return [Event(step=int(line["step"]), text=str(line["text"])) for line in self._lines("events.jsonl")]

    def last_step(self) -> int:
        """Return the last step with metrics, -1 if none."""
        lines = self._lines("metrics.jsonl")
        return int(lines[-1]["step"]) if lines else -1

    def replayed_losses(self) -> dict[int, tuple[float, float]]:
        """Return, for every step that was done twice, its loss the first and the last time."""
        seen: dict[int, list[float]] = {}
        for line in self._lines("metrics.jsonl"):
            if "trainer/loss" in line:
                seen.setdefault(int(line["step"]), []).append(float(line["trainer/loss"]))
        return {step: (losses[0], losses[-1]) for step, losses in seen.items() if len(losses) > 1}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Keep the closing numbers of the run for its report."""
        self._write("summary.json", summary)

    def summary(self) -> dict[str, Any] | None:
        """Return the closing numbers, if written."""
        path = self.path / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Keep the resolved settings beside the run."""
        self._write("settings.json", settings)

    def _write(self, name: str, data: Mapping[str, Any]) -> None:
        partial = self.path / f".{name}.{os.getpid()}"
        partial.write_text(json.dumps(data, indent=1, default=str), encoding="utf-8")
        os.replace(partial, self.path / name)

    def _append(self, name: str, data: Mapping[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """Whole lines only: a run may be writing, or may have been killed while it wrote."""
        path = self.path / name
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
