"""Long segments in the loader: every rank reads its share, and all know who has the others."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from loaders.assemble import Piece, encoder_inputs, pieces_of, planned_bytes, segment_of
from loaders.shares import grid_of_share, units_of_share
from omni_pipeline.core.batch import EncoderInput, JoinedSegment
from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.plan import Pack, StepPlan
from omni_pipeline.core.sample import Modality, SampleId
from omni_pipeline.core.sizes import MEL_FRAMES_PER_ROW, audio_rows
from tests.loaders.test_assemble import MODEL, array_of, plan_of
from tests.support.strategies import make_sample, media_segment, text_segment

NO_FAILURES: frozenset[SampleId] = frozenset()
PICTURE = media_segment(Modality.IMAGE, (1, 6, 4))
CLIP = media_segment(Modality.VIDEO, (5, 2, 4))
TALK = media_segment(Modality.AUDIO, (131, 1, 1))
SMALL = media_segment(Modality.IMAGE, (1, 2, 4))
SAMPLE = make_sample([SMALL, PICTURE, CLIP, text_segment(2), TALK, SMALL])
# By segment of SAMPLE: ranks, shares, whether they are joined.
SHARES = {
    1: ((1, 0), (4, 2), True),
    2: ((0, 1), (4, 6), False),
    4: ((1, 0), (20, 13), False),
}


def long_plan(shares: dict[int, tuple[tuple[int, ...], tuple[int, ...], bool]] = SHARES) -> StepPlan:
    """One pack on replica 0 and an empty one on replica 1; segments not in ``shares`` are rank 0's."""
    plan = plan_of([Pack(0, 0, (SAMPLE,)), Pack(1, 0, ())], [(0, 0), (1, 0)], media_ranks={})
    media = []
    for item in plan.media:
        if item.segment in shares:
            ranks, rows, joined = shares[item.segment]
            item = replace(item, ranks=ranks, shares=rows, joined=joined)
        media.append(item)
    return replace(plan, media=tuple(media))


def content(plan: StepPlan, piece: Piece) -> np.ndarray[Any, Any]:
    """The whole array of a piece; every unit differs."""
    _, segment = segment_of(plan, piece)
    return array_of(segment, 1) * np.arange(segment.num_units)[:, None].astype(MODEL.dtype(segment.modality))


def inputs_of(
    plan: StepPlan, rank: int, failed: frozenset[SampleId] = NO_FAILURES
) -> dict[str, EncoderInput]:
    pieces = pieces_of(plan, microbatch=0, rank=rank, replica=rank, with_text=False, model=MODEL)
    arrays = {piece: content(plan, piece)[units.start : units.stop] for piece, units in pieces.items()}
    return encoder_inputs(plan, 0, rank=rank, arrays=arrays, failed=failed, model=MODEL)


def test_each_rank_reads_the_units_of_its_rows() -> None:
    plan = long_plan()
    pieces = [
        pieces_of(plan, microbatch=0, rank=rank, replica=rank, with_text=False, model=MODEL)
        for rank in (0, 1)
    ]
    by_segment = [{piece.segment: units for piece, units in of_rank.items()} for of_rank in pieces]
    assert by_segment[0] == {
        0: range(8),
        1: range(16, 24),
        2: range(16),
        4: range(80, 131),
        5: range(8),
    }
    assert by_segment[1] == {1: range(16), 2: range(16, 40), 4: range(80)}


def test_a_share_by_itself_is_a_smaller_segment_and_joined_shares_stand_behind() -> None:
    plan = long_plan()
    small, picture, clip, talk = (content(plan, Piece(0, 0, segment)) for segment in (0, 1, 2, 4))
    first, second = inputs_of(plan, 0), inputs_of(plan, 1)
    assert first["vision"].grids.tolist() == [[1, 2, 4], [2, 2, 4], [1, 2, 4]]
    assert second["vision"].grids.tolist() == [[3, 2, 4]]
    np.testing.assert_array_equal(
        first["vision"].values, np.concatenate([small, clip[:16], small, picture[16:]])
    )
    np.testing.assert_array_equal(second["vision"].values, np.concatenate([clip[16:], picture[:16]]))
    assert first["audio"].grids.tolist() == [[51, 1, 1]]
    assert second["audio"].grids.tolist() == [[80, 1, 1]]
    np.testing.assert_array_equal(first["audio"].values, talk[80:])
    np.testing.assert_array_equal(second["audio"].values, talk[:80])


def test_every_member_is_told_of_every_joined_segment_of_the_group() -> None:
    plan = long_plan()
    shared = JoinedSegment(grid=(1, 6, 4), members=(1, 0), shares=(4, 2), place=1)
    assert inputs_of(plan, 0)["vision"].joined == (shared,)
    assert inputs_of(plan, 1)["vision"].joined == (replace(shared, place=0),)
    assert inputs_of(plan, 0)["audio"].joined == ()
    alone = long_plan({1: ((1,), (6,), False)})
    assert inputs_of(alone, 0)["vision"].joined == ()
    wider = replace(plan, ranks=(0, 1, 2))
    (told,) = inputs_of(wider, 2)["vision"].joined
    assert told == replace(shared, place=-1)
    assert inputs_of(wider, 2)["vision"].values.shape == (0, MODEL.width(Modality.IMAGE))


def test_a_failed_long_sample_keeps_its_geometry_on_every_rank() -> None:
    plan = long_plan()
    for rank in (0, 1):
        whole, failed = inputs_of(plan, rank), inputs_of(plan, rank, frozenset({SAMPLE.id}))
        for name in ("vision", "audio"):
            assert failed[name].values.shape == whole[name].values.shape
            assert failed[name].values.dtype == whole[name].values.dtype
            assert not failed[name].values.any()
            np.testing.assert_array_equal(failed[name].grids, whole[name].grids)
            assert failed[name].joined == whole[name].joined


def test_planned_bytes_count_shares_only() -> None:
    plan = long_plan()
    for rank in (0, 1):
        values = sum(item.values.nbytes for item in inputs_of(plan, rank).values())
        empty = planned_bytes(replace(plan, media=()), rank=rank, replica=rank, model=MODEL)
        assert planned_bytes(plan, rank=rank, replica=rank, model=MODEL) == empty + values


@given(st.integers(4, 2000), st.data())
def test_shares_of_a_recording_make_its_rows_and_take_all_its_frames(
    frames: int, data: st.DataObject
) -> None:
    talk = media_segment(Modality.AUDIO, (frames, 1, 1))
    cuts = data.draw(st.sets(st.integers(1, max(1, talk.num_rows - 1)), max_size=3))
    bounds = [0, *sorted(cut for cut in cuts if cut < talk.num_rows), talk.num_rows]
    shares = tuple(end - start for start, end in itertools.pairwise(bounds))
    plan = plan_of([Pack(0, 0, (make_sample([talk]),))], [(0, 0)], media_ranks={})
    placement = replace(plan.media[0], ranks=tuple(range(len(shares))), shares=shares)
    end = 0
    for rank, rows in enumerate(shares):
        units = units_of_share(talk, placement, rank=rank, sizes=MODEL.sizes)
        assert units.start == end
        assert audio_rows(len(units)) == rows
        assert grid_of_share(talk, units) == (len(units), 1, 1)
        end = units.stop
    assert end == frames
    assert audio_rows(MEL_FRAMES_PER_ROW * 7) == 7


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (
            {1: ((0, 1), (4, 2), False)},
            "cuts frames of 6 rows into shares of (4, 2) rows that are not joined",
        ),
        (
            {2: ((1, 0), (3, 7), False)},
            "cuts frames of 2 rows into shares of (3, 7) rows that are not joined",
        ),
        ({4: ((0, 1), (20, 13), True)}, "joins shares of a recording, whose attention stays in its chunks"),
    ],
)
def test_shares_that_cannot_be_encoded_as_planned_are_refused(
    shares: dict[int, tuple[tuple[int, ...], tuple[int, ...], bool]], message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        inputs_of(long_plan(shares), 0)
    assert caught.value.what == f"plan {message}"
