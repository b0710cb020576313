"""Every position has one owner; rows stand where a walk over single tokens puts them."""

from __future__ import annotations

import re
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.interleave import clip_chunks, runs_of_rows, sample_layout
from omni_pipeline.core.sample import Modality, Sample, Segment
from tests.support.interleaved import Token, token_walk
from tests.support.strategies import clip_with_sound, make_sample, media_segment, samples, text_segment


def layout_tokens(sample: Sample) -> dict[int, Token]:
    """Return what the layout says of each position of media; raises where two claim one."""
    found: dict[int, Token] = {}

    def put(position: int, token: Token) -> None:
        assert position not in found, f"{token} and {found[position]} at {position}"
        found[position] = token

    for index, layout in sample_layout(sample).items():
        put(layout.start, ("start", index, 0))
        put(layout.end, ("end", index, 0))
        row = 0
        for position, num_rows in layout.runs:
            for place in range(position, position + num_rows):
                put(place, ("row", index, row))
                row += 1
        assert row == sample.segments[index].num_rows
    return found


@given(samples())
def test_media_stand_where_a_walk_over_single_tokens_puts_them(sample: Sample) -> None:
    tokens = token_walk(sample)
    assert len(tokens) == sample.num_tokens
    expected = {place: token for place, token in enumerate(tokens) if token[0] not in ("text", "eos")}
    assert layout_tokens(sample) == expected


def test_clip_and_sound_take_turns_of_two_seconds_and_the_longer_goes_on_alone() -> None:
    clip, sound = clip_with_sound((3, 4, 2), 520)
    (of_clip, of_sound) = sample_layout(make_sample([text_segment(2), clip, sound])).values()
    # Two rows a second: 4 and 2 of the clip; 50, 50 and 30 of the sound.
    assert of_clip.runs == ((4, 4), (58, 2))
    assert of_sound.runs == ((8, 50), (60, 80))
    assert (of_clip.start, of_sound.start, of_sound.end, of_clip.end) == (2, 3, 140, 141)


def test_a_clip_longer_than_its_sound_ends_with_its_own_rows() -> None:
    of_clip, of_sound = sample_layout(make_sample(clip_with_sound((5, 2, 2), 12))).values()
    assert of_clip.runs == ((2, 2), (7, 3))
    assert of_sound.runs == ((4, 3),)


def test_a_clip_and_a_recording_that_is_not_its_own_stand_one_after_the_other() -> None:
    clip, sound = clip_with_sound((3, 4, 2), 520)
    of_clip, of_sound = sample_layout(make_sample([clip, replace(sound, is_track=False)])).values()
    assert (of_clip.start, of_clip.runs, of_clip.end) == (0, ((1, 6),), 7)
    assert (of_sound.start, of_sound.runs, of_sound.end) == (8, ((9, 130),), 139)


def test_frames_more_than_two_seconds_apart_end_one_chunk_a_row() -> None:
    # At 0, 100 and 200 positions: the chunk of 50 to 100 is a single row, as in the reference.
    assert clip_chunks(3, 4, 4.0) == (4, 1, 3, 1, 3)


def test_chunks_end_at_times_in_double_precision() -> None:
    # Frames 41 and 82 are at 50 and 100 positions, the borders; single precision says 49.999996.
    assert clip_chunks(83, 4, 2 / 41) == (164, 164, 4)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_some_of_the_rows_stand_where_they_stand_among_all(lengths: list[int], data: st.DataObject) -> None:
    runs = tuple((100 * number, rows) for number, rows in enumerate(lengths))
    positions = [first + row for first, rows in runs for row in range(rows)]
    first = data.draw(st.integers(0, len(positions)))
    num_rows = data.draw(st.integers(0, len(positions) - first))
    part = runs_of_rows(runs, first, num_rows)
    assert [start + row for start, rows in part for row in range(rows)] == positions[first : first + num_rows]
    assert all(rows for _, rows in part)


@pytest.mark.parametrize("before", [[], [media_segment(Modality.IMAGE, (1, 2, 2))], [text_segment(3)]])
def test_a_track_without_a_clip_is_a_bug(before: list[Segment]) -> None:
    sample = make_sample([*before, clip_with_sound((1, 2, 2), 40)[1]])
    with pytest.raises(PlanError, match=re.escape("sound track 'video' does not follow a clip")):
        sample_layout(sample)
