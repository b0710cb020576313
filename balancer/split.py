"""How one media segment divides over the ranks of a sequence-parallel subgroup.

In this model family attention never crosses a frame of a clip nor a chunk of a recording, so a segment with
enough of these is cut at their borders and its shares need nothing of each other. One that has too few (a
big picture, an encoder that sees all) is cut into runs of rows whose attention is *joined*: Ulysses (Jacobs
et al. 2023, arXiv 2309.14509), an all-to-all from rows to heads and back around every attention.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from balancer.shapes import TransformerShape, position_grid


@dataclass(frozen=True, slots=True)
class Cut:
    """A segment's rows in consecutive shares.

    Args:
        rows: Embedding rows of each share.
        positions: Attention positions of each share.
        grids: The smaller segment that each share is; none if the shares are joined.
    """

    rows: tuple[int, ...]
    positions: tuple[int, ...]
    grids: tuple[tuple[int, int, int], ...]

    @property
    def joined(self) -> bool:
        """Whether attention crosses the shares."""
        return not self.grids


def cut_segment(shape: TransformerShape, grid: tuple[int, int, int], degree: int) -> Cut | None:
    """Return the segment in ``degree`` shares as even as its borders allow, or None if that cannot be.

    Args:
        shape: Its encoder.
        grid: (temporal, rows, columns) of patches, or (mel frames, 1, 1).
        degree: Ranks, at least 1.
    """
    if shape.units_per_position > 1:
        # Never joined: the convolutions in front see across the rows between two shares.
        return _cut_line(shape, grid, degree)
    return _cut_frames(shape, grid, degree) or _cut_rows(shape, grid, degree)


def even_runs(total: int, count: int) -> tuple[int, ...]:
    """Return ``count`` numbers that sum to ``total`` and differ by at most one, larger ones first."""
    small, rest = divmod(total, count)
    return tuple(small + (index < rest) for index in range(count))


def _cut_frames(shape: TransformerShape, grid: tuple[int, int, int], degree: int) -> Cut | None:
    frames, rows, columns = grid
    if frames < degree or (degree > 1 and rows * columns % shape.positions_per_row):
        return None
    shares = even_runs(frames, degree)
    positions = tuple(share * rows * columns for share in shares)
    return Cut(
        rows=tuple(count // shape.positions_per_row for count in positions),
        positions=positions,
        grids=tuple((share, rows, columns) for share in shares),
    )


def _cut_line(shape: TransformerShape, grid: tuple[int, int, int], degree: int) -> Cut | None:
    """Cut a recording between chunks, where no row straddles the cut; the last chunk may be short."""
    positions = position_grid(shape, grid)[1]
    if degree == 1:
        return Cut(rows=(positions // shape.positions_per_row,), positions=(positions,), grids=(grid,))
    if not shape.window or shape.full_attention_layers:
        return None
    # Where chunks hold an odd number of positions, only every other border is one of rows too.
    unit = math.lcm(shape.window, shape.positions_per_row)
    # What is left at the end counts as a unit of its own if it makes a row.
    num_units = positions // unit + (positions % unit >= shape.positions_per_row)
    if num_units < degree:
        return None
    ends = [unit * end for end in itertools.accumulate(even_runs(num_units, degree))]
    ends[-1] = positions
    shares = [end - start for start, end in itertools.pairwise([0, *ends])]
    units = [shape.units_per_position * share for share in shares]
    units[-1] = grid[0] - sum(units[:-1])
    return Cut(
        rows=tuple(share // shape.positions_per_row for share in shares),
        positions=tuple(shares),
        grids=tuple((share, 1, 1) for share in units),
    )


def _cut_rows(shape: TransformerShape, grid: tuple[int, int, int], degree: int) -> Cut | None:
    total = math.prod(position_grid(shape, grid))
    num_rows = total // shape.positions_per_row
    if not shape.joins or num_rows < degree or shape.heads % degree or shape.kv_heads % degree:
        return None
    rows = even_runs(num_rows, degree)
    return Cut(rows=rows, positions=tuple(count * shape.positions_per_row for count in rows), grids=())
