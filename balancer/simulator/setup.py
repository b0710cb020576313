"""A simulated run: layout, machine, models, how parameters are sharded, and what is known of its data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from balancer.cost import CostModel
from balancer.hardware import HardwareProfile
from balancer.layout import SequenceKind
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.topology import Topology


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the ranks that hold equal parameters share them (FSDP; Zhao et al. 2023, arXiv 2304.11277).

    Args:
        dp_shard: Ranks that share one copy; -1: all that hold it. The copies are summed once per step.
        reshard: When whole parameters are freed and gradients summed: in every microbatch (least memory), or
            once per step (least traffic; each rank keeps a whole copy and its gradients).
    """

    dp_shard: int = -1
    reshard: Literal["microbatch", "step"] = "microbatch"

    def ranks_per_copy(self, num_ranks: int, *, what: str) -> int:
        """Return how many of ``num_ranks`` ranks share one copy.

        Raises:
            ConfigError: ``dp_shard`` does not divide them.
        """
        degree = num_ranks if self.dp_shard == -1 else min(self.dp_shard, num_ranks)
        if degree < 1 or num_ranks % degree:
            raise ConfigError(
                f"{what}: {self.dp_shard} ranks per copy do not divide the {num_ranks} that hold parameters",
                fix="choose a divisor, or -1 for all of them",
            )
        return degree


@dataclass(frozen=True, slots=True)
class Profile:
    """What a strategy that decides before it sees the data knows of it: means per pack, seconds of one rank.

    Args:
        encoder_s: Encoding of a pack's media, forward and backward.
        llm_s: The pack in the LLM, forward and backward.
        segment_s: One media segment, forward and backward, by encoder.
    """

    encoder_s: float
    llm_s: float
    segment_s: dict[str, float] = field(default_factory=dict)


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
    """

    topology: Topology
    cost_model: CostModel
    seq_len: int = 0
    sequence: SequenceKind = "contiguous"
    llm: Sharding = Sharding()
    encoder: Sharding = Sharding()
    profile: Profile | None = None

    @property
    def hardware(self) -> HardwareProfile:
        """The machine."""
        return self.cost_model.hardware
