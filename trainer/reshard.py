"""Carry embedding rows from the ranks that encoded them to the ranks that own their positions.

Executes a ``ReshardPlan``: every hop picks rows, moves them, and appends what arrives to the rows held; the
last pick takes the rank's own rows. The adjoint of an all-to-all is the reverse one, and that of a summed
buffer is the same sum of the gradients at its places; picking rows adds them up in backward, so a row that
is consumed twice gets the sum of both gradients. The functions are our own because plain collectives have
dropped gradients without a word (pytorch#152127).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.reshard import AllToAll, Hop, IntArray, ReshardPlan, Scope, SumBuffer


def reshard(
    rows: Tensor, plan: ReshardPlan, *, groups: Mapping[Scope, dist.ProcessGroup]
) -> tuple[Tensor, Tensor]:
    """Move rows as ``plan`` says; differentiable in ``rows``.

    A collective, forward and backward, unless the plan has no hop: all ranks of the balance group must call
    it, also with no row at all. For the backward to run everywhere, ``rows`` must require a gradient on all
    members or on none, and the result must be part of every member's loss.

    Args:
        rows: [R, H]; outputs of all encoders of this rank, in plan order.
        plan: The part of this rank.
        groups: Process groups by scope, each in the order of the hops' splits.

    Returns:
        The rows [T, H] that this rank owns and their local sequence positions, int64 [T], ascending.

    Raises:
        PlanError: The plan and ``rows`` or ``groups`` do not fit.
    """
    sizes = {scope: dist.get_world_size(group) for scope, group in groups.items()}
    problem = reshard_problem(plan, num_rows=len(rows), sizes=sizes)
    if problem:
        raise PlanError(
            problem, where="reshard of one microbatch", fix="report this: the planner is at fault"
        )
    held = rows
    for hop in plan.hops:
        picked = _pick(held, hop.send_rows)
        held = torch.cat([held, _move(picked, hop, groups[hop.scope])])
    return _pick(held, plan.take_rows), torch.from_numpy(plan.positions).to(rows.device)


def reshard_problem(plan: ReshardPlan, *, num_rows: int, sizes: Mapping[Scope, int]) -> str:
    """Return why ``plan`` cannot run on ``num_rows`` rows and process groups of ``sizes`` ranks, or ""."""
    num_held = num_rows
    for hop in plan.hops:
        if hop.scope not in sizes:
            return f"a hop among the ranks of a {hop.scope}, this rank has no such process group"
        if problem := _outside(hop.send_rows, num_held, "rows are sent"):
            return problem
        if isinstance(hop, AllToAll):
            problem = _all_to_all_problem(hop, sizes[hop.scope])
        else:
            problem = _buffer_problem(hop)
        if problem:
            return problem
        num_held += hop.num_received
    if len(plan.take_rows) != len(plan.positions):
        return f"{len(plan.take_rows)} rows are taken for {len(plan.positions)} positions"
    if (np.diff(plan.positions) <= 0).any():
        return "rows are not taken in ascending order of distinct positions"
    return _outside(plan.take_rows, num_held, "rows are taken")


def _all_to_all_problem(hop: AllToAll, size: int) -> str:
    if not len(hop.send_splits) == len(hop.recv_splits) == size:
        splits = f"{len(hop.send_splits)} and {len(hop.recv_splits)} splits"
        return f"{splits} for a {hop.scope} of {size} ranks"
    if sum(hop.send_splits) != len(hop.send_rows):
        return f"splits send {sum(hop.send_splits)} rows, {len(hop.send_rows)} rows are named"
    return ""


def _buffer_problem(hop: SumBuffer) -> str:
    if len(hop.send_rows) != len(hop.send_places):
        return f"{len(hop.send_rows)} rows are sent to {len(hop.send_places)} places"
    if len(np.unique(hop.send_places)) != len(hop.send_places):
        return "two rows are sent to one place"
    places = np.concatenate([hop.send_places, hop.recv_places])
    return _outside(places, hop.num_places, "places of the buffer are used")


def _outside(numbers: IntArray, count: int, what: str) -> str:
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < count:
        return f"{what}: {numbers.min()} to {numbers.max()}, there are {count}"
    return ""


def _pick(rows: Tensor, numbers: IntArray) -> Tensor:
    return rows.index_select(0, torch.from_numpy(numbers).to(rows.device))


def _move(picked: Tensor, hop: Hop, group: dist.ProcessGroup) -> Tensor:
    """Return the rows that a hop brings."""
    if isinstance(hop, AllToAll):
        moved: Tensor = _AllToAll.apply(picked, hop.send_splits, hop.recv_splits, group)  # type: ignore[no-untyped-call]
        return moved
    places = (torch.from_numpy(numbers).to(picked.device) for numbers in (hop.send_places, hop.recv_places))
    summed: Tensor = _SumBuffer.apply(picked, *places, hop.num_places, group)  # type: ignore[no-untyped-call]
    return summed


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        send_splits: tuple[int, ...],
        recv_splits: tuple[int, ...],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.splits = send_splits, recv_splits
        ctx.group = group
        return _all_to_all(rows, send_splits, recv_splits, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        send_splits, recv_splits = ctx.splits
        return _all_to_all(gradients[0], recv_splits, send_splits, ctx.group), None, None, None


class _SumBuffer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        send_places: Tensor,
        recv_places: Tensor,
        num_places: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.places = send_places, recv_places, num_places
        ctx.group = group
        return _through_buffer(rows, send_places, recv_places, num_places, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        send_places, recv_places, num_places = ctx.places
        returned = _through_buffer(gradients[0], recv_places, send_places, num_places, ctx.group)
        return returned, None, None, None, None


def _all_to_all(
    rows: Tensor, send_splits: tuple[int, ...], recv_splits: tuple[int, ...], group: dist.ProcessGroup
) -> Tensor:
    received = rows.new_empty((sum(recv_splits), rows.shape[1]))
    dist.all_to_all_single(received, rows.contiguous(), list(recv_splits), list(send_splits), group=group)
    return received


def _through_buffer(
    rows: Tensor, written: Tensor, taken: Tensor, num_places: int, group: dist.ProcessGroup
) -> Tensor:
    """Add ``rows`` to a buffer of zeros at ``written``, sum it over the group, and take ``taken`` of it."""
    buffer = rows.new_zeros((num_places, rows.shape[1])).index_add_(0, written, rows)
    dist.all_reduce(buffer, group=group)
    return buffer.index_select(0, taken)
