"""The exchange of rows: equal to indexing the rows of all ranks, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.plan import ReshardPlan
from tests.support.ranks import run_ranks
from trainer.reshard import reshard

HIDDEN = 3


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _plan(routes: list[list[list[int]]], rank: int) -> ReshardPlan:
    """Make the plan of ``rank`` of ``routes[sender][receiver]``: rows of the sender, in sending order."""
    sends, receives = routes[rank], [route[rank] for route in routes]
    num_received = sum(len(rows) for rows in receives)
    return ReshardPlan(
        send_rows=np.array([row for rows in sends for row in rows], dtype=np.int64),
        send_splits=tuple(len(rows) for rows in sends),
        recv_splits=tuple(len(rows) for rows in receives),
        recv_positions=np.arange(num_received, dtype=np.int64) * 2 + 1,
    )


def _rows(rank: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(num_rows * HIDDEN, dtype=torch.float64).view(num_rows, HIDDEN) + 100 * rank
    return values.to(dtype).requires_grad_()


def _exchange(
    rank: int, routes: list[list[list[int]]], num_rows: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = _rows(rank, num_rows[rank], dtype)
    received, positions = reshard(rows, _plan(routes, rank), group=_world())
    torch.autograd.backward((received * (rank + 1)).sum())
    assert rows.grad is not None
    return received.detach(), positions, rows.grad


def _check_exchange(
    routes: list[list[list[int]]], num_rows: list[int], *, dtype: torch.dtype = torch.float32
) -> None:
    results = run_ranks(len(routes), _exchange, args=(routes, num_rows, dtype))
    for rank, (received, positions, gradient) in enumerate(results):
        wanted = [
            _rows(sender, num_rows[sender], dtype)[row]
            for sender in range(len(routes))
            for row in routes[sender][rank]
        ]
        expected = torch.stack(wanted) if wanted else torch.empty(0, HIDDEN, dtype=dtype)
        torch.testing.assert_close(received, expected.detach(), rtol=0, atol=0)
        assert positions.tolist() == [2 * index + 1 for index in range(len(wanted))]
        summed = torch.zeros(num_rows[rank], HIDDEN, dtype=dtype)
        for receiver, rows in enumerate(routes[rank]):
            for row in rows:
                summed[row] += receiver + 1
        torch.testing.assert_close(gradient, summed, rtol=0, atol=0)


def test_one_rank_only_reorders_its_rows() -> None:
    _check_exchange([[[2, 0, 1]]], [3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_arrive_by_sender_and_gradients_return_to_them(dtype: torch.dtype) -> None:
    _check_exchange([[[1], [0, 2]], [[], [3, 1, 0]]], [3, 4], dtype=dtype)


def test_a_row_sent_to_two_ranks_gets_the_sum_of_their_gradients() -> None:
    _check_exchange([[[0, 0], [0]], [[1], [0]]], [1, 2])


def test_four_ranks_with_a_silent_one_and_a_deaf_one() -> None:
    silent: list[list[int]] = [[], [], [], []]
    _check_exchange([[[0], [1], [], [2]], silent, [[], [0, 1], [], []], [[1], [], [], [0]]], [3, 0, 2, 2])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_no_row_anywhere_still_runs_both_ways(world_size: int) -> None:
    _check_exchange([[[] for _ in range(world_size)] for _ in range(world_size)], [0] * world_size)


def _misfits(rank: int) -> list[str]:
    rows = torch.zeros(2, HIDDEN)
    empty = np.empty(0, dtype=np.int64)
    plans = [
        ReshardPlan(empty, (0,), (0,), empty),
        ReshardPlan(np.array([0, 2]), (2, 0), (0, 0), empty),
        ReshardPlan(np.array([0, 1]), (1, 0), (0, 0), empty),
        ReshardPlan(empty, (0, 0), (0, 1), empty),
    ]
    messages = []
    for plan in plans:
        with pytest.raises(PlanError) as caught:
            reshard(rows, plan, group=_world())
        messages.append(caught.value.what)
    return messages


def test_a_plan_that_does_not_fit_is_refused_before_the_exchange() -> None:
    assert run_ranks(2, _misfits)[0] == [
        "1 and 1 splits for a group of 2",
        "rows 0 to 2 are sent, the encoders made 2",
        "splits send 1 rows, 2 rows are named",
        "splits receive 1 rows, 0 positions are named",
    ]
