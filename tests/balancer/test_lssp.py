"""Long segments in whole plans: what is shared, where, and what a cap or a threshold forces."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from pydantic import ValidationError

from balancer.encoding import MediaLoad, makespan
from balancer.lssp import DEGREES, LsspConfig, forced_degrees, long_sets
from balancer.media import place_media
from balancer.planner import BalanceConfig
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import Pack, StepPlan
from omni_pipeline.core.topology import Topology
from tests.balancer.loads import free, media_load, media_loads
from tests.balancer.worlds import LSSP, Step, clip_pack, cost_model, image_pack, steps
from tests.support.strategies import make_sample, text_segment


def encoder_bytes(plan: StepPlan) -> dict[tuple[int, int], int]:
    """Return the activations by (rank, microbatch), summed by hand."""
    model = cost_model()
    found: dict[tuple[int, int], int] = {}
    for item in plan.media:
        segment = plan.packs[item.pack].samples[item.sample].segments[item.segment]
        for rank, rows in zip(item.ranks, item.shares, strict=True):
            place = rank, item.microbatch
            found[place] = found.get(place, 0) + model.media_bytes(segment, rows)
    return found


@settings(max_examples=100)
@given(steps(), st.sampled_from(DEGREES))
def test_shares_are_all_rows_and_their_ranks_aligned_in_one_node(step: Step, max_degree: int) -> None:
    planner = step.planner(lssp=LsspConfig(kind="auto", max_degree=max_degree))
    topology = step.topology
    for group in range(topology.num_groups):
        plan = planner.plan(step.packs_of(group), step=0, group=group)
        for item in plan.media:
            assert sum(item.shares) == item.num_rows
            rows = [item.rows_of(rank) for rank in item.ranks]
            assert all(first.stop == second.start for first, second in pairwise(rows))
            degree = len(item.ranks)
            if degree == 1:
                assert not item.joined
                continue
            assert degree in DEGREES
            assert degree <= max_degree
            assert min(item.shares) > 0
            (node,) = {topology.node_of(rank) for rank in item.ranks}
            members = [rank for rank in plan.ranks if topology.node_of(rank) == node]
            start = members.index(item.ranks[0])
            assert start % degree == 0
            assert item.ranks == tuple(members[start : start + degree])


@settings(max_examples=100)
@given(steps(), st.sampled_from([1e3, 1e5, 1e12]))
def test_sharing_never_lengthens_the_modelled_step(step: Step, bytes_per_s: float) -> None:
    model = cost_model(bytes_per_s=bytes_per_s)
    for group in range(step.topology.num_groups):
        packs = step.packs_of(group)
        alone = step.planner(model=model).plan(packs, step=0, group=group)
        plan = step.planner(model=model, lssp=LSSP).plan(packs, step=0, group=group)
        assert not any(item.is_long for item in alone.media)
        for balance in (plan.encoder_balance, plan.llm_balance):
            assert balance.makespan_after <= balance.makespan_before
            assert balance.mean <= balance.makespan_after * (1 + 1e-9) + 1e-9
        if bytes_per_s == 1e12:
            whole = alone.encoder_balance.makespan_after + alone.llm_balance.makespan_after
            shared = plan.encoder_balance.makespan_after + plan.llm_balance.makespan_after
            assert shared <= whole * (1 + 1e-6)


@settings(max_examples=60)
@given(steps(), st.randoms(use_true_random=False))
def test_members_make_the_same_long_plan_whatever_the_order_of_the_packs(
    step: Step, rng: random.Random
) -> None:
    for group in range(step.topology.num_groups):
        packs = list(step.packs_of(group))
        first = step.planner(lssp=LSSP).plan(packs, step=5, group=group)
        rng.shuffle(packs)
        second = step.planner(lssp=LSSP).plan(packs, step=5, group=group)
        assert first == second
        assert first.digest == second.digest


@settings(max_examples=40)
@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_ties_are_broken_by_lane_not_by_the_order_of_input(frames: int, rng: random.Random) -> None:
    packs = [clip_pack(lane, frames=frames) for lane in range(4)]
    step = Step(Topology(world_size=8, tp=2), 4, 1, tuple(packs))
    first = step.planner(lssp=LSSP).plan(packs, step=0, group=0)
    rng.shuffle(packs)
    assert step.planner(lssp=LSSP).plan(packs, step=0, group=0).digest == first.digest


def test_a_long_clip_is_shared_by_its_frames() -> None:
    packs = (clip_pack(0, frames=16), Pack(lane=1, number=0, samples=()))
    step = Step(Topology(world_size=8, tp=2, pp=2), 2, 1, packs)
    plan = step.planner(lssp=LSSP).plan(packs, step=0, group=0)
    (item,) = plan.media
    assert item.ranks == tuple(range(8))
    assert item.shares == (32,) * 8
    assert not item.joined
    assert plan.encoder_balance.imbalance_after == pytest.approx(1, rel=1e-3)
    assert step.planner().plan(packs, step=0, group=0).encoder_balance.imbalance_after == pytest.approx(8)


def test_a_large_picture_is_joined_and_pays_for_its_exchanges() -> None:
    packs = (image_pack(0, num_images=1, side=24), Pack(lane=1, number=0, samples=()))
    step = Step(Topology(world_size=2), 2, 1, packs)
    (item,) = step.planner(lssp=LSSP).plan(packs, step=0, group=0).media
    assert (item.ranks, item.shares, item.joined) == ((0, 1), (72, 72), True)
    slow = cost_model(bytes_per_s=1e3)
    (item,) = step.planner(lssp=LSSP, model=slow).plan(packs, step=0, group=0).media
    assert (item.ranks, item.joined) == ((0,), False)


def test_a_segment_is_never_shared_across_nodes() -> None:
    packs = (clip_pack(0, frames=16), Pack(lane=1, number=0, samples=()))
    step = Step(Topology(world_size=8, ranks_per_node=2), 2, 4, packs)
    (item,) = step.planner(lssp=LSSP).plan(packs, step=0, group=0).media
    assert len(item.ranks) == 2


def test_digests_tell_shares_apart() -> None:
    packs = (clip_pack(0, frames=16), Pack(lane=1, number=0, samples=()))
    step = Step(Topology(world_size=4), 2, 1, packs)
    plan = step.planner(lssp=LSSP).plan(packs, step=0, group=0)
    (item,) = plan.media
    other = dataclasses.replace(item, shares=(65, 63, 64, 64))
    assert dataclasses.replace(plan, media=(other,)).digest != plan.digest


@settings(max_examples=100)
@given(media_loads())
def test_bounds_of_long_sets_hold_and_the_best_comes_first(load: MediaLoad) -> None:
    ones = np.ones(len(load.costs), dtype=np.int64)
    sets = long_sets(load, ones)
    assert [choice.bound for choice in sets] == sorted(choice.bound for choice in sets)
    for choice in sets:
        assert (choice.degrees > 1).any()
        encoding = place_media(load, free, forced=choice.degrees, search=False)
        assert encoding is not None
        assert (encoding.degrees == choice.degrees).all()
        assert makespan(load, encoding) >= choice.bound - 1e-9


@settings(max_examples=100)
@given(steps(), st.integers(1, 12))
def test_a_threshold_shares_all_segments_from_its_rows_on(step: Step, min_rows: int) -> None:
    planner = step.planner(lssp=LsspConfig(kind="fixed", min_rows=min_rows, max_degree=2))
    for group in range(step.topology.num_groups):
        nodes = step.topology.nodes_of_group(group)
        plan = planner.plan(step.packs_of(group), step=0, group=group)
        for item in plan.media:
            segment = plan.packs[item.pack].samples[item.sample].segments[item.segment]
            can_be = planner.cost_model.split(segment, 2) is not None and any(len(node) > 1 for node in nodes)
            assert item.is_long == (can_be and item.num_rows >= min_rows)


@settings(max_examples=100)
@given(steps(), st.integers(1, 16))
def test_a_plan_keeps_the_cap_or_says_that_it_cannot(step: Step, sixteenths: int) -> None:
    for group in range(step.topology.num_groups):
        packs = step.packs_of(group)
        used = encoder_bytes(step.planner(enabled=False).plan(packs, step=0, group=group))
        cap = max(used.values(), default=0) * sixteenths // 16 + 1
        try:
            plan = step.planner(lssp=LSSP, encoder_memory_bytes=cap).plan(packs, step=0, group=group)
        except ConfigError:
            assert sixteenths < 16
        else:
            assert max(encoder_bytes(plan).values(), default=0) <= cap


def test_a_cap_shares_a_clip_on_a_network_where_it_does_not_pay() -> None:
    packs = (clip_pack(0, frames=16), Pack(lane=1, number=0, samples=()))
    step, slow = Step(Topology(world_size=4), 2, 2, packs), cost_model(bytes_per_s=1.0)
    (item,) = step.planner(lssp=LSSP, model=slow).plan(packs, step=0, group=0).media
    assert not item.is_long
    half = slow.media_bytes(packs[0].samples[0].segments[0], 128)
    capped = step.planner(lssp=LSSP, model=slow, encoder_memory_bytes=half)
    (item,) = capped.plan(packs, step=0, group=0).media
    assert item.shares == (128, 128)
    unbalanced = capped.unbalanced(capped.plan(packs, step=0, group=0))
    assert not unbalanced.media[0].is_long


def test_a_segment_above_the_cap_at_every_degree_is_refused() -> None:
    packs = (clip_pack(0, frames=16), Pack(lane=1, number=0, samples=()))
    step, model = Step(Topology(world_size=2), 2, 1, packs), cost_model()
    needed = model.media_bytes(packs[0].samples[0].segments[0], 128)
    with pytest.raises(ConfigError) as caught:
        step.planner(lssp=LSSP, encoder_memory_bytes=needed - 1).plan(packs, step=0, group=0)
    assert str(caught.value) == (
        f"the video of 256 rows keeps {needed} bytes on a rank, shared by at most 2, limit {needed - 1}\n"
        "  where: source 'source', source-00000.tar, sample 0000-000000\n"
        "  fix:   raise balance.encoder_memory_bytes, or balance.lssp.max_degree (kind = 'auto'), "
        "or leave out samples of this size (sources.N.where)"
    )
    with pytest.raises(ConfigError, match="shared by at most 1, limit"):
        step.planner(encoder_memory_bytes=needed).plan(packs, step=0, group=0)


def test_media_that_are_too_many_for_the_cap_are_refused() -> None:
    packs = tuple(image_pack(lane, num_images=4) for lane in range(2))
    step, model = Step(Topology(world_size=2), 2, 1, packs), cost_model()
    one = model.media_bytes(packs[0].samples[0].segments[0])
    step.planner(lssp=LSSP, encoder_memory_bytes=4 * one).plan(packs, step=0, group=0)
    with pytest.raises(ConfigError, match=f"the media of a step keep {8 * one} bytes on 2 ranks") as told:
        step.planner(lssp=LSSP, encoder_memory_bytes=3 * one).plan(packs, step=0, group=0)
    assert told.value.fix == "raise balance.encoder_memory_bytes, or lower order.seq_len"
    with pytest.raises(ConfigError, match="the media of a step keep") as told:
        step.planner(enabled=False, encoder_memory_bytes=3 * one).plan(packs, step=0, group=0)
    assert told.value.fix.endswith(", or set balance.lssp.kind = 'auto'")


def test_a_pack_above_the_cap_of_the_llm_is_refused() -> None:
    pack = Pack(lane=0, number=7, samples=(make_sample([text_segment(99)]),))
    step, needed = Step(Topology(world_size=1), 1, 1, (pack,)), cost_model().pack_bytes(pack)
    step.planner(llm_memory_bytes=needed).plan((pack,), step=3, group=0)
    with pytest.raises(ConfigError) as caught:
        step.planner(llm_memory_bytes=needed - 1).plan((pack,), step=3, group=0)
    assert str(caught.value) == (
        f"pack 7 of lane 0 has 100 positions and keeps {needed} bytes of activations in the LLM, "
        f"limit {needed - 1}\n"
        "  where: step 3, group 0\n"
        "  fix:   lower order.seq_len, or raise balance.llm_memory_bytes"
    )


def test_forced_degrees_are_the_least_under_the_cap_and_the_largest_above_the_threshold() -> None:
    load = media_load([1.0] * 4, num_members=8, rows=[2, 8, 16, 40])

    def forced(*, min_rows: int = 0, max_bytes: float = np.inf) -> tuple[list[int], list[tuple[int, int]]]:
        found, overflows = forced_degrees(
            [2, 8, 16, 40],
            load.num_bytes,
            shares=load.shares,
            degrees=DEGREES,
            min_rows=min_rows,
            max_bytes=max_bytes,
        )
        return found.tolist(), [(overflow.item, overflow.num_bytes) for overflow in overflows]

    assert forced() == ([1, 1, 1, 1], [])
    assert forced(max_bytes=50) == ([1, 2, 4, 8], [])
    assert forced(max_bytes=40) == ([1, 2, 4, 1], [(3, 50)])
    assert forced(min_rows=16) == ([1, 1, 8, 8], [])
    assert forced(min_rows=2) == ([2, 8, 8, 8], [])


@pytest.mark.parametrize(
    "bad",
    [{"kind": "fixed"}, {"kind": "auto", "min_rows": 9}, {"max_degree": 3}, {"kind": "some"}, {"degree": 2}],
)
def test_wrong_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        BalanceConfig.model_validate({"lssp": bad})
