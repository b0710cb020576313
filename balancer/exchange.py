"""Which way rows travel: the traffic of each kind of exchange, its modelled time, and the quickest kind.

An exact all-to-all moves least, but a rank sends up to as many messages as the group has other ranks. A
summed buffer moves every row to everyone in a number of messages that grows with the logarithm of the group
(recursive doubling; Thakur, Rabenseifner and Gropp 2005). Two hops send one message to each node instead of
one to each rank, and carry a row twice. So many rows favour the first, few rows in a large group the others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from balancer.cost import CostModel
from balancer.nodes import GroupNodes
from balancer.partition import IntArray
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import EXACT, ExchangeKind

ExchangeSetting = Literal["auto", "exact", "symmetric", "two_level"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the busiest rank of a group does in one exchange, in one direction.

    Args:
        num_rows: Rows inside its node, the larger of those sent and received.
        num_messages: Messages there.
        num_rows_network: Rows between nodes.
        num_messages_network: Messages there.
        total_rows: Rows of the whole group that change rank.
    """

    num_rows: int
    num_messages: int
    num_rows_network: int
    num_messages_network: int
    total_rows: int


@dataclass(frozen=True)
class ExchangePricer:
    """Prices the exchanges of one group; the same on every member.

    Members are the ranks of the group, numbered from 0. Rows that stay on their rank cost nothing.

    Args:
        cost_model: Seconds of traffic.
        nodes: The members by node.
        setting: The kind to use, or ``"auto"``: the quickest, the first of equals in the order of
            ``ExchangeKind``.

    Raises:
        ConfigError: ``setting`` asks for two hops in a group without rails.
    """

    cost_model: CostModel
    nodes: GroupNodes
    setting: ExchangeSetting = "auto"

    def __post_init__(self) -> None:
        if self.setting == "two_level" and not self.nodes.has_rails:
            counts = ", ".join(map(str, self.nodes.counts))
            nodes = "node" if len(self.nodes.counts) == 1 else "nodes"
            raise ConfigError(
                f"balance.exchange is 'two_level', and a group has {counts} ranks in its {nodes}",
                fix="use balance.exchange = 'auto', or a balance.group of several whole nodes",
            )

    @functools.cached_property
    def kinds(self) -> tuple[ExchangeKind, ...]:
        """Kinds that may be chosen."""
        if self.setting != "auto":
            return (self.setting,)
        return ("exact", "symmetric", "two_level") if self.nodes.has_rails else ("exact", "symmetric")

    def choose(self, maker: IntArray, owner: IntArray, rows: IntArray) -> tuple[ExchangeKind, float]:
        """Return the kind for these rows and its seconds, there and back.

        Args:
            maker: int64 [runs]; the member that makes each run of rows.
            owner: int64 [runs]; the member that owns it.
            rows: int64 [runs]; its length.
        """
        away = maker != owner
        if not away.any():
            return (EXACT if self.setting == "auto" else self.setting), 0.0
        moves = maker[away], owner[away], rows[away]
        priced = [(self._seconds(kind, self.traffic(kind, *moves)), kind) for kind in self.kinds]
        seconds, kind = min(priced, key=lambda pair: pair[0])
        return kind, seconds

    def seconds(self, kind: ExchangeKind, maker: IntArray, owner: IntArray, rows: IntArray) -> float:
        """Return the seconds of an exchange of ``kind``, there and back; arguments as ``choose``."""
        if not (maker != owner).any():
            return 0.0
        return self._seconds(kind, self.traffic(kind, maker, owner, rows))

    def traffic(self, kind: ExchangeKind, maker: IntArray, owner: IntArray, rows: IntArray) -> Traffic:
        """Return what the busiest rank does in an exchange of ``kind``; arguments as ``choose``."""
        node, num_members = self.nodes.node, len(self.nodes.node)
        total_rows = int(rows[maker != owner].sum())
        if kind == "symmetric":
            # Up and down a tree over the ranks of a node, and over the nodes.
            steps = [
                2 * (count - 1).bit_length() for count in (max(self.nodes.counts), len(self.nodes.counts))
            ]
            # The node with the fewest members has the fewest ports.
            carried = -(-total_rows // min(self.nodes.counts)) if steps[1] else 0
            return Traffic(0, steps[0], carried, steps[1], total_rows)
        if kind == "two_level":
            relay = self.nodes.relay(maker, owner)
            near = _busiest(maker, relay, rows, num_members)
            far = _busiest(relay, owner, rows, num_members)
        elif len(self.nodes.counts) == 1:
            near, far = _busiest(maker, owner, rows, num_members), (0, 0)
        else:
            same = node[maker] == node[owner]
            near = _busiest(maker[same], owner[same], rows[same], num_members)
            far = _busiest(maker[~same], owner[~same], rows[~same], num_members)
        return Traffic(*near, *far, total_rows)

    def _seconds(self, kind: ExchangeKind, traffic: Traffic) -> float:
        return self.cost_model.exchange_cost(
            kind,
            num_rows=traffic.num_rows,
            num_messages=traffic.num_messages,
            num_rows_network=traffic.num_rows_network,
            num_messages_network=traffic.num_messages_network,
            total_rows=traffic.total_rows,
        )


def _busiest(sender: IntArray, receiver: IntArray, rows: IntArray, num_members: int) -> tuple[int, int]:
    """Return the most rows and the most messages that one member sends or receives."""
    away = sender != receiver
    if not away.all():
        sender, receiver, rows = sender[away], receiver[away], rows[away]
    if not len(rows):
        return 0, 0
    links = np.unique(sender * num_members + receiver)
    most_rows = max(int(np.bincount(end, weights=rows).max()) for end in (sender, receiver))
    ends = links // num_members, links % num_members
    most_messages = max(int(np.bincount(end).max()) for end in ends)
    return most_rows, most_messages
