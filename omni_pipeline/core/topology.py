"""Which rank is what: a pure map between ranks, replicas and groups. Reads no environment.

Axes from fastest to slowest: tp, cp, dp, pp; so tensor- and context-parallel ranks are neighbours on a node
and pipeline stages are far apart. A replica is the tp x cp x pp ranks that hold one copy of the LLM; a group
is a run of consecutive replicas that balance together. Every answer costs as much as it is long, whatever
the size of the world: planning asks for them in each step.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from omni_pipeline.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Topology:
    """The layout of a run.

    Args:
        world_size: Number of ranks.
        tp: Tensor-parallel degree.
        cp: Context-parallel degree.
        pp: Pipeline stages.
        replicas_per_group: Replicas that balance together; 0 means all.
        ranks_per_node: Consecutive ranks on one machine, equal on all; 0 means that one machine holds all.

    Raises:
        ConfigError: The degrees do not divide the world size, the groups do not divide the replicas, or the
            nodes do not divide the ranks.
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    replicas_per_group: int = 0
    ranks_per_node: int = 0

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.world_size % self.ranks_per_replica:
            raise ConfigError(
                f"world size {self.world_size} is not a multiple of tp x cp x pp = {self.ranks_per_replica}",
                fix="start another number of ranks, or change llm.parallel",
            )
        if self.replicas_per_group and self.num_replicas % self.replicas_per_group:
            raise ConfigError(
                f"{self.num_replicas} replicas do not divide into groups of {self.replicas_per_group}",
                fix="change balance.group or the number of ranks",
            )
        if self.ranks_per_node < 0:
            raise ConfigError(
                f"{self.ranks_per_node} ranks per node, must be at least 1, or 0 for a single node",
                fix="give the number of ranks that one machine runs",
            )
        if self.num_nodes > 1 and self.world_size % self.ranks_per_node:
            raise ConfigError(
                f"{self.world_size} ranks do not divide into nodes of {self.ranks_per_node}",
                fix="start the same number of ranks on every node",
            )

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that hold one copy of the LLM."""
        return self.tp * self.cp * self.pp

    @property
    def num_replicas(self) -> int:
        """Copies of the LLM (the data-parallel degree)."""
        return self.world_size // self.ranks_per_replica

    @property
    def num_groups(self) -> int:
        """Groups that plan and balance independently."""
        return self.num_replicas // (self.replicas_per_group or self.num_replicas)

    @property
    def num_nodes(self) -> int:
        """Machines that the run uses."""
        return -(-self.world_size // self.ranks_per_node) if self.ranks_per_node else 1

    def replica_of(self, rank: int) -> int:
        """Return the replica that ``rank`` is part of."""
        return rank // (self.tp * self.cp) % self.num_replicas

    def group_of(self, rank: int) -> int:
        """Return the group that ``rank`` balances with."""
        return self.replica_of(rank) // (self.num_replicas // self.num_groups)

    def replicas_of_group(self, group: int) -> tuple[int, ...]:
        """Return the replicas of ``group``, ascending."""
        return tuple(self._replicas(group))

    def ranks_of_replica(self, replica: int) -> tuple[int, ...]:
        """Return all ranks of ``replica``, ascending."""
        if not 0 <= replica < self.num_replicas:
            raise ValueError(f"there is no replica {replica}: the layout has {self.num_replicas}")
        return self._ranks(range(replica, replica + 1))

    def ranks_of_group(self, group: int) -> tuple[int, ...]:
        """Return all ranks of ``group``, ascending."""
        return self._ranks(self._replicas(group))

    def node_of(self, rank: int) -> int:
        """Return the machine that ``rank`` runs on."""
        return rank // self.ranks_per_node if self.ranks_per_node else 0

    def nodes_of_group(self, group: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of ``group`` by machine, ascending; machines without any are left out."""
        return tuple(tuple(ranks) for _, ranks in itertools.groupby(self.ranks_of_group(group), self.node_of))

    def rails_of_group(self, group: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of ``group`` with equal places in its nodes, by place.

        None if the group lies in one node, or has more ranks in one node than in another.
        """
        nodes = self.nodes_of_group(group)
        if len(nodes) == 1 or len({len(ranks) for ranks in nodes}) > 1:
            return ()
        return tuple(zip(*nodes, strict=True))

    def row_owners(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of pipeline stage 0 of ``replica``, which own its sequence positions, in order."""
        return self.ranks_of_replica(replica)[: self.tp * self.cp]

    def _replicas(self, group: int) -> range:
        if not 0 <= group < self.num_groups:
            raise ValueError(f"there is no group {group}: the layout has {self.num_groups}")
        size = self.num_replicas // self.num_groups
        return range(group * size, (group + 1) * size)

    def _ranks(self, replicas: range) -> tuple[int, ...]:
        """Ranks of consecutive replicas: one run per pipeline stage, so the cost is that of the answer."""
        width, per_stage = self.tp * self.cp, self.world_size // self.pp
        return tuple(
            stage * per_stage + rank
            for stage in range(self.pp)
            for rank in range(replicas.start * width, replicas.stop * width)
        )
