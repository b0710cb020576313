"""The slots of a step, by pipeline stage: 1F1B, and where the encoders' work goes in it.

A schedule is data that depends on the number of stages and microbatches and on nothing that differs between
steps, so every rank knows it and collectives have one order everywhere. Forward and backward follow 1F1B
(PipeDream-flush, Narayanan et al. 2021): stage s of P runs at most P - s microbatches ahead of their
backward. The joint pipeline adds encoder work on demand (MegaScale-Omni, arXiv 2605.08962): each microbatch
is encoded by all stages just before stage 0 needs it, and its encoders' backward follows that of stage 0.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Literal, TypeAlias

from omni_pipeline.core.errors import PlanError

Task = Literal["encode", "dispatch", "forward", "backward", "collect", "encode_backward"]
"""What a slot does with its microbatch: encoders forward; rows to the owners; LLM forward; LLM backward;
gradients of rows back; encoders backward."""

TICK = 1e-9


@dataclass(frozen=True, slots=True)
class Slot:
    """One piece of work of a stage.

    Args:
        task: What is done.
        microbatch: With which microbatch.
        share: Part of the stage's encoder work of that microbatch, 0 to 1.
    """

    task: Task
    microbatch: int
    share: float = 1.0


Stage: TypeAlias = tuple[Slot, ...]
"""The slots of one pipeline stage, in order."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Start and end of each slot of one stage, in the unit of its forward and backward times."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]

    def early(self, moment: float) -> int:
        """Return the first slot that ends after ``moment``: what is put before it does not come late."""
        return bisect_right(self.ends, moment + TICK)

    def late(self, moment: float) -> int:
        """Return the first slot that starts at ``moment`` or later: what is put before it does not wait."""
        return bisect_left(self.starts, moment - TICK)


def one_f_one_b(num_stages: int, num_microbatches: int) -> tuple[Stage, ...]:
    """Return the LLM's slots: P - s - 1 forwards, then a forward and a backward in turn, then the rest."""
    if num_stages < 1 or num_microbatches < 1:
        raise PlanError(f"a pipeline of {num_stages} stages and {num_microbatches} microbatches")
    stages = []
    for stage in range(num_stages):
        ahead = min(num_stages - stage - 1, num_microbatches)
        slots = [Slot("forward", microbatch) for microbatch in range(ahead)]
        for microbatch in range(num_microbatches - ahead):
            slots += [Slot("forward", ahead + microbatch), Slot("backward", microbatch)]
        slots += [
            Slot("backward", microbatch) for microbatch in range(num_microbatches - ahead, num_microbatches)
        ]
        stages.append(tuple(slots))
    return tuple(stages)


def clocks(stages: tuple[Stage, ...], *, forward: float, backward: float) -> tuple[Clock, ...]:
    """Return when each LLM slot runs if all forwards take equally long, and all backwards; messages are free.

    Raises:
        PlanError: The stages wait for each other in a circle.
    """
    ends: dict[tuple[int, Task, int], float] = {}
    times: list[list[tuple[float, float]]] = [[] for _ in stages]
    moved = True
    while moved:
        moved = False
        for stage, slots in enumerate(stages):
            done = times[stage]
            while len(done) < len(slots):
                slot = slots[len(done)]
                before = _before(slot, stage, len(stages))
                if before is not None and before not in ends:
                    break
                start = max(done[-1][1] if done else 0.0, ends[before] if before else 0.0)
                end = start + (forward if slot.task == "forward" else backward)
                done.append((start, end))
                ends[stage, slot.task, slot.microbatch] = end
                moved = True
    stuck = [stage for stage, slots in enumerate(stages) if len(times[stage]) < len(slots)]
    if stuck:
        raise PlanError(f"stages {stuck} wait for each other in a circle")
    return tuple(Clock(tuple(start for start, _ in found), tuple(end for _, end in found)) for found in times)


def on_demand(num_stages: int, num_microbatches: int, *, forward_fraction: float) -> tuple[Stage, ...]:
    """Return 1F1B with each microbatch's encoding spread over all stages just before stage 0 needs it.

    The moments are those of a pipeline of equal microbatches. On every stage the encoding comes before the
    slot that runs at the moment of need, and the encoders' backward before the first slot that starts after
    stage 0's backward, so neither makes the other stages wait; all stages have them in one order.

    Args:
        num_stages: Pipeline stages.
        num_microbatches: Of the step.
        forward_fraction: Share of the forward in forward and backward, 0 to 1.
    """
    stages = one_f_one_b(num_stages, num_microbatches)
    times = clocks(stages, forward=forward_fraction, backward=1 - forward_fraction)
    moments: list[tuple[float, int, Slot]] = []
    # At one moment stage 0 ends a microbatch and needs another one: what it needs goes first, others wait for
    # it. With one stage nobody waits, and a microbatch is done with before the next is begun.
    order = 0 if num_stages > 1 else 2
    for index, slot in enumerate(stages[0]):
        if slot.task == "forward":
            moments.append((times[0].starts[index], order, Slot("encode", slot.microbatch)))
        else:
            moments.append((times[0].ends[index], 1, Slot("encode_backward", slot.microbatch)))
    moments.sort(key=lambda item: (round(item[0] / TICK), item[1], item[2].microbatch))
    return tuple(_with_encoders(slots, clock, moments) for slots, clock in zip(stages, times, strict=True))


def upfront(num_stages: int, num_microbatches: int) -> tuple[Stage, ...]:
    """Return the slots of: all stages encode all microbatches, then 1F1B, then all encoders' backwards."""
    every = range(num_microbatches)
    first = [Slot(task, microbatch) for microbatch in every for task in _ENCODE]
    last = [Slot("encode_backward", microbatch) for microbatch in every]
    return tuple(
        (*first, *_with_collect(slots), *last) for slots in one_f_one_b(num_stages, num_microbatches)
    )


def first_stage(num_stages: int, num_microbatches: int) -> tuple[Stage, ...]:
    """Return 1F1B with all encoder work in stage 0, around the microbatch's own forward and backward."""
    stages = one_f_one_b(num_stages, num_microbatches)
    slots: list[Slot] = []
    for slot in stages[0]:
        if slot.task == "forward":
            slots += [*(Slot(task, slot.microbatch) for task in _ENCODE), slot]
        else:
            slots += [slot, *(Slot(task, slot.microbatch) for task in _ENCODE_BACKWARD)]
    return (tuple(slots), *stages[1:])


def pool(num_stages: int, num_microbatches: int) -> tuple[Stage, ...]:
    """Return 1F1B over an encoder pool and ``num_stages`` stages of the LLM behind it; the pool is first."""
    encoders, *stages = one_f_one_b(num_stages + 1, num_microbatches)
    slots: list[Slot] = []
    for slot in encoders:
        tasks: tuple[Task, ...] = _ENCODE if slot.task == "forward" else ("encode_backward",)
        slots += [Slot(task, slot.microbatch) for task in tasks]
    return (tuple(slots), _with_collect(stages[0]), *stages[1:])


_ENCODE: tuple[Task, ...] = ("encode", "dispatch")
_ENCODE_BACKWARD: tuple[Task, ...] = ("collect", "encode_backward")


def _before(slot: Slot, stage: int, num_stages: int) -> tuple[int, Task, int] | None:
    """What another stage must have done before a slot."""
    if slot.task == "forward":
        return (stage - 1, "forward", slot.microbatch) if stage else None
    return (stage + 1, "backward", slot.microbatch) if stage + 1 < num_stages else None


def _with_collect(slots: Stage) -> Stage:
    """Let gradients of rows travel as soon as this stage's backward of their microbatch is done."""
    found: list[Slot] = []
    for slot in slots:
        found.append(slot)
        if slot.task == "backward":
            found.append(Slot("collect", slot.microbatch))
    return tuple(found)


def _with_encoders(slots: Stage, clock: Clock, moments: list[tuple[float, int, Slot]]) -> Stage:
    """Insert encoder slots at their moments.

    They keep their order on every stage: between a backward of stage 0 and its next need lies a whole slot of
    both kinds, longer than any that could run through both moments.
    """
    issues: list[list[Slot]] = [[] for _ in range(len(slots) + 1)]
    work: list[list[Slot]] = [[] for _ in range(len(slots) + 1)]
    for moment, _, slot in moments:
        if slot.task == "encode":
            work[clock.early(moment)] += [slot, Slot("dispatch", slot.microbatch)]
        else:
            issues[clock.early(moment)].append(Slot("collect", slot.microbatch))
            work[clock.late(moment)].append(slot)
    found: list[Slot] = []
    for index in range(len(slots) + 1):
        found += [*issues[index], *work[index], *slots[index : index + 1]]
    return tuple(found)
