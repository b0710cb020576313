"""Run programs as discrete events: when does each operation start and end?

Programs are fixed before they run, so the moment of an event follows from the events before it and from
nothing else. Ranks are therefore advanced one at a time as far as they get, in any order: the times are
those of a queue of events sorted by time, without the queue. The cost is that of reading every program
once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from balancer.partition import FloatArray
from balancer.simulator.program import COMPUTE, COMPUTE_KINDS, Kind, Name, Op, Program, Wait
from omni_pipeline.core.errors import PlanError

NAMED = 4


@dataclass(frozen=True)
class Timeline:
    """When everything happened.

    Args:
        step_s: When the last operation ended, seconds from the start of the step.
        starts: Start of each operation by name, seconds.
        ends: End of each operation by name, seconds.
        ranks: All ranks, ascending.
        finish_s: float64 [ranks]; when the last operation of each rank ended.
        busy_s: By kind, float64 [ranks]; seconds in operations, waiting for other members left out.
    """

    step_s: float
    starts: dict[Name, float]
    ends: dict[Name, float]
    ranks: tuple[int, ...]
    finish_s: FloatArray
    busy_s: dict[Kind, FloatArray]

    @property
    def compute_s(self) -> FloatArray:
        """Seconds that each rank computes, float64 [ranks]."""
        found = np.zeros(len(self.ranks))
        for kind in COMPUTE_KINDS:
            found += self.busy_s.get(kind, 0.0)
        return found

    @property
    def idle_fraction(self) -> float:
        """Share of the step in which the ranks do not compute, mean over ranks, 0 to 1."""
        # Sums of a rank may round above the step that they fill.
        return max(0.0, 1 - float(self.compute_s.mean()) / self.step_s) if self.step_s else 0.0


def run(programs: Sequence[Program]) -> Timeline:
    """Return when the operations of ``programs`` start and end.

    Raises:
        PlanError: A rank has no or two programs, an operation is missing on a member, issued by a rank that
            is no member, twice by one rank, or differs between members; a wait for what no rank does; or
            ranks wait for each other in a circle. Names ranks and operations.
    """
    known = _known_ops(programs)
    linked = [_linked(program, index, known) for index, program in enumerate(programs)]
    _check_complete(programs, linked, known)
    machine = _Machine(programs, linked)
    machine.run()
    return machine.timeline(known)


@dataclass(slots=True, eq=False)
class _State:
    """An operation as it runs: who issues it, who has to come still, when all were ready, when it ended.

    ``waiting``: programs that go on when it has ended. ``followers``: operations that a rank has issued
    behind it on its stream, with the moment from which the rank is ready for them.
    """

    op: Op
    programs: frozenset[int]
    missing: int
    ready_s: float = 0.0
    end_s: float = -1.0
    waiting: list[int] = field(default_factory=list)
    followers: list[tuple[_State, float]] = field(default_factory=list)


@dataclass(slots=True)
class _Linked:
    """A program that knows its operations: their states, and the stream of each; None is a wait."""

    states: list[_State]
    streams: list[str | None]


class _Machine:
    """Programs with their places: each advances until it needs the end of an operation that has none yet."""

    def __init__(self, programs: Sequence[Program], linked: Sequence[_Linked]) -> None:
        self.programs = programs
        self.linked = linked
        self.place = [0] * len(programs)
        self.now_s = [0.0] * len(programs)
        self.on_stream: list[dict[str, _State]] = [{} for _ in programs]

    def run(self) -> None:
        """Advance every program to its end."""
        runnable = list(range(len(self.programs)))
        while runnable:
            self._advance(runnable.pop(), runnable)
        stuck = [index for index in range(len(self.programs)) if self._open_entry(index) is not None]
        if stuck:
            raise PlanError(
                "ranks wait for each other in a circle: " + "; ".join(map(self._stuck_at, stuck[:NAMED])),
                where=f"{len(stuck)} of {len(self.programs)} programs",
            )

    def _advance(self, index: int, runnable: list[int]) -> None:
        linked, on_stream = self.linked[index], self.on_stream[index]
        place, now_s = self.place[index], self.now_s[index]
        while place < len(linked.states):
            state, stream = linked.states[place], linked.streams[place]
            if stream is None or stream == COMPUTE:
                if stream is not None and on_stream.get(COMPUTE) is not state:
                    on_stream[COMPUTE] = state
                    self._arrive(state, now_s, runnable)
                if state.end_s < 0:
                    state.waiting.append(index)
                    break
                now_s = max(now_s, state.end_s)
            else:
                before = on_stream.get(stream)
                on_stream[stream] = state
                if before is not None and before.end_s < 0:
                    before.followers.append((state, now_s))
                else:
                    self._arrive(state, now_s if before is None else max(now_s, before.end_s), runnable)
            place += 1
        self.place[index], self.now_s[index] = place, now_s

    def _arrive(self, state: _State, ready_s: float, runnable: list[int]) -> None:
        """A member is ready for an operation; the last one starts it, and so perhaps those behind it."""
        arrivals = [(state, ready_s)]
        while arrivals:
            state, ready_s = arrivals.pop()
            state.missing -= 1
            state.ready_s = max(state.ready_s, ready_s)
            if state.missing == 0:
                state.end_s = end_s = state.ready_s + state.op.seconds
                runnable += state.waiting
                arrivals += [(behind, max(moment, end_s)) for behind, moment in state.followers]

    def _open_entry(self, index: int) -> int | None:
        """Return the entry that holds a program up, or that never ends though all is issued; None without."""
        states = self.linked[index].states
        if self.place[index] < len(states):
            return self.place[index]
        return next((place for place, state in enumerate(states) if state.end_s < 0), None)

    def _stuck_at(self, index: int) -> str:
        linked, place = self.linked[index], self._open_entry(index)
        assert place is not None, f"program {index} has ended"
        doing = "waits for" if linked.streams[place] is None else "is at"
        return f"rank {self.programs[index].ranks[0]} {doing} {_shown(linked.states[place].op.name)}"

    def timeline(self, known: dict[Name, _State]) -> Timeline:
        """Return the times; all programs must be at their end."""
        ranks = tuple(sorted(rank for program in self.programs for rank in program.ranks))
        number = {rank: index for index, rank in enumerate(ranks)}
        busy_s: dict[Kind, FloatArray] = defaultdict(lambda: np.zeros(len(ranks)))
        finish_s = np.zeros(len(ranks))
        for program, linked in zip(self.programs, self.linked, strict=True):
            sums: dict[Kind, float] = defaultdict(float)
            last_s = 0.0
            for state, stream in zip(linked.states, linked.streams, strict=True):
                if stream is not None:
                    sums[state.op.kind] += state.op.seconds
                    last_s = max(last_s, state.end_s)
            places = [number[rank] for rank in program.ranks]
            finish_s[places] = last_s
            for kind, seconds in sums.items():
                busy_s[kind][places] = seconds
        return Timeline(
            step_s=float(finish_s.max(initial=0.0)),
            starts={name: state.ready_s for name, state in known.items()},
            ends={name: state.end_s for name, state in known.items()},
            ranks=ranks,
            finish_s=finish_s,
            busy_s=dict(busy_s),
        )


def _known_ops(programs: Sequence[Program]) -> dict[Name, _State]:
    """Every operation once, with the programs that must issue it."""
    program_of: dict[int, int] = {}
    for index, program in enumerate(programs):
        for rank in program.ranks:
            if rank in program_of:
                raise PlanError(f"rank {rank} has two programs")
            program_of[rank] = index
    known: dict[Name, _State] = {}
    # By identity: thousands of operations share one long tuple, and tuples do not remember their hash.
    issuers: dict[int, frozenset[int]] = {}
    for program in programs:
        for entry in program.entries:
            if isinstance(entry, Wait):
                continue
            state = known.get(entry.name)
            if state is None:
                found = issuers.get(id(entry.members))
                if found is None:
                    found = issuers[id(entry.members)] = _issuers(entry, programs, program_of)
                known[entry.name] = _State(entry, found, len(found))
            elif state.op is not entry and state.op != entry:
                raise PlanError(
                    f"{_shown(entry.name)} is {_described(state.op)} on one member and {_described(entry)} "
                    "on another",
                    where=f"rank {program.ranks[0]}",
                )
    return known


def _issuers(op: Op, programs: Sequence[Program], program_of: dict[int, int]) -> frozenset[int]:
    found = frozenset(program_of[rank] for rank in op.members if rank in program_of)
    num_ranks = sum(len(programs[index].ranks) for index in found)
    if num_ranks != len(op.members):
        raise PlanError(
            f"{_shown(op.name)} has {len(op.members)} members; programs that hold them have {num_ranks} ranks"
        )
    return found


def _linked(program: Program, index: int, known: dict[Name, _State]) -> _Linked:
    """Look every entry up, once."""
    rank = program.ranks[0]
    states: list[_State] = []
    streams: list[str | None] = []
    seen: set[Name] = set()
    for entry in program.entries:
        state = known.get(entry.name)
        if state is None:
            raise PlanError(f"rank {rank} waits for {_shown(entry.name)}, which no rank does")
        states.append(state)
        if isinstance(entry, Wait):
            streams.append(None)
            continue
        streams.append(entry.stream)
        if index not in state.programs:
            raise PlanError(f"rank {rank} issues {_shown(entry.name)} and is no member of it")
        if entry.name in seen:
            raise PlanError(f"rank {rank} issues {_shown(entry.name)} twice")
        seen.add(entry.name)
    return _Linked(states, streams)


def _check_complete(
    programs: Sequence[Program], linked: Sequence[_Linked], known: dict[Name, _State]
) -> None:
    """Raise unless each operation is issued by each of its members."""
    num_issued: dict[int, int] = defaultdict(int)
    for item in linked:
        for state, stream in zip(item.states, item.streams, strict=True):
            if stream is not None:
                num_issued[id(state)] += 1
    for state in known.values():
        if num_issued[id(state)] != len(state.programs):
            absent = [
                programs[index].ranks[0]
                for index in sorted(state.programs)
                if all(found is not state for found in linked[index].states)
            ]
            raise PlanError(f"{_shown(state.op.name)} is never issued by its members {absent[:NAMED]}")


def _shown(name: Name) -> str:
    return " ".join(map(str, name))


def _described(op: Op) -> str:
    return f"{op.kind} of {len(op.members)} ranks for {op.seconds:.3g} s on stream {op.stream!r}"
