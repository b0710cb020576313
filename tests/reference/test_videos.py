"""Clips against the published processor: the same frames, grids and (but for the filter) pixel patches.

The processor picks frames by number, the decoder here by their times. Its resize is torchvision's bicubic on
uint8, here it is Pillow's: the two clip overshoots at different moments.
"""

from __future__ import annotations

import functools
import io
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from loaders.decode.patches import unpatchify
from loaders.decode.video import asked_times, decode_video, video_size
from omni_pipeline.core.sample import Modality, RawSize
from omni_pipeline.core.sizes import ModelSizes, VisionSizes, media_grid, num_sampled_frames
from tests.support.clips import clip_of
from tests.support.reference_library import transformers
from trainer.model.vision import PIXEL_STD, normalise_patches

PUBLISHED = VisionSizes()
RATES = [Fraction(rate) for rate in (1, 8, 10, 24, 25, 30, 60)]
RATES += [Fraction(24_000, 1001), Fraction(30_000, 1001), Fraction(60_000, 1001)]
NUM_BITS, BIT_PIXELS = 8, 21

Frames = npt.NDArray[np.uint8]


@functools.cache
def processor() -> Any:
    return transformers.Qwen2VLVideoProcessor(cap_pixels_per_frame=False)


def reference_numbers(num_frames: int, rate: Fraction, fps: float) -> list[int]:
    """Return which frames the processor takes of a clip.

    Where its step between them rounds down, its range ends with one more than the number that it worked out
    (15 where that is 14, of 150 frames at 30 a second, 3 asked for); that one is left out.
    """
    known = transformers.video_utils.VideoMetadata(total_num_frames=num_frames, fps=float(rate))
    taken = processor().sample_frames(known, fps=fps).tolist()
    return taken[: len(taken) // PUBLISHED.temporal_patch * PUBLISHED.temporal_patch]


def numbered(number: int) -> Frames:
    """Return a frame that shows its number: one white or black block for each bit."""
    bits = (number >> np.arange(NUM_BITS) & 1).astype(np.uint8)
    row = np.repeat(bits * 220 + 16, BIT_PIXELS)
    return np.broadcast_to(row[None, :, None], (28, len(row), 3)).copy()


def numbers_of(frames: Frames) -> list[int]:
    """Return the numbers that decoded frames show."""
    blocks = frames.mean(axis=(1, 3)).reshape(len(frames), NUM_BITS, -1)
    return ((blocks.mean(axis=2) > 127) << np.arange(NUM_BITS)).sum(axis=1).tolist()


def test_the_settings_are_those_of_the_processor() -> None:
    found = processor()
    low, high = PUBLISHED.video_min_pixels, PUBLISHED.video_max_pixels
    assert found.size == {"shortest_edge": low, "longest_edge": high}
    assert transformers.Qwen2_5OmniProcessor.videos_kwargs["size"] == found.size
    assert (found.min_frames, found.max_frames) == (PUBLISHED.video_min_frames, PUBLISHED.video_max_frames)
    assert (found.patch_size, found.merge_size) == (PUBLISHED.patch, PUBLISHED.merge)
    assert found.temporal_patch_size == PUBLISHED.temporal_patch


@given(
    st.one_of(st.integers(2, 30), st.integers(2, 20_000)),
    st.sampled_from(RATES),
    st.sampled_from([0.5, 1.0, 2.0, 3.0, 4.0, 7.5, 24.0, 60.0]),
)
def test_frames_on_screen_at_the_asked_times_are_those_that_the_processor_counts(
    num_frames: int, rate: Fraction, fps: float
) -> None:
    expected = reference_numbers(num_frames, rate, fps)
    sizes = PUBLISHED.model_copy(update={"video_fps": fps})
    duration_s = float(num_frames / rate)
    taken = int(num_sampled_frames(np.array([num_frames]), np.array([duration_s]), sizes)[0])
    assert taken == len(expected)
    starts = np.array([float(number / rate) for number in range(num_frames)])
    shown = np.searchsorted(starts - 1e-6, asked_times(taken, duration_s), side="right") - 1
    assert shown.tolist() == expected


@pytest.mark.parametrize("kind", ["mp4", "mkv"])
@pytest.mark.parametrize(("num_frames", "rate"), [(71, RATES[3]), (145, RATES[5]), (173, RATES[8])])
def test_frames_of_steady_clips_are_those_of_the_processor(
    num_frames: int, rate: Fraction, kind: str
) -> None:
    data = clip_of([numbered(number) for number in range(num_frames)], rate, kind=kind)
    raw = video_size(io.BytesIO(data))
    assert (raw.num_frames, raw.duration_s) == (num_frames, pytest.approx(float(num_frames / rate), abs=1e-9))
    for fps in (1.0, 2.0, 7.5, 24.0):
        sizes = VisionSizes(video_fps=fps, video_min_pixels=28 * 28, video_max_pixels=28 * 168)
        grid = media_grid(Modality.VIDEO, raw, ModelSizes(vision=sizes))
        frames = unpatchify(decode_video(data, grid, sizes, max_pixels=10**6), grid, sizes)
        assert numbers_of(frames) == reference_numbers(num_frames, rate, fps)


@pytest.mark.parametrize("num_frames", range(1, 10))
def test_short_clips_have_the_grids_of_the_processor(num_frames: int) -> None:
    raw = RawSize(height=60, width=100, num_frames=num_frames, duration_s=num_frames / 24)
    grid = media_grid(Modality.VIDEO, raw, ModelSizes())
    if num_frames < PUBLISHED.temporal_patch:
        # The processor divides by zero there; a clip of one frame repeats it.
        assert grid[0] == 1
        return
    expected = reference(np.zeros((num_frames, 60, 100, 3), dtype=np.uint8), 24, fps=2.0)
    assert expected["video_grid_thw"].tolist() == [list(grid)]
    assert grid[0] == min(num_frames, 4) // 2


def reference(frames: Frames, rate: float, *, fps: float, **more: Any) -> Any:
    """Return what the processor makes of the frames uint8 [T, H, W, 3] of a clip."""
    known = transformers.video_utils.VideoMetadata(total_num_frames=len(frames), fps=rate)
    clip = torch.from_numpy(frames).permute(0, 3, 1, 2)
    return processor()(
        videos=[clip], video_metadata=[known], fps=fps, do_sample_frames=True, return_tensors="pt", **more
    )


@pytest.mark.parametrize(
    ("height", "width", "num_frames"), [(62, 46, 11), (140, 250, 8), (288, 352, 5)], ids=str
)
def test_patches_are_those_of_the_processor_but_for_the_filter(
    height: int, width: int, num_frames: int
) -> None:
    rng = np.random.default_rng(num_frames)
    blocks = rng.integers(0, 256, (num_frames, height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    frames = blocks.repeat(4, axis=1).repeat(4, axis=2)[:, :height, :width]
    data = clip_of(frames, Fraction(4), kind="mkv", exact=True)
    grid = media_grid(Modality.VIDEO, video_size(io.BytesIO(data)), ModelSizes())
    patches = decode_video(data, grid, PUBLISHED, max_pixels=10**6)
    expected = reference(frames, 4.0, fps=PUBLISHED.video_fps)
    assert expected["video_grid_thw"].tolist() == [list(grid)]
    difference = normalise_patches(torch.from_numpy(patches), dtype=torch.float32)
    difference -= expected["pixel_values_videos"]
    levels = difference.abs() * 255 * max(PIXEL_STD)
    # Every edge here is as hard as can be: pixels differ by up to 16 levels of 255, most by none.
    assert float(levels.mean()) < 0.2
    assert float(levels.max()) < 20
    assert float((levels > 2.5).float().mean()) < 0.02


@example(num_frames=800, height=100, width=914, thousand_rows=10, is_bounded=True)
@given(
    st.integers(2, 1000), st.integers(60, 2000), st.integers(60, 2000), st.integers(10, 200), st.booleans()
)
def test_frames_of_long_clips_are_as_small_as_those_of_the_bounded_processor(
    num_frames: int, height: int, width: int, thousand_rows: int, is_bounded: bool
) -> None:
    total = int(1000 * thousand_rows * 28 * 28 * 0.9)
    sizes = VisionSizes(video_total_pixels=total if is_bounded else None)
    raw = RawSize(height=height, width=width, num_frames=num_frames, duration_s=num_frames / 2)
    time, rows, columns = media_grid(Modality.VIDEO, raw, ModelSizes(vision=sizes))
    bounded = transformers.Qwen2VLVideoProcessor(max_video_tokens=1000 * thousand_rows)
    asked: list[Any] = []
    # Only the sides are of interest: the resize itself is put aside.
    clip = torch.zeros(1, 1, 1, 1, 1, dtype=torch.uint8).expand(1, 2 * time, 3, height, width)
    with pytest.MonkeyPatch.context() as patch:
        parent = type(bounded).__mro__[1]
        patch.setattr(parent, "resize", lambda _, image, size, resample: asked.append(size))
        bounded.resize(
            clip, bounded_size(), None, factor=28, temporal_factor=2, cap_pixels_per_frame=is_bounded
        )
    assert (asked[0].height, asked[0].width) == (14 * rows, 14 * columns)


def bounded_size() -> Any:
    return transformers.image_utils.SizeDict(
        shortest_edge=PUBLISHED.video_min_pixels, longest_edge=PUBLISHED.video_max_pixels
    )
