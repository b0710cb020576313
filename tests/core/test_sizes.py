"""core.sizes: raw sizes to grids and rows; the vectors are what a plain walk over Python numbers gives."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_pipeline.core.errors import SampleError
from omni_pipeline.core.sample import Modality, RawSize
from omni_pipeline.core.sizes import (
    AudioSizes,
    ModelSizes,
    VisionSizes,
    audio_rows,
    grid_rows,
    media_grid,
    media_grids,
    media_rows,
    resampled_length,
    resized_sides,
    smart_resize,
)

sides = st.integers(1, 4000)
# Small sides and their multiples are where rounding decides; the largest is what an index can hold.
any_sides = st.one_of(
    st.integers(0, 300), sides, st.integers(0, 40).map(lambda n: 14 * n), st.integers(0, 2**24)
)
pictures = st.one_of(
    st.tuples(any_sides, any_sides),
    st.integers(1, 100).flatmap(lambda n: st.tuples(st.just(n), st.integers(200 * n - 1, 200 * n + 1))),
)
pixels = st.tuples(st.integers(1, 100_000), st.integers(1, 20_000_000)).map(sorted)
seconds = st.one_of(
    st.integers(0, 4000).map(lambda n: n / 8), st.floats(0, 1e6), st.sampled_from([math.nan, math.inf, 1e308])
)


def plain_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """The rule of the Qwen2-VL processor for one picture, in Python numbers."""
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
    elif new_height * new_width < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return new_height, new_width


def plain_frames(num_frames: int, duration_s: float, sizes: VisionSizes) -> int:
    """Frames taken of one video, in Python numbers; a duration that is no number tells nothing."""
    wanted = most = min(num_frames, sizes.video_max_frames)
    if math.isfinite(duration_s * sizes.video_fps):
        wanted = min(max(math.floor(duration_s * sizes.video_fps), sizes.video_min_frames), most)
    return max(sizes.temporal_patch, wanted - wanted % sizes.temporal_patch)


@given(st.lists(pictures, min_size=1, max_size=20), st.sampled_from([14, 28, 32]), pixels)
def test_sides_are_those_of_the_plain_rule(
    pictures: list[tuple[int, int]], factor: int, bounds: list[int]
) -> None:
    low, high = bounds
    heights, widths, problems = resized_sides(
        np.array([height for height, _ in pictures], dtype=np.int32),
        np.array([width for _, width in pictures], dtype=np.int32),
        factor=factor,
        min_pixels=low,
        max_pixels=high,
    )
    for place, (height, width) in enumerate(pictures):
        if min(height, width) < 1:
            assert problems[place].what == f"picture of {width} x {height} pixels has no area"
        elif max(height, width) / min(height, width) > 200:
            assert problems[place].what == f"aspect ratio of {width} x {height} pixels is above 200"
        else:
            assert place not in problems
            expected = plain_resize(height, width, factor=factor, min_pixels=low, max_pixels=high)
            assert (heights[place], widths[place]) == expected
            assert smart_resize(height, width, factor=factor, min_pixels=low, max_pixels=high) == expected
            continue
        assert heights[place] == widths[place] == 0


@given(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), seconds, sides, sides), min_size=1, max_size=20),
    st.one_of(st.none(), st.integers(1, 10**8)),
)
def test_video_grids_are_those_of_the_plain_rule(
    videos: list[tuple[int, float, int, int]], total: int | None
) -> None:
    sizes = ModelSizes(vision=VisionSizes(video_max_frames=63, video_fps=2.5, video_total_pixels=total))
    vision = sizes.vision
    raws = [RawSize(num_frames=n, duration_s=t, height=h, width=w) for n, t, h, w in videos]
    arrays = {name: np.array([getattr(raw, name) for raw in raws]) for name in RawSize.__dataclass_fields__}
    grids, problems = media_grids(Modality.VIDEO, arrays, sizes)
    rows = grid_rows(Modality.VIDEO, grids, sizes)
    for place, raw in enumerate(raws):
        if place in problems:
            continue
        time = plain_frames(raw.num_frames, raw.duration_s, vision) // 2
        most = vision.video_max_pixels
        if total is not None:
            most = max(min(most, total // time), int(1.05 * vision.video_min_pixels))
        height, width = plain_resize(
            raw.height, raw.width, factor=28, min_pixels=vision.video_min_pixels, max_pixels=most
        )
        assert grids[place].tolist() == [time, height // 14, width // 14]
        assert media_grid(Modality.VIDEO, raw, sizes) == (time, height // 14, width // 14)
        assert rows[place] == time * (height // 28) * (width // 28)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 400_000)), min_size=1, max_size=20))
def test_audio_grids_are_those_of_the_plain_rule(recordings: list[tuple[int, int]]) -> None:
    sizes = ModelSizes(audio=AudioSizes(max_duration_s=1e6))
    arrays = {
        "num_samples": np.array([count for count, _ in recordings]),
        "sample_rate": np.array([rate for _, rate in recordings], dtype=np.int32),
    }
    grids, problems = media_grids(Modality.AUDIO, arrays, sizes)
    for place, (count, rate) in enumerate(recordings):
        if count < 1 or rate < 1:
            assert problems[place].what == "recording has no samples"
        elif count / rate > 1e6:
            assert problems[place].what == f"recording lasts {count / rate:.1f} s, limit 1000000.0 s"
        else:
            at_16_khz = math.ceil(Fraction(count * 16_000, rate))
            assert grids[place].tolist() == [max(3, math.ceil(Fraction(at_16_khz, 160))), 1, 1]
            assert place not in problems


@given(st.lists(st.integers(3, 40_000), max_size=20))
def test_rows_of_many_are_the_rows_of_each(frames: list[int]) -> None:
    grids = np.array([[count, 1, 1] for count in frames], dtype=np.int64).reshape(-1, 3)
    each = [media_rows(Modality.AUDIO, (count, 1, 1), ModelSizes()) for count in frames]
    assert grid_rows(Modality.AUDIO, grids, ModelSizes()).tolist() == each == [audio_rows(n) for n in frames]


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
    sizes = ModelSizes(vision=VisionSizes(video_max_frames=64))
    raw = RawSize(height=height, width=width, num_frames=frames, duration_s=seconds)
    time, rows, columns = media_grid(Modality.VIDEO, raw, sizes)
    assert 1 <= time <= 32
    assert rows % 2 == columns % 2 == 0


def test_sizes_of_known_pictures_and_recordings() -> None:
    sizes = ModelSizes()
    assert media_grid(Modality.IMAGE, RawSize(height=427, width=640), sizes) == (1, 30, 46)
    assert media_rows(Modality.IMAGE, (1, 30, 46), sizes) == 345
    ten_seconds = RawSize(sample_rate=44_100, num_samples=441_000)
    assert media_grid(Modality.AUDIO, ten_seconds, sizes) == (1000, 1, 1)
    assert audio_rows(1000) == 250
    assert resampled_length(44_101, 44_100) == 16_001


def test_recordings_without_samples_or_too_long_are_refused() -> None:
    with pytest.raises(SampleError, match="no samples"):
        media_grid(Modality.AUDIO, RawSize(sample_rate=16_000), ModelSizes())
    with pytest.raises(SampleError, match=r"lasts 301\.0 s, limit 300\.0 s"):
        media_grid(Modality.AUDIO, RawSize(sample_rate=16_000, num_samples=301 * 16_000), ModelSizes())


def test_a_long_clip_has_smaller_frames_where_its_area_is_bounded() -> None:
    raw = RawSize(height=1080, width=1920, num_frames=18_000, duration_s=600.0)
    free = media_grid(Modality.VIDEO, raw, ModelSizes())
    # What the family's own loader allows: 90 % of 128000 rows.
    bounded = ModelSizes(vision=VisionSizes(video_total_pixels=128_000 * 28 * 28 * 9 // 10))
    assert free == (384, 40, 72)
    assert media_grid(Modality.VIDEO, raw, bounded) == (384, 24, 46)
