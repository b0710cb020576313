"""How good the shuffle is, against one permutation of all samples, and what it costs in open shards."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from loaders.lanes import LaneOrder
from loaders.order import Order
from loaders.order_config import OrderConfig
from omni_pipeline.core.sample import SampleId
from omni_pipeline.core.seeding import generator
from tests.support.strategies import text_source

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BATCH = 256


@dataclass(frozen=True)
class Case:
    """A source of equal shards, and how it is read."""

    num_shards: int
    shard_size: int
    lanes: int = 64
    shuffle_block: int = 1024

    @property
    def num_samples(self) -> int:
        return self.num_shards * self.shard_size

    @property
    def blocks_per_run(self) -> float:
        """At 1 or less a lane permutes all of its run."""
        return self.num_samples / self.lanes / self.shuffle_block

    def epochs(self, num_epochs: int) -> list[IntArray]:
        """The samples of each epoch in the order of training: all lanes side by side."""
        sizes = [self.shard_size] * self.num_shards
        order = LaneOrder(sizes, name="s", lanes=self.lanes, seed=3, shuffle_block=self.shuffle_block)
        return [walk(order, self.lanes, epoch) for epoch in range(num_epochs)]


CASES = [Case(64, 1000), Case(1, 64_000), Case(64, 4000), Case(256, 1000)]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.num_shards}x{case.shard_size}")


def walk(order: LaneOrder, lanes: int, epoch: int) -> IntArray:
    """All samples of one epoch, one of every lane in turn."""
    columns = []
    for lane in range(lanes):
        length = order.run_length(lane)
        position, found = epoch * length, []
        while position < (epoch + 1) * length:
            first, ordinals = order.block(lane, position)
            found.append(ordinals)
            position = first + len(ordinals)
        columns.append(np.concatenate(found))
    assert len({len(column) for column in columns}) == 1, "the cases have equal runs"
    return np.stack(columns, axis=1).reshape(-1)


def times(seen: IntArray) -> IntArray:
    """When each sample is seen, by ordinal."""
    found = np.empty(len(seen), dtype=np.int64)
    found[seen] = np.arange(len(seen))
    return found


def meeting(seen: IntArray) -> float:
    """Share of neighbours of the unshuffled order that are seen less than a batch apart."""
    return float((np.abs(np.diff(times(seen))) < BATCH).mean())


def spread(seen: IntArray, values: FloatArray) -> float:
    """Variance of the mean of ``values`` over a batch, in times of that of independent draws."""
    whole = len(seen) // BATCH * BATCH
    means = values[seen][:whole].reshape(-1, BATCH).mean(axis=1)
    return float(((means - values.mean()) ** 2).mean() / (values.var() / BATCH))


def features(case: Case) -> dict[str, FloatArray]:
    """What real data may depend on: place in the source, place in the shard, and the shard as such."""
    ordinals = np.arange(case.num_samples)
    of_shard = generator(1, "feature").random(case.num_shards)
    found = {
        "place in the source": ordinals / case.num_samples,
        "place in the shard": ordinals % case.shard_size / case.shard_size,
    }
    return found if case.num_shards == 1 else found | {"shard": of_shard[ordinals // case.shard_size]}


@each_case
def test_neighbours_meet_no_oftener_than_stated(case: Case) -> None:
    (seen,) = case.epochs(1)
    full = generator(0, "full").permutation(case.num_samples)
    assert np.array_equal(np.sort(seen), np.arange(case.num_samples))
    assert meeting(seen) <= 1.1 * max(1.0, case.blocks_per_run) * meeting(full)


@each_case
def test_the_mean_of_a_batch_varies_as_after_a_full_shuffle_or_as_stated(case: Case) -> None:
    epochs = case.epochs(12)
    # As if of the samples that a lane gives to a batch only one counted.
    limit = 1.2 if case.blocks_per_run <= 1 else BATCH / case.lanes
    full = generator(0, "full").permutation(case.num_samples)
    for name, values in features(case).items():
        assert spread(full, values) == pytest.approx(1.0, abs=0.35), "the yardstick itself"
        found = float(np.mean([spread(seen, values) for seen in epochs]))
        assert found <= limit, name


@each_case
def test_the_order_does_not_follow_the_source_and_epochs_do_not_follow_each_other(case: Case) -> None:
    found = [times(seen) for seen in case.epochs(5)]
    source = np.arange(case.num_samples)
    pairs = [(source, found[0]), *itertools.pairwise(found), (found[0], found[4])]
    correlations = [float(np.corrcoef(one, other)[0, 1]) for one, other in pairs]
    # What is drawn at random: the place of every sample, or the beginning of every lane.
    num_random = case.num_samples if case.blocks_per_run <= 1 else case.lanes
    assert np.sqrt(np.mean(np.square(correlations))) <= 1 / np.sqrt(num_random), correlations


def stated_limit(shard_sizes: list[list[int]], config: OrderConfig) -> int:
    """The number of shards that one node with all lanes needs open, as in ``loaders.lanes``."""
    per_lane = sum(-(-(config.shuffle_block - 1) // min(sizes)) + 1 for sizes in shard_sizes)
    return config.lanes * (per_lane + config.look_ahead)


def opened(seen: list[SampleId], *, capacity: int) -> int:
    """How often a shard is opened by a node that keeps the ``capacity`` last used ones open."""
    kept: OrderedDict[tuple[str, int], None] = OrderedDict()
    count = 0
    for sample in seen:
        shard = (sample.source, sample.shard)
        count += shard not in kept
        kept[shard] = None
        kept.move_to_end(shard)
        if len(kept) > capacity:
            kept.popitem(last=False)
    return count


def test_with_the_stated_number_of_shards_open_a_node_opens_each_shard_hardly_more_than_once() -> None:
    sizes = [[40] * 300, [25] * 160]
    config = OrderConfig(
        lanes=4, packs_per_step=16, seq_len=300, look_ahead=8, shuffle_block=64, epochs=1, oversize="cut"
    )
    sources = [text_source(name, found, [40, 90, 10, 60]) for name, found in zip("ab", sizes, strict=True)]
    order = Order(config, sources=sources, weights={"a": 3, "b": 1}, seed=3, lanes=range(4))
    seen: list[SampleId] = []
    step = 0
    while not order.exhausted:
        seen += [sample.id for pack in order.next_step(step) for sample in pack.samples]
        step += 1
    num_shards = sum(map(len, sizes))
    assert len(seen) == sum(map(sum, sizes))
    # A shard is cut where a lane's run ends, where it begins its turn, and by the border of a block.
    cuts = config.lanes * len(sizes) * 2
    limit = stated_limit(sizes, config)
    assert limit < num_shards / 3, "else the test says nothing"
    assert opened(seen, capacity=limit) <= num_shards + cuts
    shuffled = [seen[place] for place in generator(0, "full").permutation(len(seen))]
    assert opened(shuffled, capacity=limit) > 10 * num_shards


def test_a_source_of_a_hundred_thousand_shards_is_ready_in_a_few_milliseconds() -> None:
    spent = []
    for number in range(5):
        begin = time.process_time()
        order = LaneOrder([10_000] * 100_000, name=f"s{number}", lanes=64, seed=0, shuffle_block=1024)
        order.block(5, 10**9)
        order.positions_of(10**8, epoch=3)
        spent.append(time.process_time() - begin)
    assert min(spent) < 0.05
