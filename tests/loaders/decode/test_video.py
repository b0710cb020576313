"""loaders.decode.video: the frames on screen at the asked times, whatever the frame rate or container."""

from __future__ import annotations

import io
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from loaders.decode.patches import unpatchify
from loaders.decode.video import asked_times, decode_video, video_size
from omni_pipeline.core.errors import SampleError
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.sizes import ModelSizes, VisionSizes, media_grid
from tests.support.shards import grey_of, m4a_bytes, video_bytes

SIZES = VisionSizes(video_min_pixels=28 * 28)
LIMIT = 178_956_970
Backend = Literal["pyav", "decord"]


def frames_of(
    data: bytes, num_frames: int, *, sizes: VisionSizes = SIZES, backend: Backend = "pyav"
) -> npt.NDArray[np.uint8]:
    """Return the ``num_frames`` decoded frames, [T, H, W, 3]."""
    grid = media_grid(Modality.VIDEO, video_size(io.BytesIO(data)), ModelSizes(vision=sizes))
    grid = (num_frames // sizes.temporal_patch, *grid[1:])
    return unpatchify(decode_video(data, grid, sizes, max_pixels=LIMIT, backend=backend), grid, sizes)


def numbers_of(frames: npt.NDArray[Any]) -> list[int]:
    """Return which frame of ``video_bytes`` each one is, by its grey level on the right side."""
    greys = frames[:, :, -10:].reshape(len(frames), -1).mean(axis=1)
    return [round((grey - grey_of(0)) / 8) for grey in greys]


def shown_at(starts_s: list[float], times: npt.NDArray[np.float64]) -> list[int]:
    """Return the last frame that starts at or before each time."""
    return [max(n for n, start in enumerate(starts_s) if start <= time + 1e-6) for time in times]


@pytest.mark.parametrize("backend", ["pyav", "decord"])
@pytest.mark.parametrize("kind", ["mp4", "mov", "mkv", "webm"])
def test_frames_of_a_steady_clip_are_evenly_spread(kind: str, backend: Backend) -> None:
    data = video_bytes(24, fps=8, kind=kind)
    assert numbers_of(frames_of(data, 6, backend=backend)) == [0, 4, 8, 12, 16, 20]
    assert numbers_of(frames_of(data, 24, backend=backend)) == list(range(24))


@pytest.mark.parametrize("backend", ["pyav", "decord"])
@pytest.mark.parametrize("kind", ["mp4", "mkv", "webm"])
def test_frames_of_a_variable_rate_clip_are_chosen_by_their_times(kind: str, backend: Backend) -> None:
    starts_ms = [0, 40, 80, 120, 1000, 1030, 1060, 2500, 2600, 3000]
    data = video_bytes(10, kind=kind, starts_ms=starts_ms, fps=25)
    times = asked_times(8, video_size(io.BytesIO(data)).duration_s)
    expected = shown_at([start / 1000 for start in starts_ms], times)
    assert numbers_of(frames_of(data, 8, backend=backend)) == expected
    # Counting frames instead of reading their times would have given an even spread.
    assert expected != [0, 1, 2, 4, 5, 6, 8, 9]


def test_frames_out_of_decode_order_are_shown_in_order() -> None:
    data = video_bytes(20, fps=10, options={"preset": "medium", "bf": "3", "g": "20"})
    assert numbers_of(frames_of(data, 20)) == list(range(20))


@pytest.mark.parametrize("num_frames", [1, 2, 3])
def test_a_clip_shorter_than_asked_repeats_frames(num_frames: int) -> None:
    numbers = numbers_of(frames_of(video_bytes(num_frames, fps=8), 8))
    assert (numbers[0], numbers[-1]) == (0, num_frames - 1)
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("backend", ["pyav", "decord"])
@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_a_turned_clip_is_shown_upright(rotation: int, backend: Backend) -> None:
    data = video_bytes(4, width=112, height=56, rotation=rotation)
    raw = video_size(io.BytesIO(data))
    assert (raw.height, raw.width) == ((112, 56) if rotation % 180 else (56, 112))
    frame = frames_of(data, 2, backend=backend)[0].mean(axis=2)
    assert frame.shape == (raw.height, raw.width)
    # The dark third is on the left; a display rotation is counter-clockwise.
    sides = {0: frame[:, :15], 90: frame[-15:], 180: frame[:, -15:], 270: frame[:15]}
    assert sides[rotation].mean() < frame.mean() - 5
    darkest = min(sides, key=lambda side: float(sides[side].mean()))
    assert darkest == rotation


def test_counts_and_durations_missing_in_the_header_are_measured() -> None:
    raw = video_size(io.BytesIO(video_bytes(12, fps=6, kind="webm")))
    assert raw.num_frames == 12
    assert raw.duration_s == pytest.approx(2.0, abs=0.01)


def test_odd_sides_are_decoded() -> None:
    data = video_bytes(4, width=62, height=46)
    assert frames_of(data, 2).shape == (2, 56, 56, 3)


def test_the_planned_sides_are_met() -> None:
    small = VisionSizes(video_max_pixels=56 * 84, video_min_pixels=28 * 28)
    frames = frames_of(video_bytes(4, width=240, height=160), 4, sizes=small)
    assert frames.shape == (4, 56, 84, 3)
    assert numbers_of(frames) == [0, 1, 2, 3]


def test_a_clip_much_shorter_than_its_header_says_is_a_sample_error() -> None:
    noise = {"crf": "1"}
    data = video_bytes(24, fps=4, kind="mkv", options={**noise, "g": "1"})
    with pytest.raises(SampleError, match=r"clip ends after \d\.\d\d s, its header says 6\.00 s"):
        frames_of(data[: len(data) // 2], 12)


def test_what_is_no_clip_is_a_sample_error() -> None:
    for data in (b"", b"nothing" * 50, video_bytes()[:200]):
        with pytest.raises(SampleError, match="clip cannot be decoded"):
            video_size(io.BytesIO(data))
    with pytest.raises(SampleError, match="file has no video"):
        decode_video(m4a_bytes(), (1, 4, 4), SIZES, max_pixels=LIMIT)


def test_frames_above_the_limit_are_refused() -> None:
    with pytest.raises(SampleError, match="image header says 64 x 48 pixels, limit 3000"):
        decode_video(video_bytes(), (1, 2, 2), SIZES, max_pixels=3000)
