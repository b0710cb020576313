"""Cursor of a lane: rows that are left out are passed by, counted and recorded; none is looked up twice."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from loaders.fitting import FILTERED, PackSizes
from loaders.lane_cursor import WINDOW, LaneCursor, LeftOut
from loaders.lanes import LaneOrder
from loaders.packing import Budgets, Entry
from omni_pipeline.core.errors import DataError
from tests.support.orders import (
    CountingSource,
    PartlyUsableSource,
    StatusSource,
    build,
    config,
    ends,
    ids,
    mixed_sources,
)
from tests.support.strategies import MemorySource, text_segment, text_source


def test_rows_that_are_left_out_are_passed_by_and_only_the_unwanted_losses_are_recorded() -> None:
    source = PartlyUsableSource("text", [10, 0, 40], [[text_segment(30)]])
    order = build(config(epochs=3), [source])
    packs = [pack for step in ends(order) for pack in step]
    usable = {source.sample(ordinal).id for ordinal in range(50) if ordinal % 5 in (0, 4)}
    assert Counter(ids(packs)) == dict.fromkeys(usable, 3)
    assert order.left_out == {("text", "where"): 30, ("text", "deny"): 30, ("text", "unusable"): 30}
    dropped = order.drain_dropped()
    assert sorted(item.reason for item in dropped) == sorted(
        f"row {ordinal} is bad" for ordinal in range(3, 50, 5)
    ), "once, in the first round"
    assert not any(order.remaining().values())


def test_an_endless_source_that_gives_nothing_more_stops_the_run_instead_of_hanging() -> None:
    good = text_source("text", [4], [30])
    status = np.zeros(4, dtype=np.int8)
    changing = StatusSource(good.name, good.shard_sizes, good.segments, status=status)
    order = build(config(), [changing])
    status[:] = FILTERED
    with pytest.raises(DataError, match="257 rows in a row cannot be drawn"):
        order.next_step(0)


def test_dropped_samples_are_recorded_with_id_lane_and_reason() -> None:
    order = build(config(oversize="drop"), [text_source("text", [8], [50, 401])])
    order.next_step(0)
    record = order.drain_dropped()[0]
    assert record.id.source == "text"
    assert record.id.row % 2 == 1
    assert record.reason == "401 tokens, limit 400 (order.seq_len)"
    assert record.shard == "text-00000.tar"
    assert record.lane in range(4)


def counting_sources() -> list[CountingSource]:
    return [CountingSource(found.name, found.shard_sizes, found.segments) for found in mixed_sources()]


def test_a_resume_at_any_step_looks_up_the_buffered_samples_and_nothing_else() -> None:
    near = build(config(), mixed_sources())
    near.next_step(0)
    state = near.state_dict()
    for lane in state.values():
        for saved in lane["sources"].values():
            saved["position"] += 10**12
        lane["buffer"] = [[name, position + 10**12] for name, position in lane["buffer"]]
    sources = counting_sources()
    far = build(config(), sources)
    for source in sources:
        source.looked_at.clear()  # the check that something can be drawn
    far.load_state_dict(json.loads(json.dumps(state)))
    looked_at = sum(count for source in sources for count in source.looked_at)
    assert looked_at == sum(len(lane["buffer"]) for lane in state.values())
    assert far.state_dict() == state
    assert all(pack.samples for pack in far.next_step(10**9))


def cursor_of(source: MemorySource, *, shuffle_block: int = 1024) -> LaneCursor:
    order = LaneOrder(source.shard_sizes, name=source.name, lanes=1, seed=0, shuffle_block=shuffle_block)
    return LaneCursor(
        0, index=0, source=source, order=order, budgets=Budgets(400), oversize="drop", left_out=LeftOut()
    )


def drawn(cursor: LaneCursor, count: int) -> list[Entry]:
    found = []
    for _ in range(count):
        entry = cursor.head()
        assert entry is not None
        found.append(entry)
        assert cursor.advance() == cursor.head()
    return found


@pytest.mark.parametrize("shuffle_block", [4, 100, 1024])
def test_a_cursor_that_is_put_back_gives_the_same_samples_as_a_look_at_their_positions(
    shuffle_block: int,
) -> None:
    source = PartlyUsableSource("text", [700, 0, 90], [[text_segment(30)]])
    cursor = cursor_of(source, shuffle_block=shuffle_block)
    first = drawn(cursor, 1000)
    cursor.seek(0)
    assert drawn(cursor, 20) == first[:20]
    cursor.seek(first[10].position)
    assert drawn(cursor, 500) == first[10:510]
    assert cursor.entries([entry.position for entry in first]) == first
    passed_by = sorted(set(range(50)) - {entry.position for entry in first})
    assert len(passed_by) > 10
    assert cursor.entries(passed_by) == [None] * len(passed_by)


def test_where_a_window_has_nothing_the_rest_of_the_block_is_looked_up_at_once() -> None:
    source = CountingSource("text", [1024], [[text_segment(30)]])
    assert cursor_of(source).head() is not None
    assert source.looked_at == [WINDOW]
    sparse = SparseSource("text", [4096], [[text_segment(30)]])
    found = drawn(cursor_of(sparse), 2)
    assert [entry.ordinal % 1500 for entry in found] == [0, 0]
    assert set(sparse.looked_at) <= {WINDOW, 1024 - WINDOW, 1024}
    assert len(sparse.looked_at) <= 2 * 4096 // 1024


@dataclass(frozen=True)
class SparseSource(CountingSource):
    """Only every 1500th row can be drawn."""

    def sizes(self, ordinals: npt.NDArray[np.int64]) -> PackSizes:
        status = np.where(ordinals % 1500, FILTERED, 0).astype(np.int8)
        return replace(super().sizes(ordinals), status=status)
