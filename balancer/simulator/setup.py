"""A simulated run: layout, machine, models, how parameters are sharded, and what is known of its data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from balancer.cost import CostModel
from balancer.hardware import HardwareProfile
from balancer.layout import SequenceKind
from balancer.work import media_sizes
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Segment
from omni_pipeline.core.topology import Topology


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the ranks that hold equal parameters share them (FSDP; Zhao et al. 2023, arXiv 2304.11277).

    Args:
        dp_shard: Ranks that share one copy; -1: all that hold it. Strategies differ in how many hold it, so
            the greatest common divisor with these is taken. Copies are summed once per step.
        reshard: When whole parameters are freed and gradients summed: in every microbatch (least memory), or
            once per step (least traffic; each rank keeps a whole copy and its gradients).
    """

    dp_shard: int = -1
    reshard: Literal["microbatch", "step"] = "microbatch"

    def ranks_per_copy(self, num_ranks: int) -> int:
        """Return how many of ``num_ranks`` ranks share one copy."""
        return num_ranks if self.dp_shard == -1 else math.gcd(self.dp_shard, num_ranks)


@dataclass(frozen=True, slots=True)
class Profile:
    """What a strategy that decides before it sees the data knows of it: means over packs, seconds of one
    rank.

    Args:
        encoder_s: Encoding of a pack's media, forward and backward.
        llm_s: The pack in the LLM, forward and backward.
        largest_s: The longest media segment of a pack.
        segment_s: One media segment, by encoder.
        positions: Attention positions of a pack's media, by encoder.
    """

    encoder_s: float
    llm_s: float
    largest_s: float
    segment_s: Mapping[str, float]
    positions: Mapping[str, float]


def profile_of(packs: Sequence[Pack], cost_model: CostModel) -> Profile:
    """Return the means over ``packs``: those of an average mixture, to be used for all mixtures."""
    costs: dict[str, list[float]] = {name: [] for name in cost_model.encoders}
    positions = dict.fromkeys(cost_model.encoders, 0)
    largest = []
    for pack in packs:
        own = [0.0]
        for segment in media_of(pack):
            name = cost_model.encoder_name(segment)
            own.append(cost_model.media_cost(segment))
            costs[name].append(own[-1])
            positions[name] += media_sizes(cost_model.encoders[name], segment.grid).positions
        largest.append(max(own))
    num_packs = max(1, len(packs))
    return Profile(
        encoder_s=sum(map(sum, costs.values())) / num_packs,
        llm_s=sum(cost_model.pack_cost(pack) for pack in packs) / num_packs,
        largest_s=sum(largest) / num_packs,
        segment_s={name: sum(found) / max(1, len(found)) for name, found in costs.items()},
        positions={name: count / num_packs for name, count in positions.items()},
    )


def media_of(pack: Pack) -> list[Segment]:
    """Return the media segments of a pack."""
    return [segment for sample in pack.samples for segment in sample.segments if segment.is_media]


@dataclass(frozen=True)
class Setup:
    """A run to simulate.

    Args:
        topology: Layout of the LLM over all ranks.
        cost_model: Models, machine, and whether activations are computed again.
        seq_len: Positions of every sequence where packs are padded to one length; 0 where they are not.
        sequence: How the ranks of a replica own its positions; see ``balancer.layout``.
        llm: Sharding over the ranks with the same stage and place in tp.
        encoder: Sharding over the ranks that host the encoders.
        profile: What strategies with a fixed part are made for; None: for the step itself (they foresee it).

    Raises:
        ConfigError: Layout and machine differ in the ranks of a node.
    """

    topology: Topology
    cost_model: CostModel
    seq_len: int = 0
    sequence: SequenceKind = "contiguous"
    llm: Sharding = Sharding()
    encoder: Sharding = Sharding()
    profile: Profile | None = None

    def __post_init__(self) -> None:
        per_node = self.hardware.ranks_per_node
        if self.topology.world_size > per_node != self.topology.ranks_per_node:
            raise ConfigError(
                f"the layout has {self.topology.ranks_per_node} ranks per node (0: all on one), the machine "
                f"{self.hardware.name!r} {per_node}",
                fix="give the layout ranks_per_node of the machine, so that plans see the same nodes",
            )

    @property
    def hardware(self) -> HardwareProfile:
        """The machine."""
        return self.cost_model.hardware
