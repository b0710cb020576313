"""How one rank's embedding rows reach the ranks that own their positions: data that the trainer executes.

One idea: a rank *holds* rows, first those that its encoders made, and every hop appends what it brings. A hop
sends any rows held so far; at the end the rank takes its own rows out of all that it holds. Rows that stay
on their rank are taken and never sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

Scope = Literal["group", "node", "rail"]
"""Who takes part in a hop: the balance group; its ranks in this node; its ranks with this rank's place in
their nodes."""


@dataclass(frozen=True, slots=True)
class AllToAll:
    """A hop in which every member sends rows to every other, exactly those that it needs.

    Args:
        scope: The members, in ascending order of their ranks.
        send_rows: int64 [sum(send_splits)]; held rows in sending order, by receiver.
        send_splits: Rows for each member.
        recv_splits: Rows from each member, in the order in which they arrive.
    """

    scope: Scope
    send_rows: IntArray
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]

    @property
    def num_received(self) -> int:
        """Rows that it brings."""
        return sum(self.recv_splits)


@dataclass(frozen=True, slots=True)
class SumBuffer:
    """A hop in which all rows that move in the group get a place in one buffer, summed over the members.

    Every place is written by one member, the others add zero.

    Args:
        num_places: Rows of the buffer, equal on all members of the group.
        send_rows: int64 [sent]; held rows that this rank writes.
        send_places: int64 [sent]; where.
        recv_places: int64 [received]; the places that this rank takes.
    """

    num_places: int
    send_rows: IntArray
    send_places: IntArray
    recv_places: IntArray

    @property
    def scope(self) -> Scope:
        """The members: always the whole group."""
        return "group"

    @property
    def num_received(self) -> int:
        """Rows that it brings."""
        return len(self.recv_places)


Hop = AllToAll | SumBuffer


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The part of one rank in the exchange of one microbatch, within its group.

    The rank's encoder outputs are concatenated by encoder (in the order of the run's encoders), then by
    ``StepPlan.media`` order: its first held rows.

    Args:
        hops: In order; empty where no row of the group moves. All members have the same kinds and scopes.
        take_rows: int64 [taken]; the held rows that are this rank's.
        positions: int64 [taken]; the local sequence position of each, strictly ascending.
    """

    hops: tuple[Hop, ...]
    take_rows: IntArray
    positions: IntArray


def nothing_to_reshard() -> ReshardPlan:
    """Return the plan of a rank in whose group no row exists."""
    return ReshardPlan(hops=(), take_rows=np.zeros(0, dtype=np.int64), positions=np.zeros(0, dtype=np.int64))
