"""Where metrics and log lines of a run end up. The only module that configures logging.

``JsonlMetrics`` keeps one JSON object per step, so a run can be read while it is written and after any
kill. A run that is killed at step 60 and resumes at step 50 appends: each line names its *attempt*, and the
reader lets the later attempt win, so the file is never rewritten and the report can still draw both.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.live import Live
from rich.text import Text

from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.metrics import Metrics

MetricValues = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]

EVALUATION = "evaluation/"
_HANDLER_NAME = "omni"
_ETA_WINDOW_STEPS = 20
_LIVE_PERIOD_S = 0.2


class JsonlMetrics:
    """Appends one JSON object per step: ``{"step", "time_s", "attempt", "<name>": value, ...}``.

    The line of a step is written and flushed when a number of another step arrives, or at ``flush`` or
    ``close``. Values that are no finite number are written as ``null``.

    Args:
        path: The file; its folder is made. A last line that was cut by a kill is closed, not mended.
        clock: Unix time, seconds.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        attempts = read_attempts(path) if path.exists() else []
        self._attempt = attempts[-1].number + 1 if attempts else 0
        self._clock = clock
        self._step: int | None = None
        self._values: dict[str, float] = {}
        cut = path.exists() and not _ends_with_newline(path)
        self._file = path.open("a", encoding="utf-8")
        if cut:
            self._file.write("\n")

    def record(self, name: str, value: float, step: int) -> None:
        """Keep ``value`` under ``name`` for ``step``; a second call replaces the first."""
        if step != self._step:
            self.flush()
            self._step = step
        self._values[name] = float(value)

    def flush(self) -> None:
        """Write what is known of the current step; later numbers of the same step make another line."""
        if not self._values:
            return
        line: dict[str, Any] = {"step": self._step, "time_s": round(self._clock(), 3)}
        line["attempt"] = self._attempt
        line |= {name: value if math.isfinite(value) else None for name, value in self._values.items()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._values = {}

    def close(self) -> None:
        """Write the last step and close the file."""
        if not self._file.closed:
            self.flush()
            self._file.close()


@dataclass(frozen=True)
class Attempt:
    """What one start of the run wrote: from its first step to its end or its death.

    Args:
        number: 0 for the first start.
        values: By name, then by step, steps ascending.
        times: Unix time in seconds by step.
    """

    number: int
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)

    @property
    def first_step(self) -> int:
        """The step it started from; an evaluation of the step before may have come first."""
        done, evaluated = set[int](), set[int]()
        for name, values in self.values.items():
            (evaluated if name.startswith(EVALUATION) else done).update(values)
        if done or not evaluated:
            return min(done or self.times)
        return max(evaluated) + 1

    @property
    def last_step(self) -> int:
        """The last step that it wrote."""
        return max(self.times)


def read_attempts(path: Path) -> list[Attempt]:
    """Return every attempt in the order of writing; damaged lines are left out and counted in the log.

    A line without an attempt number starts a new attempt when its step goes back.

    Raises:
        ConfigError: There is no such file.
    """
    attempts: dict[int, Attempt] = {}
    damaged, number, last_step = 0, 0, -1
    for line in _lines(path):
        item = _parse(line)
        if item is None:
            damaged += bool(line.strip())
            continue
        step = item["step"]
        default = number + 1 if step < last_step else number
        given = item.get("attempt", default)
        number, last_step = given if isinstance(given, int) else default, step
        attempt = attempts.setdefault(number, Attempt(number))
        attempt.times[step] = _number(item.get("time_s"))
        for name, value in item.items():
            if "/" in name:
                attempt.values.setdefault(name, {})[step] = _number(value)
    if damaged:
        logging.getLogger(__name__).warning("%d damaged lines of %s are left out", damaged, path)
    return [attempts[key] for key in sorted(attempts)]


def merge_attempts(attempts: Sequence[Attempt]) -> dict[str, MetricValues]:
    """Return by name (steps int64 [n] ascending, values float64 [n]) with superseded numbers left out.

    A resumed attempt supersedes all steps after its first one; at that step itself names that it did not
    write again are kept (an evaluation that ran just before the checkpoint).
    """
    merged: dict[str, dict[int, float]] = {}
    for attempt in attempts:
        if not attempt.times:
            continue
        first = attempt.first_step
        for name, values in merged.items():
            merged[name] = {step: value for step, value in values.items() if step <= first}
        for name, values in attempt.values.items():
            merged.setdefault(name, {}).update(values)
    found: dict[str, MetricValues] = {}
    for name in sorted(merged):
        if merged[name]:
            steps = np.array(sorted(merged[name]), dtype=np.int64)
            found[name] = steps, np.array([merged[name][int(step)] for step in steps], dtype=np.float64)
    return found


def read_metrics(path: Path) -> dict[str, MetricValues]:
    """Return the numbers of a run by name, the last attempt winning; see ``merge_attempts``.

    Raises:
        ConfigError: There is no such file.
    """
    return merge_attempts(read_attempts(path))


def num_steps_trained(path: Path) -> int:
    """Return the steps that a run has trained since its last fresh start, also those lost to a kill."""
    furthest = 0
    for attempt in read_attempts(path) if path.exists() else []:
        if attempt.times:
            reached = attempt.last_step + 1
            furthest = reached if attempt.first_step == 0 else max(furthest, reached)
    return furthest


def has_evaluation(path: Path, step: int, *, sets: Sequence[str]) -> bool:
    """Return whether the file has an evaluation of every one of ``sets`` recorded at ``step``."""
    metrics = read_metrics(path) if path.exists() else {}
    found = [metrics.get(f"{EVALUATION}{name}/loss") for name in sets]
    return all(series is not None and step in series[0] for series in found)


class MultiMetrics:
    """Passes every number on to several sinks."""

    def __init__(self, sinks: Iterable[Metrics]) -> None:
        self._sinks = tuple(sinks)

    def record(self, name: str, value: float, step: int) -> None:
        """Record in each sink."""
        for sink in self._sinks:
            sink.record(name, value, step)

    def flush(self) -> None:
        """Flush the sinks that can."""
        self._call("flush")

    def close(self) -> None:
        """Close the sinks that can."""
        self._call("close")

    def _call(self, method: str) -> None:
        for sink in self._sinks:
            if callable(function := getattr(sink, method, None)):
                function()


class ConsoleMetrics:
    """Shows the run: one live line on a terminal, an occasional plain line on a pipe.

    Args:
        total_steps: Steps of the whole run, for the ETA; None if unknown.
        console: Where to; stderr by default, because stdout is for results.
        period_s: Seconds between two lines on a pipe.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        console: Console | None = None,
        period_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._console = console or Console(stderr=True)
        self._period_s = _LIVE_PERIOD_S if self._console.is_terminal else period_s
        self._clock = clock
        self._step: int | None = None
        self._values: dict[str, float] = {}
        self._step_times_s: deque[float] = deque(maxlen=_ETA_WINDOW_STEPS)
        self._shown_at = -math.inf
        self._shown_step: int | None = None
        self._live: Live | None = None

    def record(self, name: str, value: float, step: int) -> None:
        """Keep ``value``; a number of another step shows the step that is complete."""
        if step != self._step:
            self._finish_step()
            self._step = step
        self._values[name] = float(value)
        if name == "trainer/step_s" and math.isfinite(value):
            self._step_times_s.append(float(value))

    def flush(self) -> None:
        """Show the current step, whatever the period."""
        if self._step is not None and self._step != self._shown_step:
            self._show()

    def close(self) -> None:
        """Show the last step and give the terminal back."""
        self.flush()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self) -> str:
        """Return the text for the current step; numbers that were not recorded are left out."""
        total = f"/{self._total_steps}" if self._total_steps else ""
        parts = [f"step {self._step}{total}", *self._numbers(), self._eta(), self._imbalance()]
        return "  ".join(part for part in parts if part)

    def _numbers(self) -> Iterable[str]:
        value = self._values.get
        if (loss := value("trainer/loss")) is not None:
            yield f"loss {loss:.4f}"
        if (rate := value("trainer/tokens_per_s")) is not None:
            yield f"{rate:,.0f} tokens/s"
        wait_s, step_s = value("loader/wait_s"), value("trainer/step_s")
        if wait_s is not None and step_s:
            yield f"data wait {100 * wait_s / step_s:.1f}%"
        if padding := value("loader/padding"):
            yield f"padding {100 * padding:.1f}%"

    def _imbalance(self) -> str:
        found = []
        for name, label in (("encoder", "encoder"), ("llm", "LLM")):
            before = self._values.get(f"balancer/{name}_imbalance_before")
            after = self._values.get(f"balancer/{name}_imbalance_after")
            if before is not None and after is not None:
                found.append(f"{label} {before:.2f}->{after:.2f}")
        return " ".join(["imbalance", *found]) if found else ""

    def _eta(self) -> str:
        if not self._total_steps or not self._step_times_s or self._step is None:
            return ""
        left_s = max(self._total_steps - self._step - 1, 0) * float(np.median(self._step_times_s))
        return f"ETA {format_duration(left_s)}"

    def _finish_step(self) -> None:
        if self._step is not None and self._clock() - self._shown_at >= self._period_s:
            self._show()

    def _show(self) -> None:
        self._shown_at, self._shown_step = self._clock(), self._step
        if not self._console.is_terminal:
            self._console.print(Text(self.line()), soft_wrap=True)
            return
        if self._live is None:
            # No refresh thread: the line changes only here, and threads do not survive a fork.
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        self._live.update(Text(self.line(), style="cyan", no_wrap=True, overflow="ellipsis"), refresh=True)


def format_duration(seconds: float) -> str:
    """Return ``seconds`` in words of at most two units, e.g. ``2 h 05 min``, ``3 min 20 s``, ``12 s``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole} s"


def configure_logging(rank: int, *, worker: int | None = None, level: int = logging.INFO) -> None:
    """Send all log lines of this process to stderr, each with its rank (and decode worker).

    A second call replaces the first; handlers of others are left alone.
    """
    place = f"rank {rank}" if worker is None else f"rank {rank} worker {worker}"
    handler = _StderrHandler()
    handler.set_name(_HANDLER_NAME)
    line = "%(asctime)s {place} %(levelname)s %(name)s: %(message)s".replace("{place}", place)
    handler.setFormatter(logging.Formatter(line, datefmt="%H:%M:%S"))
    root = logging.getLogger()
    for old in [item for item in root.handlers if item.get_name() == _HANDLER_NAME]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Looks ``sys.stderr`` up at every line, so that log lines appear above a live progress line."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").split("\n")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"there is no metrics file {path}", fix="give the folder of a run that has trained a step"
        ) from error


def _parse(line: str) -> dict[str, Any] | None:
    try:
        item = json.loads(line)
    except json.JSONDecodeError:
        return None
    is_line = isinstance(item, dict) and type(item.get("step")) is int
    return item if is_line else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if not size:
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"
