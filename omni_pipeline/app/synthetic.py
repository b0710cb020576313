"""Packs of the published workloads, made by the product's own order from synthetic samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from balancer.simulator.samples import SAMPLES
from balancer.simulator.workloads import Workload
from loaders.fitting import IntArray, PackSizes, sizes_of
from loaders.order import Order, OrderConfig
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Sample, SampleId

NUM_SAMPLES = 8192
"""Samples of each synthetic source; then it begins again, in another order."""


@dataclass(frozen=True)
class SyntheticSource:
    """Samples in memory as a ``SampleSource`` of one shard."""

    name: str
    samples: list[Sample] = field(repr=False)

    @property
    def shard_sizes(self) -> list[int]:
        """One shard of all samples."""
        return [len(self.samples)]

    def sizes(self, ordinals: IntArray) -> PackSizes:
        """Return what these samples take of a pack."""
        return sizes_of([self.samples[ordinal] for ordinal in ordinals.tolist()])

    def sample(self, ordinal: int) -> Sample:
        """Return a sample."""
        return self.samples[ordinal]

    def identify(self, ordinal: int) -> tuple[SampleId, str, str]:
        """Return (id, key, shard) of a sample."""
        sample = self.samples[ordinal]
        return sample.id, sample.key, sample.shard

    def problem(self, ordinal: int) -> str:
        """Never asked: all samples are usable."""
        raise ValueError(f"sample {ordinal} of {self.name!r} is usable")


def num_lanes(workload: Workload) -> int:
    """Return the lanes of a workload: one for each replica."""
    return workload.topology.num_replicas


def workload_packs(
    workload: Workload, mixture: tuple[int, int], *, num_steps: int, seed: int, public_only: bool = False
) -> list[list[Pack]]:
    """Return the packs of the first steps of a workload, by step; best fit at the exact mixture.

    Texts longer than a sequence are cut at its end.

    Args:
        workload: What is trained.
        mixture: (media, text), as in ``MIXTURES``.
        num_steps: Steps wanted.
        seed: Of samples and order.
        public_only: Without the large pictures and long recordings that we assume beside the public sets.
    """
    weights = workload.weights(mixture)
    order = Order(
        OrderConfig(
            lanes=num_lanes(workload),
            packs_per_step=workload.packs_per_step,
            seq_len=workload.seq_len,
            oversize="cut",
        ),
        sources=[
            SyntheticSource(name, SAMPLES[name](NUM_SAMPLES, seed=seed, public_only=public_only))
            for name in weights
        ],
        weights=dict(weights),
        seed=seed,
        lanes=range(num_lanes(workload)),
    )
    return [order.next_step(step) for step in range(num_steps)]
