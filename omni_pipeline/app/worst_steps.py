"""The worst steps of a run on file: which rank held the others up, and on which samples.

A step is worst by its measured time, or by the time that the model says it loses to imbalance (makespans less
means; a ratio would choose the nearly empty steps at the end of data). A few of each are kept, so the file
stays small however long the run is, and is written anew, whole, when they change. The first step of a start
is slow because it is the first, and is not ranked by time. A resumed run drops the steps that it does again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from loaders.source import Source
from omni_pipeline.core.errors import DataError
from omni_pipeline.core.sample import SampleId
from trainer.step_causes import HeavySample, PartCause, StepCause

KEEP = 8
"""Steps that are kept of each kind."""
SHOWN = 4
"""Steps of each kind that people are shown."""
STANDS_OUT = 1.1
"""Own work over the mean of all ranks from which a rank is said to hold the others up."""
LIGHT = 0.2
BY_TIME, BY_IMBALANCE = "time", "imbalance"


@dataclass(frozen=True)
class SampleName:
    """What people know a sample by: its key, and path or URL of its shard; both "" if it cannot be told."""

    id: SampleId
    key: str
    shard: str


@dataclass(frozen=True)
class WorstStep:
    """One of the worst steps.

    Args:
        cause: Why it took so long.
        worst_by: ``time``, ``imbalance``, or both.
        names: Of all samples of ``cause``.
    """

    cause: StepCause
    worst_by: tuple[str, ...]
    names: tuple[SampleName, ...]

    def name_of(self, sample: SampleId) -> SampleName:
        """Return the name of a sample of the step."""
        return next((name for name in self.names if name.id == sample), SampleName(sample, "", ""))

    @property
    def outstanding(self) -> list[PartCause]:
        """The parts in which a rank was far above the mean; without any, imbalance is not what took time."""
        return [part for part in self.cause.parts if part.own_s >= STANDS_OUT * part.mean_s > 0]

    @property
    def waited(self) -> bool:
        """Whether much of the step was waiting for data."""
        return self.cause.wait_s >= self.cause.step_s / 4


def telling_samples(part: PartCause) -> list[HeavySample]:
    """Return the samples that explain a slow rank: each once, none that is light beside the heaviest.

    They are those of the microbatch in which it was slow, if it named any of these.
    """
    there = [item for item in part.samples if item.microbatch == part.microbatch]
    once: dict[SampleId, HeavySample] = {}
    for item in there or part.samples:
        once.setdefault(item.id, item)
    ranked = sorted(once.values(), key=lambda item: -item.modelled_s)
    return [item for item in ranked if item.modelled_s >= LIGHT * ranked[0].modelled_s][:2]


_ADAPTER = TypeAdapter(WorstStep)
NameOf = Callable[[SampleId], SampleName]


class WorstSteps:
    """Keeps the worst steps of a run, those of its earlier starts included.

    Args:
        path: JSONL, one step a line, ascending.
        first_step: The first step of this start; what the file says of it and of later ones is dropped.
        name_of: Finds the names of samples.
    """

    def __init__(self, path: Path, *, first_step: int, name_of: NameOf) -> None:
        self._path = path
        self._first_step = first_step
        self._name_of = name_of
        self._steps = {
            item.cause.step: item for item in read_worst_steps(path) if item.cause.step < first_step
        }
        if path.exists():
            self._write()

    def see(self, cause: StepCause) -> None:
        """Look at one more step."""
        ranked = (BY_IMBALANCE,) if cause.step == self._first_step else (BY_TIME, BY_IMBALANCE)
        others = [item for step, item in self._steps.items() if step != cause.step]
        kept = _worst([*others, WorstStep(cause, ranked, ())])
        if cause.step not in kept:
            return
        samples = {item.id for part in cause.parts for item in part.samples}
        names = tuple(self._name_of(sample) for sample in sorted(samples))
        self._steps = {**kept, cause.step: replace(kept[cause.step], names=names)}
        self._write()

    def _write(self) -> None:
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        lines = [_ADAPTER.dump_json(self._steps[step]) + b"\n" for step in sorted(self._steps)]
        partial.write_bytes(b"".join(lines))
        os.replace(partial, self._path)


def read_worst_steps(path: Path) -> list[WorstStep]:
    """Return the steps of the file, ascending; none if there is no file. Damaged lines are left out."""
    return sorted(_read(path), key=lambda item: item.cause.step)


def worst_shown(steps: Sequence[WorstStep]) -> list[WorstStep]:
    """Return the steps to show: the worst by time, then those by imbalance that are not among them."""
    by_time = sorted(steps, key=lambda item: -item.cause.step_s)
    by_loss = sorted(steps, key=lambda item: -item.cause.modelled_loss_s)
    chosen = [item for item in by_time if BY_TIME in item.worst_by][:SHOWN]
    rest = [item for item in by_loss if BY_IMBALANCE in item.worst_by and item not in chosen]
    return chosen + rest[:SHOWN]


def namer(sources: Sequence[Source]) -> NameOf:
    """Return what finds the names of samples of ``sources``."""
    by_name = {source.name: source for source in sources}

    def name_of(sample: SampleId) -> SampleName:
        source = by_name[sample.source]
        try:
            _, key, shard = source.identify(sum(source.shard_sizes[: sample.shard]) + sample.row)
        except (DataError, OSError):  # a name is no reason to end a run
            return SampleName(sample, "", source.shards[sample.shard])
        return SampleName(sample, key, shard)

    return name_of


def _worst(steps: Sequence[WorstStep]) -> dict[int, WorstStep]:
    """Return the worst of each kind by step, each with the kinds that it is among the worst of."""
    kinds: dict[int, tuple[str, ...]] = {}
    for kind, size in ((BY_TIME, _step_s), (BY_IMBALANCE, _modelled_loss_s)):
        ranked = [item.cause for item in steps if kind in item.worst_by]
        for cause in sorted(ranked, key=lambda cause: (-size(cause), cause.step))[:KEEP]:
            kinds[cause.step] = (*kinds.get(cause.step, ()), kind)
    found = {item.cause.step: item for item in steps}
    return {step: replace(found[step], worst_by=worst_by) for step, worst_by in kinds.items()}


def _step_s(cause: StepCause) -> float:
    return cause.step_s


def _modelled_loss_s(cause: StepCause) -> float:
    return cause.modelled_loss_s


def _read(path: Path) -> Iterator[WorstStep]:
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            yield _ADAPTER.validate_json(line)
        except ValidationError:
            continue
