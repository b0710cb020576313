"""The order of a run at any step, without running: begin at the nearest known state, go on with numbers only.

Packs depend on those before, so a step is reached by drawing all steps from a known state up to it. Known are
the beginning of the run and every complete checkpoint in its folder whose loader state fits these settings; a
checkpoint that does not fit is told, not used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loaders.identity import STATE_VERSION, check_identity, full_identity, step_and_lanes
from loaders.order import LanePack, Order
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.run_dir import RunDir
from omni_pipeline.app.wire import Stream
from omni_pipeline.core.errors import OmniError, StateMismatchError
from trainer.checkpoint_files import is_complete, numbered, read_loader_state

# (done, of all)
Progress = Callable[[int, int], None]


def no_progress(done: int, total: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Start:
    """A known state of the order: before step 0, or that of a checkpoint.

    Args:
        step: The next step.
        lanes: State of the lanes; None before step 0.
    """

    step: int = 0
    lanes: Mapping[str, Any] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return "step 0" if self.lanes is None else f"the checkpoint at step {self.step}"

    def to_dict(self) -> dict[str, Any]:
        """Return which it is, as plain data."""
        return {"step": self.step, "checkpoint": self.lanes is not None}


class KnownStates:
    """The known states of a run, and why others cannot be used.

    Args:
        config: The run.
        stream: Its opened sources.
    """

    def __init__(self, config: RunConfig, stream: Stream) -> None:
        self._stream = stream
        self._num_steps = config.run.steps
        self._starts = [Start()]
        self._unusable: dict[int, str] = {}
        identity = full_identity(stream.identity, config.loader)
        for step, path in numbered(RunDir(config.run.dir).checkpoints):
            try:
                self._starts.append(_read_start(path, identity))
            except OmniError as error:
                self._unusable[step] = error.what

    def before(self, step: int) -> Iterator[Start]:
        """Yield the known states at or below ``step``, the latest first; the last is that before step 0."""
        return (start for start in reversed(self._starts) if start.step <= step)

    def order_at(self, start: Start, lanes: Iterable[int]) -> Order:
        """Return the order of ``lanes`` from ``start`` on.

        Raises:
            StateMismatchError: The state does not fit.
        """
        order = self._stream.order_of_lanes(lanes)
        if start.lanes is not None:
            order.load_state_dict(start.lanes)
        return order

    def nearest(self, step: int, lanes: Iterable[int]) -> tuple[Start, Order]:
        """Return the latest usable state at or below ``step``, and the order of ``lanes`` from there on."""
        wanted = tuple(lanes)
        for start in self.before(step):
            try:
                return start, self.order_at(start, wanted)
            except StateMismatchError as error:
                self._unusable[start.step] = error.what
        raise AssertionError("the state before step 0 always fits")

    def notes(self, start: Start, step: int) -> list[str]:
        """Return what to know of ``step`` followed from ``start``: unused checkpoints, the end of the run."""
        notes = self.unusable(after=start.step, until=step)
        if step >= self._num_steps:
            notes.append(f"the run ends before step {step}: run.steps = {self._num_steps}")
        return notes

    def unusable(self, *, after: int, until: int) -> list[str]:
        """Return a sentence for every checkpoint in (after, until] that could not be used."""
        return [
            f"the checkpoint at step {step} cannot be used: {reason}"
            for step, reason in sorted(self._unusable.items())
            if after < step <= until
        ]


def follow(
    order: Order, steps: range, *, progress: Progress = no_progress
) -> Iterator[tuple[int, list[LanePack]]]:
    """Yield (step, its packs as numbers) of ``steps``, which begin where ``order`` stands."""
    for step in steps:
        packs = order.next_entries(step)
        # What is left out on the way is counted by the order; its list would only grow.
        order.drain_dropped()
        progress(step + 1 - steps.start, len(steps))
        yield step, packs


def _read_start(path: Path, identity: Mapping[str, Any]) -> Start:
    if not is_complete(path):
        raise StateMismatchError("it is incomplete", where=str(path), fix="remove it")
    try:
        state = read_loader_state(path)
    except (OSError, json.JSONDecodeError) as error:
        raise StateMismatchError(f"it cannot be read: {error}", where=str(path), fix="remove it") from error
    check_identity(state, version=STATE_VERSION, identity=identity, where=str(path), announce=False)
    step, lanes = step_and_lanes(state)
    return Start(step, lanes)
