"""``train``: the main path of a run.

For each batch: one step of all ranks, its numbers, and from time to time a checkpoint. What all ranks must
do together (stop, save, end of the data) is decided from what they tell each other at the start of a step,
so they all do it at the same step.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any, Literal, Protocol

import torch.distributed as dist

from omni_pipeline.core.batch import Batch, EndRule
from omni_pipeline.core.metrics import Metrics
from trainer.agreement import Requests
from trainer.batches import next_batch
from trainer.checkpoint import Checkpointer, Progress
from trainer.checkpoint_config import CheckpointConfig
from trainer.parallel.mesh import RankGroups
from trainer.step import Learner, StepResult, train_step
from trainer.step_numbers import StepRecorder, StepTimes, StepWatcher

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class BatchLoader(Protocol):
    """Gives the batches of one rank, in order; ``batch.state`` resumes after that batch.

    It may end, or go on with exhausted batches; these keep the states of all groups at the same step.
    """

    def __iter__(self) -> Iterator[Batch]:
        """Continue where the loader is."""
        ...


MergeStates = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]
"""Loader states of all groups, by group -> one state of the run."""


@dataclass(frozen=True)
class LoopSettings:
    """What ``train`` needs to know.

    Args:
        num_steps: Steps of the whole run, those before a resume included.
        seq_len: Positions of a full pack.
        sources: Names of all sources.
        checkpoint: When to save.
        end: What to do with the last, uneven steps of data that ends.
    """

    num_steps: int
    seq_len: int
    sources: tuple[str, ...]
    checkpoint: CheckpointConfig
    end: EndRule = "pad"


EndReason = Literal["steps", "data", "signal"]


@dataclass(frozen=True)
class TrainEnd:
    """How far ``train`` has come, and why it ended: all steps done, no data left, or a signal."""

    progress: Progress
    reason: EndReason


def train(
    learner: Learner,
    loader: BatchLoader,
    *,
    settings: LoopSettings,
    metrics: Metrics,
    checkpointer: Checkpointer,
    merge_states: MergeStates,
    progress: Progress | None = None,
    after_step: Callable[[int], None] | None = None,
    watcher: StepWatcher | None = None,
) -> TrainEnd:
    """Train until ``num_steps``, the end of the data, or a signal; a collective of all ranks.

    SIGTERM, SIGUSR1 or SIGINT to any rank ends the run on all of them after the next step. Unless an error
    ends it, the last thing is a checkpoint, if anything was trained.

    Args:
        learner: Changed in place.
        loader: Of this rank, at the step that ``progress`` says.
        settings: Equal on all ranks.
        metrics: Used on rank 0 only.
        checkpointer: Of this run.
        merge_states: See ``MergeStates``; called on all ranks.
        progress: From the checkpoint that was loaded; default: a new run.
        after_step: Called on all ranks after each step with the number of steps done, e.g. to evaluate.
        watcher: Told on rank 0 why steps take so long; given on all ranks or on none.

    Returns:
        How far the run has come, and why it ended.

    Raises:
        OmniError: A step, the loader of any rank, or a checkpoint failed; raised on all ranks.
    """
    groups = learner.model.groups
    recorder = StepRecorder(
        metrics, sources=settings.sources, seq_len=settings.seq_len, groups=groups, watcher=watcher
    )
    saver = _Saver(checkpointer, settings.checkpoint, merge_states=merge_states, groups=groups)
    progress = progress or Progress()
    reason: EndReason = "steps"
    batches = iter(loader)
    with StopSignals() as signals:
        while progress.num_steps < settings.num_steps:
            start = time.perf_counter()
            batch, problem = next_batch(batches)
            wait_s = time.perf_counter() - start
            requests = Requests(stop=signals.caught, checkpoint=saver.is_due_by_time())
            result = train_step(
                learner,
                batch,
                step=progress.num_steps,
                requests=requests,
                problem=problem,
                end=settings.end,
            )
            if result.ended:
                reason = "data"
                break
            progress = _advanced(progress, result)
            saver.see(batch)
            times = StepTimes(wait_s=wait_s, step_s=time.perf_counter() - start)
            recorder.record(result, batch, times=times)
            if saver.is_due(progress, result.requests):
                saver.save(progress)
            if after_step is not None and not result.requests.stop:
                after_step(progress.num_steps)
            if result.requests.stop:
                logger.warning("stopping after %s steps: a signal asked for it", progress.num_steps)
                reason = "signal"
                break
            if result.skipped:
                logger.warning("step %s has no label to train on and was skipped", result.step)
        saver.save_last(progress)
    return TrainEnd(progress, reason)


class StopSignals:
    """Notes SIGTERM, SIGUSR1 and SIGINT while entered, in the main thread; elsewhere it notes nothing."""

    def __init__(self) -> None:
        self.caught = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.caught = True


class _Saver:
    """Knows when a checkpoint is due, and the loader state of the last batch trained on."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        config: CheckpointConfig,
        *,
        merge_states: MergeStates,
        groups: RankGroups,
    ) -> None:
        self.checkpointer = checkpointer
        self.config = config
        self.merge_states = merge_states
        self.groups = groups
        self._state: dict[str, Any] | None = None
        self._num_steps_saved: int | None = None
        self._saved_at = time.monotonic()

    def see(self, batch: Batch | None) -> None:
        if batch is not None:
            self._state = batch.state

    def is_due_by_time(self) -> bool:
        """Return whether this rank asks for a checkpoint: only rank 0 looks at the clock."""
        passed_s = time.monotonic() - self._saved_at
        return self.groups.rank == 0 and 0 < self.config.every_minutes * 60 <= passed_s

    def is_due(self, progress: Progress, requests: Requests) -> bool:
        by_step = self.config.every_steps and progress.num_steps % self.config.every_steps == 0
        return requests.checkpoint or bool(by_step)

    def save(self, progress: Progress) -> None:
        start = time.monotonic()
        path = self.checkpointer.save(progress, self.merge_states(self._states_of_groups()))
        self._num_steps_saved = progress.num_steps
        self._saved_at = time.monotonic()
        if self.groups.rank == 0:
            logger.info("saved %s in %.1f s", path, self._saved_at - start)

    def save_last(self, progress: Progress) -> None:
        """Save unless nothing was trained, or all of it is saved."""
        if self._state is not None and self._num_steps_saved != progress.num_steps:
            self.save(progress)

    def _states_of_groups(self) -> list[dict[str, Any]]:
        """Return the loader states by group; the first member of a group speaks for it."""
        speaks = self.groups.rank == self.groups.members[0]
        gathered: list[dict[str, Any] | None] = [None] * self.groups.topology.world_size
        dist.all_gather_object(gathered, self._state if speaks else None)
        topology = self.groups.topology
        firsts = [topology.ranks_of_group(group)[0] for group in range(topology.num_groups)]
        return [state for first in firsts if (state := gathered[first]) is not None]


def _advanced(progress: Progress, result: StepResult) -> Progress:
    return replace(
        progress,
        num_steps=progress.num_steps + 1,
        num_tokens=progress.num_tokens + result.num_tokens,
        num_labels=progress.num_labels + result.num_labels,
        num_skipped=progress.num_skipped + int(result.skipped),
    )
