"""Slots and prices to programs: what each rank issues, operation by operation.

Parameters are gathered beside the slot that needs them, layer by layer, so a slot ends when its compute and
its gather have ended; gradients are reduced behind their slot and waited for at the end of the step.
Activations are sent without waiting for the receiver (it has posted its buffer), and the receiver's slot
waits for them. The step ends with the norm of all gradients, which every rank waits for, and the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from balancer.simulator.exchanges import Exchange
from balancer.simulator.network import rounds_s, spread_of
from balancer.simulator.program import Op, Program, Wait
from balancer.simulator.schedule import Slot, Stage
from balancer.simulator.setup import Setup
from balancer.simulator.shards import Shards
from balancer.simulator.work import EncoderPart, LlmWork


@dataclass(frozen=True, slots=True)
class Seat:
    """Ranks that run one list of slots and do the same at the same time.

    Args:
        ranks: Of the run, ascending.
        slots: What they do.
        replica: The LLM replica that they are of; -1: they only encode.
        stage: Their pipeline stage; -1: they only encode.
        team: Ranks of the whole stage of the replica, which run its slots together.
        exchange: Whose rows they exchange, the first part of a key of ``StepWork.exchanges``.
    """

    ranks: tuple[int, ...]
    slots: Stage
    replica: int = -1
    stage: int = -1
    team: tuple[int, ...] = ()
    exchange: int = 0


@dataclass(frozen=True)
class StepWork:
    """All prices of a step.

    Args:
        seats: Every rank in one of them.
        num_stages: Pipeline stages of the LLM.
        llm: Slots of the LLM.
        parts: Encoder work by (first rank of a seat, microbatch).
        exchanges: By (exchange of a seat, microbatch); missing where nothing travels.
        encoder_shards: How the encoders' parameters are shared; None without encoders.
        llm_shards: How the LLM's parameters are shared.
        update_s: Seconds of the optimizer by first rank of a seat.
    """

    seats: tuple[Seat, ...]
    num_stages: int
    llm: LlmWork
    parts: Mapping[tuple[int, int], tuple[EncoderPart, ...]]
    exchanges: Mapping[tuple[int, int], Exchange]
    encoder_shards: Shards | None
    llm_shards: Shards
    update_s: Mapping[int, float]


def build_programs(work: StepWork, setup: Setup) -> list[Program]:
    """Return the program of every seat."""
    ranks = tuple(sorted(rank for seat in work.seats for rank in seat.ranks))
    norm = Op(
        ("norm",), "reduce", 2 * rounds_s(spread_of(ranks, setup.hardware), setup.hardware), ranks, "reduce"
    )
    shared: dict[tuple[str | int, ...], Op] = {}
    return [Program(seat.ranks, _SeatProgram(seat, work, shared).build(norm)) for seat in work.seats]


@dataclass(slots=True)
class _SeatProgram:
    """The program of one seat as it grows; ``shared`` holds the operations of several seats."""

    seat: Seat
    work: StepWork
    shared: dict[tuple[str | int, ...], Op]
    entries: list[Op | Wait] = field(default_factory=list)
    reduces: list[Wait] = field(default_factory=list)
    num_encodes: int = 0

    def build(self, norm: Op) -> list[Op | Wait]:
        """Return all entries."""
        seat, work = self.seat, self.work
        last = {slot.task: index for index, slot in enumerate(seat.slots)}
        for index, slot in enumerate(seat.slots):
            is_last = last[slot.task] == index
            if slot.task in ("encode", "encode_backward"):
                self._encode(slot, is_last=is_last)
            elif slot.task in ("forward", "backward"):
                self._llm(slot, is_last=is_last)
            else:
                self._exchange(slot)
        if seat.stage >= 0:
            self._across(work.llm_shards, seat.team[0])
        if work.encoder_shards and self.num_encodes:
            self._across(work.encoder_shards, seat.ranks[0])
        self.entries += [*self.reduces, norm, Wait(norm.name)]
        seconds = work.update_s[seat.ranks[0]]
        self.entries.append(Op(("update", seat.ranks[0]), "optimizer", seconds, seat.ranks))
        return self.entries

    def _encode(self, slot: Slot, *, is_last: bool) -> None:
        first = self.num_encodes == 0
        forward = slot.task == "encode"
        self.num_encodes += 1
        if not forward and (self.seat.exchange, slot.microbatch) in self.work.exchanges:
            self.entries.append(Wait(("collect", self.seat.exchange, slot.microbatch)))
        rank, shards = self.seat.ranks[0], self.work.encoder_shards
        gather = self._gather(shards, rank, self.num_encodes, first=first)
        for part in self.work.parts.get((rank, slot.microbatch), ()):
            seconds = slot.share * (part.forward_s if forward else part.backward_s)
            members = part.members
            name = (slot.task, slot.microbatch, self.num_encodes, members[0], len(members))
            self.entries.append(self._op(Op(name, "encoder", seconds, members)))
        self.entries += gather
        if not forward:
            self._reduce(shards, rank, slot.microbatch, is_last=is_last)

    def _llm(self, slot: Slot, *, is_last: bool) -> None:
        seat, work, microbatch = self.seat, self.work, slot.microbatch
        forward = slot.task == "forward"
        to_stage = seat.stage + (1 if forward else -1)
        from_stage = seat.stage - (1 if forward else -1)
        if 0 <= from_stage < work.num_stages:
            self.entries.append(Wait(("send", slot.task, seat.replica, from_stage, microbatch)))
        elif forward and (seat.exchange, microbatch) in work.exchanges:
            self.entries.append(Wait(("dispatch", seat.exchange, microbatch)))
        gather = self._gather(
            work.llm_shards, seat.team[0], slot.task, microbatch, first=forward and microbatch == 0
        )
        times = work.llm.forward_s if forward else work.llm.backward_s
        seconds = float(times[seat.replica, microbatch])
        name = (slot.task, seat.replica, seat.stage, microbatch)
        self.entries.append(self._op(Op(name, "llm", seconds, seat.team)))
        self.entries += gather
        if 0 <= to_stage < work.num_stages:
            seconds = float(work.llm.message_s[seat.replica, microbatch])
            sent = ("send", slot.task, seat.replica, seat.stage, microbatch)
            self.entries.append(self._op(Op(sent, "message", seconds, seat.team, f"send {slot.task}")))
        if not forward:
            self._reduce(work.llm_shards, seat.team[0], microbatch, is_last=is_last)

    def _exchange(self, slot: Slot) -> None:
        exchange = self.work.exchanges.get((self.seat.exchange, slot.microbatch))
        if exchange is None:
            return
        forward = slot.task == "dispatch"
        members = exchange.makers if forward else exchange.owners
        seconds = exchange.forward_s if forward else exchange.backward_s
        name = (slot.task, self.seat.exchange, slot.microbatch)
        self.entries.append(self._op(Op(name, "exchange", seconds, members, slot.task)))

    def _gather(self, shards: Shards | None, rank: int, *which: str | int, first: bool) -> list[Wait]:
        if shards is None or not shards.gather_s or (shards.per_step and not first):
            return []
        members = shards.members_of[rank]
        name = ("gather", shards.what, members[0], *(("step",) if shards.per_step else which))
        self.entries.append(self._op(Op(name, "gather", shards.gather_s, members, f"{shards.what} gather")))
        return [Wait(name)]

    def _reduce(self, shards: Shards | None, rank: int, microbatch: int, *, is_last: bool) -> None:
        if shards is None or not shards.reduce_s or (shards.per_step and not is_last):
            return
        members = shards.members_of[rank]
        # Seats may end their parts with different microbatches; what they sum once is one operation.
        name = ("reduce", shards.what, members[0], "step" if shards.per_step else microbatch)
        self.entries.append(self._op(Op(name, "reduce", shards.reduce_s, members, f"{shards.what} reduce")))
        self.reduces.append(Wait(name))

    def _across(self, shards: Shards, rank: int) -> None:
        """Sum gradients over the copies of the parameters."""
        if not shards.across_s:
            return
        members = shards.holders_of[rank]
        name = ("across", shards.what, members[0])
        self.entries.append(self._op(Op(name, "reduce", shards.across_s, members, f"{shards.what} reduce")))
        self.reduces.append(Wait(name))

    def _op(self, op: Op) -> Op:
        """Return the one object of an operation that several seats issue."""
        if op.members == self.seat.ranks:
            return op
        return self.shared.setdefault(op.name, op)
