"""The exchange of all members, simulated: every row arrives once, where it is needed, with its content."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from balancer.layout import SequenceKind, SequenceLayout
from balancer.lssp import LsspConfig
from balancer.reshard import build_routes, media_places, reshard_plan
from balancer.step_inputs import step_inputs
from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.plan import ExchangeKind, Pack, StepPlan
from omni_pipeline.core.reshard import AllToAll, ReshardPlan, SumBuffer
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.topology import Topology
from tests.balancer.exchanges import made_rows, run_hops, wanted_rows, with_shares
from tests.balancer.worlds import ENCODERS, Step, cost_model, image_pack, steps
from tests.support.strategies import clip_with_sound, make_sample, media_segment, text_segment


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[StepPlan, SequenceLayout, ExchangeKind]:
    """Any plan of one group, with shares of long segments, on any layout, by any exchange that it has."""
    step = draw(steps())
    group = draw(st.integers(0, step.topology.num_groups - 1))
    plan = step.planner().plan(step.packs_of(group), step=3, group=group)
    layout = SequenceLayout(step.topology, step.seq_len, draw(st.sampled_from(get_args(SequenceKind))))
    possible = ["exact", "symmetric", *(["two_level"] if step.topology.rails_of_group(group) else [])]
    return draw(with_shares(plan)), layout, draw(st.sampled_from(possible))


@settings(max_examples=200)
@given(exchanges())
def test_every_row_reaches_the_one_owner_of_its_position(
    exchange: tuple[StepPlan, SequenceLayout, ExchangeKind],
) -> None:
    plan, layout, kind = exchange
    for microbatch in range(plan.num_microbatches):
        routes = build_routes(plan, microbatch=microbatch, layout=layout, encoders=ENCODERS)
        reshards = [reshard_plan(routes, kind=kind, member=member) for member in range(len(plan.ranks))]
        made = [made_rows(plan, rank=rank, microbatch=microbatch, encoders=ENCODERS) for rank in plan.ranks]
        assert routes.num_made.tolist() == [len(rows) for rows in made]
        taken = run_hops(reshards, made, layout.topology, plan.group)
        found = {}
        for rank, reshard, rows in zip(plan.ranks, reshards, taken, strict=True):
            positions = reshard.positions.tolist()
            assert positions == sorted(set(positions))
            found.update({(rank, position): row for position, row in zip(positions, rows, strict=True)})
        wanted = wanted_rows(plan, microbatch, layout)
        assert found == wanted
        _check_travel(reshards, made, wanted, plan, kind, layout.topology)


def _check_travel(
    reshards: list[ReshardPlan],
    made: list[list[tuple[int, int]]],
    wanted: dict[tuple[int, int], tuple[int, int]],
    plan: StepPlan,
    kind: ExchangeKind,
    topology: Topology,
) -> None:
    """Rows that stay never travel, and others only as often as they must."""
    maker = {row: rank for rank, rows in zip(plan.ranks, made, strict=True) for row in rows}
    moving = {row: (maker[row], owner) for (owner, _), row in wanted.items() if maker[row] != owner}
    sent = [[len(hop.send_rows) for hop in reshard.hops] for reshard in reshards]
    totals = [sum(by_hop) for by_hop in zip(*sent, strict=True)]
    if not moving:
        assert totals == []
    elif kind == "two_level":
        rail_of = {
            rank: place for place, rail in enumerate(topology.rails_of_group(plan.group)) for rank in rail
        }
        assert totals == [
            sum(rail_of[start] != rail_of[end] for start, end in moving.values()),
            sum(topology.node_of(start) != topology.node_of(end) for start, end in moving.values()),
        ]
    else:
        assert totals == [len(moving)]
    for reshard in reshards:
        assert all(hop.num_places == len(moving) for hop in reshard.hops if isinstance(hop, SumBuffer))


def two_stage_world() -> tuple[Step, StepPlan]:
    """Two replicas of tp 2 and pp 2; audio stands before the image, so the two orders differ."""
    parts = [
        text_segment(5),
        media_segment(Modality.AUDIO, (40, 1, 1)),
        media_segment(Modality.IMAGE, (1, 8, 8)),
        text_segment(3),
    ]
    packs = (
        Pack(lane=0, number=0, samples=(make_sample(parts, row=0),)),
        Pack(lane=1, number=0, samples=(make_sample([text_segment(9)], row=1),)),
    )
    step = Step(Topology(world_size=8, tp=2, pp=2), num_lanes=2, packs_per_lane=1, packs=packs)
    return step, step.planner(enabled=False).plan(packs, step=0, group=0)


def test_rows_are_concatenated_by_encoder_then_by_plan() -> None:
    step, plan = two_stage_world()
    # 10 audio rows at positions 6..15, 16 image rows at 18..33; 39 tokens, so rank 1 owns 20 and up.
    reshard = step.planner().reshard(plan, microbatch=0, rank=0)
    (hop,) = reshard.hops
    assert isinstance(hop, AllToAll)
    assert hop.send_splits == (0, 14, 0, 0, 0, 0, 0, 0)
    # Vision comes first in the outputs: its rows 0 and 1 stay, like audio (16..25); the other 14 go.
    assert hop.send_rows.tolist() == list(range(2, 16))
    assert reshard.positions.tolist() == [*range(6, 16), 18, 19]
    assert reshard.take_rows.tolist() == [*range(16, 26), 0, 1]
    other = step.planner().reshard(plan, microbatch=0, rank=1)
    assert [hop.num_received for hop in other.hops] == [14]
    assert other.positions.tolist() == list(range(14))


def test_a_rank_of_a_later_stage_receives_nothing_and_still_takes_part() -> None:
    step, plan = two_stage_world()
    reshard = step.planner().reshard(plan, microbatch=0, rank=7)
    (hop,) = reshard.hops
    assert isinstance(hop, AllToAll)
    assert hop.send_splits == hop.recv_splits == (0,) * 8
    assert hop.send_rows.dtype == reshard.take_rows.dtype == reshard.positions.dtype == np.int64


def test_where_no_row_moves_there_is_no_hop() -> None:
    packs = tuple(image_pack(lane, num_images=2) for lane in range(2))
    step = Step(Topology(world_size=2), num_lanes=2, packs_per_lane=1, packs=packs)
    plan = step.planner(enabled=False).plan(packs, step=0, group=0)
    for rank in range(2):
        reshard = step.planner().reshard(plan, microbatch=0, rank=rank)
        assert reshard.hops == ()
        assert reshard.take_rows.tolist() == list(range(32))


def test_two_hops_need_a_group_that_is_even_over_several_nodes() -> None:
    step, plan = two_stage_world()
    with pytest.raises(PlanError, match=re.escape("two hops in a group whose nodes have (8,) of its ranks")):
        step.planner().reshard(replace(plan, exchanges=("two_level",)), microbatch=0, rank=0)


def test_positions_of_media_follow_the_start_marker() -> None:
    image = media_segment(Modality.IMAGE, (1, 4, 4))
    first = make_sample([text_segment(5), image], row=0)
    second = make_sample([image, text_segment(2), image], row=1)
    # Sample one takes 5 + 6 + 1 positions; in sample two 6 + 2 stand before the second image.
    pack = Pack(lane=0, number=0, samples=(first, second))
    assert media_places([pack])[1][:, 1:4].tolist() == [[0, 1, 6], [1, 0, 13], [1, 2, 21]]
    padded = Pack(lane=0, number=0, samples=(first, second), padded_len=20)
    assert media_places([padded])[1][:, 1:4].tolist() == [[0, 1, 6], [1, 0, 21], [1, 2, 29]]


def test_rows_of_a_clip_and_of_its_sound_go_where_they_are_interleaved() -> None:
    # Six seconds in three chunks of 2 rows, and 60 rows of sound.
    clip, sound = clip_with_sound((3, 4, 2), 240, patch_s=2.0)
    pack = Pack(lane=0, number=0, samples=(make_sample([text_segment(3), clip, sound]),))
    step = Step(Topology(world_size=1), num_lanes=1, packs_per_lane=1, packs=(pack,))
    planner = step.planner()
    plan = planner.plan([pack], step=0, group=0)
    of_clip, of_sound = plan.media
    assert (of_clip.position, of_clip.runs) == (5, ((5, 2), (57, 2), (69, 2)))
    assert (of_sound.position, of_sound.runs) == (7, ((7, 50), (59, 10)))
    reshard = planner.reshard(plan, microbatch=0, rank=0)
    assert reshard.positions.tolist() == list(range(5, 71))
    # The encoder of pictures makes rows 0 to 5, that of sound 6 to 65.
    assert reshard.take_rows.tolist() == [0, 1, *range(6, 56), 2, 3, *range(56, 66), 4, 5]


def test_moves_of_interleaved_rows_are_priced_where_they_go() -> None:
    clip, sound = clip_with_sound((3, 4, 2), 240, patch_s=2.0)
    pack = Pack(lane=0, number=0, samples=(make_sample([clip, sound]),))
    layout = SequenceLayout(Topology(world_size=2, tp=2))
    inputs = step_inputs(
        (pack,),
        group=0,
        cost_model=cost_model(),
        layout=layout,
        lssp=LsspConfig(kind="off"),
        encoder_memory_bytes=0,
        exchange="exact",
    )
    rows = np.zeros((2, 2), dtype=np.int64)
    np.add.at(rows, (inputs.pieces.item, inputs.pieces.owner), inputs.pieces.rows)
    # 71 positions, 36 for the first rank: of them two are markers, two of the clip.
    assert rows.tolist() == [[2, 4], [32, 28]]


def test_a_rank_from_outside_the_group_is_refused() -> None:
    step = Step(Topology(world_size=2, replicas_per_group=1), 2, 1, ())
    plan = step.planner().plan((), step=0, group=1)
    with pytest.raises(PlanError, match="rank 0 is not one of the 1 ranks of group 1"):
        step.planner().reshard(plan, microbatch=0, rank=0)
