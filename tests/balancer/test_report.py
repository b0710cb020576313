"""Plans as rows."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings

from balancer.planner import GroupPlanner
from balancer.report import ExchangeRow, exchange_rows, moved_rows_fraction, pack_rows, rank_rows
from omni_pipeline.core.plan import Pack, StepPlan
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.topology import Topology
from tests.balancer.worlds import LSSP, Step, clip_pack, cost_model, image_pack, steps
from tests.support.strategies import make_sample, media_segment, text_segment


def travel(planner: GroupPlanner, plan: StepPlan) -> list[ExchangeRow]:
    return exchange_rows(
        plan, layout=planner.layout, encoders=planner.encoders, cost_model=planner.cost_model
    )


def test_rows_of_packs_name_their_samples_and_show_empty_places() -> None:
    image = media_segment(Modality.IMAGE, (1, 8, 8))
    pack = Pack(lane=0, number=4, samples=(make_sample([image, text_segment(13)], source="pets", row=9),))
    step = Step(Topology(world_size=2), 1, 1, (pack,))
    model = cost_model()
    first, empty = pack_rows(step.planner().plan((pack,), step=0, group=0), cost_model=model, seq_len=64)
    assert (first.lane, first.number, first.num_samples, first.num_media) == (0, 4, 1, 1)
    assert (first.num_tokens, first.num_positions, first.fill) == (32, 32, 0.5)
    padded = dataclasses.replace(pack, padded_len=48)
    plan = step.planner().plan((padded,), step=0, group=0)
    (wide, _) = pack_rows(plan, cost_model=model, seq_len=64)
    assert (wide.num_tokens, wide.num_positions, wide.fill) == (32, 48, 0.5)
    assert plan.padding == 1 - 32 / 48
    assert first.samples == ("pets/0000-000009 (pets-00000.tar)",)
    assert first.llm_s == model.pack_cost(pack)
    assert first.encoder_s == model.media_cost(image)
    assert (empty.replica, empty.microbatch, empty.lane, empty.num_tokens, empty.samples) == (1, 0, -1, 0, ())


def test_rows_of_ranks_show_the_load_before_and_after() -> None:
    images = [media_segment(Modality.IMAGE, (1, 8, 8)) for _ in range(4)]
    pack = Pack(lane=0, number=0, samples=(make_sample(images),))
    step = Step(Topology(world_size=2), 1, 1, (pack,))
    planner = step.planner()
    plan = planner.plan((pack,), step=0, group=0)
    off = planner.unbalanced(plan)
    rows = rank_rows(plan, off, cost_model=planner.cost_model)
    assert [(row.num_media_before, row.num_media_after, row.num_rows_after) for row in rows] == [
        (4, 2, 32),
        (0, 2, 32),
    ]
    assert rows[0].before_s == pytest.approx(2 * rows[0].after_s)
    assert moved_rows_fraction(travel(planner, plan)) == 0.5
    assert moved_rows_fraction(travel(planner, off)) == 0


def test_rows_of_ranks_show_their_shares_of_long_segments() -> None:
    packs = (clip_pack(0, frames=5), Pack(lane=1, number=0, samples=()))
    planner = Step(Topology(world_size=2), 2, 1, packs).planner(lssp=LSSP)
    plan = planner.plan(packs, step=0, group=0)
    rows = rank_rows(plan, planner.unbalanced(plan), cost_model=planner.cost_model)
    assert [(row.num_media_before, row.num_media_after, row.num_long) for row in rows] == [
        (1, 1, 1),
        (0, 1, 1),
    ]
    assert [row.num_rows_after for row in rows] == [48, 32]
    split = planner.cost_model.split(packs[0].samples[0].segments[0], 2)
    assert split is not None
    assert tuple(row.after_s for row in rows) == split.costs


@settings(max_examples=30)
@given(steps())
def test_rows_add_up_to_the_balance_of_the_plan(step: Step) -> None:
    planner = step.planner()
    for group in range(step.topology.num_groups):
        plan = planner.plan(step.packs_of(group), step=0, group=group)
        rows = rank_rows(plan, planner.unbalanced(plan), cost_model=planner.cost_model)
        mean = sum(row.after_s for row in rows) / len(rows)
        assert mean == pytest.approx(plan.encoder_balance.mean, abs=1e-9)
        assert sum(row.before_s for row in rows) == pytest.approx(sum(row.after_s for row in rows))
        packs = pack_rows(plan, cost_model=planner.cost_model, seq_len=100)
        assert len(packs) == len(plan.replicas) * plan.num_microbatches
        assert sum(row.num_tokens for row in packs) == plan.num_tokens
        exchanges = travel(planner, plan)
        assert [row.num_rows for row in exchanges] == [
            sum(item.num_rows for item in plan.media_in(microbatch))
            for microbatch in range(plan.num_microbatches)
        ]
        assert 0 <= moved_rows_fraction(exchanges) <= 1


def test_a_segment_that_follows_its_pack_moves_no_rows() -> None:
    # In order the picture's pack is on replica 1; sorted by cost it is on replica 0, and the picture with it.
    image = media_segment(Modality.IMAGE, (1, 8, 8))
    packs = (
        Pack(lane=0, number=0, samples=(make_sample([text_segment(100)], row=0),)),
        Pack(lane=1, number=0, samples=(make_sample([image, text_segment(200)], row=1),)),
        Pack(lane=2, number=0, samples=(make_sample([text_segment(120)], row=2),)),
    )
    step = Step(Topology(world_size=2), 3, 1, packs)
    planner = step.planner()
    plan = planner.plan(packs, step=0, group=0)
    assert moved_rows_fraction(travel(planner, plan)) == 0


def test_rows_of_exchanges_tell_bytes_inside_and_between_nodes() -> None:
    pack = image_pack(0, num_images=4)
    step = Step(Topology(4, ranks_per_node=2), 1, 1, (pack,))
    planner = step.planner(model=cost_model(bytes_per_s=1e9), exchange="exact")
    plan = planner.plan((pack,), step=0, group=0)
    (row,) = travel(planner, plan)
    # Four images of 16 rows; one goes to the other rank of the node, two to the other node. A row has 16
    # values of 2 bytes, and as many for the gradient.
    assert (row.kind, row.num_rows, row.num_moved) == ("exact", 64, 48)
    assert (row.node_bytes, row.network_bytes) == (16 * 64, 32 * 64)
    assert row.exchange_s == pytest.approx(32 * 64 / 1e9)
