"""M-RoPE position ids of a sample, from its segments alone.

The rule is that of the Qwen2.5-Omni thinker: text advances the three axes (temporal, height, width)
together; the rows of a picture or clip spread over the axes from the running position on; whatever follows
media continues at the largest position of its last row + 1. Positions restart in every sample, so packing
never changes them (known fault: positions that run on over a pack's samples).

A clip and its own sound begin at the same position, so rows of the same moment have the same temporal
position; their start markers share one, and their end markers do. Where the sound has the last row, the
text that follows may have positions that a large picture has had too: so it is in the reference.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.interleave import POSITIONS_PER_SECOND, MediaLayout, sample_layout
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Modality, Sample, Segment

PositionArray = npt.NDArray[np.int64]


def sample_positions(sample: Sample, *, merge: int) -> PositionArray:
    """Return the position ids of one sample, its markers and end token included.

    Args:
        sample: Its segments say everything that is needed.
        merge: Patches per side of one embedding row.

    Returns:
        int64 [3, num_tokens]; (temporal, height, width), from 0.

    Raises:
        PlanError: The segments do not add up to the sample's token count.
    """
    num_positions = sum(segment.num_tokens for segment in sample.segments) + 1
    if num_positions != sample.num_tokens:
        raise PlanError(
            f"segments make {num_positions} positions, the sample is planned with {sample.num_tokens}",
            where=f"sample {sample.key!r} of {sample.shard}",
            fix="report this as a bug, with the index of that shard",
        )
    positions = np.empty((3, num_positions), dtype=np.int64)
    layouts = sample_layout(sample)
    start = begin = 0
    for index, segment in enumerate(sample.segments):
        end = begin + segment.num_tokens
        if not segment.is_media:
            positions[:, begin:end] = np.arange(start, start + segment.num_tokens)
            start += segment.num_tokens
        elif index + 1 == len(sample.segments) or not sample.segments[index + 1].is_track:
            group = [index - 1, index] if segment.is_track else [index]
            blocks = [_rows_block(sample.segments[item], merge=merge) + start + 1 for item in group]
            start = _place_media(positions, [layouts[item] for item in group], blocks, start=start)
        begin = end
    positions[:, -1] = start
    return positions


def pack_positions(pack: Pack, *, merge: int) -> PositionArray:
    """Return int64 [3, S] of samples in one sequence; each starts at 0, padding repeats its last ones."""
    parts = [np.zeros((3, 0), dtype=np.int64)]
    for sample in pack.samples:
        own = sample_positions(sample, merge=merge)
        padding = pack.padded_len - sample.num_tokens if pack.padded_len else 0
        parts += [own, np.repeat(own[:, -1:], padding, axis=1)]
    return np.concatenate(parts, axis=1)


def _place_media(
    positions: PositionArray, layouts: list[MediaLayout], blocks: list[PositionArray], *, start: int
) -> int:
    """Fill in the positions of media that stand together; return the running position behind them."""
    for layout, block in zip(layouts, blocks, strict=True):
        positions[:, layout.start] = start
        first = 0
        for place, num_rows in layout.runs:
            positions[:, place : place + num_rows] = block[:, first : first + num_rows]
            first += num_rows
    # The last row of each segment has its largest position.
    end = int(positions[:, min(layout.end for layout in layouts) - 1].max()) + 1
    for layout in layouts:
        positions[:, layout.end] = end
    return end + 1


def _rows_block(segment: Segment, *, merge: int) -> PositionArray:
    """Return the positions of the rows of one media segment, int64 [3, num_rows] from 0."""
    if segment.modality not in (Modality.IMAGE, Modality.VIDEO):
        return np.broadcast_to(np.arange(segment.num_rows, dtype=np.int64), (3, segment.num_rows))
    num_frames, height, width = segment.grid[0], segment.grid[1] // merge, segment.grid[2] // merge
    # Single precision, in this order, then truncated: the integers of the reference implementation.
    seconds, rate = np.float32(segment.patch_s), np.float32(POSITIONS_PER_SECOND)
    times = np.arange(num_frames, dtype=np.float32) * seconds * rate
    temporal = times.astype(np.int64) if segment.modality is Modality.VIDEO else np.zeros(1, dtype=np.int64)
    grid = np.empty((3, num_frames, height, width), dtype=np.int64)
    grid[0] = temporal[:, None, None]
    grid[1] = np.arange(height)[None, :, None]
    grid[2] = np.arange(width)[None, None, :]
    return grid.reshape(3, -1)
