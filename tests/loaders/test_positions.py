"""Position ids against a walk over single tokens, and against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaders.positions import pack_positions, sample_positions, seconds_per_temporal_patch
from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Modality, Sample, SampleId, Segment
from omni_pipeline.core.sizes import VisionSizes

MERGE = 2


def segment(modality: Modality, *grid: int) -> Segment:
    full = (grid[0], grid[1] if len(grid) > 1 else 1, grid[2] if len(grid) > 2 else 1)
    rows = {
        Modality.TEXT: 0,
        Modality.AUDIO: full[0] // 4,
        Modality.IMAGE: full[0] * full[1] * full[2] // MERGE**2,
        Modality.VIDEO: full[0] * full[1] * full[2] // MERGE**2,
    }[modality]
    num_tokens = full[0] if modality is Modality.TEXT else rows + 2
    return Segment(
        modality=modality, member="", offset=0, length=0, grid=full, num_rows=rows, num_tokens=num_tokens
    )


def sample(*segments: Segment) -> Sample:
    num_tokens = sum(item.num_tokens for item in segments) + 1
    return Sample(
        id=SampleId("s", 0, 0), key="k", shard="s.tar", segments=segments, num_tokens=num_tokens, num_labels=0
    )


def walk(segments: Sequence[Segment], seconds: float) -> list[list[int]]:
    """One token after the other, as one would do it by hand."""
    ids: list[list[int]] = []

    def following() -> int:
        return 1 + max((max(axes) for axes in ids), default=-1)

    for item in segments:
        if item.modality is Modality.TEXT:
            for _ in range(item.num_tokens):
                ids.append([following()] * 3)
            continue
        ids.append([following()] * 3)
        start = following()
        if item.modality is Modality.AUDIO:
            for row in range(item.num_rows):
                ids.append([start + row] * 3)
        else:
            for time in range(item.grid[0]):
                offset = 0
                if item.modality is Modality.VIDEO:
                    offset = int(np.float32(time) * np.float32(seconds) * np.float32(25))
                for row in range(item.grid[1] // MERGE):
                    for column in range(item.grid[2] // MERGE):
                        ids.append([start + offset, start + row, start + column])
        ids.append([following()] * 3)
    ids.append([following()] * 3)
    return ids


segments_strategy = st.lists(
    st.one_of(
        st.builds(lambda n: segment(Modality.TEXT, n), st.integers(0, 5)),
        st.builds(lambda n: segment(Modality.AUDIO, 4 * n), st.integers(1, 6)),
        st.builds(
            lambda h, w: segment(Modality.IMAGE, 1, 2 * h, 2 * w), st.integers(1, 4), st.integers(1, 4)
        ),
        st.builds(
            lambda t, h, w: segment(Modality.VIDEO, t, 2 * h, 2 * w),
            st.integers(1, 4),
            st.integers(1, 3),
            st.integers(1, 3),
        ),
    ),
    max_size=5,
)


@given(segments_strategy, st.sampled_from([1.0, 0.5, 1 / 3, 0.04, 0.2]))
def test_positions_equal_a_walk_over_single_tokens(segments: list[Segment], seconds: float) -> None:
    positions = sample_positions(sample(*segments), merge=MERGE, seconds_per_temporal_patch=seconds)
    assert positions.dtype == np.int64
    assert positions.T.tolist() == walk(segments, seconds)


def test_a_picture_spreads_over_rows_and_columns_and_text_goes_on_after_its_largest_side() -> None:
    item = sample(segment(Modality.TEXT, 2), segment(Modality.IMAGE, 1, 4, 6), segment(Modality.TEXT, 1))
    positions = sample_positions(item, merge=2, seconds_per_temporal_patch=1.0)
    assert positions.tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8],
    ]


def test_a_clip_of_two_frames_per_second_advances_25_positions_per_second() -> None:
    seconds = seconds_per_temporal_patch(VisionSizes(video_fps=2.0, temporal_patch=2))
    assert seconds == 1.0
    item = sample(segment(Modality.VIDEO, 3, 2, 2))
    positions = sample_positions(item, merge=2, seconds_per_temporal_patch=seconds)
    assert positions[0].tolist() == [0, 1, 26, 51, 52, 53]
    assert positions[1].tolist() == [0, 1, 1, 1, 52, 53]


def test_positions_start_again_in_every_sample_of_a_pack() -> None:
    first, second = sample(segment(Modality.IMAGE, 1, 4, 4)), sample(segment(Modality.TEXT, 3))
    packed = pack_positions(Pack(0, 0, (first, second)), merge=2, seconds_per_temporal_patch=1.0)
    alone = sample_positions(second, merge=2, seconds_per_temporal_patch=1.0)
    assert packed[:, first.num_tokens :].tolist() == alone.tolist()
    assert pack_positions(Pack(0, 0, ()), merge=2, seconds_per_temporal_patch=1.0).shape == (3, 0)


def test_padding_repeats_the_last_position_of_its_sample() -> None:
    first, second = sample(segment(Modality.TEXT, 2)), sample(segment(Modality.TEXT, 3))
    pack = Pack(0, 0, (first, second), padded_len=5)
    padded = pack_positions(pack, merge=2, seconds_per_temporal_patch=1.0)
    assert padded.tolist() == [[0, 1, 2, 2, 2, 0, 1, 2, 3, 3]] * 3


def test_a_sample_whose_segments_do_not_add_up_is_a_bug_of_the_plan() -> None:
    item = sample(segment(Modality.TEXT, 2))
    broken = Sample(id=item.id, key="k", shard="s.tar", segments=item.segments, num_tokens=9, num_labels=0)
    with pytest.raises(PlanError, match="segments make 3 positions, the sample is planned with 9"):
        sample_positions(broken, merge=2, seconds_per_temporal_patch=1.0)
