"""Elastic resume: saved on N ranks, continued on M, again and again: the packs of the unbroken run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.reorder import lanes_of_group
from loaders.fitting import PackSizes
from loaders.loader import merge_states as merge_loader_states
from loaders.order import Order, OrderConfig, SampleSource, merge_states
from loaders.weight import Weight, WeightTable
from omni_pipeline.core.batch import Batch
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.topology import Topology
from tests.support.loading import Data, make_loader
from tests.support.strategies import MemorySource, source_sets, text_source

RANKS = (1, 2, 3, 4, 6, 8)
LANES = 12


@dataclass(frozen=True)
class Attempt:
    """One start of a run: how many ranks, replicas that balance together, and steps until it ends."""

    ranks: int
    per_group: int
    steps: int
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def topology(self) -> Topology:
        return Topology(self.ranks, replicas_per_group=self.per_group)


def attempts(*, max_steps: int) -> st.SearchStrategy[Attempt]:
    """Any number of ranks in any groups; no step at all is a run that is saved just after its resume."""

    def with_groups(ranks: int) -> st.SearchStrategy[Attempt]:
        divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
        return st.builds(Attempt, st.just(ranks), st.sampled_from(divisors), st.integers(0, max_steps))

    return st.sampled_from(RANKS).flatmap(with_groups)


def order_config(**changes: Any) -> OrderConfig:
    values: dict[str, Any] = {
        "lanes": LANES, "packs_per_step": 2 * LANES, "seq_len": 300, "look_ahead": 4, "shuffle_block": 4,
        "max_patches": 500, "max_mel_frames": 900, "oversize": "cut",
    }  # fmt: skip
    return OrderConfig(**(values | changes))


@dataclass(frozen=True)
class Run:
    """A run that can be started on any number of ranks."""

    config: OrderConfig
    sources: Sequence[SampleSource]
    weights: dict[str, Weight]

    def order(self, lanes: Iterable[int]) -> Order:
        return Order(self.config, sources=self.sources, weights=self.weights, seed=5, lanes=lanes)

    def unbroken(self, steps: int) -> tuple[list[list[Pack]], list[dict[str, Any]]]:
        """Return the packs of every step, and the states before the first step and after each."""
        order = self.order(range(LANES))
        packs, states = [], [plain(order.state_dict())]
        for step in range(steps):
            packs.append(order.next_step(step))
            states.append(plain(order.state_dict()))
        return packs, states

    def broken(self, parts: Iterable[Attempt]) -> Iterator[tuple[list[Pack], dict[str, Any]]]:
        """Yield the packs of every step and the state after it, each attempt resumed from the one before."""
        state: dict[str, Any] | None = None
        step = 0
        for part in parts:
            groups = range(part.topology.num_groups)
            orders = [self.order(lanes_of_group(group, LANES, part.topology)) for group in groups]
            for order in orders if state is not None else []:
                order.load_state_dict(state or {})
            reached = plain(merge_states(order.state_dict() for order in orders))
            assert state in (None, reached), "a resume changes the state"
            for _ in range(part.steps):
                packs = [pack for order in orders for pack in order.next_step(step)]
                reached = plain(merge_states(order.state_dict() for order in orders))
                yield sorted(packs, key=lambda pack: (pack.lane, pack.number)), reached
                step += 1
            state = reached


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Through JSON, as a checkpoint does."""
    found: dict[str, Any] = json.loads(json.dumps(state, allow_nan=False))
    return found


@dataclass(frozen=True)
class GappySource(MemorySource):
    """Of every four rows one is left out."""

    def sizes(self, ordinals: npt.NDArray[np.int64]) -> PackSizes:
        return replace(super().sizes(ordinals), status=(ordinals % 4 == 2).astype(np.int8))


def small_run(**changes: Any) -> Run:
    """Text, a source with fewer samples than lanes, one with gaps, and weights that move."""
    sources = [
        text_source("long", [150, 0, 90], [10, 280, 55, 120, 1000, 33]),
        text_source("tiny", [5], [40, 70]),
        GappySource("gappy", [30, 40], text_source("", [1], [90, 20]).segments),
    ]
    by_tokens = WeightTable(points=((10_000, 0.1), (40_000, 0.6)), over="tokens", curve="cosine")
    weights: dict[str, Weight] = {"long": ((0, 0.8), (4, 0.2)), "tiny": 0.1, "gappy": by_tokens}
    return Run(order_config(**changes), sources, weights)


def check(run: Run, parts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """Compare every global batch and every state; return the states."""
    packs, states = run.unbroken(sum(part.steps for part in parts))
    found = list(run.broken(parts))
    assert [step for step, _ in found] == packs
    assert [state for _, state in found] == states[1:]
    return states


@pytest.fixture(scope="module")
def six_steps() -> tuple[list[list[Pack]], list[dict[str, Any]]]:
    return small_run().unbroken(6)


@pytest.mark.parametrize("saved_on", RANKS)
@pytest.mark.parametrize("resumed_on", RANKS)
def test_saved_on_any_and_resumed_on_any_number_of_ranks(
    saved_on: int, resumed_on: int, six_steps: tuple[list[list[Pack]], list[dict[str, Any]]]
) -> None:
    packs, states = six_steps
    found = list(small_run().broken([Attempt(saved_on, 1, 3), Attempt(resumed_on, 1, 3)]))
    assert found == list(zip(packs, states[1:], strict=True))
    assert all(lane["buffer"] for lane in states[3].values()), "saved with half-filled packs"


@settings(max_examples=25)
@given(
    sources=source_sets(max_sources=3),
    parts=st.lists(attempts(max_steps=2), min_size=2, max_size=5),
    epochs=st.sampled_from([None, 1, 2]),
    data=st.data(),
)
def test_any_chain_of_resumes_gives_the_packs_and_states_of_the_unbroken_run(
    sources: list[MemorySource], parts: list[Attempt], epochs: int | None, data: st.DataObject
) -> None:
    schedules: list[Weight] = [
        1.0,
        0.3,
        ((0, 1.0), (3, 0.1)),
        WeightTable(points=((0, 0.2), (9000, 2.0)), over="tokens"),
    ]
    weights = {source.name: data.draw(st.sampled_from(schedules)) for source in sources}
    run = Run(
        order_config(epochs=epochs, unit=data.draw(st.sampled_from(["tokens", "samples"]))), sources, weights
    )
    try:
        run.order([])
    except ConfigError:
        return  # a source of which nothing fits
    states = check(run, parts)
    assert len(states) == 1 + sum(part.steps for part in parts)


@pytest.mark.parametrize("look_ahead", [1, 16])
def test_resumed_at_every_step_over_the_ends_of_epochs_and_over_the_end_of_the_data(look_ahead: int) -> None:
    run = small_run(epochs=3, look_ahead=look_ahead)
    steps = 0
    whole = run.order(range(LANES))
    while not whole.exhausted:
        whole.next_step(steps)
        steps += 1
    assert steps > 8
    parts = [Attempt(RANKS[step % len(RANKS)], 1, 1) for step in range(steps + 2)]
    states = check(run, parts)
    assert states[steps + 1]["0"]["buffer"] == []
    last = run.order(range(LANES))
    last.load_state_dict(states[steps])
    assert last.exhausted


def test_the_state_stays_as_small_as_it_says_however_far_the_run_is() -> None:
    order = small_run().order(range(LANES))
    sizes = []
    for step in range(60):
        order.next_step(step)
        state = order.state_dict()
        assert all(len(lane["buffer"]) <= 4 and len(lane["sources"]) == 3 for lane in state.values())
        sizes.append(len(json.dumps(state)))
    assert max(sizes) < 1.2 * sizes[2]


def content(batches: Sequence[Batch]) -> dict[Any, Any]:
    """What a global batch trains on, wherever it is: packs, and tokens, labels and media of every sample."""
    found: dict[Any, Any] = {}
    for rank, batch in enumerate(batches):
        packs = batch.plan.packs
        found |= {("pack", pack.lane, pack.number): pack for pack in packs}
        for microbatch in batch.microbatches:
            arrays = (microbatch.tokens, microbatch.labels, microbatch.positions)
            for span in microbatch.spans:
                found["text", span.id] = [array[..., span.start : span.end].tobytes() for array in arrays]
            placed = batch.plan.media_of(rank=rank, microbatch=microbatch.index)
            for encoder, read in microbatch.inputs.items():
                media = [item for item in placed if item.encoder == encoder]
                values = np.split(read.values, np.cumsum(read.grids.prod(axis=1))[:-1])
                for item, value in zip(media, values, strict=len(media) > 0):
                    sample = packs[item.pack].samples[item.sample]
                    found["media", sample.id, item.segment] = value.tobytes()
    return found


def loaded(
    data: Data, quarantine: Path, parts: Iterable[Attempt], **changes: Any
) -> Iterator[tuple[dict[Any, Any], dict[str, Any]]]:
    """Yield what every global batch trains on and the lanes' state after it, over the attempts."""
    state: dict[str, Any] | None = None
    for part in parts:
        options = {**changes, **part.settings}
        loaders = [
            make_loader(data, quarantine=quarantine, topology=part.topology, rank=rank, **options)
            for rank in range(part.ranks)
        ]
        try:
            for loader in loaders if state is not None else []:
                loader.load_state_dict(state or {})
            for _ in range(part.steps):
                batches = [next(loader) for loader in loaders]
                merged = merge_loader_states([batch.state for batch in batches])
                yield content(batches), {"step": merged["step"], "lanes": merged["lanes"]}
            state = plain(merge_loader_states([loader.state_dict() for loader in loaders]))
        finally:
            for loader in loaders:
                loader.close()


def unbroken(data: Data, quarantine: Path, steps: int, **changes: Any) -> list[Any]:
    return list(loaded(data, quarantine, [Attempt(1, 1, steps)], **changes))


def test_loaders_on_any_number_of_ranks_and_groups_train_on_the_same_bytes_over_many_resumes(
    good: Data, quarantine: Path
) -> None:
    worlds = [(8, 2), (3, 1), (1, 1), (6, 3), (2, 2), (4, 1), (8, 8), (1, 1), (6, 1), (4, 2), (2, 1), (3, 3)]
    parts = [Attempt(ranks, per_group, 1 + number % 2) for number, (ranks, per_group) in enumerate(worlds)]
    parts.insert(4, Attempt(4, 2, 0))  # saved just after its resume
    expected = unbroken(good, quarantine, sum(part.steps for part in parts))
    assert sum(kind == "media" for found, _ in expected for kind, *_ in found) > 20
    assert list(loaded(good, quarantine, parts)) == expected


def test_other_workers_and_prefetch_after_a_resume_change_nothing(good: Data, quarantine: Path) -> None:
    parts = [
        Attempt(2, 1, 2, {"num_workers": 1, "prefetch_steps": 3}),
        Attempt(1, 1, 2, {"num_workers": 2, "prefetch_steps": 1, "prefetch_bytes": 1}),
        Attempt(3, 3, 2, {"num_workers": 0, "prefetch_steps": 4}),
    ]
    assert list(loaded(good, quarantine, parts)) == unbroken(good, quarantine, 6)


@settings(max_examples=6)
@given(parts=st.lists(attempts(max_steps=2), min_size=2, max_size=4))
def test_any_chain_of_loaders_over_the_end_of_the_data_sees_every_sample_as_the_unbroken_run(
    parts: list[Attempt], good: Data, tmp_path_factory: pytest.TempPathFactory
) -> None:
    quarantine = tmp_path_factory.mktemp("run") / "quarantine.jsonl"
    expected = unbroken(good, quarantine, sum(part.steps for part in parts), epochs=1)
    assert list(loaded(good, quarantine, parts, epochs=1)) == expected
