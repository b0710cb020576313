"""Carry embedding rows from the ranks that encoded them to the ranks that own their positions.

Executes a ``ReshardPlan``: pick the rows to send, one all-to-all with exact (uneven, possibly zero) splits,
and the positions of what arrives. The adjoint of an exchange is the reverse exchange, and the adjoint of
picking rows adds them up, so a row that several ranks consume gets the sum of their gradients. The function
is our own because plain collectives have dropped gradients without a word (pytorch#152127).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.plan import ReshardPlan


def reshard(rows: Tensor, plan: ReshardPlan, *, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Send and receive rows as ``plan`` says; differentiable in ``rows``.

    A collective, forward and backward: all ranks of ``group`` must call it, also with no row at all. For the
    backward to run everywhere, ``rows`` must require a gradient on all members or on none, and the result
    must be part of every member's loss.

    Args:
        rows: [R, H]; outputs of all encoders of this rank, in plan order.
        plan: The rows of this rank.
        group: The balance group, in the order of the plan's splits.

    Returns:
        The received rows [sum(recv_splits), H] and their sequence positions, int64 [sum(recv_splits)].

    Raises:
        PlanError: The plan and ``rows`` or ``group`` do not fit.
    """
    problem = reshard_problem(plan, num_rows=len(rows), num_members=dist.get_world_size(group))
    if problem:
        raise PlanError(
            problem, where="reshard of one microbatch", fix="report this: the planner is at fault"
        )
    picked = rows.index_select(0, torch.from_numpy(plan.send_rows).to(rows.device))
    positions = torch.from_numpy(plan.recv_positions).to(rows.device)
    if dist.get_world_size(group) == 1:
        return picked, positions
    received: Tensor = _Exchange.apply(picked, plan.send_splits, plan.recv_splits, group)  # type: ignore[no-untyped-call]
    return received, positions


def reshard_problem(plan: ReshardPlan, *, num_rows: int, num_members: int) -> str:
    """Return why ``plan`` cannot run on ``num_rows`` rows and ``num_members`` ranks, or ""."""
    if not len(plan.send_splits) == len(plan.recv_splits) == num_members:
        return f"{len(plan.send_splits)} and {len(plan.recv_splits)} splits for a group of {num_members}"
    if sum(plan.send_splits) != len(plan.send_rows):
        return f"splits send {sum(plan.send_splits)} rows, {len(plan.send_rows)} rows are named"
    if sum(plan.recv_splits) != len(plan.recv_positions):
        return f"splits receive {sum(plan.recv_splits)} rows, {len(plan.recv_positions)} positions are named"
    if len(plan.send_rows) and not 0 <= plan.send_rows.min() <= plan.send_rows.max() < num_rows:
        return f"rows {plan.send_rows.min()} to {plan.send_rows.max()} are sent, the encoders made {num_rows}"
    return ""


class _Exchange(torch.autograd.Function):
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


def _all_to_all(
    rows: Tensor, send_splits: tuple[int, ...], recv_splits: tuple[int, ...], group: dist.ProcessGroup
) -> Tensor:
    received = rows.new_empty((sum(recv_splits), rows.shape[1]))
    dist.all_to_all_single(received, rows.contiguous(), list(recv_splits), list(send_splits), group=group)
    return received
