"""A rank's next batch, pure checks on it before it runs, and the batch of a rank whose data has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from omni_pipeline.core.batch import Batch, MicroBatch, joined_segments
from omni_pipeline.core.errors import OmniError
from omni_pipeline.core.plan import EXACT, Balance, StepPlan
from omni_pipeline.core.reshard import nothing_to_reshard
from trainer.colocation import EncoderAnchor
from trainer.parallel.mesh import RankGroups
from trainer.reshard import reshard_problem


def next_batch(batches: Iterator[Batch]) -> tuple[Batch | None, str]:
    """Return the next batch or why there is none: the step tells the others, so that none waits."""
    try:
        return next(batches, None), ""
    except OSError as error:
        return None, f"{error}; check the path, its permissions and the room on the disk"
    except OmniError as error:
        return None, "; ".join(part for part in (error.what, error.where, error.fix) if part)


def batch_problem(batch: Batch, anchors: Sequence[EncoderAnchor], groups: RankGroups) -> str:
    """Return in one sentence why ``batch`` cannot run on this rank, or ""; runs nothing.

    Found before the first exchange, so that it is an error on all ranks and not a wait on some.
    """
    if batch.plan.ranks != groups.members:
        return f"the plan is for ranks {batch.plan.ranks}, the group has {groups.members}"
    indices = [microbatch.index for microbatch in batch.microbatches]
    if indices != list(range(batch.plan.num_microbatches)):
        return f"microbatches {indices}, the plan has {batch.plan.num_microbatches}"
    for microbatch in batch.microbatches:
        problem = _shape_problem(microbatch) or _input_problem(batch.plan, microbatch, anchors, groups)
        if not problem:
            num_rows = rows_by_plan(batch.plan, microbatch.index, rank=groups.rank)
            problem = reshard_problem(microbatch.reshard, num_rows=num_rows, sizes=groups.sizes)
        if problem:
            return f"microbatch {microbatch.index}: {problem}"
    return ""


def rows_by_plan(plan: StepPlan, microbatch: int, *, rank: int) -> int:
    """Return the embedding rows that ``rank`` makes in ``microbatch``."""
    return sum(len(item.rows_of(rank)) for item in plan.media_of(rank=rank, microbatch=microbatch))


def idle_batch(
    *, step: int, num_microbatches: int, anchors: Sequence[EncoderAnchor], groups: RankGroups
) -> Batch:
    """Return a batch without samples, for a group whose data has ended before that of others."""
    nothing = Balance(mean=0.0, makespan_before=0.0, makespan_after=0.0)
    group = groups.topology.group_of(groups.rank)
    plan = StepPlan(
        step=step,
        group=group,
        ranks=groups.members,
        replicas=groups.topology.replicas_of_group(group),
        num_microbatches=num_microbatches,
        packs=(),
        slots=(),
        media=(),
        exchanges=(EXACT,) * num_microbatches,
        encoder_balance=nothing,
        llm_balance=nothing,
    )
    microbatches = tuple(_idle_microbatch(index, anchors) for index in range(num_microbatches))
    return Batch(plan=plan, microbatches=microbatches, failed=frozenset(), state={}, num_bytes=0, timings={})


def _idle_microbatch(index: int, anchors: Sequence[EncoderAnchor]) -> MicroBatch:
    empty = np.empty(0, dtype=np.int64)
    return MicroBatch(
        index=index,
        tokens=empty,
        labels=empty,
        positions=np.empty((3, 0), dtype=np.int64),
        cu_seqlens=np.zeros(1, dtype=np.int32),
        spans=(),
        inputs={anchor.name: anchor.empty_input() for anchor in anchors},
        reshard=nothing_to_reshard(),
    )


def _shape_problem(microbatch: MicroBatch) -> str:
    length = len(microbatch.tokens)
    if microbatch.labels.shape != (length,) or microbatch.positions.shape != (3, length):
        shapes = f"{microbatch.labels.shape} and positions {microbatch.positions.shape}"
        return f"{length} tokens, but labels {shapes}"
    positions = microbatch.reshard.positions
    if len(positions) and not 0 <= positions.min() <= positions.max() < length:
        return f"rows for positions {positions.min()} to {positions.max()} of {length}"
    return ""


def _input_problem(
    plan: StepPlan, microbatch: MicroBatch, anchors: Sequence[EncoderAnchor], groups: RankGroups
) -> str:
    names = [anchor.name for anchor in anchors]
    if set(microbatch.inputs) != set(names):
        return f"inputs for encoders {sorted(microbatch.inputs)}, the model has {sorted(names)}"
    index, rank, member = microbatch.index, groups.rank, groups.members.index(groups.rank)
    for anchor in anchors:
        inputs = microbatch.inputs[anchor.name]
        # An exchange among members that were told different things would never end.
        if inputs.joined != joined_segments(plan, microbatch=index, encoder=anchor.name, rank=rank):
            return f"{anchor.name} input has other joined segments than the plan"
        if problem := anchor.problem(inputs, member=member):
            return problem
        for item in plan.media_of(rank=rank, microbatch=index):
            if item.encoder == anchor.name and item.is_long and not item.joined:
                segment = plan.packs[item.pack].samples[item.sample].segments[item.segment]
                if problem := anchor.share_problem(item, segment.grid):
                    return problem
    return ""
