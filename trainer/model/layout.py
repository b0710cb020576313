"""Where patches and mel frames lie inside their encoder: pure index arithmetic on the CPU, free of torch.

Patches arrive as the loader packs them: merge x merge patches of one embedding row together, rows in raster
order. The vision encoder runs them in *window order*, so that every window is a run of consecutive patches.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omni_pipeline.core.batch import JoinedSegment

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class VisionLayout:
    """The patches of a microbatch in window order.

    Args:
        patch_order: [patches]; the packed patch that stands at each place.
        row_order: [rows]; where the embedding row of each packed place stands in window order.
        positions: [2, patches]; row and column of the patch at each place.
        window_lengths: Patches of each window, in order.
        frame_lengths: Patches of each temporal patch of each picture, in order.
    """

    patch_order: Indices
    row_order: Indices
    positions: Indices
    window_lengths: tuple[int, ...]
    frame_lengths: tuple[int, ...]


@dataclass(frozen=True)
class _Frame:
    unit_order: Indices
    positions: Indices
    window_lengths: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _frame(rows: int, columns: int, merge: int, window: int) -> _Frame:
    """Lay out one temporal patch of ``rows`` x ``columns`` patches; ``window``: embedding rows a side."""
    if rows % merge or columns % merge:
        raise ValueError(f"grid of {rows} x {columns} patches is not a multiple of merge {merge}")
    unit_rows, unit_columns = rows // merge, columns // merge
    row, column = np.divmod(np.arange(unit_rows * unit_columns), unit_columns)
    window_id = row // window * -(-unit_columns // window) + column // window
    order = np.argsort(window_id, kind="stable")
    inner_row, inner_column = np.divmod(np.arange(merge * merge), merge)
    positions = np.stack(
        [
            (row[order, None] * merge + inner_row).reshape(-1),
            (column[order, None] * merge + inner_column).reshape(-1),
        ]
    )
    lengths = np.bincount(window_id) * merge * merge
    return _Frame(order, positions, tuple(lengths.tolist()))


def vision_layout(grids: Sequence[Sequence[int]], *, merge: int, window: int) -> VisionLayout:
    """Return the layout of pictures with these (temporal, rows, columns) grids; none is fine.

    Args:
        grids: In patches.
        merge: Patches per side of one embedding row.
        window: Embedding rows per side of one window.

    Raises:
        ValueError: A side of a grid is not a multiple of ``merge``.
    """
    unit_orders = [np.zeros(0, dtype=np.int64)]
    positions = [np.zeros((2, 0), dtype=np.int64)]
    window_lengths: list[int] = []
    frame_lengths: list[int] = []
    start = 0
    for temporal, rows, columns in grids:
        frame = _frame(rows, columns, merge, window)
        units = len(frame.unit_order)
        starts = start + units * np.arange(temporal)
        unit_orders.append((starts[:, None] + frame.unit_order).reshape(-1))
        positions.append(np.tile(frame.positions, temporal))
        window_lengths.extend(frame.window_lengths * temporal)
        frame_lengths.extend([rows * columns] * temporal)
        start += units * temporal
    unit_order = np.concatenate(unit_orders)
    patch_order = unit_order[:, None] * merge**2 + np.arange(merge**2)
    return VisionLayout(
        patch_order=patch_order.reshape(-1),
        row_order=np.argsort(unit_order),
        positions=np.concatenate(positions, axis=1),
        window_lengths=tuple(window_lengths),
        frame_lengths=tuple(frame_lengths),
    )


@dataclass(frozen=True)
class ShareLayout:
    """The joined segments of a group, and this member's shares of them, the patches in packed order.

    Args:
        orders: For each joined segment, [patches of it]: the packed patch at each place in window order.
        positions: [2, patches]; row and column of each patch of this member's shares.
        window_lengths: By number of sharing members, ascending, for the segments that this member shares:
            patches of each window; {1: ()} for one that shares none.
        frame_lengths: Likewise, patches of each temporal patch.
        row_order: [rows]; where the embedding row of each place *in plan order* stands among the rows of
            whole segments followed by those of shares.
    """

    orders: tuple[Indices, ...]
    positions: Indices
    window_lengths: dict[int, tuple[int, ...]]
    frame_lengths: dict[int, tuple[int, ...]]
    row_order: Indices


def share_layout(
    joined: Sequence[JoinedSegment],
    *,
    member: int,
    grids: Sequence[Sequence[int]],
    merge: int,
    window: int,
) -> ShareLayout:
    """Return the layout of the segments that members of a group encode together.

    Args:
        joined: Of the whole group.
        member: Of the group.
        grids: Of the segments that it encodes alone.
        merge: Patches per side of one embedding row.
        window: Embedding rows per side of one window.
    """
    layouts = [vision_layout([item.grid], merge=merge, window=window) for item in joined]
    positions = [np.zeros((2, 0), dtype=np.int64)]
    lengths: dict[str, dict[int, tuple[int, ...]]] = {"window": {}, "frame": {}}
    rows = [temporal * height * width // merge**2 for temporal, height, width in grids]
    starts = np.cumsum([0, *rows]).tolist()
    runs = [np.arange(start, start + count) for start, count in zip(starts, rows, strict=False)]
    next_row = starts[-1]
    for item, layout in zip(joined, layouts, strict=True):
        if member not in item.members:
            continue
        share = item.members.index(member)
        first, count = sum(item.shares[:share]), item.shares[share]
        packed = layout.positions[:, np.argsort(layout.patch_order)]
        positions.append(packed[:, first * merge**2 : (first + count) * merge**2])
        runs.insert(item.place, np.arange(next_row, next_row + count))
        next_row += count
        degree = len(item.members)
        for kind, found in (("window", layout.window_lengths), ("frame", layout.frame_lengths)):
            lengths[kind][degree] = lengths[kind].get(degree, ()) + found
    return ShareLayout(
        orders=tuple(layout.patch_order for layout in layouts),
        positions=np.concatenate(positions, axis=1),
        window_lengths=dict(sorted(lengths["window"].items())) or {1: ()},
        frame_lengths=dict(sorted(lengths["frame"].items())) or {1: ()},
        row_order=np.concatenate([np.zeros(0, dtype=np.int64), *runs]),
    )


@dataclass(frozen=True)
class AudioLayout:
    """The chunks of the recordings of a microbatch, padded to the longest one.

    Args:
        num_chunks: Chunks of all recordings.
        padded_length: Mel frames of a padded chunk.
        frame_places: [mel frames]; the place of each frame in the padded chunks, flattened.
        row_places: [rows after the convolutions]; the place of each true row in the padded chunks after them.
        chunk_lengths: Rows after the convolutions of each chunk.
        pooled: [2, rows]; the pair of rows after the convolutions that makes each embedding row.
    """

    num_chunks: int
    padded_length: int
    frame_places: Indices
    row_places: Indices
    chunk_lengths: tuple[int, ...]
    pooled: Indices


def audio_layout(frames: Sequence[int], *, chunk: int) -> AudioLayout:
    """Return the layout of recordings of so many mel frames; none is fine.

    Args:
        frames: Mel frames of each recording.
        chunk: Mel frames of a full chunk, even; the last chunk of a recording holds what is left.
    """
    lengths = [min(chunk, count - start) for count in frames for start in range(0, count, chunk)]
    padded_length = max(lengths, default=chunk)
    halves = [-(-length // 2) for length in lengths]
    pairs = [np.zeros(0, dtype=np.int64)]
    start = 0
    for count in frames:
        rows = -(-count // 2)
        pairs.append(start + 2 * np.arange(rows // 2))
        start += rows
    first = np.concatenate(pairs)
    return AudioLayout(
        num_chunks=len(lengths),
        padded_length=padded_length,
        frame_places=_places(lengths, stride=padded_length),
        row_places=_places(halves, stride=-(-padded_length // 2)),
        chunk_lengths=tuple(halves),
        pooled=np.stack([first, first + 1]),
    )


def _places(lengths: Sequence[int], *, stride: int) -> Indices:
    """Return the flat places of runs of ``lengths`` that begin every ``stride``."""
    counts = np.array(lengths, dtype=np.int64)
    shift = np.arange(len(counts)) * stride - (np.cumsum(counts) - counts)
    return np.repeat(shift, counts) + np.arange(counts.sum())
