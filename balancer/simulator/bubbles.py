"""Baseline: encoder work in the LLM's pipeline bubbles (Optimus, Feng et al. 2024, arXiv 2408.03505)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from balancer.cost import LLM
from balancer.simulator.exchanges import Exchange, exchange_s, moved_rows
from balancer.simulator.schedule import TICK, Clock, Slot, Stage, clocks, one_f_one_b
from balancer.simulator.seats import Prepared, all_packs, placed_packs, seats_of, stage_team, step_work
from balancer.simulator.setup import Setup, profile_of
from balancer.simulator.shards import encoder_shards, llm_shards
from balancer.simulator.teams import encode_in_teams, given_to, tensor_parallel_s
from balancer.simulator.work import llm_work, planned_segments
from omni_pipeline.core.plan import StepPlan


def bubble_filling(plans: Sequence[StepPlan], setup: Setup) -> Prepared:
    """Encoders beside the LLM; each microbatch is encoded by one stage of its replica, in its bubbles.

    Assumes: which stage, and in which of its bubbles, is found once for equal packs with the means of the
    profile (see ``bubble_slots``); a step with more to encode stretches the bubbles, one with less leaves
    them partly empty. Each replica encodes its own packs, which run where they fall. The encoders have the
    LLM's tensor parallelism (see ``teams``), and their parameters are gathered once per step. Encoder work
    can be cut anywhere between bubbles; the gaps inside tensor-parallel layers are not filled.
    """
    topology, num_microbatches = setup.topology, plans[0].num_microbatches
    packs = placed_packs(plans)
    filled = bubble_slots(topology.pp, num_microbatches, **_mean_slots(plans, setup))
    segments = [
        given_to(item, stage_team(topology, item.replica, filled.stage_of[item.microbatch]))
        for item in planned_segments(plans, setup)
    ]
    replicas = range(topology.num_replicas)
    hosting = sorted(set(filled.stage_of))
    teams = [stage_team(topology, replica, stage) for stage in hosting for replica in replicas]
    encoding = encode_in_teams(segments, teams, setup, tp=topology.tp, num_microbatches=num_microbatches)
    exchanges = {}
    for replica in replicas:
        ranks = topology.ranks_of_replica(replica)
        own = [item for item in segments if item.replica == replica]
        for microbatch, moves in enumerate(moved_rows(own, setup, num_microbatches=num_microbatches)):
            seconds = exchange_s(moves, setup) / 2
            exchanges[replica, microbatch] = Exchange(ranks, ranks, seconds, seconds)
    work = step_work(
        seats_of(setup, filled.stages, {replica: replica for replica in replicas}, alone=()),
        encoding,
        llm_work(packs, setup, num_microbatches=num_microbatches),
        setup=setup,
        exchanges=exchanges,
        shards=(encoder_shards(setup, encoding.hosts, tp=topology.tp, per_step=True), llm_shards(setup)),
    )
    return Prepared(work, encoding)


@dataclass(frozen=True, slots=True)
class Filled:
    """1F1B with encoder work in it.

    Args:
        stages: Slots of each stage.
        stage_of: The stage that encodes each microbatch.
    """

    stages: tuple[Stage, ...]
    stage_of: tuple[int, ...]


def bubble_slots(
    num_stages: int,
    num_microbatches: int,
    *,
    llm_s: tuple[float, float],
    encoder_s: tuple[float, float],
) -> Filled:
    """Return 1F1B with encoder work in its bubbles.

    What stage 0 needs before a stage has had enough bubbles runs before the step. Each microbatch goes to the
    stage that makes this shortest; of equals where least of it does so, then where least is so far. Its
    backward fills the bubbles of that stage from the moment that stage 0 has done its own; the rest runs
    after the step.

    Args:
        num_stages: Pipeline stages.
        num_microbatches: Of the step.
        llm_s: Forward and backward of one stage.
        encoder_s: Forward and backward of the encoders if one stage does all of a microbatch.
    """
    stages = one_f_one_b(num_stages, num_microbatches)
    times = clocks(stages, forward=llm_s[0], backward=llm_s[1])
    bubbles = [_bubbles(clock, times) for clock in times]
    inserted: list[dict[int, list[Slot]]] = [{} for _ in stages]
    needed, done = _moments(stages[0], times[0])
    early_s, given_s = [0.0] * num_stages, [0.0] * num_stages
    stage_of = []
    for microbatch in range(num_microbatches):
        window = 0.0, needed[microbatch]
        left_s = [encoder_s[0] - sum(_free(found, encoder_s[0], window).values()) for found in bubbles]
        before = [
            (max(*early_s, early_s[index] + left_s[index]), left_s[index], given_s[index])
            for index in range(num_stages)
        ]
        stage = before.index(min(before))
        slot = Slot("encode", microbatch)
        _fill(bubbles[stage], inserted[stage], slot, encoder_s[0], window, rest_before=-1)
        early_s[stage] += left_s[stage]
        given_s[stage] += encoder_s[0]
        stage_of.append(stage)
    for microbatch, stage in enumerate(stage_of):
        window = done[microbatch], times[0].ends[-1]
        slot, end = Slot("encode_backward", microbatch), len(stages[stage])
        _fill(bubbles[stage], inserted[stage], slot, encoder_s[1], window, rest_before=end + 1)
    found = []
    for stage, slots in enumerate(stages):
        flat = inserted[stage].get(-1, [])
        for index in range(len(slots) + 2):
            flat = [*flat, *inserted[stage].get(index, []), *slots[index : index + 1]]
        found.append(_with_exchanges(flat, num_microbatches, is_first=stage == 0))
    return Filled(tuple(found), tuple(stage_of))


def _mean_slots(plans: Sequence[StepPlan], setup: Setup) -> dict[str, tuple[float, float]]:
    """Seconds (forward, backward) of a mean pack: a stage of the LLM, and the encoders on one stage."""
    topology, model = setup.topology, setup.cost_model
    profile = setup.profile or profile_of(all_packs(plans), model)
    fractions = [model.forward_fraction(name) for name in model.encoders] or [0.5]
    fraction, llm_fraction = sum(fractions) / len(fractions), model.forward_fraction(LLM)
    slot_s = profile.llm_s / topology.ranks_per_replica
    exchanged_s = tensor_parallel_s(profile.positions, setup, tp=topology.tp, split=topology.cp)
    encode_s = profile.encoder_s / (topology.tp * topology.cp)
    return {
        "llm_s": (slot_s * llm_fraction, slot_s * (1 - llm_fraction)),
        "encoder_s": (
            encode_s * fraction + exchanged_s,
            encode_s * (1 - fraction) + exchanged_s * (1 + model.encoders_again),
        ),
    }


@dataclass(slots=True)
class _Bubble:
    """A time in which a stage has nothing to do, and the slot before which it lies."""

    before: int
    start: float
    end: float


def _bubbles(clock: Clock, times: Sequence[Clock]) -> list[_Bubble]:
    step_end = max(other.ends[-1] for other in times)
    starts, ends = [*clock.starts, step_end], [0.0, *clock.ends]
    gaps = enumerate(zip(ends, starts, strict=True))
    return [_Bubble(index, start, end) for index, (start, end) in gaps if end - start > TICK]


def _moments(slots: Stage, clock: Clock) -> tuple[dict[int, float], dict[int, float]]:
    """When stage 0 needs each microbatch, and when it has done its backward."""
    needed, done = {}, {}
    for slot, start, end in zip(slots, clock.starts, clock.ends, strict=True):
        if slot.task == "forward":
            needed[slot.microbatch] = start
        else:
            done[slot.microbatch] = end
    return needed, done


def _free(bubbles: Sequence[_Bubble], seconds: float, window: tuple[float, float]) -> dict[int, float]:
    """Return how much of ``seconds`` goes into which of the earliest bubbles inside ``window``."""
    used: dict[int, float] = {}
    for number, bubble in enumerate(bubbles):
        free = min(bubble.end, window[1]) - max(bubble.start, window[0])
        if free > TICK and seconds > TICK:
            used[number] = min(free, seconds)
            seconds -= used[number]
    return used


def _fill(
    bubbles: Sequence[_Bubble],
    inserted: dict[int, list[Slot]],
    slot: Slot,
    seconds: float,
    window: tuple[float, float],
    *,
    rest_before: int,
) -> None:
    """Put ``seconds`` of work into the bubbles, and what does not fit before slot ``rest_before``."""
    left = 1.0
    for number, used in _free(bubbles, seconds, window).items():
        bubble = bubbles[number]
        bubble.start = max(bubble.start, window[0]) + used
        share = min(left, used / seconds)
        left -= share
        inserted.setdefault(bubble.before, []).append(replace(slot, share=share))
    if left > TICK:
        inserted.setdefault(rest_before, []).append(replace(slot, share=left))


def _with_exchanges(slots: Sequence[Slot], num_microbatches: int, *, is_first: bool) -> Stage:
    """Let rows leave when a stage has encoded its part, in the order of the microbatches.

    Their gradients leave stage 0 behind its backward; the other stages expect them from the start.
    """
    remaining = [0] * num_microbatches
    for slot in slots:
        if slot.task == "encode":
            remaining[slot.microbatch] += 1
    found: list[Slot] = []
    if not is_first:
        found += [Slot("collect", microbatch) for microbatch in range(num_microbatches)]
    sent = 0
    for index in range(len(slots) + 1):
        while sent < num_microbatches and not remaining[sent]:
            found.append(Slot("dispatch", sent))
            sent += 1
        for slot in slots[index : index + 1]:
            found.append(slot)
            if slot.task == "encode":
                remaining[slot.microbatch] -= 1
            elif slot.task == "backward" and is_first:
                found.append(Slot("collect", slot.microbatch))
    return tuple(found)
