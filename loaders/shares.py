"""What a rank reads of a media segment: all of it, or the encoder units of its share.

Rows are consecutive, and so are the patches or mel frames that they are made of. Each rank with a share
fetches and decodes the segment and keeps its own units: formats are compressed as a whole, and decoding it
on every one of them costs no message between ranks.
"""

from __future__ import annotations

from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.plan import MediaPlacement
from omni_pipeline.core.sample import Modality, Segment
from omni_pipeline.core.sizes import MEL_FRAMES_PER_ROW, ModelSizes, units_per_row


def units_of_share(segment: Segment, placement: MediaPlacement, *, rank: int, sizes: ModelSizes) -> range:
    """Return which patches or mel frames of ``segment`` are read by ``rank``, which encodes some of it.

    Raises:
        PlanError: A share that is to be encoded alone ends inside a frame, or shares of sound are joined.
    """
    if not placement.is_long:
        return range(segment.num_units)
    rows = placement.rows_of(rank)
    if segment.modality is Modality.AUDIO:
        if placement.joined:
            raise _wrong(placement, "joins shares of a recording, whose attention stays in its chunks")
        is_last = rows.stop == placement.num_rows
        # The last frames of a recording may be too few for a row of their own.
        stop = segment.num_units if is_last else rows.stop * MEL_FRAMES_PER_ROW
        return range(rows.start * MEL_FRAMES_PER_ROW, stop)
    rows_per_frame = segment.num_rows // segment.grid[0]
    if not placement.joined and (rows.start % rows_per_frame or rows.stop % rows_per_frame):
        frames = f"frames of {rows_per_frame} rows"
        raise _wrong(placement, f"cuts {frames} into shares of {placement.shares} rows that are not joined")
    units = units_per_row(segment.modality, sizes)
    return range(rows.start * units, rows.stop * units)


def grid_of_share(segment: Segment, units: range) -> tuple[int, int, int]:
    """Return the grid of these ``units``, whole frames or mel frames, as of a segment by itself."""
    _, rows, columns = segment.grid
    return len(units) // (rows * columns), rows, columns


def _wrong(placement: MediaPlacement, what: str) -> PlanError:
    return PlanError(
        f"plan {what}",
        where=f"pack {placement.pack}, sample {placement.sample}, segment {placement.segment}, "
        f"ranks {placement.ranks}",
        fix="report this: the planner is at fault",
    )
