"""Clips to patches: the frames shown at evenly spread times, by their real timestamps.

The plan fixes how many frames are taken; times are spread evenly over the duration, and for each the frame on
screen at that moment (the latest that starts at or before it) is taken. Counting frames instead of reading
timestamps is wrong for variable frame rates. Containers round times (Matroska to 1 ms), so a time within half
a millisecond of the beat of the clip's rate counts as on it: of a steady clip that gives the very frames that
counting does, those of the Qwen2-VL processor. decord can be chosen as back end; it is known to return wrong
frames for some files (stream-copied cuts, open GOPs, MPEG-TS), so it is never chosen by itself.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from loaders.decode.image import check_pixels
from loaders.decode.patches import grid_pixels, patchify
from omni_pipeline.core.errors import SampleError
from omni_pipeline.core.sample import RawSize
from omni_pipeline.core.sizes import VisionSizes

UInt8Array = npt.NDArray[np.uint8]

DAMAGED_FIX = "replace the file, or let the quarantine take it"
# A clip may end before its header says; beyond both of these it counts as damaged, not as short.
TOLERATED_SHORT_SHARE = 0.1
TOLERATED_SHORT_S = 1.0
ROUNDING_S = 5e-4
# Of sums and products of floats; times that differ are further apart.
FLOAT_ERROR_S = 1e-6


@dataclass(frozen=True, slots=True)
class _Header:
    raw: RawSize
    rotation: int
    rate: float


def video_size(file: IO[bytes]) -> RawSize:
    """Return upright size, frame count and duration of ``file`` (seekable).

    Reads the container's header and the first frame (its rotation is told only there). Where the header does
    not tell count or duration, all packets are read and counted, without decoding.

    Raises:
        SampleError: No video that this build can decode.
    """
    return _header(file).raw


def decode_video(
    data: bytes,
    grid: tuple[int, int, int],
    sizes: VisionSizes,
    *,
    max_pixels: int,
    backend: Literal["pyav", "decord"] = "pyav",
) -> UInt8Array:
    """Return uint8 [patches, values] of a clip; its last frame is repeated where it is short.

    Raises:
        SampleError: Damaged, much shorter than its header says, or larger than ``max_pixels`` per frame.
    """
    header = _header(io.BytesIO(data))
    check_pixels(header.raw.width, header.raw.height, max_pixels)
    num_frames, height, width = grid_pixels(grid, sizes)
    times = asked_times(num_frames, header.raw.duration_s)
    # decord turns its frames itself; PyAV only tells by how much.
    rotation = header.rotation if backend == "pyav" else 0
    target = (height, width) if rotation % 180 else (width, height)
    shown = _shown_pyav if backend == "pyav" else _shown_decord
    frames = np.empty((num_frames, height, width, 3), dtype=np.uint8)
    last: UInt8Array | None = None
    filled = 0
    for count, picture in shown(data, times, header):
        if picture is not None:
            small = Image.fromarray(picture).resize(target, Image.Resampling.BICUBIC)
            last = np.rot90(np.asarray(small), rotation // 90)
        if last is None:
            break
        frames[filled : filled + count] = last
        filled += count
    if last is None:
        raise SampleError("clip has no frame that can be decoded", fix=DAMAGED_FIX)
    frames[filled:] = last
    return patchify(frames, sizes)


def asked_times(num_frames: int, duration_s: float) -> npt.NDArray[np.float64]:
    """Return float64 [num_frames]: seconds from the first frame, evenly spread, starting at 0."""
    return np.arange(num_frames, dtype=np.float64) * np.float64(duration_s / num_frames)


def _header(file: IO[bytes]) -> _Header:
    import av  # only workers that meet video need it

    try:
        with av.open(file, mode="r") as container:
            stream = _video_stream(container)
            rate = _rate(stream)
            first = next(iter(container.decode(stream)), None)
            if first is None:
                raise SampleError("clip has no frame that can be decoded", fix=DAMAGED_FIX)
            num_frames = int(stream.frames)
            duration_s = _header_duration(container, stream)
            if num_frames < 1 or duration_s <= 0:
                container.seek(0)
                num_frames, measured_s = _count_packets(container, stream)
                duration_s = duration_s if duration_s > 0 else measured_s
            height, width, rotation = first.height, first.width, round(first.rotation / 90) * 90 % 360
    except (av.FFmpegError, ValueError, OSError) as error:
        raise _damaged(error) from error
    if rotation % 180:
        height, width = width, height
    # A rounded start of the last frame and its rounded length.
    duration_s = _on_beat(duration_s, rate, within_s=2 * ROUNDING_S) or duration_s
    raw = RawSize(height=height, width=width, num_frames=max(1, num_frames), duration_s=duration_s)
    return _Header(raw, rotation, rate)


def _video_stream(container: Any) -> Any:
    if not container.streams.video:
        raise SampleError("file has no video", fix="name a video member in the layout")
    stream = container.streams.video[0]
    # Frame threads keep frames back and have deadlocked on early stops; workers are the parallelism here.
    stream.thread_type = "SLICE"
    stream.codec_context.thread_count = 1
    return stream


def _rate(stream: Any) -> float:
    return float(stream.average_rate or stream.guessed_rate or 25)


def _header_duration(container: Any, stream: Any) -> float:
    if stream.duration:
        return float(stream.duration * stream.time_base)
    return container.duration / 1_000_000 if container.duration else 0.0


def _count_packets(container: Any, stream: Any) -> tuple[int, float]:
    """Return (frames, seconds) by demuxing; packets outside an edit list are not shown and not counted."""
    count, first, last = 0, None, 0.0
    for packet in container.demux(stream):
        if packet.size == 0 or packet.is_discard:
            continue
        count += 1
        if packet.pts is not None:
            start = float(packet.pts * packet.time_base)
            end = start + float((packet.duration or 0) * packet.time_base)
            first = start if first is None else min(first, start)
            last = max(last, end)
    return count, last - first if first is not None and last > first else count / _rate(stream)


def _shown_pyav(
    data: bytes, times: npt.NDArray[np.float64], header: _Header
) -> Iterator[tuple[int, UInt8Array | None]]:
    """Yield (number of asked times, picture on screen at them), in order."""
    import av  # only workers that meet video need it

    asked, previous, origin, now = 0, None, 0.0, 0.0
    try:
        with av.open(io.BytesIO(data), mode="r") as container:
            stream = _video_stream(container)
            for number, frame in enumerate(container.decode(stream)):
                start = number / header.rate if frame.pts is None else float(frame.pts * frame.time_base)
                origin = start if previous is None else origin
                now = start - origin
                if previous is not None:
                    until = int(np.searchsorted(times, _first_asked(now, header.rate), side="left"))
                    if until > asked:
                        yield until - asked, previous.to_ndarray(format="rgb24")
                        asked = until
                previous = frame
                if asked == len(times):
                    return
    except (av.FFmpegError, ValueError) as error:
        if previous is None:
            raise _damaged(error) from error
    if previous is None:
        return
    _check_end(now, header)
    yield len(times) - asked, previous.to_ndarray(format="rgb24")


def _first_asked(start_s: float, rate: float) -> float:
    """Return from when on a frame that starts at ``start_s`` counts as shown, seconds."""
    beat = _on_beat(start_s, rate)
    return (start_s - ROUNDING_S if beat is None else beat) - FLOAT_ERROR_S


def _on_beat(seconds: float, rate: float, *, within_s: float = ROUNDING_S) -> float | None:
    """Return the multiple of 1 / ``rate`` within ``within_s`` of ``seconds``, if there is one."""
    beat = round(seconds * rate) / rate
    return beat if abs(beat - seconds) <= within_s else None


def _check_end(last_s: float, header: _Header) -> None:
    duration_s = header.raw.duration_s
    mean_s = duration_s / header.raw.num_frames
    missing_s = duration_s - last_s - mean_s
    if missing_s > max(TOLERATED_SHORT_S, TOLERATED_SHORT_SHARE * duration_s):
        raise SampleError(
            f"clip ends after {last_s:.2f} s, its header says {duration_s:.2f} s", fix=DAMAGED_FIX
        )


def _shown_decord(
    data: bytes, times: npt.NDArray[np.float64], header: _Header
) -> Iterator[tuple[int, UInt8Array | None]]:
    """As ``_shown_pyav``, by decord's timestamps and frames."""
    import decord  # an optional back end

    try:
        reader = decord.VideoReader(io.BytesIO(data), num_threads=1)
        starts = np.asarray(reader.get_frame_timestamp(np.arange(len(reader))), dtype=np.float64)[:, 0]
        starts -= starts[0]
        _check_end(float(starts[-1]), header)
        firsts = [_first_asked(start, header.rate) for start in starts.tolist()]
        chosen = np.maximum(np.searchsorted(firsts, times, side="right") - 1, 0)
        pictures = reader.get_batch(chosen).asnumpy()
    except (decord.DECORDError, IndexError) as error:
        raise _damaged(error) from error
    for picture in pictures:
        yield 1, picture


def _damaged(error: BaseException) -> SampleError:
    return SampleError(f"clip cannot be decoded: {error or type(error).__name__}", fix=DAMAGED_FIX)
