"""Layouts against their definition, one position at a time."""

from __future__ import annotations

from dataclasses import astuple
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.layout import SequenceKind, SequenceLayout, row_owners
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.topology import Topology
from tests.balancer.exchanges import owned_positions
from tests.support.strategies import make_sample, text_segment

KINDS = get_args(SequenceKind)


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, int]:
    """(length of the sequence, first position, rows) of one run of rows."""
    length = draw(st.integers(1, 70))
    start = draw(st.integers(0, length - 1))
    return length, start, draw(st.integers(0, length - start))


@given(
    st.sampled_from(KINDS),
    st.integers(1, 5),
    st.integers(1, 4),
    st.lists(runs(), max_size=5),
    st.integers(1, 2),
)
def test_every_row_has_the_owner_and_the_place_of_its_position(
    kind: SequenceKind, tp: int, cp: int, items: list[tuple[int, int, int]], pp: int
) -> None:
    layout = SequenceLayout(Topology(tp * cp * pp, tp=tp, cp=cp, pp=pp), kind=kind)
    lengths, positions, num_rows = np.asarray(items, dtype=np.int64).reshape(-1, 3).T
    pieces = layout.cut(positions, num_rows, lengths)
    found = []
    for item, owner, rows, first, local in zip(
        pieces.item, pieces.owner, pieces.rows, pieces.first_row, pieces.local, strict=True
    ):
        found += [(int(item), int(first + row), int(owner), int(local + row)) for row in range(rows)]
    expected = []
    for item, (length, start, count) in enumerate(items):
        places = {
            position: (owner, local)
            for owner, held in enumerate(owned_positions(kind, length, tp=tp, cp=cp))
            for local, position in enumerate(held)
        }
        expected += [(item, row, *places[start + row]) for row in range(count)]
    assert found == expected
    assert (pieces.rows > 0).all()
    assert pieces.owner.max(initial=0) < layout.num_owners


@given(st.sampled_from(KINDS), st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), max_size=4))
def test_items_in_several_runs_are_cut_as_their_runs_are(kind: SequenceKind, items: list[list[int]]) -> None:
    layout = SequenceLayout(Topology(4, tp=2, cp=2), kind=kind)
    # Runs with a gap of 3 positions between them; an item of a single run has no entry.
    where = {
        item: tuple((3 * place + sum(lengths[:place]), rows) for place, rows in enumerate(lengths))
        for item, lengths in enumerate(items)
    }
    num_rows = np.asarray([sum(lengths) for lengths in items], dtype=np.int64)
    sequence = np.full(len(items), 48)
    several = {item: runs for item, runs in where.items() if len(runs) > 1}
    pieces = layout.cut(np.zeros_like(num_rows), num_rows, sequence, several)
    found = [
        (item, first + row, owner, local + row)
        for item, owner, rows, first, local in zip(
            *(field.tolist() for field in astuple(pieces)), strict=True
        )
        for row in range(rows)
    ]
    expected = []
    for item, runs in where.items():
        row = 0
        for position, rows in runs:
            alone = layout.cut(*(np.asarray([value]) for value in (position, rows, 48)))
            for owner, count, local in zip(alone.owner, alone.rows, alone.local, strict=True):
                expected += [(item, row + place, owner, local + place) for place in range(count)]
                row += count
    assert found == expected


def test_a_run_over_the_whole_sequence_is_cut_into_as_few_pieces_as_can_be() -> None:
    whole = np.asarray([0]), np.asarray([16]), np.asarray([16])
    topology = Topology(4, tp=2, cp=2)
    contiguous = SequenceLayout(topology).cut(*whole)
    assert (contiguous.owner.tolist(), contiguous.rows.tolist()) == ([0, 1, 2, 3], [4, 4, 4, 4])
    zigzag = SequenceLayout(topology, kind="zigzag").cut(*whole)
    assert (zigzag.owner.tolist(), zigzag.rows.tolist()) == ([0, 2, 3, 1], [4, 4, 4, 4])
    assert zigzag.first_row.tolist() == [0, 4, 8, 12]
    assert zigzag.local.tolist() == [0, 0, 0, 0]
    first = SequenceLayout(topology, kind="stage0").cut(*whole)
    assert (first.owner.tolist(), first.rows.tolist()) == ([0], [16])


@pytest.mark.parametrize(("kind", "owners"), [("contiguous", (2, 3)), ("zigzag", (2, 3)), ("stage0", (2,))])
def test_owners_are_ranks_of_the_first_stage(kind: SequenceKind, owners: tuple[int, ...]) -> None:
    topology = Topology(world_size=8, tp=2, pp=2)
    assert SequenceLayout(topology, kind=kind).owners(1) == owners
    assert row_owners(topology, 1) == topology.row_owners(1) == (2, 3)


def test_the_length_of_a_sequence_is_that_of_its_pack_unless_all_are_padded_to_one() -> None:
    pack = Pack(lane=0, number=0, samples=(make_sample([text_segment(5)]),))
    assert SequenceLayout(Topology(1)).length(pack) == 6
    assert SequenceLayout(Topology(1), seq_len=9).length(pack) == 9
