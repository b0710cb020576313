"""The exchange of rows: equal to indexing the rows of all ranks, forward and backward, whatever the way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from balancer.layout import SequenceKind, SequenceLayout
from balancer.reshard import build_routes, reshard_plan
from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.plan import ExchangeKind, MediaPlacement, Pack, StepPlan
from omni_pipeline.core.reshard import AllToAll, ReshardPlan, Scope, SumBuffer, nothing_to_reshard
from omni_pipeline.core.topology import Topology
from tests.balancer.exchanges import Row, made_rows, wanted_rows
from tests.balancer.worlds import ENCODERS, Step
from tests.support.parity import mixed_sample, text_sample
from tests.support.ranks import run_ranks
from trainer.parallel.mesh import make_exchange_groups
from trainer.reshard import reshard

HIDDEN = 3
KINDS: tuple[ExchangeKind, ...] = ("exact", "symmetric", "two_level")
Routes = list[list[list[int]]]
"""``routes[sender][receiver]``: rows of the sender, in sending order."""


def _world() -> dict[Scope, dist.ProcessGroup]:
    group = dist.group.WORLD
    assert group is not None
    return {"group": group}


def _plan(routes: Routes, rank: int, *, num_rows: int, kind: ExchangeKind) -> ReshardPlan:
    sends, receives = routes[rank], [route[rank] for route in routes]
    num_received = sum(len(rows) for rows in receives)
    send_rows = np.array([row for rows in sends for row in rows], dtype=np.int64)
    hop: AllToAll | SumBuffer
    if kind == "exact":
        splits = tuple(len(rows) for rows in sends), tuple(len(rows) for rows in receives)
        hop = AllToAll("group", send_rows, *splits)
    else:
        moved = [(sender, receiver) for sender, route in enumerate(routes) for receiver in range(len(route))]
        ends = [ends for ends in moved for _ in routes[ends[0]][ends[1]]]
        hop = SumBuffer(
            num_places=len(ends),
            send_rows=send_rows,
            send_places=np.array([place for place, end in enumerate(ends) if end[0] == rank], dtype=np.int64),
            recv_places=np.array([place for place, end in enumerate(ends) if end[1] == rank], dtype=np.int64),
        )
    return ReshardPlan(
        hops=(hop,),
        take_rows=np.arange(num_received, dtype=np.int64) + num_rows,
        positions=np.arange(num_received, dtype=np.int64) * 2 + 1,
    )


def _rows(rank: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(num_rows * HIDDEN, dtype=torch.float64).view(num_rows, HIDDEN) + 100 * rank
    return values.to(dtype).requires_grad_()


def _exchange(
    rank: int, routes: Routes, num_rows: list[int], dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    results = []
    for kind in KINDS[:2]:
        rows = _rows(rank, num_rows[rank], dtype)
        plan = _plan(routes, rank, num_rows=num_rows[rank], kind=kind)
        received, positions = reshard(rows, plan, groups=_world())
        torch.autograd.backward((received * (rank + 1)).sum())
        assert rows.grad is not None
        results.append((received.detach(), positions, rows.grad))
    return results


def _check_exchange(routes: Routes, num_rows: list[int], *, dtype: torch.dtype = torch.float32) -> None:
    results = run_ranks(len(routes), _exchange, args=(routes, num_rows, dtype))
    for rank, by_kind in enumerate(results):
        wanted = [
            _rows(sender, num_rows[sender], dtype)[row]
            for sender in range(len(routes))
            for row in routes[sender][rank]
        ]
        expected = torch.stack(wanted) if wanted else torch.empty(0, HIDDEN, dtype=dtype)
        summed = torch.zeros(num_rows[rank], HIDDEN, dtype=dtype)
        for receiver, rows in enumerate(routes[rank]):
            for row in rows:
                summed[row] += receiver + 1
        for received, positions, gradient in by_kind:
            torch.testing.assert_close(received, expected.detach(), rtol=0, atol=0)
            assert positions.tolist() == [2 * index + 1 for index in range(len(wanted))]
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


def _scattered(topology: Topology) -> StepPlan:
    """Two microbatches, the second without media; the media of the first lie anywhere, also in shares."""
    num_packs = 2 * topology.num_replicas
    contents = [[mixed_sample(3 * lane), mixed_sample(3 * lane + 1)] for lane in range(num_packs // 2)]
    contents += [[text_sample(lane)] for lane in range(num_packs // 2)]
    packs = tuple(Pack(lane, 0, tuple(samples)) for lane, samples in enumerate(contents))
    step = Step(topology, num_lanes=num_packs, packs_per_lane=1, packs=packs)
    plan = step.planner(enabled=False).plan(packs, step=0, group=0)
    media = (_placed(number, item, plan) for number, item in enumerate(plan.media))
    return replace(plan, media=tuple(media))


def _placed(number: int, item: MediaPlacement, plan: StepPlan) -> MediaPlacement:
    """Encode by one to three ranks, any but the last one, which has no row."""
    random = np.random.default_rng(number)
    able = plan.ranks[:-1]
    degree = 1 + number % min(3, len(able), item.num_rows)
    ranks = tuple(random.permutation(able)[:degree].tolist())
    inner = 1 + np.sort(random.permutation(item.num_rows - 1)[: degree - 1])
    shares = tuple(np.diff([0, *inner, item.num_rows]).tolist())
    return replace(item, ranks=ranks, shares=shares)


def _value(row: Row) -> list[float]:
    return [row[0] + row[1] / 256, float(row[1]), -float(row[0])]


def _weight(rank: int, position: int) -> float:
    return 1 + rank + position / 64


def _run_plans(
    rank: int, topology: Topology, sequence: SequenceKind
) -> list[tuple[dict[int, list[float]], dict[Row, list[float]]]]:
    """Return rows by local position, and gradients by row, for each kind and microbatch."""
    groups = make_exchange_groups(topology)
    plan = _scattered(topology)
    layout = SequenceLayout(topology, kind=sequence)
    results = []
    for kind in _kinds(topology):
        for microbatch in range(plan.num_microbatches):
            made = made_rows(plan, rank=rank, microbatch=microbatch, encoders=ENCODERS)
            rows = torch.tensor([_value(row) for row in made], dtype=torch.float64).reshape(-1, HIDDEN)
            rows.requires_grad_()
            routes = build_routes(plan, microbatch=microbatch, layout=layout, encoders=ENCODERS)
            part = reshard_plan(routes, kind=kind, member=plan.ranks.index(rank))
            taken, positions = reshard(rows, part, groups=groups)
            weights = torch.tensor([_weight(rank, position) for position in positions.tolist()])
            torch.autograd.backward((taken * weights.double()[:, None]).sum())
            assert rows.grad is not None
            found = dict(zip(positions.tolist(), taken.tolist(), strict=True))
            results.append((found, dict(zip(made, rows.grad.tolist(), strict=True))))
    return results


def _kinds(topology: Topology) -> tuple[ExchangeKind, ...]:
    return KINDS if topology.rails_of_group(0) else KINDS[:2]


WORLDS: list[tuple[Topology, SequenceKind]] = [
    (Topology(2), "contiguous"),
    (Topology(2, tp=2), "stage0"),
    (Topology(2, ranks_per_node=1), "contiguous"),
    (Topology(4, ranks_per_node=2), "contiguous"),
    (Topology(4, tp=2, ranks_per_node=2), "contiguous"),
    (Topology(4, cp=2), "zigzag"),
    (Topology(4, tp=2, cp=2, ranks_per_node=2), "zigzag"),
    (Topology(4, pp=2, ranks_per_node=2), "contiguous"),
    (Topology(4, tp=2, pp=2, ranks_per_node=1), "stage0"),
]


@pytest.mark.parametrize(("topology", "sequence"), WORLDS)
def test_every_exchange_of_a_plan_equals_one_process(topology: Topology, sequence: SequenceKind) -> None:
    results = run_ranks(topology.world_size, _run_plans, args=(topology, sequence))
    plan = _scattered(topology)
    layout = SequenceLayout(topology, kind=sequence)
    number = 0
    for _ in _kinds(topology):
        for microbatch in range(plan.num_microbatches):
            wanted = wanted_rows(plan, microbatch, layout)
            assert bool(wanted) == (microbatch == 0)
            taken = {(rank, at): row for rank in plan.ranks for at, row in results[rank][number][0].items()}
            assert taken == {place: _value(row) for place, row in wanted.items()}
            gradients = {
                row: gradient for rank in plan.ranks for row, gradient in results[rank][number][1].items()
            }
            expected = {row: [_weight(*place)] * HIDDEN for place, row in wanted.items()}
            assert gradients == expected
            number += 1


def _misfits(rank: int) -> list[str]:
    rows = torch.zeros(2, HIDDEN)
    empty = np.empty(0, dtype=np.int64)
    nothing = nothing_to_reshard()

    def one(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array(numbers, dtype=np.int64)

    plans = [
        replace(nothing, hops=(AllToAll("rail", empty, (0, 0), (0, 0)),)),
        replace(nothing, hops=(AllToAll("group", empty, (0,), (0,)),)),
        replace(nothing, hops=(AllToAll("group", one(0, 2), (2, 0), (0, 0)),)),
        replace(nothing, hops=(AllToAll("group", one(0, 1), (1, 0), (0, 0)),)),
        replace(nothing, hops=(SumBuffer(3, one(0, 1), one(0), empty),)),
        replace(nothing, hops=(SumBuffer(3, one(0, 1), one(2, 2), empty),)),
        replace(nothing, hops=(SumBuffer(3, one(0), one(1), one(3)),)),
        replace(nothing, take_rows=one(0), positions=empty),
        replace(nothing, take_rows=one(0, 1), positions=one(4, 4)),
        replace(nothing, take_rows=one(3), positions=one(0)),
        replace(nothing, hops=(SumBuffer(1, empty, empty, one(0)),), take_rows=one(3), positions=one(0)),
    ]
    messages = []
    for plan in plans:
        with pytest.raises(PlanError) as caught:
            reshard(rows, plan, groups=_world())
        messages.append(caught.value.what)
    return messages


def test_a_plan_that_does_not_fit_is_refused_before_the_exchange() -> None:
    assert run_ranks(2, _misfits)[0] == [
        "a hop among the ranks of a rail, this rank has no such process group",
        "1 and 1 splits for a group of 2 ranks",
        "rows are sent: 0 to 2, there are 2",
        "splits send 1 rows, 2 rows are named",
        "2 rows are sent to 1 places",
        "two rows are sent to one place",
        "places of the buffer are used: 1 to 3, there are 3",
        "1 rows are taken for 0 positions",
        "rows are not taken in ascending order of distinct positions",
        "rows are taken: 3 to 3, there are 2",
        "rows are taken: 3 to 3, there are 3",
    ]
