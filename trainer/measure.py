"""Where the time of a step goes on one rank, by stage, and how much of it is the rank's own work.

A stage is marked at its end; nothing waits for a mark. On a CPU each mark reads two clocks: the wall, and the
time that the training thread has been computing. A thread that waits in a collective computes nothing, so the
second one tells a rank's own work from waiting for others, and from standing aside for another process on
the same core. On CUDA a mark is an event in the queue of the device: the device waits and works in one
queue, so there is a wall time and no own time, and the events are read after the one place of a step where
the host waits for the device anyway.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.stage_times import ENCODER, EXCHANGE, LLM, STAGES, StageTimes


class StageClock:
    """Times the stages of one step on one rank.

    Args:
        device: Where the rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._marks: list[list[tuple[str, _Reading]]] = []
        self._read = _read_event if device.type == "cuda" else _read_clocks
        self._last_stage = LLM

    def begin(self) -> None:
        """Begin the next microbatch."""
        self._marks.append([("", self._read())])

    def mark(self, stage: str) -> None:
        """End a stage of the microbatch; one that ends twice, as forward and backward, is added up."""
        self._marks[-1].append((stage, self._read()))

    def watch_backward(self, encoded: Tensor, received: Tensor) -> None:
        """Mark the stages of the backward as it passes the tensors between them.

        Args:
            encoded: What the encoders made.
            received: What the exchange brought.
        """
        self._last_stage = LLM
        if received.requires_grad:
            received.register_hook(lambda _: self.mark(LLM))  # type: ignore[no-untyped-call]
            self._last_stage = EXCHANGE
        if encoded.requires_grad:
            encoded.register_hook(lambda _: self.mark(EXCHANGE))  # type: ignore[no-untyped-call]
            self._last_stage = ENCODER

    def end(self) -> None:
        """End the backward of the microbatch."""
        self.mark(self._last_stage)

    def times(self) -> StageTimes:
        """Return what was marked. On CUDA the device must have passed the last mark."""
        wall = {stage: [0.0] * len(self._marks) for stage in STAGES}
        own = {stage: [0.0] * len(self._marks) for stage in STAGES}
        for index, marks in enumerate(self._marks):
            for (_, before), (stage, after) in itertools.pairwise(marks):
                wall_s, own_s = before.until(after)
                wall[stage][index] += wall_s
                own[stage][index] += own_s or 0.0
        can_tell = self._read is _read_clocks
        return StageTimes(
            wall={stage: tuple(values) for stage, values in wall.items()},
            own={stage: tuple(values) for stage, values in own.items()} if can_tell else {},
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    """One moment: two clocks of the host, or an event of the device."""

    wall_s: float = 0.0
    own_s: float = 0.0
    event: torch.cuda.Event | None = None

    def until(self, later: _Reading) -> tuple[float, float | None]:
        """Return wall and own seconds between two moments."""
        if self.event is not None and later.event is not None:
            return self.event.elapsed_time(later.event) / 1e3, None
        return later.wall_s - self.wall_s, later.own_s - self.own_s


def _read_clocks() -> _Reading:
    return _Reading(time.perf_counter(), time.thread_time())


def _read_event() -> _Reading:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return _Reading(event=event)
