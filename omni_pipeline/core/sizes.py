"""Raw sizes to patches, frames and tokens: pure functions over arrays, one per modality.

The numbers follow the Qwen2.5-Omni family: sides rounded to a multiple of patch x merge within a pixel
budget, two frames per temporal patch, one embedding row per merge x merge patches; audio at 16 kHz in
10 ms log-mel frames, two convolution strides and a pooling of two, so 25 rows per second. The decoders
produce exactly what these functions promise, so plans can be made from headers alone.

There is one formula for each size, over many at once; the functions of a single picture or recording are its
case of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from omni_pipeline.core.errors import SampleError
from omni_pipeline.core.media import KINDS
from omni_pipeline.core.sample import Modality, RawSize

MAX_ASPECT_RATIO = 200
SAMPLE_RATE = 16_000
HOP_SAMPLES = 160
# One row: a convolution of stride 2, then the mean of a pair.
MEL_FRAMES_PER_ROW = 4
# The fewest that make a row; a shorter recording is followed by silence.
MIN_MEL_FRAMES = 3

IntArray = npt.NDArray[np.int64]
IntT = TypeVar("IntT", int, IntArray)
RawArrays = Mapping[str, npt.NDArray[Any]]
"""Raw sizes of many members: arrays of equal length by field name of ``RawSize``."""
_BOUNDS = (
    ("min_pixels", "max_pixels"),
    ("video_min_pixels", "video_max_pixels"),
    ("video_min_frames", "video_max_frames"),
)
Problems = dict[int, SampleError]
"""By place: why this one has no size."""


class VisionSizes(BaseModel):
    """How images and video frames become patches."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    patch: int = Field(14, ge=1, description="Side of a square patch, pixels.")
    merge: int = Field(2, ge=1, description="Patches per side merged into one embedding row.")
    temporal_patch: int = Field(2, ge=1, description="Frames per temporal patch.")
    min_pixels: int = Field(56 * 56, ge=1, description="Smallest image area after resizing, pixels.")
    max_pixels: int = Field(1280 * 28 * 28, ge=1, description="Largest image area after resizing, pixels.")
    video_fps: float = Field(2.0, gt=0, description="Frames sampled per second of video.")
    video_min_frames: int = Field(
        4, ge=1, description="Fewest frames sampled from one video, as far as it has them."
    )
    video_max_frames: int = Field(768, ge=1, description="Most frames sampled from one video.")
    video_min_pixels: int = Field(
        128 * 28 * 28, ge=1, description="Smallest area of one video frame after resizing, pixels."
    )
    video_max_pixels: int = Field(
        768 * 28 * 28, ge=1, description="Largest area of one video frame after resizing, pixels."
    )
    video_total_pixels: int | None = Field(
        None,
        ge=1,
        description="Largest area of all temporal patches of one video together after resizing, pixels; "
        "frames are not made smaller than 1.05 x video_min_pixels for it. Default: no bound.",
    )

    @property
    def factor(self) -> int:
        """Sides are multiples of this, pixels."""
        return self.patch * self.merge

    @property
    def patch_s(self) -> float:
        """Time that one temporal patch of a video stands for, seconds."""
        return self.temporal_patch / self.video_fps

    @property
    def bounds_problem(self) -> str | None:
        """Which lower bound is above its upper one. A preset may still fill them, so whole models check."""
        for low, high in _BOUNDS:
            least, most = getattr(self, low), getattr(self, high)
            if least > most:
                return f"{low} {least} is above {high} {most}; set both"
        return None


class AudioSizes(BaseModel):
    """How a recording becomes mel frames."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_mels: int = Field(128, ge=1, description="Mel bands.")
    max_duration_s: float = Field(300.0, gt=0, description="Longest recording accepted, seconds.")


class ModelSizes(BaseModel):
    """All that turns raw sizes into model sizes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vision: VisionSizes = VisionSizes()
    audio: AudioSizes = AudioSizes()


def resized_sides(
    height: IntArray, width: IntArray, *, factor: int, min_pixels: int, max_pixels: int | IntArray
) -> tuple[IntArray, IntArray, Problems]:
    """Return (heights, widths) in pixels, multiples of ``factor``, areas within the budget, aspects kept.

    The rule is that of the Qwen2-VL processor: round both sides; if the area is out of bounds, scale by
    the square root of the ratio and round down (too large) or up (too small). A side that rounds to nothing
    makes the area too small, however long the other. Pictures without area or with an aspect ratio beyond
    200 have a problem instead; their sides are zero. ``max_pixels`` may be one number for each picture.
    """
    height, width = np.asarray(height, dtype=np.int64), np.asarray(width, dtype=np.int64)
    low, high = np.minimum(height, width), np.maximum(height, width)
    is_bad = (low < 1) | (high > MAX_ASPECT_RATIO * low)
    bad = np.flatnonzero(is_bad)
    problems = {
        place: (_no_area if low[place] < 1 else _too_thin)(int(height[place]), int(width[place]))
        for place in bad.tolist()
    }
    if problems:
        height, width = np.where(is_bad, factor, height), np.where(is_bad, factor, width)
    sides = [height.astype(np.float64), width.astype(np.float64)]
    fitted = [np.rint(side / factor) * factor for side in sides]
    area = fitted[0] * fitted[1]
    most = np.broadcast_to(max_pixels, area.shape)
    large = np.flatnonzero(area > most)
    small = np.flatnonzero((area < min_pixels) & (area <= most))
    if len(large):
        shrink = np.sqrt(sides[0][large] * sides[1][large] / most[large])
        for side, out in zip(sides, fitted, strict=True):
            out[large] = np.maximum(factor, np.floor(side[large] / shrink / factor) * factor)
    if len(small):
        grow = np.sqrt(min_pixels / (sides[0][small] * sides[1][small]))
        for side, out in zip(sides, fitted, strict=True):
            out[small] = np.ceil(side[small] * grow / factor) * factor
    for out in fitted:
        out[bad] = 0
    return fitted[0].astype(np.int64), fitted[1].astype(np.int64), problems


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return (height, width) of one picture; see ``resized_sides``.

    Raises:
        SampleError: A side is not positive, or the aspect ratio is beyond 200.
    """
    heights, widths, problems = resized_sides(
        np.array([height]), np.array([width]), factor=factor, min_pixels=min_pixels, max_pixels=max_pixels
    )
    for problem in problems.values():
        raise problem
    return int(heights[0]), int(widths[0])


def num_sampled_frames(
    num_frames: IntArray, duration_s: npt.NDArray[np.float64], sizes: VisionSizes
) -> IntArray:
    """Return how many frames are taken of each video: a multiple of ``temporal_patch``, at least one patch.

    As the Qwen2-VL processor: those of ``video_fps``, at least ``video_min_frames``, then at most
    ``video_max_frames`` and what the clip has, rounded down. A clip shorter than one patch repeats its last
    frame, so the number never depends on the decode.
    """
    most = np.minimum(num_frames, sizes.video_max_frames).astype(np.float64)
    # A header may say any duration: fmin passes by one that is no number.
    with np.errstate(over="ignore"):
        asked = np.floor(np.asarray(duration_s) * sizes.video_fps)
    wanted = np.minimum(np.maximum(np.fmin(asked, most), sizes.video_min_frames), most).astype(np.int64)
    whole: IntArray = np.maximum(sizes.temporal_patch, wanted - wanted % sizes.temporal_patch)
    return whole


def image_grids(raw: RawArrays, sizes: VisionSizes) -> tuple[IntArray, Problems]:
    """Return the patch grids int64 [n, 3], (1, rows, columns) each, of still images."""
    rows, columns, problems = _sides_in_patches(
        raw, sizes, min_pixels=sizes.min_pixels, max_pixels=sizes.max_pixels
    )
    return _grids(np.ones_like(rows), rows, columns), problems


def video_grids(raw: RawArrays, sizes: VisionSizes) -> tuple[IntArray, Problems]:
    """Return the patch grids int64 [n, 3], (temporal patches, rows, columns) each, of videos."""
    frames = num_sampled_frames(raw["num_frames"], raw["duration_s"], sizes)
    rows, columns, problems = _sides_in_patches(
        raw, sizes, min_pixels=sizes.video_min_pixels, max_pixels=_frame_pixels(frames, sizes)
    )
    return _grids(frames // sizes.temporal_patch, rows, columns), problems


def resampled_length(num_samples: IntT, sample_rate: IntT) -> IntT:
    """Return the audio samples at 16 kHz of ``num_samples`` at ``sample_rate`` Hz (rounded up)."""
    return -(-num_samples * SAMPLE_RATE // sample_rate)


def num_mel_frames(num_samples: IntArray) -> IntArray:
    """Return the mel frames of recordings of ``num_samples`` at 16 kHz: every 10 ms begun, at least 3."""
    return np.maximum(-(-num_samples // HOP_SAMPLES), MIN_MEL_FRAMES)


def audio_grids(raw: RawArrays, sizes: AudioSizes) -> tuple[IntArray, Problems]:
    """Return the grids int64 [n, 3], (mel frames, 1, 1) each, of recordings.

    Those without samples, or longer than ``max_duration_s``, have a problem instead.
    """
    num_samples = np.asarray(raw["num_samples"], dtype=np.int64)
    sample_rate = np.asarray(raw["sample_rate"], dtype=np.int64)
    is_empty = (num_samples < 1) | (sample_rate < 1)
    duration_s = num_samples / np.maximum(sample_rate, 1)
    is_good = ~is_empty & (duration_s <= sizes.max_duration_s)
    length = resampled_length(np.where(is_good, num_samples, 1), np.maximum(sample_rate, 1))
    frames = num_mel_frames(length)
    problems = {
        place: _no_samples() if is_empty[place] else _too_long(float(duration_s[place]), sizes)
        for place in np.flatnonzero(~is_good).tolist()
    }
    ones = np.ones_like(frames)
    return _grids(frames, ones, ones), problems


def audio_rows(mel_frames: IntT) -> IntT:
    """Return the embedding rows of ``mel_frames``: a stride-2 convolution, then pooling by two."""
    after_conv = (mel_frames - 1) // 2 + 1
    return (after_conv - 2) // 2 + 1


def media_grids(modality: Modality, raw: RawArrays, sizes: ModelSizes) -> tuple[IntArray, Problems]:
    """Return the encoder grids int64 [n, 3] of media segments, zero or one where there is a problem.

    See the function of each modality.
    """
    if modality is Modality.IMAGE:
        return image_grids(raw, sizes.vision)
    if modality is Modality.VIDEO:
        return video_grids(raw, sizes.vision)
    if modality is Modality.AUDIO:
        return audio_grids(raw, sizes.audio)
    return KINDS[modality].checked_grids(raw)


def media_grid(modality: Modality, raw: RawSize, sizes: ModelSizes) -> tuple[int, int, int]:
    """Return the encoder grid of one media segment.

    Raises:
        SampleError: As ``media_grids`` says of each modality.
    """
    arrays = {name: np.array([value]) for name, value in asdict(raw).items()}
    grids, problems = media_grids(modality, arrays, sizes)
    for problem in problems.values():
        raise problem
    time, rows, columns = grids[0].tolist()
    return time, rows, columns


def grid_rows(modality: Modality, grids: IntArray, sizes: ModelSizes) -> IntArray:
    """Return the embedding rows int64 [n] that the encoder makes of media segments with these grids."""
    if modality is Modality.AUDIO:
        return audio_rows(grids[:, 0])
    return grids[:, 0] * grids[:, 1] * grids[:, 2] // units_per_row(modality, sizes)


def units_per_row(modality: Modality, sizes: ModelSizes) -> int:
    """Return the units that make one embedding row: patches, or mel frames of all rows but the last."""
    if modality is Modality.IMAGE or modality is Modality.VIDEO:
        return sizes.vision.merge**2
    return MEL_FRAMES_PER_ROW if modality is Modality.AUDIO else KINDS[modality].units_per_row


def media_rows(modality: Modality, grid: tuple[int, int, int], sizes: ModelSizes) -> int:
    """Return the embedding rows of one media segment."""
    return int(grid_rows(modality, np.array([grid], dtype=np.int64), sizes)[0])


def _frame_pixels(num_frames: IntArray, sizes: VisionSizes) -> int | IntArray:
    """Return the most pixels of a frame after resizing: its share of the bound for the whole video, too."""
    if sizes.video_total_pixels is None:
        return sizes.video_max_pixels
    share = sizes.video_total_pixels * sizes.temporal_patch // num_frames
    return np.maximum(np.minimum(share, sizes.video_max_pixels), int(sizes.video_min_pixels * 1.05))


def _sides_in_patches(
    raw: RawArrays, sizes: VisionSizes, *, min_pixels: int, max_pixels: int | IntArray
) -> tuple[IntArray, IntArray, Problems]:
    """Return rows and columns of patches after resizing, int64 [n] each."""
    height, width, problems = resized_sides(
        raw["height"],
        raw["width"],
        factor=sizes.factor,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
    )
    return height // sizes.patch, width // sizes.patch, problems


def _grids(time: IntArray, rows: IntArray, columns: IntArray) -> IntArray:
    """Return int64 [n, 3], each column in one piece: users take whole columns."""
    return np.stack([time, rows, columns]).T


def _no_area(height: int, width: int) -> SampleError:
    return SampleError(
        f"picture of {width} x {height} pixels has no area",
        fix="remove the file, or let the quarantine take it",
    )


def _too_thin(height: int, width: int) -> SampleError:
    return SampleError(
        f"aspect ratio of {width} x {height} pixels is above {MAX_ASPECT_RATIO}",
        fix="crop the picture, or let the quarantine take it",
    )


def _no_samples() -> SampleError:
    return SampleError("recording has no samples", fix="remove the file, or let the quarantine take it")


def _too_long(duration_s: float, sizes: AudioSizes) -> SampleError:
    return SampleError(
        f"recording lasts {duration_s:.1f} s, limit {sizes.max_duration_s:.1f} s",
        fix="raise model.sizes.audio.max_duration_s, or cut the recording",
    )
