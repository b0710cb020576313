"""Known faults of state, resume and randomness, one test each, in the smallest situation."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from balancer.reorder import lanes_of_group
from loaders.loader import OmniLoader, merge_states
from loaders.order import Order, OrderConfig
from loaders.order import merge_states as merge_lanes
from loaders.weight import Weight
from omni_pipeline.core.errors import StateMismatchError
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.topology import Topology
from tests.support.loading import Data, content, make_loader, take
from tests.support.orders import CountingSource
from tests.support.strategies import MemorySource, text_source


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Through JSON, as a checkpoint does."""
    found: dict[str, Any] = json.loads(json.dumps(state))
    return found


def make_order(
    sources: Sequence[MemorySource],
    *,
    lanes: Iterable[int] | None = None,
    weights: dict[str, Weight] | None = None,
    state: dict[str, Any] | None = None,
    **changes: Any,
) -> Order:
    values: dict[str, Any] = {"lanes": 4, "packs_per_step": 4, "seq_len": 100, "look_ahead": 4}
    config = OrderConfig(**(values | changes))
    order = Order(
        config,
        sources=sources,
        weights=weights or {source.name: 1.0 for source in sources},
        seed=0,
        lanes=range(config.lanes) if lanes is None else lanes,
    )
    if state is not None:
        order.load_state_dict(plain(state))
    return order


def steps_of(order: Order, steps: range) -> list[list[Pack]]:
    return [order.next_step(step) for step in steps]


def samples_of(steps: Iterable[Iterable[Pack]]) -> Counter[Any]:
    return Counter(sample.id for packs in steps for pack in packs for sample in pack.samples)


def resumed(data: Data, quarantine: Path, state: dict[str, Any], **options: Any) -> OmniLoader:
    loader = make_loader(data, quarantine=quarantine, **options)
    loader.load_state_dict(plain(state))
    return loader


def test_a_second_resume_goes_on_like_the_first(good: Data, quarantine: Path) -> None:
    """Row 74: run 3, save, resume, run 3, save, resume: the second resume began from zero."""
    unbroken = take(make_loader(good, quarantine=quarantine), 9)
    state = make_loader(good, quarantine=quarantine).state_dict()
    found: list[Any] = []
    for _ in range(3):
        with resumed(good, quarantine, state) as loader:
            found += [content(next(loader)) for _ in range(3)]
            state = loader.state_dict()
    assert found == unbroken


def test_the_buffer_is_saved_as_references_and_loses_and_repeats_nothing() -> None:
    """Row 75: a buffer of 100, saved after 20 samples: about a buffer was lost or came twice."""
    sources = [text_source("text", [300], [100])]
    unbroken = make_order(sources, look_ahead=100, epochs=1, lanes=[2])
    packs = steps_of(unbroken, range(100))
    first = make_order(sources, look_ahead=100, epochs=1, lanes=[2])
    head = steps_of(first, range(20))
    state = plain(first.state_dict())
    # Lane 2 has 75 samples: 20 are given, all others wait in the buffer.
    assert len(state["2"]["buffer"]) == 55
    assert all(name == "text" and isinstance(place, int) for name, place in state["2"]["buffer"])
    second = make_order(sources, look_ahead=100, epochs=1, lanes=[2], state=state)
    tail = steps_of(second, range(20, 100))
    assert head + tail == packs
    assert sorted(samples_of(head + tail).values()) == [1] * 75


def test_a_state_taken_just_after_a_resume_is_complete(good: Data, quarantine: Path) -> None:
    """Row 76: four workers, two batches, a save: the state lacked workers that had not answered yet."""
    with make_loader(good, quarantine=quarantine, num_workers=4) as loader:
        next(loader), next(loader)
        saved = loader.state_dict()
    with resumed(good, quarantine, saved, num_workers=4) as loader:
        assert loader.state_dict() == saved, "before any batch"
        assert set(saved["lanes"]) == {"0", "1", "2", "3"}
        following = content(next(loader))
        after_one = loader.state_dict()
    with resumed(good, quarantine, saved) as loader:
        assert content(next(loader)) == following
        assert loader.state_dict() == {**after_one, "saved_with": loader.state_dict()["saved_with"]}


@pytest.mark.parametrize("epochs", [2, None])
def test_a_state_of_the_end_of_an_epoch_starts_the_next_one(epochs: int | None) -> None:
    """Row 77: saved after the last batch of an epoch: the next epoch was skipped."""
    sources = [text_source("text", [8], [100])]
    options: dict[str, Any] = {"look_ahead": 1, "epochs": epochs}
    order = make_order(sources, **options)
    first_epoch = steps_of(order, range(2))
    state = plain(order.state_dict())
    again = make_order(sources, state=state, **options)
    assert not again.exhausted
    second_epoch = steps_of(again, range(2, 4))
    assert samples_of(first_epoch) == samples_of(second_epoch)
    assert sorted(samples_of(second_epoch).values()) == [1] * 8
    assert second_epoch == steps_of(order, range(2, 4))
    assert again.exhausted == (epochs == 2)


def test_no_counter_of_the_state_ever_goes_back(good: Data, quarantine: Path) -> None:
    """Row 79: two preemptions in one epoch: counters began again, so positions came twice."""
    state = make_loader(good, quarantine=quarantine).state_dict()
    before = [0] * len(counters(state))
    for _ in range(4):
        with resumed(good, quarantine, state) as loader:
            next(loader)
            state = loader.state_dict()
        now = counters(state)
        assert all(new >= old for old, new in zip(before, now, strict=True))
        assert now != before
        before = now
    with make_loader(good, quarantine=quarantine) as loader:
        for _ in range(4):
            next(loader)
        assert loader.state_dict() == state


def counters(state: dict[str, Any]) -> list[int]:
    """Step, and per lane its packs, its tokens and its position in every source."""
    found = [state["step"]]
    for lane in state["lanes"].values():
        found += [lane["number"], lane["tokens"], *(saved["position"] for saved in lane["sources"].values())]
    return found


def test_every_rank_gets_its_own_lanes_and_no_state_after_the_start(good: Data, quarantine: Path) -> None:
    """Row 80: the state of rank 0 was given to all, or loaded after workers had begun to read."""
    two = Topology(2, replicas_per_group=1)
    loaders = [make_loader(good, quarantine=quarantine, topology=two, rank=rank) for rank in range(2)]
    for loader in loaders:
        next(loader)
    states = [loader.state_dict() for loader in loaders]
    following = [content(next(loader))[:-1] for loader in loaders]
    assert following[0] != following[1]
    with pytest.raises(RuntimeError, match="load into a fresh loader"):
        loaders[1].load_state_dict(states[1])
    for loader in loaders:
        loader.close()
    merged = merge_states(states)
    for rank in range(2):
        with resumed(good, quarantine, merged, topology=two, rank=rank) as loader:
            assert content(next(loader))[:-1] == following[rank]
    other = make_loader(good, quarantine=quarantine, topology=two, rank=1)
    with other, pytest.raises(StateMismatchError, match="state has no lanes 1, 3; it has 2 lanes"):
        other.load_state_dict(states[0])


def test_fewer_ranks_take_over_the_positions_of_all_or_refuse() -> None:
    """Row 81: saved on four ranks, loaded on two: the positions of two ranks were dropped in silence."""
    sources = [text_source("text", [50, 31], [40, 70, 20])]
    whole = make_order(sources)
    four = [
        make_order(sources, lanes=lanes_of_group(group, 4, Topology(4, replicas_per_group=1)))
        for group in range(4)
    ]
    for step in range(3):
        assert [pack for order in four for pack in order.next_step(step)] == whole.next_step(step)
    states = [order.state_dict() for order in four]
    halves = [lanes_of_group(group, 4, Topology(2, replicas_per_group=1)) for group in range(2)]
    for lanes in halves:
        with pytest.raises(StateMismatchError, match="state has no lanes"):
            make_order(sources, lanes=lanes, state=merge_lanes(states[:2]))
    two = [make_order(sources, lanes=lanes, state=merge_lanes(states)) for lanes in halves]
    for step in range(3, 6):
        packs = [pack for order in two for pack in order.next_step(step)]
        assert sorted(packs, key=lambda pack: pack.lane) == whole.next_step(step)


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_a_weighted_mixture_resumes_at_any_topology(num_groups: int) -> None:
    """Row 83: a weighted mixture, or more than one node: resume hung or failed."""
    sources = [text_source("a", [70], [40, 9]), text_source("b", [3], [25]), text_source("c", [30, 30], [77])]
    weights: dict[str, Weight] = {"a": 0.5, "b": 0.2, "c": 0.3}
    whole = make_order(sources, weights=weights)
    steps_of(whole, range(5))
    state = whole.state_dict()
    topology = Topology(num_groups, replicas_per_group=1)
    parts = [
        make_order(sources, weights=weights, lanes=lanes_of_group(group, 4, topology), state=state)
        for group in range(num_groups)
    ]
    for step in range(5, 8):
        packs = [pack for order in parts for pack in order.next_step(step)]
        assert sorted(packs, key=lambda pack: pack.lane) == whole.next_step(step)


def test_a_resume_at_step_ten_thousand_reads_the_buffer_and_no_more() -> None:
    """Row 85: resume by replay: hours for a run of 10,000 steps, then killed."""
    source = CountingSource("text", [1000, 500], text_source("", [1], [40, 70, 20]).segments)
    options: dict[str, Any] = {"lanes": [0], "shuffle_block": 16}
    order = make_order([source], **options)
    saved: dict[int, dict[str, Any]] = {}
    expected: dict[int, list[Pack]] = {}
    begin = time.process_time()
    for step in range(10_001):
        if step in (10, 10_000):
            saved[step] = plain(order.state_dict())
        packs = order.next_step(step)
        if step in saved:
            expected[step] = packs
    replay_s = time.process_time() - begin
    spent = {}
    for step, state in saved.items():
        fresh = make_order([source], **options)
        source.looked_at.clear()
        begin = time.process_time()
        fresh.load_state_dict(state)
        assert sum(source.looked_at) == len(state["0"]["buffer"]) <= 4
        assert fresh.next_step(step) == expected[step]
        spent[step] = time.process_time() - begin
    assert spent[10_000] < replay_s / 50
    assert len(json.dumps(saved[10_000])) < len(json.dumps(saved[10])) + 40


def test_no_worker_and_no_global_generator_shows_in_a_batch(good: Data, quarantine: Path) -> None:
    """Row 86: four workers with one numpy seed: the same augmentation in each of them."""
    found = []
    for seed, num_workers in ((1, 0), (2, 4)):
        np.random.seed(seed)
        random.seed(seed)
        before = (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
        found.append(take(make_loader(good, quarantine=quarantine, num_workers=num_workers), 4))
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]
    assert found[0] == found[1]
    assert len({repr(item[0]) for item in found[0]}) == 4, "every step has another plan"


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_weights_follow_the_step_of_the_run_not_the_calls_of_a_rank_and_survive_a_resume(
    num_groups: int,
) -> None:
    """Row 88: weights by step, 100 then 10 then 0, on any number of ranks, also after a resume."""
    sources = [text_source("fades", [500], [10]), text_source("stays", [500], [10])]
    fades: Weight = ((0, 100), (4, 100), (5, 10), (9, 10), (10, 0))
    weights: dict[str, Weight] = {"fades": fades, "stays": 10}
    topology = Topology(num_groups, replicas_per_group=1)
    lanes = [lanes_of_group(group, 4, topology) for group in range(num_groups)]
    options: dict[str, Any] = {"look_ahead": 1, "weights": weights}
    parts = [make_order(sources, lanes=own, **options) for own in lanes]
    counts = []
    for step in range(13):
        if step == 7:
            state = merge_lanes([order.state_dict() for order in parts])
            parts = [make_order(sources, lanes=own, state=state, **options) for own in lanes]
        packs = [pack for order in parts for pack in order.next_step(step)]
        counts.append(Counter(sample.source for sample in samples_of([packs]).elements()))
    early, middle, late = (sum(counts[a:b], Counter()) for a, b in ((0, 5), (5, 10), (11, 13)))
    # Per lane at most one sample off, at each of the two changes.
    assert abs(early["fades"] - early.total() * 100 / 110) <= 8
    assert abs(middle["fades"] - middle.total() * 10 / 20) <= 8
    assert set(late) == {"stays"}
    whole = make_order(sources, **options)
    assert counts == [
        Counter(sample.source for sample in samples_of([whole.next_step(step)]).elements())
        for step in range(13)
    ]
