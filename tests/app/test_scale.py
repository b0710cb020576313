"""16,384 ranks in 2,048 groups: a group plans its own part, at the cost of a run of one group."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest

from balancer.planner import BalanceConfig, GroupPlanner
from balancer.reorder import lanes_of_group
from loaders.lanes import LaneOrder
from loaders.order import Order, OrderConfig
from omni_pipeline.core.plan import StepPlan
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.topology import Topology
from tests.balancer.worlds import ENCODERS, cost_model
from tests.support.strategies import MemorySource, media_segment, text_segment, text_source

RANKS, REPLICAS_PER_GROUP, PACKS_PER_RANK, STEPS = 16_384, 8, 4, 3
COUNTED = {"balancer", "loaders", "omni_pipeline", "tests"}
GROUPS = RANKS // REPLICAS_PER_GROUP
SHARDS = [2**23] * 16  # so that runs of lanes are whole blocks in every world


@dataclass(frozen=True)
class World:
    """A run of ``ranks``: lanes and packs in step with them, the data always the same."""

    ranks: int
    lanes_per_group: int
    sources: Sequence[MemorySource]

    @property
    def topology(self) -> Topology:
        return Topology(self.ranks, replicas_per_group=REPLICAS_PER_GROUP)

    def config(self) -> OrderConfig:
        return OrderConfig(
            lanes=self.lanes_per_group * self.topology.num_groups,
            packs_per_step=PACKS_PER_RANK * self.ranks,
            seq_len=1000,
            look_ahead=16,
            shuffle_block=64,
        )

    def order(self, group: int) -> Order:
        config = self.config()
        return Order(
            config,
            sources=self.sources,
            weights={source.name: 1 for source in self.sources},
            seed=0,
            lanes=lanes_of_group(group, config.lanes, self.topology),
        )

    def plans(self, group: int) -> list[StepPlan]:
        """What a member of ``group`` does from its start on, but for the media themselves."""
        config, order = self.config(), self.order(group)
        planner = GroupPlanner(
            self.topology,
            cost_model=cost_model(),
            config=BalanceConfig(),
            num_lanes=config.lanes,
            packs_per_step=config.packs_per_step,
            encoders=ENCODERS,
        )
        plans = []
        for step in range(STEPS):
            plan = planner.plan(order.next_step(step), step=step, group=group)
            rank = plan.ranks[-1]
            for microbatch in range(plan.num_microbatches):
                planner.reshard(plan, microbatch=microbatch, rank=rank)
            json.dumps(order.state_dict())
            plans.append(plan)
        return plans


def equal_samples() -> list[MemorySource]:
    """All alike, so that every pack of every group needs exactly the same work."""
    return [text_source("text", SHARDS, [100])]


def mixed_samples() -> list[MemorySource]:
    pictures = [[media_segment(Modality.IMAGE, (1, 8, 2 * side)), text_segment(30)] for side in range(4, 12)]
    return [text_source("text", SHARDS, [90, 500, 20, 260]), MemorySource("images", SHARDS, pictures)]


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Count by name the functions called, and those that they call outside: work without a clock."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        # Not what the test runner does meanwhile, as at a garbage collection.
        if frame.f_globals.get("__name__", "").partition(".")[0] not in COUNTED:
            return
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[argument.__qualname__] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def work(function: Callable[[], object]) -> Counter[str]:
    function()  # imports and caches
    with counted_calls() as calls:
        function()
    return calls


@pytest.mark.parametrize("lanes_per_group", [1, 8])
def test_a_group_of_two_thousand_does_exactly_the_calls_of_a_run_of_one_group(lanes_per_group: int) -> None:
    small = World(REPLICAS_PER_GROUP, lanes_per_group, equal_samples())
    large = World(RANKS, lanes_per_group, equal_samples())
    assert large.topology.num_groups == GROUPS == 2048
    expected = work(lambda: small.plans(0))
    assert expected.total() > 1000
    for group in (0, 1, GROUPS - 1):
        assert work(lambda group=group: large.plans(group)) == expected  # type: ignore[misc]


def test_a_plan_of_mixed_media_costs_the_same_within_what_samples_differ() -> None:
    small = World(REPLICAS_PER_GROUP, 8, mixed_samples())
    large = World(RANKS, 8, mixed_samples())
    expected = work(lambda: small.plans(0)).total()
    for group in (7, GROUPS // 2):
        assert work(lambda group=group: large.plans(group)).total() == pytest.approx(expected, rel=0.1)  # type: ignore[misc]

    def seconds(world: World, group: int) -> float:
        begin = time.process_time()
        world.plans(group)
        return time.process_time() - begin

    pairs = [(seconds(small, 0), seconds(large, 1000 + repeat)) for repeat in range(4)]
    assert min(large for _, large in pairs) < 2 * min(small for small, _ in pairs)


def test_groups_share_no_lane_and_no_sample_and_leave_none_out() -> None:
    large = World(RANKS, 8, mixed_samples())
    num_lanes = large.config().lanes
    lanes = [lanes_of_group(group, num_lanes, large.topology) for group in range(GROUPS)]
    assert sorted(lane for of_group in lanes for lane in of_group) == list(range(num_lanes))
    ranks = [rank for group in range(GROUPS) for rank in large.topology.ranks_of_group(group)]
    assert ranks == list(range(RANKS))
    seen: set[Any] = set()
    packs: set[tuple[int, int]] = set()
    total = 0
    for group in (0, 1, 2, 1023, 2047):
        for plan in large.plans(group):
            assert {pack.lane for pack in plan.packs} <= set(lanes[group])
            assert len(plan.packs) == PACKS_PER_RANK * REPLICAS_PER_GROUP
            packs |= {(pack.lane, pack.number) for pack in plan.packs}
            samples = [sample.id for pack in plan.packs for sample in pack.samples]
            seen |= set(samples)
            total += len(samples)
    assert len(seen) == total
    assert len(packs) == 5 * STEPS * PACKS_PER_RANK * REPLICAS_PER_GROUP


def test_sixteen_thousand_lanes_of_a_source_with_a_hundred_samples_give_each_as_often() -> None:
    order = LaneOrder([60, 0, 40], name="tiny", lanes=RANKS, seed=0, shuffle_block=1024, epochs=170)
    seen = Counter(
        order.ordinal(lane, position)
        for lane in range(RANKS)
        for position in range(order.num_positions(lane) or 0)
    )
    assert seen == dict.fromkeys(range(100), 170)
    tiny = World(RANKS, 8, [text_source("tiny", [60, 0, 40], [100])])
    packs = [pack for plan in tiny.plans(5) for pack in plan.packs]
    assert len({sample.id for pack in packs for sample in pack.samples}) == 100
    assert all(pack.num_tokens == 1000 for pack in packs)
