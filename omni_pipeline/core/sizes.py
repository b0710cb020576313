"""Raw sizes to patches, frames and tokens: pure functions, one per modality.

The numbers follow the Qwen2.5-Omni family: sides rounded to a multiple of patch x merge within a pixel
budget, two frames per temporal patch, one embedding row per merge x merge patches; audio at 16 kHz in
10 ms log-mel frames, two convolution strides and a pooling of two, so 25 rows per second. The decoders
produce exactly what these functions promise, so plans can be made from headers alone.
"""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field

from omni_pipeline.core.errors import SampleError
from omni_pipeline.core.sample import Modality, RawSize

MAX_ASPECT_RATIO = 200
SAMPLE_RATE = 16_000
HOP_SAMPLES = 160


class VisionSizes(BaseModel):
    """How images and video frames become patches."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    patch: int = Field(14, ge=1, description="Side of a square patch, pixels.")
    merge: int = Field(2, ge=1, description="Patches per side merged into one embedding row.")
    temporal_patch: int = Field(2, ge=1, description="Frames per temporal patch.")
    min_pixels: int = Field(56 * 56, ge=1, description="Smallest image area after resizing, pixels.")
    max_pixels: int = Field(1280 * 28 * 28, ge=1, description="Largest image area after resizing, pixels.")
    video_fps: float = Field(2.0, gt=0, description="Frames sampled per second of video.")
    video_max_frames: int = Field(768, ge=1, description="Most frames sampled from one video.")
    video_max_pixels: int = Field(
        768 * 28 * 28, ge=1, description="Largest area of one video frame after resizing, pixels."
    )

    @property
    def factor(self) -> int:
        """Sides are multiples of this, pixels."""
        return self.patch * self.merge


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


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return (height, width) in pixels, multiples of ``factor``, area within the budget, aspect kept.

    The rule is that of the Qwen2-VL processor: round both sides; if the area is out of bounds, scale by
    the square root of the ratio and round down (too large) or up (too small).

    Raises:
        SampleError: A side is not positive, or the aspect ratio is beyond 200.
    """
    if height < 1 or width < 1:
        raise SampleError(
            f"picture of {width} x {height} pixels has no area",
            fix="remove the file, or let the quarantine take it",
        )
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise SampleError(
            f"aspect ratio of {width} x {height} pixels is above {MAX_ASPECT_RATIO}",
            fix="crop the picture, or let the quarantine take it",
        )
    new_height = max(factor, round(height / factor) * factor)
    new_width = max(factor, round(width / factor) * factor)
    if new_height * new_width > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
    elif new_height * new_width < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return new_height, new_width


def num_sampled_frames(num_frames: int, duration_s: float, sizes: VisionSizes) -> int:
    """Return how many frames are taken of a video: a multiple of ``temporal_patch``, at least one patch.

    A clip shorter than that repeats its last frame, so the number never depends on the decode.
    """
    wanted = math.floor(duration_s * sizes.video_fps)
    wanted = min(wanted, num_frames, sizes.video_max_frames)
    return max(sizes.temporal_patch, wanted - wanted % sizes.temporal_patch)


def image_grid(raw: RawSize, sizes: VisionSizes) -> tuple[int, int, int]:
    """Return the patch grid (1, rows, columns) of a still image."""
    height, width = smart_resize(
        raw.height, raw.width, factor=sizes.factor, min_pixels=sizes.min_pixels, max_pixels=sizes.max_pixels
    )
    return 1, height // sizes.patch, width // sizes.patch


def video_grid(raw: RawSize, sizes: VisionSizes) -> tuple[int, int, int]:
    """Return the patch grid (temporal patches, rows, columns) of a video."""
    height, width = smart_resize(
        raw.height,
        raw.width,
        factor=sizes.factor,
        min_pixels=sizes.min_pixels,
        max_pixels=sizes.video_max_pixels,
    )
    frames = num_sampled_frames(raw.num_frames, raw.duration_s, sizes)
    return frames // sizes.temporal_patch, height // sizes.patch, width // sizes.patch


def resampled_length(num_samples: int, sample_rate: int) -> int:
    """Return the audio samples at 16 kHz of ``num_samples`` at ``sample_rate`` Hz (rounded up)."""
    return -(-num_samples * SAMPLE_RATE // sample_rate)


def audio_grid(raw: RawSize, sizes: AudioSizes) -> tuple[int, int, int]:
    """Return (mel frames, 1, 1) of a recording.

    Raises:
        SampleError: No samples, or longer than ``max_duration_s``.
    """
    if raw.num_samples < 1 or raw.sample_rate < 1:
        raise SampleError("recording has no samples", fix="remove the file, or let the quarantine take it")
    duration_s = raw.num_samples / raw.sample_rate
    if duration_s > sizes.max_duration_s:
        raise SampleError(
            f"recording lasts {duration_s:.1f} s, limit {sizes.max_duration_s:.1f} s",
            fix="raise model.sizes.audio.max_duration_s, or cut the recording",
        )
    frames = -(-resampled_length(raw.num_samples, raw.sample_rate) // HOP_SAMPLES)
    return max(frames, 4), 1, 1


def audio_rows(mel_frames: int) -> int:
    """Return the embedding rows of ``mel_frames``: a stride-2 convolution, then pooling by two."""
    after_conv = (mel_frames - 1) // 2 + 1
    return (after_conv - 2) // 2 + 1


def media_grid(modality: Modality, raw: RawSize, sizes: ModelSizes) -> tuple[int, int, int]:
    """Return the encoder grid of a media segment; see the function of each modality."""
    if modality is Modality.IMAGE:
        return image_grid(raw, sizes.vision)
    if modality is Modality.VIDEO:
        return video_grid(raw, sizes.vision)
    if modality is Modality.AUDIO:
        return audio_grid(raw, sizes.audio)
    raise ValueError(f"{modality} has no encoder grid")


def media_rows(modality: Modality, grid: tuple[int, int, int], sizes: ModelSizes) -> int:
    """Return the embedding rows that the encoder makes of a media segment with this grid."""
    if modality is Modality.AUDIO:
        return audio_rows(grid[0])
    return grid[0] * (grid[1] // sizes.vision.merge) * (grid[2] // sizes.vision.merge)
