"""The sound of a clip: how long its header says it is, and its mel frames.

Of several tracks the first counts. A track is taken from its first sample on, as the reference does; what a
container says of its length is not exact (AAC has silence at both ends, Matroska rounds times), so a track is
cut, or filled with silence, to the planned frames.
"""

from __future__ import annotations

import io
from typing import IO, Any

from loaders.decode.audio import FloatArray, mel_of_waves, read_pyav
from omni_pipeline.core.sizes import HOP_SAMPLES, SAMPLE_RATE, AudioSizes

# As of a clip that ends before its header says: beyond both of these a track counts as damaged.
TOLERATED_SHARE = 0.1
TOLERATED_S = 1.0
MOST_SAMPLES = 2**62


def track_size(file: IO[bytes]) -> tuple[int, int]:
    """Return (sample rate, samples) of the sound of the clip in ``file`` (seekable), from its header.

    Zeros where there is no track, or none that this build can decode. Where the header does not tell the
    length of the track, all packets are read, without decoding.

    Raises:
        av.FFmpegError: The container cannot be read.
    """
    import av  # only indexing meets clips

    with av.open(file, mode="r") as container:
        if not container.streams.audio:
            return 0, 0
        stream = container.streams.audio[0]
        rate = int(getattr(stream.codec_context, "sample_rate", 0) or 0)
        seconds = float(stream.duration * stream.time_base) if stream.duration else 0.0
        if rate > 0 and seconds <= 0:
            seconds = _span_of_packets(container, stream)
    if rate < 1 or seconds <= 0:
        return 0, 0
    return rate, min(round(seconds * rate), MOST_SAMPLES)


def decode_track(data: bytes, mel_frames: int, sizes: AudioSizes) -> FloatArray:
    """Return float32 [mel_frames, mels] of the sound of a clip.

    Raises:
        SampleError: Damaged, not finite, or of another length than planned by more than a second and a tenth.
    """
    waves, rate = read_pyav(io.BytesIO(data))
    second = SAMPLE_RATE // HOP_SAMPLES
    tolerated = max(round(TOLERATED_S * second), round(TOLERATED_SHARE * mel_frames))
    return mel_of_waves(waves, rate, mel_frames, num_mels=sizes.num_mels, tolerated_frames=tolerated)


def _span_of_packets(container: Any, stream: Any) -> float:
    """Return the seconds from the first packet to the end of the last; 0 where packets tell no time."""
    first, last = None, 0.0
    for packet in container.demux(stream):
        if packet.size and packet.pts is not None:
            start = float(packet.pts * packet.time_base)
            first = start if first is None else min(first, start)
            last = max(last, start + float((packet.duration or 0) * packet.time_base))
    return 0.0 if first is None else last - first
