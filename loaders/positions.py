"""M-RoPE position ids of a sample, from its segments alone.

The rule is that of the Qwen2.5-Omni thinker: text advances the three axes (temporal, height, width)
together; the rows of a picture or clip spread over the axes from the running position on; whatever follows
media continues at the largest position used so far + 1. Positions restart in every sample, so packing
never changes them (known fault: positions that run on over a pack's samples).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Modality, Sample, Segment
from omni_pipeline.core.sizes import VisionSizes

POSITIONS_PER_SECOND = 25

PositionArray = npt.NDArray[np.int64]


def seconds_per_temporal_patch(sizes: VisionSizes) -> float:
    """Return the time that one temporal patch of a video stands for, seconds."""
    return sizes.temporal_patch / sizes.video_fps


def sample_positions(sample: Sample, *, merge: int, seconds_per_temporal_patch: float) -> PositionArray:
    """Return the position ids of one sample, its markers and end token included.

    Args:
        sample: Its segments say everything that is needed.
        merge: Patches per side of one embedding row.
        seconds_per_temporal_patch: Time between two temporal patches of a video, seconds.

    Returns:
        int64 [3, num_tokens]; (temporal, height, width), from 0.

    Raises:
        PlanError: The segments do not add up to the sample's token count.
    """
    blocks: list[PositionArray] = []
    start = 0
    for segment in sample.segments:
        for block in _segment_blocks(segment, merge=merge, seconds=seconds_per_temporal_patch):
            if block.shape[1]:
                blocks.append(block + start)
                start = int(blocks[-1].max()) + 1
    blocks.append(_text_block(1) + start)
    positions = np.concatenate(blocks, axis=1)
    if positions.shape[1] != sample.num_tokens:
        raise PlanError(
            f"segments make {positions.shape[1]} positions, the sample is planned with {sample.num_tokens}",
            where=f"sample {sample.key!r} of {sample.shard}",
            fix="report this as a bug, with the index of that shard",
        )
    return positions


def pack_positions(pack: Pack, *, merge: int, seconds_per_temporal_patch: float) -> PositionArray:
    """Return int64 [3, S] of samples in one sequence; each starts at 0, padding repeats its last ones."""
    parts = [np.zeros((3, 0), dtype=np.int64)]
    for sample in pack.samples:
        own = sample_positions(sample, merge=merge, seconds_per_temporal_patch=seconds_per_temporal_patch)
        padding = pack.padded_len - sample.num_tokens if pack.padded_len else 0
        parts += [own, np.repeat(own[:, -1:], padding, axis=1)]
    return np.concatenate(parts, axis=1)


def _segment_blocks(segment: Segment, *, merge: int, seconds: float) -> tuple[PositionArray, ...]:
    """Blocks of positions from 0; each following block is offset by the maximum of those before it + 1."""
    if segment.modality is Modality.TEXT:
        return (_text_block(segment.num_tokens),)
    if segment.modality is Modality.AUDIO:
        rows = _text_block(segment.num_rows)
    else:
        rows = _vision_block(segment, merge=merge, seconds=seconds)
    return _text_block(1), rows, _text_block(1)


def _text_block(num_tokens: int) -> PositionArray:
    return np.broadcast_to(np.arange(num_tokens, dtype=np.int64), (3, num_tokens))


def _vision_block(segment: Segment, *, merge: int, seconds: float) -> PositionArray:
    num_frames, height, width = segment.grid[0], segment.grid[1] // merge, segment.grid[2] // merge
    # Single precision, in this order, then truncated: the integers of the reference implementation.
    times = np.arange(num_frames, dtype=np.float32) * np.float32(seconds) * np.float32(POSITIONS_PER_SECOND)
    temporal = times.astype(np.int64) if segment.modality is Modality.VIDEO else np.zeros(1, dtype=np.int64)
    grid = np.empty((3, num_frames, height, width), dtype=np.int64)
    grid[0] = temporal[:, None, None]
    grid[1] = np.arange(height)[None, :, None]
    grid[2] = np.arange(width)[None, None, :]
    return grid.reshape(3, -1)
