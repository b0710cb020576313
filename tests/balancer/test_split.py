"""Segments in shares: nothing lost, cut where attention ends, and no work made by cutting."""

from __future__ import annotations

import dataclasses
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from balancer.cost import CostModel
from balancer.shapes import TransformerShape, audio_shape, vision_shape
from balancer.split import cut_segment
from balancer.work import media_flops
from omni_pipeline.core.sample import Modality, Segment
from omni_pipeline.core.sizes import audio_rows
from tests.support.hardware import flat_hardware
from tests.support.strategies import media_segment

VISION = vision_shape(
    layers=4,
    hidden=16,
    ffn=12,
    heads=4,
    patch_values=24,
    merge=2,
    window_patches=4,
    full_attention_layers=1,
    llm_hidden=8,
)
LLM = TransformerShape(hidden=8, layers=3, ffn=16, heads=4, kv_heads=2, head_dim=2, causal=True)


def audio(chunk_frames: int) -> TransformerShape:
    """Return an audio encoder of four heads with chunks of so many mel frames."""
    return audio_shape(
        layers=2, hidden=16, ffn=32, heads=4, num_mels=16, chunk_frames=chunk_frames, llm_hidden=8
    )


def model(*, chunk_frames: int = 20, **machine: float) -> CostModel:
    """Return a cost model of both encoders."""
    return CostModel(
        encoders={"vision": VISION, "audio": audio(chunk_frames)},
        llm=LLM,
        encoder_of={Modality.IMAGE: "vision", Modality.VIDEO: "vision", Modality.AUDIO: "audio"},
        hardware=flat_hardware(**machine),
    )


clips = st.tuples(st.integers(1, 20), st.integers(1, 6), st.integers(1, 6)).map(
    lambda grid: media_segment(Modality.VIDEO, (grid[0], 2 * grid[1], 2 * grid[2]))
)
recordings = st.integers(4, 900).map(lambda frames: media_segment(Modality.AUDIO, (frames, 1, 1)))
degrees = st.sampled_from([1, 2, 3, 4, 8])


@settings(max_examples=300)
@given(clips | recordings, degrees, st.sampled_from([2, 10, 18, 20, 200]))
def test_shares_are_all_rows_and_a_cut_at_borders_makes_no_work(
    segment: Segment, degree: int, chunk_frames: int
) -> None:
    costs = model(chunk_frames=chunk_frames)
    shape = costs.encoders[costs.encoder_name(segment)]
    split = costs.split(segment, degree)
    cut = cut_segment(shape, segment.grid, degree)
    if split is None or cut is None:
        assert split is cut
        return
    assert len(split.shares) == len(split.costs) == degree
    assert sum(split.shares) == segment.num_rows
    assert min(split.shares) >= 1
    assert split.shares == cut.rows
    if cut.grids:
        assert not split.joined
        whole = media_flops(shape, segment.grid)
        assert sum(media_flops(shape, grid) for grid in cut.grids) == whole
        for grid, rows in zip(cut.grids, cut.rows, strict=True):
            is_sound = segment.modality is Modality.AUDIO
            assert rows == (audio_rows(grid[0]) if is_sound else math.prod(grid) // 4)
        assert sum(split.costs) == pytest.approx(costs.media_cost(segment))
    else:
        assert split.joined
        assert max(split.shares) - min(split.shares) <= 1


@settings(max_examples=200)
@given(recordings, st.integers(2, 8), st.sampled_from([2, 10, 18, 20, 200]))
def test_a_recording_is_cut_between_chunks_and_between_rows(
    segment: Segment, degree: int, chunk_frames: int
) -> None:
    cut = cut_segment(audio(chunk_frames), segment.grid, degree)
    if cut is None or not cut.grids:
        return
    unit = math.lcm(chunk_frames, 4)
    for frames, _, _ in cut.grids[:-1]:
        assert frames % unit == 0
    assert sum(frames for frames, _, _ in cut.grids) == segment.grid[0]
    counts = [-(-frames // unit) for frames, _, _ in cut.grids]
    assert max(counts) - min(counts) <= 1 + (segment.grid[0] % unit in (1, 2))


def test_a_clip_is_cut_between_frames_as_evenly_as_they_allow() -> None:
    split = model().split(media_segment(Modality.VIDEO, (5, 4, 6)), 2)
    assert split is not None
    assert (split.shares, split.joined) == ((18, 12), False)


def test_a_picture_is_joined_when_heads_and_rows_allow() -> None:
    costs, picture = model(), media_segment(Modality.IMAGE, (1, 6, 6))
    split = costs.split(picture, 4)
    assert split is not None
    assert (split.shares, split.joined) == ((3, 2, 2, 2), True)
    assert costs.split(picture, 3) is None  # four heads
    assert costs.split(media_segment(Modality.IMAGE, (1, 2, 6)), 4) is None  # three rows
    whole = costs.split(picture, 1)
    assert whole is not None
    assert (whole.shares, whole.joined, whole.costs) == ((9,), False, (costs.media_cost(picture),))


def test_a_clip_of_few_frames_is_joined_over_many_ranks() -> None:
    split = model().split(media_segment(Modality.VIDEO, (3, 4, 4)), 4)
    assert split is not None
    assert (split.shares, split.joined) == ((3, 3, 3, 3), True)


def test_a_recording_is_never_joined_because_its_convolutions_cross_rows() -> None:
    assert cut_segment(audio(20), (59, 1, 1), 4) is None  # three chunks
    assert cut_segment(audio(0), (400, 1, 1), 2) is None  # all attends to all
    some_full = dataclasses.replace(audio(20), full_attention_layers=1)
    assert cut_segment(some_full, (400, 1, 1), 2) is None
    # Two chunks, and one position more that makes no row: no third share.
    assert cut_segment(audio(20), (41, 1, 1), 3) is None
    whole = cut_segment(audio(0), (400, 1, 1), 1)
    assert whole is not None
    assert (whole.rows, whole.joined) == ((100,), False)


def test_joined_shares_do_the_work_of_the_whole_and_pay_for_the_exchange() -> None:
    picture = media_segment(Modality.IMAGE, (1, 8, 8))
    free = model(bytes_per_s=1e30)
    split = free.split(picture, 2)
    assert split is not None
    assert sum(split.costs) == pytest.approx(free.media_cost(picture))
    # Per position, layer and direction: queries, keys, values, outputs of 16 numbers of 2 bytes, half leave.
    num_bytes = 2 * 4 * 32 * (4 * 16 * 2) // 2
    slow = model(bytes_per_s=1e3, latency_s=0.25).split(picture, 2)
    assert slow is not None
    exchange_s = num_bytes / 1e3 + 2 * 4 * 4 * 0.25
    assert slow.costs == pytest.approx([cost + exchange_s for cost in split.costs])
