import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_pipeline.core.errors import SampleError
from omni_pipeline.core.sample import Modality, RawSize
from omni_pipeline.core.sizes import (
    AudioSizes,
    ModelSizes,
    VisionSizes,
    audio_grid,
    audio_rows,
    image_grid,
    media_rows,
    resampled_length,
    smart_resize,
    video_grid,
)

sides = st.integers(1, 4000)


@given(sides, sides)
def test_resized_pictures_are_multiples_within_the_budget(height: int, width: int) -> None:
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(SampleError, match="aspect ratio"):
            smart_resize(height, width, factor=28, min_pixels=56 * 56, max_pixels=1280 * 28 * 28)
        return
    new_height, new_width = smart_resize(
        height, width, factor=28, min_pixels=56 * 56, max_pixels=1280 * 28 * 28
    )
    assert new_height % 28 == new_width % 28 == 0
    # A very thin picture cannot go below one factor on its short side, so only its long side bounds it.
    assert new_height * new_width <= 1280 * 28 * 28 or min(new_height, new_width) == 28
    assert new_height * new_width >= 56 * 56


@given(st.integers(1, 10_000), st.floats(0.0, 600.0), st.integers(28, 800), st.integers(28, 800))
def test_a_video_has_whole_temporal_patches_and_at_least_one(
    frames: int, seconds: float, height: int, width: int
) -> None:
    sizes = VisionSizes(video_max_frames=64)
    time, rows, columns = video_grid(
        RawSize(height=height, width=width, num_frames=frames, duration_s=seconds), sizes
    )
    assert 1 <= time <= 32
    assert rows % 2 == columns % 2 == 0


def test_sizes_of_known_pictures_and_recordings() -> None:
    assert image_grid(RawSize(height=427, width=640), VisionSizes()) == (1, 30, 46)
    assert media_rows(Modality.IMAGE, (1, 30, 46), ModelSizes()) == 345
    assert audio_grid(RawSize(sample_rate=44_100, num_samples=441_000), AudioSizes()) == (1000, 1, 1)
    assert audio_rows(1000) == 250
    assert resampled_length(44_101, 44_100) == 16_001


def test_recordings_without_samples_or_too_long_are_refused() -> None:
    with pytest.raises(SampleError, match="no samples"):
        audio_grid(RawSize(sample_rate=16_000), AudioSizes())
    with pytest.raises(SampleError, match=r"lasts 301\.0 s, limit 300\.0 s"):
        audio_grid(RawSize(sample_rate=16_000, num_samples=301 * 16_000), AudioSizes())
