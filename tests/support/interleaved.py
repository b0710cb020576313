"""The layout of a sample by its definition: one token after the other, as the reference writes them."""

from __future__ import annotations

from omni_pipeline.core.sample import Modality, Sample, Segment

Token = tuple[str, int, int]
"""(kind, index of the segment, row); the kinds are start, row, end, text and eos."""


def token_walk(sample: Sample) -> list[Token]:
    """Return what stands at each position of ``sample``."""
    tokens: list[Token] = []
    for index, segment in enumerate(sample.segments):
        following = sample.segments[index + 1 : index + 2]
        if segment.modality is Modality.TEXT:
            tokens += [("text", index, row) for row in range(segment.num_tokens)]
        elif following and following[0].is_track:
            tokens += _joint_walk(index, segment, following[0])
        elif not segment.is_track:
            rows = [("row", index, row) for row in range(segment.num_rows)]
            tokens += [("start", index, 0), *rows, ("end", index, 0)]
    return [*tokens, ("eos", -1, 0)]


def row_positions(sample: Sample, index: int) -> list[int]:
    """Return the position in ``sample`` of each row of its segment ``index``."""
    return [
        place for place, (kind, owner, _) in enumerate(token_walk(sample)) if (kind, owner) == ("row", index)
    ]


def _joint_walk(index: int, clip: Segment, track: Segment) -> list[Token]:
    rows_per_frame = clip.num_rows // clip.grid[0]
    clip_times = [row // rows_per_frame * clip.patch_s * 25 for row in range(clip.num_rows)]
    track_times = [float(row) for row in range(track.num_rows)]
    clip_chunks, track_chunks = _chunked(clip_times), _chunked(track_times)
    tokens: list[Token] = [("start", index, 0), ("start", index + 1, 0)]
    for number in range(max(len(clip_chunks), len(track_chunks))):
        for owner, chunks in ((index, clip_chunks), (index + 1, track_chunks)):
            if number < len(chunks):
                tokens += [("row", owner, row) for row in chunks[number]]
    return [*tokens, ("end", index + 1, 0), ("end", index, 0)]


def _chunked(times: list[float]) -> list[list[int]]:
    """Cut rows where their time reaches the next multiple of 50; a row ends at most one chunk."""
    chunks: list[list[int]] = [[]]
    for row, time in enumerate(times):
        if time >= 50 * len(chunks):
            chunks.append([])
        chunks[-1].append(row)
    return chunks
