"""What ranks tell each other before a step: some integers, so that none waits for one that went elsewhere.

Every step begins with the same three small collectives on every rank, data or not: who is where (step,
settings, plan, end of the data, wishes), which samples failed in the group, and the global sums; the last two
are left out where the first says that the data has ended. All decisions are made from gathered values, so
they are the same everywhere: a rank that differs is named on *all* ranks, at once. Messages are CPU tensors;
nothing waits for a device.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from omni_pipeline.core.batch import Batch, EndRule
from omni_pipeline.core.errors import DataError, OmniError, RankError, StateMismatchError
from omni_pipeline.core.plan import StepPlan
from omni_pipeline.core.sample import SampleId
from trainer.parallel.mesh import RankGroups

logger = logging.getLogger(__name__)

NO_PLAN = -1

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Requests:
    """What one rank wishes of all ranks.

    Args:
        stop: End the run after this step, e.g. because a signal came.
        checkpoint: Write a checkpoint after this step.
    """

    stop: bool = False
    checkpoint: bool = False


@dataclass(frozen=True)
class Agreement:
    """What all ranks know before the step; equal on all of them.

    Args:
        num_microbatches: Of every rank; 0 when the data has ended: nothing more is done in this step.
        requests: The wishes of all ranks together.
    """

    num_microbatches: int
    requests: Requests


@dataclass(frozen=True)
class _Word:
    """What one rank says of itself, as integers on the wire in the order of the fields."""

    step: int
    plan_step: int
    settings: int
    plan: int
    num_microbatches: int
    has_samples: int
    num_empty_packs: int
    stop: int
    checkpoint: int
    has_problem: int


def agree(
    batch: Batch | None,
    *,
    step: int,
    settings: Mapping[str, str],
    problem: str,
    requests: Requests,
    groups: RankGroups,
    end: EndRule = "pad",
) -> Agreement:
    """Compare notes with all ranks; all must call it.

    A group knows its own lanes only, so the end of the data is agreed on here: with ``end="pad"`` it is the
    first step for which no rank has samples, with ``"drop"`` the first one with an empty pack anywhere.

    Args:
        batch: Of this rank; None or an exhausted one when its data has ended.
        step: The step that this rank is about to do.
        settings: Digests of the settings that must be equal everywhere, by section.
        problem: Why this rank cannot run its batch; empty if it can.
        requests: Wishes of this rank.
        groups: Its place.
        end: What to do with the last, uneven steps; equal on all ranks.

    Raises:
        StateMismatchError: A rank differs in step or settings, or a member of a group in its plan.
        RankError: A rank has a problem. Like the other error it is raised on all ranks, naming the rank.
    """
    own = _Word(
        step=step,
        plan_step=step if batch is None else batch.plan.step,
        settings=_digest(settings),
        plan=NO_PLAN if batch is None else batch.plan.digest,
        num_microbatches=0 if batch is None else batch.plan.num_microbatches,
        has_samples=int(batch is not None and not batch.exhausted),
        num_empty_packs=0 if batch is None else batch.num_empty_packs,
        stop=int(requests.stop),
        checkpoint=int(requests.checkpoint),
        has_problem=int(bool(problem)),
    )
    words = [_Word(*numbers) for numbers in _gather_integers(list(vars(own).values()), groups)]
    everyone = range(len(words))
    _same(words, everyone, lambda word: word.step, "step")
    if len({word.settings for word in words}) > 1:
        compare_settings(settings, where=f"start of step {step}")
    together = Requests(
        stop=any(word.stop for word in words), checkpoint=any(word.checkpoint for word in words)
    )
    # Before the problems: that of a step which is dropped is none.
    is_dropped = end == "drop" and any(word.num_empty_packs for word in words)
    if any(word.has_problem for word in words) and not is_dropped:
        raise_together(problem, what=f"step {step} cannot run", groups=groups)
    if problem:
        logger.warning("step %s is dropped, as the data has ended; it could not have run: %s", step, problem)
    _same(
        words,
        everyone,
        lambda word: word.plan_step - word.step,
        "lead of the loader over the trainer, in steps",
    )
    if words[0].plan_step != step:
        raise StateMismatchError(
            f"the loader is at step {words[0].plan_step}, the trainer at step {step}",
            fix="load the loader state of the same checkpoint as the weights",
        )
    if is_dropped:
        return Agreement(num_microbatches=0, requests=together)
    for group in range(groups.topology.num_groups):
        members = groups.topology.ranks_of_group(group)
        _same(words, members, lambda word: word.plan, f"plan digest (group {group})")
    with_batch = [rank for rank in everyone if words[rank].plan != NO_PLAN]
    _same(words, with_batch, lambda word: word.num_microbatches, "number of microbatches")
    return Agreement(
        num_microbatches=max(word.num_microbatches * word.has_samples for word in words),
        requests=together,
    )


def compare_settings(settings: Mapping[str, str], *, where: str = "start of the run") -> None:
    """Compare digests of settings by section; all ranks must call it, also before any group is made.

    Raises:
        StateMismatchError: Names the ranks and sections that differ from rank 0; raised on all ranks.
    """
    gathered: list[Mapping[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, dict(settings))
    first = gathered[0]
    lines = [
        f"rank {rank} in {', '.join(repr(name) for name in differing)}"
        for rank, other in enumerate(gathered)
        if (differing := sorted(name for name in {*first, *other} if first.get(name) != other.get(name)))
    ]
    if lines:
        more = f" and {len(lines) - 8} more" if len(lines) > 8 else ""
        error = StateMismatchError(
            f"ranks have other settings than rank 0: {'; '.join(lines[:8])}{more}",
            where=where,
            fix="start all ranks with the same code, run file, flags and data",
        )
        error.is_shared = True
        raise error


def unite_failed(batch: Batch | None, groups: RankGroups) -> frozenset[SampleId]:
    """Return the samples of the group's step that any member failed to decode; all members must call it."""
    ids = [] if batch is None else sample_ids(batch.plan)
    own = frozenset() if batch is None else batch.failed
    # One flag more than samples, so that the message is never empty.
    flags = torch.tensor([*(int(name in own) for name in ids), 0], dtype=torch.uint8)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=groups.group)
    return frozenset(name for name, failed in zip(ids, flags.tolist(), strict=False) if failed)


def global_sums(values: Sequence[int]) -> list[int]:
    """Return the sums of ``values`` over all ranks; all must call it."""
    sums = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(sums)
    return [int(value) for value in sums.tolist()]


def all_or_none(action: Callable[[], ResultT], *, what: str) -> ResultT:
    """Return what ``action`` does on this rank, or raise on every rank if it failed on any; all must call it.

    So no rank goes on to wait for one that has failed on its own.

    Raises:
        OmniError: The rank's own error; on the others a ``RankError`` that names the rank and its message.
    """
    result: list[ResultT] = []
    error: OmniError | None = None
    try:
        result.append(action())
    except OmniError as problem:
        error = problem
    except OSError as problem:
        error = DataError(f"{problem}", fix="check the path, its permissions and the room on the disk")
    errors: list[OmniError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    failed = {rank: other for rank, other in enumerate(errors) if other is not None}
    if not failed:
        return result[0]
    first, message = next(iter(failed.items()))
    if error is not None:
        error.is_shared = len(failed) == len(errors) and len({str(other) for other in failed.values()}) == 1
        raise error
    raise RankError(
        f"rank {first} cannot go on: {what}: {message.what}", where=message.where, fix=message.fix
    )


def raise_together(
    message: str,
    *,
    what: str,
    groups: RankGroups,
    fix: str = "see the message of the rank named first",
    nobody: str = "no rank knows why",
) -> NoReturn:
    """Raise one error on all ranks with the messages of those that have one, or else ``nobody``.

    All ranks must call it.

    Raises:
        RankError: Always; names the first ranks with a message.
    """
    messages: list[str] = [""] * groups.topology.world_size
    dist.all_gather_object(messages, message)
    lines = [f"rank {rank}: {text}" for rank, text in enumerate(messages) if text]
    more = f"; and {len(lines) - 8} more ranks" if len(lines) > 8 else ""
    error = RankError(f"{what}: {'; '.join(lines[:8]) or nobody}{more}", fix=fix)
    error.is_shared = True
    raise error


def sample_ids(plan: StepPlan) -> list[SampleId]:
    """Return the ids of all samples of ``plan``, in its order."""
    return [sample.id for pack in plan.packs for sample in pack.samples]


def _gather_integers(values: list[int], groups: RankGroups) -> list[list[int]]:
    own = torch.tensor(values, dtype=torch.int64)
    gathered = [torch.empty_like(own) for _ in range(groups.topology.world_size)]
    dist.all_gather(gathered, own)
    rows: list[list[int]] = torch.stack(gathered).tolist()
    return rows


def _digest(settings: Mapping[str, str]) -> int:
    raw = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little") >> 1


def _same(words: Sequence[_Word], ranks: Iterable[int], value_of: Callable[[_Word], int], name: str) -> None:
    """Raise unless the ranks agree; the value of most ranks (at a tie the lowest rank's) counts as right."""
    values = {rank: value_of(words[rank]) for rank in ranks}
    if len(set(values.values())) <= 1:
        return
    usual = Counter(values.values()).most_common(1)[0][0]
    others = [rank for rank, value in values.items() if value != usual]
    shown = ", ".join(f"rank {rank} has {_text(values[rank])}" for rank in others[:8])
    more = f" and {len(others) - 8} more" if len(others) > 8 else ""
    error = StateMismatchError(
        f"ranks disagree on the {name}: {shown}{more}; the others have {_text(usual)}",
        where=f"start of step {words[0].step}",
        fix="start all ranks with the same code, run file, flags and data; if they are the same, report this",
    )
    error.is_shared = True
    raise error


def _text(value: int) -> str:
    if value == NO_PLAN:
        return "none"
    return str(value) if abs(value) < 10**9 else f"{value:016x}"
