"""What the files of a run folder say, made ready for its report: metrics, attempts, replays, marks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loaders.quarantine import QuarantineRecord, read_quarantine
from omni_pipeline.app.report_charts import Mark
from omni_pipeline.app.run_dir import Event, RunDir
from omni_pipeline.app.sinks import Attempt, MetricValues, merge_attempts, read_attempts
from omni_pipeline.app.worst_steps import WorstStep, read_worst_steps
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.sample import SampleId

NO_VALUES: MetricValues = (np.empty(0, dtype=np.int64), np.empty(0))


@dataclass(frozen=True)
class RunData:
    """What the files of a run folder say.

    Args:
        name: Name of the folder.
        attempts: Starts of the run, in order.
        metrics: By name (steps, values), superseded numbers left out.
        quarantine: Records of bad samples, one per sample.
        worst: Its worst steps, ascending.
    """

    name: str
    attempts: tuple[Attempt, ...]
    metrics: Mapping[str, MetricValues]
    quarantine: tuple[QuarantineRecord, ...]
    worst: tuple[WorstStep, ...] = ()

    def values(self, name: str) -> npt.NDArray[np.float64]:
        """Return the finite values of a metric; empty if it was not recorded."""
        found = self.metrics.get(name, NO_VALUES)[1]
        return found[np.isfinite(found)]

    def by_prefix(self, prefix: str) -> dict[str, MetricValues]:
        """Return the metrics that begin with ``prefix``, without it."""
        return {
            name.removeprefix(prefix): found
            for name, found in self.metrics.items()
            if name.startswith(prefix)
        }

    @property
    def wait_shares(self) -> MetricValues:
        """Share of each step that waited for data."""
        wait_steps, wait_s = self.metrics.get("loader/wait_s", NO_VALUES)
        step_steps, step_s = self.metrics.get("trainer/step_s", NO_VALUES)
        steps, left, right = np.intersect1d(wait_steps, step_steps, return_indices=True)
        total = np.where(step_s[right] > 0, step_s[right], np.nan)
        return steps, wait_s[left] / total


@dataclass(frozen=True)
class Replay:
    """What a resumed run computed again: the first numbers, and how far the second ones are from them."""

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    num_repeated: int
    largest_difference: float


def load_run(run_dir: Path) -> RunData:
    """Read a run folder.

    Raises:
        ConfigError: The folder is missing or has no metrics.
    """
    fix = "give the run.dir of a run that has trained a step"
    if not run_dir.is_dir():
        raise ConfigError(f"there is no folder {run_dir}", fix=fix)
    run = RunDir(run_dir)
    path = run.metrics_path
    attempts = read_attempts(path) if path.exists() else []
    if not attempts:
        raise ConfigError(f"{run_dir} has no metrics to report", where=str(path), fix=fix)
    # The first failure of a sample stays.
    first: dict[tuple[SampleId, str], QuarantineRecord] = {}
    for record in read_quarantine(run.quarantine_path):
        first.setdefault((record.sample_id, record.member), record)
    return RunData(
        name=run_dir.resolve().name,
        attempts=tuple(attempts),
        metrics=merge_attempts(attempts),
        quarantine=tuple(first.values()),
        worst=tuple(read_worst_steps(run.worst_steps_path)),
    )


def replays_of(attempts: Sequence[Attempt], name: str) -> list[Replay]:
    """Return, for each attempt that a later one superseded in part, what was computed again."""
    replays: list[Replay] = []
    for index, attempt in enumerate(attempts):
        later = attempts[index + 1 :]
        first = min((other.first_step for other in later), default=math.inf)
        old = {step: value for step, value in attempt.values.get(name, {}).items() if step >= first}
        if not old:
            continue
        again = {step: value for other in later for step, value in other.values.get(name, {}).items()}
        both = [step for step in old if step in again]
        gaps = np.array([abs(old[step] - again[step]) for step in both])
        steps = np.array(sorted(old), dtype=np.int64)
        values = np.array([old[int(step)] for step in steps])
        replays.append(Replay(steps, values, len(both), float(gaps.max()) if len(gaps) else 0.0))
    return replays


def marks_of(events: Sequence[Event], attempts: Sequence[Attempt]) -> list[Mark]:
    """Return the events as marks in the order they happened, then resumes that only the metrics know of."""
    marks: list[Mark] = []
    for event in events:
        label = event.text if "step" in event.text else f"{event.text}, step {event.step}"
        marks.append(Mark(event.step, label, _kind_of(event.text)))
    for attempt in attempts[1:]:
        if not any(mark.kind == "resume" and abs(mark.step - attempt.first_step) <= 1 for mark in marks):
            marks.append(Mark(attempt.first_step, f"resumed at step {attempt.first_step}", "resume"))
    return marks


def last_values(metrics: Mapping[str, MetricValues]) -> dict[str, float]:
    """Return the last finite value of each metric that has one."""
    finite = {name: values[np.isfinite(values)] for name, (_, values) in metrics.items()}
    return {name: float(values[-1]) for name, values in finite.items() if values.size}


def is_swapped(name: str) -> bool:
    """Return whether a held-out set shows the media of other samples."""
    return "swapped" in name.split("/")[0]


def base_name(name: str) -> str:
    """Return the name that a held-out set shares with its swapped twin."""
    for word in ("held-out-", "held_out_", "swapped-", "swapped_"):
        name = name.removeprefix(word)
    return name.removesuffix("-swapped").removesuffix("_swapped")


def _kind_of(text: str) -> str:
    words = text.lower()
    if "resum" in words:
        return "resume"
    return "fault" if any(word in words for word in ("kill", "fail", "crash", "lost")) else "note"
