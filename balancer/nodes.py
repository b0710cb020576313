"""The members of a group by node: who is near, who is far, and who stands at whose place."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from balancer.partition import IntArray
from omni_pipeline.core.reshard import Scope
from omni_pipeline.core.topology import Topology


@dataclass(frozen=True)
class GroupNodes:
    """The nodes of a group; members are its ranks, numbered from 0.

    Args:
        node: int64 [members]; which of the group's nodes, from 0.
        place: int64 [members]; its number among the members of its node.
        counts: Members in each node.
    """

    node: IntArray
    place: IntArray
    counts: tuple[int, ...]

    @property
    def has_rails(self) -> bool:
        """Whether there are several nodes with equally many members; see ``Topology.rails_of_group``."""
        return len(self.counts) > 1 and len(set(self.counts)) == 1

    def relay(self, sender: IntArray, receiver: IntArray) -> IntArray:
        """Return the member in the sender's node that has the receiver's place; needs rails."""
        member: IntArray = self._grid[self.node[sender], self.place[receiver]]
        return member

    def members_of(self, scope: Scope, member: int) -> IntArray:
        """Return who takes part in a hop of ``member``, ascending."""
        if scope == "node":
            return np.flatnonzero(self.node == self.node[member])
        if scope == "rail":
            return np.flatnonzero(self.place == self.place[member])
        return np.arange(len(self.node))

    @functools.cached_property
    def _grid(self) -> IntArray:
        grid = np.full((len(self.counts), max(self.counts)), -1, dtype=np.int64)
        grid[self.node, self.place] = np.arange(len(self.node))
        return grid


@functools.lru_cache(maxsize=256)
def group_nodes(topology: Topology, group: int) -> GroupNodes:
    """Return the nodes of a group, remembered: planning asks for them in each step."""
    counts = tuple(len(ranks) for ranks in topology.nodes_of_group(group))
    return GroupNodes(
        node=np.repeat(np.arange(len(counts)), counts),
        place=np.concatenate([np.arange(count) for count in counts]),
        counts=counts,
    )
