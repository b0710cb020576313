"""The exchange of all members, simulated: every row arrives once, where it is needed, with its content."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from balancer.reshard import chunk_size, media_positions, row_owners
from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.plan import Pack, StepPlan
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.topology import Topology
from tests.balancer.worlds import ENCODERS, Step, steps
from tests.support.strategies import make_sample, media_segment, text_segment


def encoder_outputs(plan: StepPlan, *, rank: int, microbatch: int) -> list[tuple[int, int]]:
    """(number of the segment in the plan, row) of each output row of ``rank``, encoder by encoder."""
    return [
        (number, row)
        for name in ENCODERS
        for number, item in enumerate(plan.media)
        if item.ranks == (rank,) and item.microbatch == microbatch and item.encoder == name
        for row in range(item.num_rows)
    ]


def exchange(step: Step, plan: StepPlan, microbatch: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Run the exchange of all members; return what lies at each (rank, local position)."""
    planner = step.planner()
    reshards = [planner.reshard(plan, microbatch=microbatch, rank=rank) for rank in plan.ranks]
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for member, (rank, reshard) in enumerate(zip(plan.ranks, reshards, strict=True)):
        rows = encoder_outputs(plan, rank=rank, microbatch=microbatch)
        assert sorted(reshard.send_rows.tolist()) == list(range(len(rows)))
        ordered = [rows[index] for index in reshard.send_rows]
        ends = np.cumsum([0, *reshard.send_splits]).tolist()
        for other in range(len(plan.ranks)):
            sent[member, other] = ordered[ends[other] : ends[other + 1]]
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for member, (rank, reshard) in enumerate(zip(plan.ranks, reshards, strict=True)):
        incoming = [sent[other, member] for other in range(len(plan.ranks))]
        assert tuple(len(rows) for rows in incoming) == reshard.recv_splits
        received = [row for rows in incoming for row in rows]
        for position, row in zip(reshard.recv_positions.tolist(), received, strict=True):
            assert (rank, position) not in found
            found[rank, position] = row
    return found


@settings(max_examples=100)
@given(steps())
def test_every_row_reaches_the_one_owner_of_its_position(step: Step) -> None:
    topology = step.topology
    for group in range(topology.num_groups):
        plan = step.planner().plan(step.packs_of(group), step=3, group=group)
        for microbatch in range(plan.num_microbatches):
            expected = {}
            for number, item in enumerate(plan.media):
                if item.microbatch != microbatch:
                    continue
                owners = topology.row_owners(plan.slots[item.pack].replica)
                length = step.seq_len or plan.packs[item.pack].num_positions
                chunk = -(-length // len(owners))
                for row in range(item.num_rows):
                    which, local = divmod(item.position + row, chunk)
                    expected[owners[which], local] = (number, row)
            assert exchange(step, plan, microbatch) == expected


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
    assert reshard.send_splits == (12, 14, 0, 0, 0, 0, 0, 0)
    # Vision comes first in the outputs: its rows 0 and 1, then audio (16..25); then the other vision rows.
    assert reshard.send_rows.tolist() == [0, 1, *range(16, 26), *range(2, 16)]
    assert reshard.recv_positions.tolist() == [18, 19, *range(6, 16)]
    other = step.planner().reshard(plan, microbatch=0, rank=1)
    assert other.recv_splits == (14, 0, 0, 0, 0, 0, 0, 0)
    assert other.recv_positions.tolist() == list(range(14))


def test_a_rank_of_a_later_stage_receives_nothing_and_still_takes_part() -> None:
    step, plan = two_stage_world()
    reshard = step.planner().reshard(plan, microbatch=0, rank=7)
    assert reshard.send_splits == reshard.recv_splits == (0,) * 8
    assert reshard.send_rows.dtype == reshard.recv_positions.dtype == np.int64


def test_positions_of_media_follow_the_start_marker() -> None:
    image = media_segment(Modality.IMAGE, (1, 4, 4))
    first = make_sample([text_segment(5), image], row=0)
    second = make_sample([image, text_segment(2), image], row=1)
    # Sample one takes 5 + 6 + 1 positions; in sample two 6 + 2 stand before the second image.
    pack = Pack(lane=0, number=0, samples=(first, second))
    assert media_positions(pack) == [(0, 1, 6), (1, 0, 13), (1, 2, 21)]
    padded = Pack(lane=0, number=0, samples=(first, second), padded_len=20)
    assert media_positions(padded) == [(0, 1, 6), (1, 0, 21), (1, 2, 29)]


def test_chunks_are_equal_and_rounded_up() -> None:
    assert [chunk_size(length, 4) for length in (0, 1, 8, 9)] == [1, 1, 2, 3]


def test_owners_are_those_of_the_first_stage() -> None:
    topology = Topology(world_size=8, tp=2, pp=2)
    assert row_owners(topology, 1) == topology.row_owners(1) == (2, 3)


def test_a_rank_from_outside_the_group_is_refused() -> None:
    step = Step(Topology(world_size=2, replicas_per_group=1), 2, 1, ())
    plan = step.planner().plan((), step=0, group=1)
    with pytest.raises(PlanError, match="rank 0 is not one of the 1 ranks of group 1"):
        step.planner().reshard(plan, microbatch=0, rank=0)
