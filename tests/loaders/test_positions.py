"""Position ids against a walk over single tokens, and against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaders.positions import pack_positions, sample_positions
from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Modality, Sample, SampleId, Segment
from omni_pipeline.core.sizes import VisionSizes

MERGE = 2


def segment(modality: Modality, *grid: int, patch_s: float = 1.0, is_track: bool = False) -> Segment:
    full = (grid[0], grid[1] if len(grid) > 1 else 1, grid[2] if len(grid) > 2 else 1)
    rows = {
        Modality.TEXT: 0,
        Modality.AUDIO: full[0] // 4,
        Modality.IMAGE: full[0] * full[1] * full[2] // MERGE**2,
        Modality.VIDEO: full[0] * full[1] * full[2] // MERGE**2,
    }[modality]
    num_tokens = full[0] if modality is Modality.TEXT else rows + 2
    return Segment(
        modality=modality,
        member="",
        offset=0,
        length=0,
        grid=full,
        num_rows=rows,
        num_tokens=num_tokens,
        patch_s=patch_s if modality is Modality.VIDEO else 0.0,
        is_track=is_track,
    )


def sample(*segments: Segment) -> Sample:
    num_tokens = sum(item.num_tokens for item in segments) + 1
    return Sample(
        id=SampleId("s", 0, 0), key="k", shard="s.tar", segments=segments, num_tokens=num_tokens, num_labels=0
    )


def walk(segments: Sequence[Segment]) -> list[list[int]]:
    """One token after the other, as one would do it by hand; without sound tracks."""
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
                    offset = int(np.float32(time) * np.float32(item.patch_s) * np.float32(25))
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
            lambda t, h, w, patch_s: segment(Modality.VIDEO, t, 2 * h, 2 * w, patch_s=patch_s),
            st.integers(1, 4),
            st.integers(1, 3),
            st.integers(1, 3),
            st.sampled_from([1.0, 0.5, 1 / 3, 0.04, 0.2]),
        ),
    ),
    max_size=5,
)


@given(segments_strategy)
def test_positions_equal_a_walk_over_single_tokens(segments: list[Segment]) -> None:
    positions = sample_positions(sample(*segments), merge=MERGE)
    assert positions.dtype == np.int64
    assert positions.T.tolist() == walk(segments)


def test_a_picture_spreads_over_rows_and_columns_and_text_goes_on_after_its_largest_side() -> None:
    item = sample(segment(Modality.TEXT, 2), segment(Modality.IMAGE, 1, 4, 6), segment(Modality.TEXT, 1))
    positions = sample_positions(item, merge=2)
    assert positions.tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8],
    ]


def test_a_clip_of_two_frames_per_second_advances_25_positions_per_second() -> None:
    patch_s = VisionSizes(video_fps=2.0, temporal_patch=2).patch_s
    assert patch_s == 1.0
    item = sample(segment(Modality.VIDEO, 3, 2, 2, patch_s=patch_s))
    positions = sample_positions(item, merge=2)
    assert positions[0].tolist() == [0, 1, 26, 51, 52, 53]
    assert positions[1].tolist() == [0, 1, 1, 1, 52, 53]


def test_a_clip_and_its_sound_run_through_the_same_positions_between_shared_markers() -> None:
    # Rows every 75 positions, so that each is in a chunk of its own; 60 rows of sound, 50 and 10.
    clip, sound = segment(Modality.VIDEO, 2, 2, 2, patch_s=3.0), segment(Modality.AUDIO, 240, is_track=True)
    positions = sample_positions(sample(segment(Modality.TEXT, 1), clip, sound), merge=2)
    expected = [0, 1, 1, 2, *range(2, 52), 77, *range(52, 62), 62, 62, 63]
    assert positions[0].tolist() == expected
    assert positions[1].tolist() == [2 if place == 77 else place for place in expected]


def test_text_goes_on_after_the_last_row_of_the_sound_even_where_the_picture_is_larger() -> None:
    clip, sound = segment(Modality.VIDEO, 1, 2, 40), segment(Modality.AUDIO, 20, is_track=True)
    positions = sample_positions(sample(clip, sound), merge=2)
    assert positions[2].tolist() == [0, 0, *range(1, 21), *range(1, 6), 6, 6, 7]


def test_positions_start_again_in_every_sample_of_a_pack() -> None:
    first, second = sample(segment(Modality.IMAGE, 1, 4, 4)), sample(segment(Modality.TEXT, 3))
    packed = pack_positions(Pack(0, 0, (first, second)), merge=2)
    alone = sample_positions(second, merge=2)
    assert packed[:, first.num_tokens :].tolist() == alone.tolist()
    assert pack_positions(Pack(0, 0, ()), merge=2).shape == (3, 0)


def test_padding_repeats_the_last_position_of_its_sample() -> None:
    first, second = sample(segment(Modality.TEXT, 2)), sample(segment(Modality.TEXT, 3))
    pack = Pack(0, 0, (first, second), padded_len=5)
    padded = pack_positions(pack, merge=2)
    assert padded.tolist() == [[0, 1, 2, 2, 2, 0, 1, 2, 3, 3]] * 3


def test_a_sample_whose_segments_do_not_add_up_is_a_bug_of_the_plan() -> None:
    item = sample(segment(Modality.TEXT, 2))
    broken = Sample(id=item.id, key="k", shard="s.tar", segments=item.segments, num_tokens=9, num_labels=0)
    with pytest.raises(PlanError, match="segments make 3 positions, the sample is planned with 9"):
        sample_positions(broken, merge=2)
