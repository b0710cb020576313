"""Where the rows of media stand in their sample: one segment after the other, or a clip among its own sound.

A media segment takes a start marker, its rows, an end marker. A clip whose next segment is its sound track
shares one run of positions with it, as in Qwen2.5-Omni (``replace_video_with_audio_token`` of its processor):
start of vision, start of sound, then by turns the rows of the next two seconds of the clip and of the next
two seconds of the sound, whichever lasts longer going on alone; end of sound, end of vision. Rows keep their
order within their segment, so only positions tell the two layouts apart.

The reference cuts the clip twice: its processor, where tokens stand, by times in double precision; its
model, where positions are counted, by times in single precision, truncated. Truncating passes no border of a
chunk, but rounding can (patch 41 of 41 a second). The order of tokens is the processor's; each row
has the position of its own time.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.sample import Modality, Sample, Segment

POSITIONS_PER_SECOND = 25
POSITIONS_PER_CHUNK = 2 * POSITIONS_PER_SECOND

Runs = tuple[tuple[int, int], ...]
"""Rows in order, as (first position, rows) of each run of rows at consecutive positions."""


@dataclass(frozen=True, slots=True)
class MediaLayout:
    """The positions of one media segment.

    Args:
        start: Of its start marker.
        runs: Of its rows.
        end: Of its end marker.
    """

    start: int
    runs: Runs
    end: int


def sample_layout(sample: Sample) -> dict[int, MediaLayout]:
    """Return where each media segment of ``sample`` stands, by its index; position 0 is the sample's first.

    What else there is fills the other positions in order: text, and the end-of-sample token.

    Raises:
        PlanError: A sound track does not follow a clip.
    """
    layouts: dict[int, MediaLayout] = {}
    start = 0
    for index, segment in enumerate(sample.segments):
        if segment.is_track:
            clip = sample.segments[index - 1] if index else segment
            layouts[index - 1], layouts[index] = joint_layout(clip, segment, start - clip.num_tokens)
        elif segment.is_media:
            first = start + 1
            layouts[index] = MediaLayout(start, ((first, segment.num_rows),), first + segment.num_rows)
        start += segment.num_tokens
    return layouts


def joint_layout(clip: Segment, track: Segment, start: int) -> tuple[MediaLayout, MediaLayout]:
    """Return the layouts of ``clip`` and of its sound ``track``, which begin at position ``start``.

    Raises:
        PlanError: ``clip`` is no clip.
    """
    if clip.modality is not Modality.VIDEO:
        raise PlanError(
            f"sound track {track.member!r} does not follow a clip",
            fix="report this: a track is made of a field with sound only",
        )
    num_frames = clip.grid[0]
    of_clip = clip_chunks(num_frames, clip.num_rows // num_frames, clip.patch_s)
    whole, rest = divmod(track.num_rows, POSITIONS_PER_CHUNK)
    of_track = (*[POSITIONS_PER_CHUNK] * whole, *[rest] * (rest > 0))
    clip_runs: list[tuple[int, int]] = []
    track_runs: list[tuple[int, int]] = []
    position = start + 2
    for clip_rows, track_rows in itertools.zip_longest(of_clip, of_track, fillvalue=0):
        for runs, rows in ((clip_runs, clip_rows), (track_runs, track_rows)):
            if rows:
                runs.append((position, rows))
                position += rows
    return (
        MediaLayout(start, _joined(clip_runs), position + 1),
        MediaLayout(start + 1, _joined(track_runs), position),
    )


def runs_of_rows(runs: Runs, first: int, num_rows: int) -> Runs:
    """Return where the rows from ``first`` on stand, ``num_rows`` of those that stand in ``runs``."""
    found = []
    before = 0
    for position, rows in runs:
        start, end = max(first, before), min(first + num_rows, before + rows)
        if start < end:
            found.append((position + start - before, end - start))
        before += rows
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def clip_chunks(num_frames: int, rows_per_frame: int, patch_s: float) -> tuple[int, ...]:
    """Return the rows of a clip in each of its chunks of two seconds.

    As in the reference, a row ends at most one chunk: frames more than two seconds apart skip none, they
    leave chunks of a single row.
    """
    starts = [0]
    for frame in range(num_frames):
        # In this order: the rounding of the reference.
        reached = int(frame * patch_s * POSITIONS_PER_SECOND // POSITIONS_PER_CHUNK)
        num_ended = min(max(0, reached - len(starts) + 1), rows_per_frame)
        first = frame * rows_per_frame
        starts += range(first, first + num_ended)
    ends = (*starts[1:], num_frames * rows_per_frame)
    return tuple(end - start for start, end in zip(starts, ends, strict=True))


def _joined(runs: list[tuple[int, int]]) -> Runs:
    """Return ``runs``, neighbours in one: the longer of the two goes on alone."""
    joined: list[tuple[int, int]] = []
    for position, rows in runs:
        if joined and sum(joined[-1]) == position:
            joined[-1] = joined[-1][0], joined[-1][1] + rows
        else:
            joined.append((position, rows))
    return tuple(joined)
