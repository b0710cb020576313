"""The same samples in buckets and in packs have the same losses, all the way from shards to the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from loaders.bucketing_config import BucketingConfig
from loaders.decode.text import ByteTokenizer
from omni_pipeline.core.batch import Batch
from omni_pipeline.core.topology import Topology
from tests.support.loading import SIZES, make_data, make_loader
from tests.support.ranks import run_ranks
from trainer.colocation import colocate
from trainer.config import ModelConfig
from trainer.evaluation import EvalSums, evaluate
from trainer.model.omni import build_model
from trainer.parallel.mesh import make_rank_groups, pick_device

SOURCES = ("captions", "talks")
BUCKETS = BucketingConfig(boundaries=(24, 40))


def _evaluate(rank: int, folder: Path, topology: Topology) -> tuple[dict[str, EvalSums], ...]:
    """Return the sums over all samples in packs, and in buckets."""
    data = make_data(folder / f"data-{rank}", broken=False, num_captions=9)
    model = colocate(
        build_model(ModelConfig(size="tiny", sizes=SIZES), seed=3),
        groups=make_rank_groups(topology, device=pick_device()),
        parallel={},
        precision="fp32",
    )
    found = []
    for bucketing in (None, BUCKETS):
        quarantine = folder / f"quarantine-{rank}.jsonl"
        loader = make_loader(
            data,
            quarantine=quarantine,
            topology=topology,
            rank=rank,
            epochs=1,
            order_settings={"bucketing": bucketing},
        )
        paddings: list[float] = []
        with loader:
            batches = _noting_padding(loader, paddings)
            eos = ByteTokenizer.special.eos
            found.append(evaluate(model, batches, sources=SOURCES, eos=eos, settings={}))
        assert any(paddings) == (bucketing is not None)
    return tuple(found)


def _noting_padding(batches: Iterable[Batch], paddings: list[float]) -> Iterator[Batch]:
    for batch in batches:
        paddings.append(batch.plan.padding)
        yield batch


@pytest.mark.parametrize("topology", [Topology(1), Topology(2), Topology(2, replicas_per_group=1)])
def test_samples_in_buckets_have_the_losses_that_they_have_in_packs(
    tmp_path: Path, topology: Topology
) -> None:
    results = run_ranks(topology.world_size, _evaluate, args=(tmp_path, topology))
    for packed, bucketed in results:
        for source in SOURCES:
            one, other = packed[source], bucketed[source]
            assert other.num_labels == one.num_labels > 20
            assert other.num_judged == one.num_judged
            assert other.num_correct == one.num_correct
            assert other.loss_sum == pytest.approx(one.loss_sum, rel=1.3e-6)
