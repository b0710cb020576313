"""Who sits where: which ranks run which slots, and the parts of a step put together."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from balancer.simulator.build import Seat, StepWork
from balancer.simulator.exchanges import Exchange
from balancer.simulator.schedule import Stage
from balancer.simulator.setup import Setup
from balancer.simulator.shards import Shards
from balancer.simulator.work import EncoderWork, LlmWork
from omni_pipeline.core.plan import Pack, StepPlan
from omni_pipeline.core.topology import Topology


@dataclass(frozen=True)
class Prepared:
    """A step, ready to run.

    Args:
        work: Slots and prices.
        encoding: Who encodes what.
    """

    work: StepWork
    encoding: EncoderWork


def all_packs(plans: Sequence[StepPlan]) -> list[Pack]:
    """Return the packs of all groups, by lane and number."""
    packs = [pack for plan in plans for pack in plan.packs]
    return sorted(packs, key=lambda pack: (pack.lane, pack.number))


def placed_packs(plans: Sequence[StepPlan]) -> dict[tuple[int, int], Pack]:
    """Return the packs of all groups by (replica, microbatch)."""
    return {(slot.replica, slot.microbatch): plan.packs[slot.pack] for plan in plans for slot in plan.slots}


def stage_team(topology: Topology, replica: int, stage: int) -> tuple[int, ...]:
    """Return the tp x cp ranks of one stage of a replica."""
    width = topology.tp * topology.cp
    start = stage * (topology.world_size // topology.pp) + replica * width
    return tuple(range(start, start + width))


def seats_of(
    setup: Setup, stages: Sequence[Stage], exchange_of: Mapping[int, int], *, alone: Container[int]
) -> tuple[Seat, ...]:
    """Return the seats of all ranks.

    Args:
        setup: The run.
        stages: Slots of each stage.
        exchange_of: By replica, whose rows its ranks exchange.
        alone: Stages whose ranks differ in what they encode; the ranks of another stage share a seat.
    """
    seats = []
    for stage, slots in enumerate(stages):
        for replica in range(setup.topology.num_replicas):
            team = stage_team(setup.topology, replica, stage)
            ranks = [(rank,) for rank in team] if stage in alone else [team]
            seats += [Seat(own, slots, replica, stage, team, exchange_of[replica]) for own in ranks]
    return tuple(seats)


def step_work(
    seats: tuple[Seat, ...],
    encoding: EncoderWork,
    llm: LlmWork,
    *,
    setup: Setup,
    exchanges: Mapping[tuple[int, int], Exchange],
    shards: tuple[Shards | None, Shards],
) -> StepWork:
    """Put the prices of a step together. ``shards``: of the encoders, of the LLM."""
    encoders, model = shards
    update_s = {}
    for seat in seats:
        seconds = model.update_s(setup.hardware) if seat.replica >= 0 else 0.0
        if encoders and seat.ranks[0] in encoders.members_of:
            seconds += encoders.update_s(setup.hardware)
        update_s[seat.ranks[0]] = seconds
    return StepWork(
        seats=seats,
        num_stages=1 + max(seat.stage for seat in seats),
        llm=llm,
        parts=encoding.parts,
        exchanges=exchanges,
        encoder_shards=encoders,
        llm_shards=model,
        update_s=update_s,
    )
