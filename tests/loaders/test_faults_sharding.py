"""Known faults of sharding and of the end of an epoch, one test each, in the smallest situation."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from balancer.reorder import lanes_of_group
from loaders.decode.segment import DecodeRequest
from loaders.order import Order, OrderConfig
from loaders.workers import InlineDecoder
from omni_pipeline.core.errors import RankError
from omni_pipeline.core.sample import SampleId
from omni_pipeline.core.topology import Topology
from tests.support.loading import Data, make_captions, make_loader, open_data
from tests.support.ranks import run_ranks
from tests.support.strategies import MemorySource, text_source
from trainer.agreement import Requests, agree
from trainer.parallel.mesh import make_rank_groups

ONE_SAMPLE_PACKS = {"max_samples": 1, "look_ahead": 1}


def orders(topology: Topology, sources: list[MemorySource], **changes: Any) -> list[Order]:
    """One order for each group of a finite run of 8 lanes."""
    values: dict[str, Any] = {"lanes": 8, "packs_per_step": 8, "seq_len": 100, "look_ahead": 4, "epochs": 1}
    config = OrderConfig(**(values | changes))
    return [
        Order(
            config,
            sources=sources,
            weights={source.name: 1.0 for source in sources},
            seed=0,
            lanes=lanes_of_group(group, config.lanes, topology),
        )
        for group in range(topology.num_groups)
    ]


def drain(order: Order) -> list[SampleId]:
    """All samples that an order gives until its end."""
    found: list[SampleId] = []
    for step in itertools.count():
        if order.exhausted:
            return found
        found += [sample.id for pack in order.next_step(step) for sample in pack.samples]
    raise AssertionError("unreachable")


def test_one_shard_feeds_all_ranks_from_the_first_step_on(tmp_path: Path) -> None:
    """Row 65: one shard, four ranks: a split by shards leaves three of them without data."""
    data = make_captions(tmp_path / "data", [8])
    topology = Topology(4, replicas_per_group=1)
    seen: Counter[SampleId] = Counter()
    for rank in range(4):
        with make_loader(
            data,
            quarantine=tmp_path / "q",
            topology=topology,
            rank=rank,
            epochs=1,
            order_settings=ONE_SAMPLE_PACKS,
        ) as loader:
            batches = [next(loader), next(loader)]
            assert next(loader).exhausted
        per_step = [[span.id for item in batch.microbatches for span in item.spans] for batch in batches]
        assert [len(ids) for ids in per_step] == [1, 1]
        seen.update(itertools.chain(*per_step))
    assert sorted(seen.values()) == [1] * 8


def test_a_source_smaller_than_the_lanes_is_given_once_and_the_others_fill_the_packs() -> None:
    """Row 66: three samples for eight workers: an empty slice is legal, the mixture goes on without it."""
    sources = [text_source("tiny", [3], [20]), text_source("large", [400], [20])]
    parts = orders(Topology(8, replicas_per_group=1), sources)
    first = [pack for order in parts for pack in order.next_step(0)]
    assert [pack.num_tokens for pack in first] == [100] * 8
    seen = Counter(sample.id for pack in first for sample in pack.samples)
    seen.update(sample for order in parts for sample in drain(order))
    assert Counter(sample.source for sample in seen) == {"tiny": 3, "large": 400}
    assert set(seen.values()) == {1}


def follow(rank: int, folder: Path, per_group: int, fail_at: int | None) -> tuple[int, list[SampleId], str]:
    """Take batches as the training loop does: no step without the word of all ranks."""
    topology = Topology(2, replicas_per_group=per_group)
    groups = make_rank_groups(topology, device=torch.device("cpu"))
    seen: list[SampleId] = []
    with make_loader(
        open_data(folder, captions="jpg"),
        quarantine=folder / "quarantine.jsonl",
        topology=topology,
        rank=rank,
        epochs=1,
        order_settings={"lanes": 2, "packs_per_step": 2, **ONE_SAMPLE_PACKS},
    ) as loader:
        for step in itertools.count():
            problem = "no room on the disk" if (rank, step) == (1, fail_at) else ""
            batch = None if problem else next(loader)
            try:
                agreement = agree(
                    batch, step=step, settings={}, problem=problem, requests=Requests(), groups=groups
                )
            except RankError as error:
                return step, seen, str(error)
            if not agreement.num_microbatches:
                return step, seen, ""
            seen += [span.id for item in (batch.microbatches if batch else ()) for span in item.spans]
    raise AssertionError("unreachable")


def test_ranks_with_three_and_with_four_batches_stop_at_the_same_step(tmp_path: Path) -> None:
    """Row 67: three batches on one rank, four on the other: the one that leaves alone hangs the other."""
    make_captions(tmp_path / "data", [7])
    results = run_ranks(2, follow, args=(tmp_path / "data", 1, None), timeout_s=60)
    assert [steps for steps, _, _ in results] == [4, 4]
    assert [len(seen) for _, seen, _ in results] == [3, 4]
    assert len({sample for _, seen, _ in results for sample in seen}) == 7


def test_a_pass_over_uneven_shards_sees_every_sample_once_on_two_ranks(tmp_path: Path) -> None:
    """Row 68: evaluation over three shards on two ranks: neither stalls nor counts twice."""
    make_captions(tmp_path / "data", [5, 1, 3])
    for per_group in (1, 2):
        results = run_ranks(2, follow, args=(tmp_path / "data", per_group, None), timeout_s=60)
        assert [steps for steps, _, _ in results] == [5, 5]
        seen = Counter(sample for _, seen, _ in results for sample in seen)
        assert sorted(seen.values()) == [1] * 9


@pytest.mark.parametrize("per_group", [1, 2])
def test_each_rank_decodes_its_own_part_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_group: int
) -> None:
    """Row 69: three shards on two ranks: each rank read everything and kept half of it."""
    data = make_captions(tmp_path / "data", [8, 8, 8])
    decoded: list[str] = []
    submit = InlineDecoder.submit

    def counting(decoder: InlineDecoder, request: DecodeRequest) -> Any:
        decoded.append(f"{request.url} {request.member}")
        return submit(decoder, request)

    monkeypatch.setattr(InlineDecoder, "submit", counting)
    by_rank: list[list[str]] = []
    for rank in range(2):
        decoded.clear()
        run_to_end(data, tmp_path, topology=Topology(2, replicas_per_group=per_group), rank=rank)
        by_rank.append(list(decoded))
    assert Counter(itertools.chain(*by_rank)) == dict.fromkeys({*by_rank[0], *by_rank[1]}, 1)
    assert sum(map(len, by_rank)) == 2 * 24, "a picture and a text of each sample"
    assert all(0.4 < len(part) / 48 < 0.6 for part in by_rank)


def run_to_end(data: Data, folder: Path, *, topology: Topology, rank: int) -> None:
    with make_loader(data, quarantine=folder / "q", topology=topology, rank=rank, epochs=1) as loader:
        while not next(loader).exhausted:
            pass


def test_no_tail_is_dropped_and_what_cannot_be_packed_is_counted() -> None:
    """Row 71: 25 rows on four ranks: an equal split dropped the rest without a word."""
    topology = Topology(4, replicas_per_group=1)
    parts = orders(topology, [text_source("text", [9, 16], [30])])
    seen = [sample for order in parts for sample in drain(order)]
    assert len(seen) == len(set(seen)) == 25
    assert not any(order.drain_dropped() for order in parts)

    too_long = [30] * 24 + [101]
    parts = orders(topology, [text_source("text", [9, 16], too_long)])
    assert len([sample for order in parts for sample in drain(order)]) == 24
    (dropped,) = [item for order in parts for item in order.drain_dropped()]
    assert (dropped.id, dropped.reason) == (SampleId("text", 1, 15), "101 tokens, limit 100 (order.seq_len)")


def test_an_error_on_one_rank_ends_both_and_names_it(tmp_path: Path) -> None:
    """Row 72: 25 rows on two ranks, one raises: the other waited for a coordinator for ever."""
    make_captions(tmp_path / "data", [25])
    results = run_ranks(2, follow, args=(tmp_path / "data", 1, 3), timeout_s=60)
    assert [(steps, len(seen)) for steps, seen, _ in results] == [(3, 3), (3, 3)]
    assert len({error for _, _, error in results}) == 1
    assert "step 3 cannot run" in results[0][2]
    assert "no room on the disk" in results[0][2]
    assert "rank 1" in results[0][2]
