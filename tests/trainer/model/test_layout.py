"""Orders of patches and frames, checked by their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_pipeline.core.sizes import audio_rows
from trainer.model.layout import audio_layout, vision_layout

GRIDS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)).map(
        lambda grid: (grid[0], 2 * grid[1], 2 * grid[2])
    ),
    max_size=4,
)


@settings(max_examples=50, deadline=None)
@given(grids=GRIDS, window=st.integers(1, 4))
def test_every_patch_stands_in_the_window_of_its_place(
    grids: list[tuple[int, int, int]], window: int
) -> None:
    layout = vision_layout(grids, merge=2, window=window)
    places = [  # of every packed patch, by the definition of the packing
        (picture, frame, 2 * unit_row + inner // 2, 2 * unit_column + inner % 2)
        for picture, (temporal, rows, columns) in enumerate(grids)
        for frame in range(temporal)
        for unit_row in range(rows // 2)
        for unit_column in range(columns // 2)
        for inner in range(4)
    ]
    ordered = [places[index] for index in layout.patch_order]
    assert sorted(ordered) == sorted(places)
    assert [place[2:] for place in ordered] == list(map(tuple, layout.positions.T.tolist()))
    side = 2 * window
    expected_windows = [(p, f, row // side, column // side) for p, f, row, column in ordered]
    labels = np.repeat(np.arange(len(layout.window_lengths)), layout.window_lengths)
    assert len(set(zip(expected_windows, labels.tolist(), strict=True))) == len(set(expected_windows))
    assert len(set(expected_windows)) == len(layout.window_lengths)
    frames = np.repeat(np.arange(len(layout.frame_lengths)), layout.frame_lengths).tolist()
    assert frames == sorted(frames)
    assert len(set(zip((place[:2] for place in ordered), frames, strict=True))) == len(layout.frame_lengths)


@settings(max_examples=30, deadline=None)
@given(grids=GRIDS)
def test_rows_come_back_in_packed_order(grids: list[tuple[int, int, int]]) -> None:
    layout = vision_layout(grids, merge=2, window=2)
    first_patches = layout.patch_order.reshape(-1, 4)[:, 0]
    assert first_patches[layout.row_order].tolist() == list(range(0, len(layout.patch_order), 4))


def test_a_grid_that_does_not_merge_is_refused() -> None:
    with pytest.raises(ValueError, match="grid of 4 x 5 patches is not a multiple of merge 2"):
        vision_layout([(1, 4, 5)], merge=2, window=4)


@settings(max_examples=100, deadline=None)
@given(frames=st.lists(st.integers(1, 900), max_size=4), half_chunk=st.integers(1, 120))
def test_recordings_give_the_promised_rows_for_every_length_and_chunk(
    frames: list[int], half_chunk: int
) -> None:
    layout = audio_layout(frames, chunk=2 * half_chunk)
    assert layout.pooled.shape[1] == sum(map(audio_rows, frames))
    assert sum(layout.chunk_lengths) == sum(-(-count // 2) for count in frames) == len(layout.row_places)
    chunks = [
        range(start, min(start + 2 * half_chunk, n)) for n in frames for start in range(0, n, 2 * half_chunk)
    ]
    padded = max(map(len, chunks), default=2 * half_chunk)
    assert (layout.num_chunks, layout.padded_length) == (len(chunks), padded)
    assert layout.frame_places.tolist() == [
        index * padded + place for index, chunk in enumerate(chunks) for place in range(len(chunk))
    ]
    assert layout.row_places.tolist() == [
        index * -(-padded // 2) + place
        for index, chunk in enumerate(chunks)
        for place in range(-(-len(chunk) // 2))
    ]
    rows = np.repeat(np.arange(len(frames)), [-(-count // 2) for count in frames])
    pairs = rows[layout.pooled]
    assert np.array_equal(pairs[0], pairs[1]), "a pair spans two recordings"
