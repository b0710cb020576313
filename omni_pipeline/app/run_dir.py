"""The files of a run and how to read them: one place that knows their names.

``metrics.jsonl`` (one object per step), ``worst_steps.jsonl``, ``quarantine.jsonl``, ``events.jsonl`` (what
happened to the run), ``checkpoints/``, ``settings.json`` (resolved), ``summary.json``, ``gallery.json``,
``report.html``.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from omni_pipeline.core.errors import ConfigError


@dataclass(frozen=True)
class Event:
    """Something that happened to a run at a step, in words: that a rank was killed, that it resumed."""

    step: int
    text: str


class RunDir:
    """The folder of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> RunDir:
        """Make the folder unless it is there, and return this object.

        Raises:
            ConfigError: It cannot be made, or is something else.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot make the folder {self.path}: {error.strerror}", fix="give another run.dir"
            ) from error
        return self

    def lock(self) -> BinaryIO:
        """Claim the folder for one run; the claim ends with the process, whatever ends it.

        Returns:
            The open lock file: keep it as long as the run writes.

        Raises:
            ConfigError: Another run holds it.
        """
        file = (self.path / ".lock").open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise ConfigError(
                f"another run writes to {self.path}", fix="wait for it to end, or give another run.dir"
            ) from error
        return file

    @property
    def metrics_path(self) -> Path:
        """JSONL, one object per step; steps done again after a resume appear again."""
        return self.path / "metrics.jsonl"

    @property
    def worst_steps_path(self) -> Path:
        """JSONL of the worst steps and the samples that caused them; see ``app.worst_steps``."""
        return self.path / "worst_steps.jsonl"

    @property
    def quarantine_path(self) -> Path:
        """JSONL of bad samples."""
        return self.path / "quarantine.jsonl"

    def quarantine_of(self, held_out: str) -> Path:
        """JSONL of bad samples of one held-out source."""
        return self.path / f"held-out-quarantine-{held_out}.jsonl"

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
        """Return the step of the last line of the metrics, -1 if there is none; reads the whole file."""
        lines = self._lines(self.metrics_path.name)
        return int(lines[-1]["step"]) if lines else -1

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Keep the closing numbers of the run for its report."""
        self._write("summary.json", summary)

    def summary(self) -> dict[str, Any] | None:
        """Return the closing numbers, if written."""
        return self._read("summary.json")

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Keep the resolved settings beside the run."""
        self._write("settings.json", settings)

    def settings(self) -> dict[str, Any] | None:
        """Return the resolved settings of the last start, if written."""
        return self._read("settings.json")

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

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
        found = []
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return [item for item in found if isinstance(item, dict) and "step" in item]
