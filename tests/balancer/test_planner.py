"""Plans of whole groups: nothing lost, the same on every member, never above the unbalanced one."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from pydantic import ValidationError

from balancer.check import check_plan
from balancer.planner import BalanceConfig, GroupPlanner, NodeGroup
from omni_pipeline.core.errors import ConfigError, PlanError
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.topology import Topology
from tests.balancer.worlds import ENCODERS, Step, cost_model, image_pack, steps
from tests.support.strategies import make_sample, media_segment, text_segment


@settings(max_examples=80)
@given(steps(), st.booleans())
def test_every_pack_and_segment_is_placed_once_inside_its_group(step: Step, enabled: bool) -> None:
    topology = step.topology
    seen: list[tuple[int, int]] = []
    for group in range(topology.num_groups):
        packs = step.packs_of(group)
        plan = step.planner(enabled=enabled).plan(packs, step=0, group=group)
        check_plan(plan, topology)
        seen += [(pack.lane, pack.number) for pack in plan.packs]
        places = {(slot.replica, slot.microbatch) for slot in plan.slots}
        assert len(places) == len(packs)
        assert {replica for replica, _ in places} <= set(topology.replicas_of_group(group))
        assert {rank for item in plan.media for rank in item.ranks} <= set(topology.ranks_of_group(group))
        num_media = sum(
            part.is_media for pack in packs for sample in pack.samples for part in sample.segments
        )
        assert len({(item.pack, item.sample, item.segment) for item in plan.media}) == num_media
    assert sorted(seen) == sorted((pack.lane, pack.number) for pack in step.packs)


@settings(max_examples=80)
@given(steps(), st.sampled_from([1e2, 1e4, 1e12]), st.sampled_from([0.0, 1e-3]))
def test_no_makespan_is_above_the_unbalanced_one(step: Step, bytes_per_s: float, latency_s: float) -> None:
    planner = step.planner(model=cost_model(bytes_per_s=bytes_per_s, latency_s=latency_s))
    for group in range(step.topology.num_groups):
        plan = planner.plan(step.packs_of(group), step=0, group=group)
        for balance in (plan.encoder_balance, plan.llm_balance):
            assert balance.mean <= balance.makespan_after * (1 + 1e-12)
            assert balance.makespan_after <= balance.makespan_before
            assert balance.imbalance_after <= balance.imbalance_before
        off = planner.unbalanced(plan)
        assert off.encoder_balance.makespan_after == plan.encoder_balance.makespan_before
        assert off.llm_balance.makespan_after == plan.llm_balance.makespan_before


@settings(max_examples=40)
@given(steps(), st.randoms(use_true_random=False))
def test_members_make_the_same_plan_whatever_the_order_of_the_packs(step: Step, rng: random.Random) -> None:
    for group in range(step.topology.num_groups):
        packs = list(step.packs_of(group))
        first = step.planner().plan(packs, step=5, group=group)
        rng.shuffle(packs)
        second = step.planner().plan(packs, step=5, group=group)
        assert first == second
        assert first.digest == second.digest


def test_digests_differ_as_soon_as_anything_differs() -> None:
    packs = tuple(image_pack(lane, num_images=3 * lane + 1) for lane in range(4))
    step = Step(Topology(world_size=4, replicas_per_group=4), 4, 1, packs)
    plan = step.planner().plan(packs, step=0, group=0)
    other_image = (image_pack(0, num_images=1, side=10), *packs[1:])
    padded = (dataclasses.replace(packs[0], padded_len=packs[0].num_tokens), *packs[1:])
    others = [
        step.planner().plan(packs, step=1, group=0),
        step.planner(enabled=False).plan(packs, step=0, group=0),
        step.planner().plan(packs[:3], step=0, group=0),
        step.planner().plan(other_image, step=0, group=0),
        step.planner().plan(padded, step=0, group=0),
        dataclasses.replace(step, topology=Topology(world_size=8, tp=2))
        .planner()
        .plan(packs, step=0, group=0),
    ]
    digests = [plan.digest, *(other.digest for other in others)]
    assert len(set(digests)) == len(digests)
    assert all(0 <= digest < 2**63 for digest in digests)


def test_images_of_one_pack_spread_over_all_ranks_of_the_group() -> None:
    packs = (image_pack(0, num_images=8), Pack(lane=1, number=0, samples=()))
    step = Step(Topology(world_size=8, tp=2, pp=2), 2, 1, packs)
    plan = step.planner().plan(packs, step=0, group=0)
    assert sorted(item.ranks[0] for item in plan.media) == list(range(8))
    assert plan.encoder_balance.imbalance_before == pytest.approx(8)
    assert plan.encoder_balance.imbalance_after == pytest.approx(1)


def test_media_stay_home_where_the_network_is_slow() -> None:
    packs = (image_pack(0, num_images=8), image_pack(1, num_images=1))
    step = Step(Topology(world_size=2), 2, 1, packs)
    plan = step.planner(model=cost_model(bytes_per_s=1.0)).plan(packs, step=0, group=0)
    home = {slot.pack: slot.replica for slot in plan.slots}
    assert all(item.ranks == (home[item.pack],) for item in plan.media)


def test_switched_off_packs_stay_in_order_and_media_at_home() -> None:
    packs = tuple(image_pack(lane, num_images=lane + 1) for lane in range(4))
    step = Step(Topology(world_size=4, cp=2), 4, 1, packs)
    plan = step.planner(enabled=False).plan(packs, step=0, group=0)
    assert [(slot.replica, slot.microbatch) for slot in plan.slots] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert {(item.pack, item.ranks[0]) for item in plan.media} == {(0, 0), (1, 2), (2, 0), (3, 2)}
    assert plan.encoder_balance.makespan_after == plan.encoder_balance.makespan_before


def test_packs_of_like_cost_share_a_microbatch() -> None:
    lengths = [400, 10, 10, 400]
    packs = tuple(
        Pack(lane=lane, number=0, samples=(make_sample([text_segment(length)], row=lane),))
        for lane, length in enumerate(lengths)
    )
    step = Step(Topology(world_size=2), 4, 1, packs)
    plan = step.planner().plan(packs, step=0, group=0)
    assert plan.slots[0].microbatch == plan.slots[3].microbatch
    assert plan.slots[1].microbatch == plan.slots[2].microbatch
    assert plan.llm_balance.imbalance_after == pytest.approx(1)
    assert plan.llm_balance.imbalance_before > 1.9


def test_llm_gain_that_would_lengthen_the_encoders_is_not_taken() -> None:
    # In order, the two picture packs share a microbatch and encode side by side on three ranks. Sorted by LLM
    # cost alone they would fall into different microbatches, where one picture cannot be shared.
    picture = media_segment(Modality.IMAGE, (1, 40, 40))
    packs = (
        Pack(lane=0, number=0, samples=(make_sample([picture, text_segment(900)], row=0),)),
        Pack(lane=1, number=0, samples=(make_sample([picture], row=1),)),
        Pack(lane=2, number=0, samples=(make_sample([text_segment(1300)], row=2),)),
        Pack(lane=3, number=0, samples=(make_sample([text_segment(300)], row=3),)),
    )
    step = Step(Topology(world_size=2), 4, 1, packs)
    plan = step.planner().plan(packs, step=0, group=0)
    assert plan.slots[0].microbatch == plan.slots[1].microbatch
    assert plan.encoder_balance.makespan_after == plan.encoder_balance.makespan_before


def test_a_group_without_packs_runs_empty_microbatches() -> None:
    step = Step(Topology(world_size=4, replicas_per_group=2), 1, 3, ())
    plan = step.planner().plan((), step=0, group=1)
    assert plan.num_microbatches == 2
    assert (plan.slots, plan.media) == ((), ())
    assert plan.encoder_balance.imbalance_after == plan.llm_balance.imbalance_after == 1.0
    reshard = step.planner().reshard(plan, microbatch=1, rank=3)
    assert reshard.hops == ()


@pytest.mark.parametrize(
    ("packs", "message"),
    [
        ([Pack(1, 0, ())], "pack 0 of lane 1 is of another group"),
        ([Pack(0, 0, ()), Pack(0, 0, ())], "the same pack was given twice"),
        ([Pack(0, number, ()) for number in range(3)], "3 packs for 1 replicas x 2 microbatches"),
        (
            [Pack(0, 0, (make_sample([text_segment(9)]),), padded_len=9)],
            "sample has 10 tokens, its bucket holds 9",
        ),
        ([Pack(0, 0, (make_sample([text_segment(9)]),), padded_len=51)], "pack takes 51 positions, limit 50"),
        ([Pack(0, 0, (make_sample([text_segment(50)]),))], "pack takes 51 positions, limit 50"),
        (
            [Pack(0, 0, (dataclasses.replace(make_sample([text_segment(50)]), num_tokens=49),))],
            "segments take 50 tokens, the sample says 49",
        ),
    ],
)
def test_packs_that_do_not_fit_the_group_are_refused(packs: list[Pack], message: str) -> None:
    step = Step(Topology(world_size=2, replicas_per_group=1), 2, 2, (), seq_len=50)
    with pytest.raises(PlanError) as caught:
        step.planner().plan(packs, step=0, group=0)
    assert caught.value.what == message
    assert caught.value.where.startswith("group 0")


def test_packs_that_do_not_divide_into_lanes_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        GroupPlanner(
            Topology(world_size=1),
            cost_model=cost_model(),
            config=BalanceConfig(),
            num_lanes=4,
            packs_per_step=6,
            encoders=ENCODERS,
        )
    assert str(caught.value) == (
        "6 packs per step do not divide into 4 lanes\n"
        "  fix:   make order.packs_per_step a multiple of order.lanes"
    )


def test_an_encoder_that_the_run_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="the cost model uses encoder 'audio', the run has vision"):
        GroupPlanner(
            Topology(world_size=1),
            cost_model=cost_model(),
            config=BalanceConfig(),
            num_lanes=1,
            packs_per_step=1,
            encoders=("vision",),
        )


@pytest.mark.parametrize(
    ("group", "expected"),
    [("none", 1), ("all", 0), (3, 3), ("node", 4), ({"nodes": 1}, 4), ({"nodes": 2}, 8), ({"nodes": 99}, 8)],
)
def test_group_sizes(group: str | int, expected: int) -> None:
    config = BalanceConfig.model_validate({"group": group})
    assert config.replicas_per_group(world_size=64, ranks_per_node=8, tp=2, cp=1, pp=4) == expected


def test_a_node_that_does_not_divide_the_replicas_makes_smaller_groups() -> None:
    config = BalanceConfig(group="node")
    assert config.replicas_per_group(world_size=12, ranks_per_node=8, tp=1, cp=1, pp=1) == 6
    assert config.replicas_per_group(world_size=2, ranks_per_node=8, tp=1, cp=1, pp=1) == 2
    assert config.replicas_per_group(world_size=16, ranks_per_node=2, tp=4, cp=1, pp=1) == 1


def test_groups_of_several_nodes_end_at_the_end_of_a_node() -> None:
    config = BalanceConfig.model_validate({"group": {"nodes": 2}})
    # Three nodes of four replicas: six replicas would end inside a node.
    assert config.replicas_per_group(world_size=12, ranks_per_node=4, tp=1, cp=1, pp=1) == 4
    assert config.replicas_per_group(world_size=16, ranks_per_node=4, tp=1, cp=1, pp=1) == 8
    assert config.replicas_per_group(world_size=9, ranks_per_node=9, tp=1, cp=1, pp=1) == 9


@pytest.mark.parametrize(
    "bad", [{"group": 0}, {"group": {"nodes": 0}}, {"group": "rack"}, {"speed": 1}, {"flops_per_s": 1}]
)
def test_wrong_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        BalanceConfig.model_validate(bad)


@pytest.mark.parametrize("group", ["bad", 0, -1, True, 2.5, None, [1], {"nodes": 0}, {"node": 1}, {}])
def test_a_wrong_group_is_told_in_one_sentence(group: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        BalanceConfig(group=group)
    (error,) = caught.value.errors()
    assert error["loc"] == ("group",)
    assert error["msg"] == "Value error, must be 'none', 'node', 'all', at least 1, or { nodes = k }"


@pytest.mark.parametrize("group", ["none", "node", "all", 3, {"nodes": 2}, NodeGroup(nodes=2)])
def test_a_group_may_be_named_counted_or_a_number_of_nodes(group: Any) -> None:
    expected = NodeGroup(nodes=2) if isinstance(group, dict) else group
    assert BalanceConfig(group=group).group == expected
