"""Which packs share a microbatch: two resources at once, the most promising placements first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer import placement
from balancer.cost import CostModel
from balancer.step_inputs import TICKS_PER_S, StepInputs, step_inputs
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.topology import Topology
from tests.balancer.worlds import LSSP, Step, cost_model, steps
from tests.support.strategies import make_sample, media_segment, text_segment


def pack(lane: int, number: int, *, side: int, num_text: int) -> Pack:
    parts = [media_segment(Modality.IMAGE, (1, side, side)), text_segment(num_text)]
    return Pack(lane=lane, number=number, samples=(make_sample(parts, row=10 * lane + number),))


def two_large_among_four() -> Step:
    """In order and by LLM cost the large pictures are in two microbatches; side by side they cost once."""
    packs = (
        pack(0, 0, side=32, num_text=740),
        pack(0, 1, side=8, num_text=500),
        pack(1, 0, side=32, num_text=340),
        pack(1, 1, side=8, num_text=900),
    )
    return Step(Topology(world_size=2), 2, 2, packs)


def test_packs_with_long_media_share_a_microbatch() -> None:
    step = two_large_among_four()
    plan = step.planner().plan(step.packs, step=0, group=0)
    large = {plan.slots[0].microbatch, plan.slots[2].microbatch}
    assert len(large) == 1
    assert plan.encoder_balance.makespan_after < 0.6 * plan.encoder_balance.makespan_before


def test_of_the_placements_tried_the_shortest_step_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    step = two_large_among_four()
    few = step.planner().plan(step.packs, step=0, group=0)
    monkeypatch.setattr(placement, "WORTH_TRYING", -1.0)
    monkeypatch.setattr(placement, "MAX_TRIED", 99)
    assert step.planner().plan(step.packs, step=0, group=0) == few


@pytest.mark.parametrize("large", [(), (0, 2)])
def test_a_placement_that_cannot_gain_is_not_priced(
    monkeypatch: pytest.MonkeyPatch, large: tuple[int, ...]
) -> None:
    packs = tuple(pack(lane, 0, side=32 if lane in large else 8, num_text=20) for lane in range(4))
    step = Step(Topology(world_size=2), 4, 1, packs)
    tried: list[int] = []
    place_media = placement.place_media
    monkeypatch.setattr(
        placement, "place_media", lambda *args, **named: tried.append(1) or place_media(*args, **named)
    )
    step.planner().plan(packs, step=0, group=0)
    # Packs that are all alike lie best in order; two large ones of one rank do not.
    assert bool(tried) == bool(large)


def test_what_comes_to_the_same_does_not_use_up_what_may_be_tried() -> None:
    step = two_large_among_four()
    inputs = _inputs(step)
    found = placement._pack_placements(inputs)
    assert len({(item.replicas.tobytes(), item.microbatches.tobytes()) for item in found}) == len(found) > 2


def test_a_bound_divides_a_picture_only_as_far_as_its_heads_allow() -> None:
    """Two heads: two of the four ranks may share a picture, whatever the largest degree."""
    packs = (pack(0, 0, side=32, num_text=40),)
    step = Step(Topology(world_size=4), 4, 1, packs)
    inputs = _inputs(step)
    best = step.planner(lssp=LSSP).plan(packs, step=0, group=0)
    found = placement._pack_placements(inputs)[0]
    bound = placement._bound(inputs, found, placement._least_shares(inputs)) / TICKS_PER_S
    assert best.media[0].is_long
    assert bound == pytest.approx(best.encoder_balance.makespan_after + best.llm_balance.makespan_after)
    assert inputs.media_costs.sum() / 4 < placement._least_shares(inputs)[0]


@given(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 900)), min_size=16, max_size=16))
def test_giving_up_a_placement_early_changes_no_plan(sizes: list[tuple[int, int]]) -> None:
    packs = tuple(
        pack(number % 4, number // 4, side=2 * side, num_text=num_text)
        for number, (side, num_text) in enumerate(sizes)
    )
    step = Step(Topology(world_size=4), 4, 4, packs)
    early = step.planner(lssp=LSSP).plan(packs, step=0, group=0)
    with_media = placement._with_media
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "_with_media", lambda *args, **_: with_media(*args))
        assert step.planner(lssp=LSSP).plan(packs, step=0, group=0) == early


@settings(max_examples=60)
@given(steps(), st.sampled_from([1e12, 1e6, 1e4]), st.sampled_from([0.0, 1e-4]))
def test_no_step_is_longer_than_the_unbalanced_one_with_all_exchanges(
    step: Step, bytes_per_s: float, latency_s: float
) -> None:
    inputs = _inputs(step, model=cost_model(bytes_per_s=bytes_per_s, latency_s=latency_s))
    unbalanced = placement.place_in_order(inputs)
    chosen = placement.place_balanced(inputs, unbalanced)
    assert chosen.step_ticks <= unbalanced.step_ticks
    assert chosen.encoder_ticks <= unbalanced.encoder_ticks
    assert chosen.llm_ticks <= unbalanced.llm_ticks


def _inputs(step: Step, *, model: CostModel | None = None) -> StepInputs:
    planner = step.planner(lssp=LSSP, model=model)
    return step_inputs(
        step.packs_of(0),
        group=0,
        cost_model=planner.cost_model,
        layout=planner.layout,
        lssp=LSSP,
        encoder_memory_bytes=0,
        exchange="auto",
    )
