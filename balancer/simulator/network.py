"""What collectives and messages between ranks take.

Bytes over bandwidth on the slower of the two kinds of link, plus a latency per round. Links inside a node
and between nodes work at once, as the rings and trees of NCCL use them: of what all members gather, a
member receives (n - 1) / n over its fast link, and a node the part that other nodes hold, over the network
ports of the members in it (Patarasuk and Yuan 2009, by level). Rounds are logarithmic (trees; Sanders et
al. 2009). A collective has all links for itself: what two of them would take from each other at the same
time is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from balancer.hardware import HardwareProfile


@dataclass(frozen=True, slots=True)
class Spread:
    """How the members of a collective lie on nodes.

    Args:
        num_ranks: Members.
        num_nodes: Nodes that hold any of them; all hold about as many.
    """

    num_ranks: int
    num_nodes: int

    @property
    def ranks_per_node(self) -> float:
        """Members on a node."""
        return self.num_ranks / self.num_nodes


def spread_of(ranks: Sequence[int], hardware: HardwareProfile) -> Spread:
    """Return how ``ranks`` lie on nodes of consecutive ranks."""
    return Spread(len(ranks), len({rank // hardware.ranks_per_node for rank in ranks}))


def gather_s(
    num_bytes: float, spread: Spread, hardware: HardwareProfile, *, num_collectives: int = 1
) -> float:
    """Return the seconds of all-gathers after which every member holds ``num_bytes``.

    A reduce-scatter of as much takes equally long.

    Args:
        num_bytes: Of all collectives together.
        spread: How the members lie on nodes.
        hardware: The machine.
        num_collectives: One after the other, each with its own latency.
    """
    if spread.num_ranks < 2 or not num_bytes:
        return 0.0
    inside = num_bytes * (spread.num_ranks - 1) / spread.num_ranks / hardware.node_bytes_per_s
    if spread.ranks_per_node <= 1:
        inside = 0.0
    between = num_bytes * (spread.num_nodes - 1) / spread.num_nodes
    between /= spread.ranks_per_node * hardware.network_bytes_per_s
    return max(inside, between) + num_collectives * rounds_s(spread, hardware)


def reduce_all_s(
    num_bytes: float, spread: Spread, hardware: HardwareProfile, *, num_collectives: int = 1
) -> float:
    """Return the seconds of all-reduces of ``num_bytes``: each a reduce-scatter, then an all-gather."""
    return 2 * gather_s(num_bytes, spread, hardware, num_collectives=num_collectives)


def message_s(num_bytes: float, *, same_node: bool, hardware: HardwareProfile) -> float:
    """Return the seconds from the sending of ``num_bytes`` to their arrival."""
    if same_node:
        return num_bytes / hardware.node_bytes_per_s + hardware.node_latency_s
    return num_bytes / hardware.network_bytes_per_s + hardware.network_latency_s


def rounds_s(spread: Spread, hardware: HardwareProfile) -> float:
    """Return the latency of the rounds of one collective."""
    within = (max(1, -(-spread.num_ranks // spread.num_nodes)) - 1).bit_length()
    across = (spread.num_nodes - 1).bit_length()
    return within * hardware.node_latency_s + across * hardware.network_latency_s
