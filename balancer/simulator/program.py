"""What ranks do in a step, as data: operations, the ranks that take part, and a program per rank.

A program is what a host would issue to a device: operations in order, each on a stream, and waits. An
operation on the compute stream starts when the one before it ended. One on another stream (a collective, a
message) is issued and forgotten: it starts when the compute issued before it and the operation before it on
its own stream have ended, and runs beside later compute until a ``Wait`` for it. These are the rules of
CUDA streams and of torch's process groups, whose every communicator has a stream of its own; so exchanges,
collectives of parameters and messages between stages overlap compute only where a program says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Name: TypeAlias = tuple[str | int, ...]
"""Identity of an operation, as its members know it: what, which microbatch, whose."""

Kind = Literal["encoder", "llm", "exchange", "gather", "reduce", "message", "optimizer"]
"""What an operation is, for sums: two kinds of compute, rows travelling, FSDP collectives of parameters and
of gradients, activations between stages, the update."""

COMPUTE = "compute"
COMPUTE_KINDS: tuple[Kind, ...] = ("encoder", "llm", "optimizer")


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one rank, or of several ranks together: all start together and end together.

    Args:
        name: Unique in the step; equal on all members.
        kind: What it counts as.
        seconds: From the moment that the last member is ready.
        members: Ranks that take part, ascending; each has it once in its program.
        stream: Of each member.
    """

    name: Name
    kind: Kind
    seconds: float
    members: tuple[int, ...]
    stream: str = COMPUTE


@dataclass(frozen=True, slots=True)
class Wait:
    """The compute of a rank goes on when an operation has ended: one of its own, or a message to it.

    Args:
        name: The operation, which may be of ranks other than the one that waits.
    """

    name: Name


@dataclass(frozen=True, slots=True)
class Program:
    """What some ranks do in a step.

    Args:
        ranks: One rank, or some that do the same at the same time because they take part in the same
            operations throughout; they are simulated once.
        entries: Operations and waits in the order of issue.
    """

    ranks: tuple[int, ...]
    entries: Sequence[Op | Wait]
