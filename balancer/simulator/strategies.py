"""How encoders and the LLM share the ranks: our way, the baselines, and our way with a part left out.

All run on one engine with one cost model, one network and one memory model; each says what it assumes. None
is tuned to a published figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from balancer.cost import LLM
from balancer.simulator.build import Seat, StepWork
from balancer.simulator.exchanges import Exchange, planned_exchanges
from balancer.simulator.schedule import Stage, on_demand, upfront
from balancer.simulator.setup import Setup
from balancer.simulator.shards import Shards, encoder_shards, llm_shards
from balancer.simulator.work import Encoding, LlmWork, llm_work, planned_encoding
from omni_pipeline.core.errors import ConfigError
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
    encoding: Encoding


Prepare = Callable[[Sequence[StepPlan], Setup], Prepared]


@dataclass(frozen=True)
class Strategy:
    """A way to share the ranks.

    Args:
        prepare: Turns plans into work.
        balance: What the planner's ``BalanceConfig`` must say otherwise, for the plans that it takes.
    """

    prepare: Prepare
    balance: Mapping[str, Any]


def multiplexed(plans: Sequence[StepPlan], setup: Setup) -> Prepared:
    """Ours: every rank hosts the encoders, each microbatch is encoded by all ranks just before it is needed.

    Assumes: placement, shares and exchanges are the plan's. Encoders are whole on every rank but for FSDP.
    Rows travel in one exchange per group and microbatch; stage 0 waits for it, other stages go on.
    """
    fraction = setup.cost_model.forward_fraction(LLM)
    stages = on_demand(setup.topology.pp, plans[0].num_microbatches, forward_fraction=fraction)
    return _as_planned(plans, setup, stages)


def encode_upfront(plans: Sequence[StepPlan], setup: Setup) -> Prepared:
    """Ours with mode ``upfront``: all ranks encode all microbatches first, all backwards come last.

    Assumes what ``multiplexed`` does; the encoders' activations of all microbatches are kept.
    """
    return _as_planned(plans, setup, upfront(setup.topology.pp, plans[0].num_microbatches))


STRATEGIES: dict[str, Strategy] = {
    "multiplexed": Strategy(multiplexed, {}),
    "upfront": Strategy(encode_upfront, {}),
}
"""By name."""


def strategy_named(name: str) -> Strategy:
    """Return a strategy.

    Raises:
        ConfigError: There is none of this name.
    """
    try:
        return STRATEGIES[name]
    except KeyError as error:
        raise ConfigError(
            f"there is no strategy {name!r}", fix=f"known strategies: {', '.join(STRATEGIES)}"
        ) from error


def plans_for(name: str) -> Mapping[str, Any]:
    """Return the changes of the planner's ``BalanceConfig`` for the plans that strategy ``name`` takes."""
    return strategy_named(name).balance


def placed_packs(plans: Sequence[StepPlan]) -> dict[tuple[int, int], Pack]:
    """Return the packs of all groups by (replica, microbatch)."""
    return {(slot.replica, slot.microbatch): plan.packs[slot.pack] for plan in plans for slot in plan.slots}


def stage_team(topology: Topology, replica: int, stage: int) -> tuple[int, ...]:
    """Return the tp x cp ranks of one stage of a replica."""
    width = topology.tp * topology.cp
    start = stage * (topology.world_size // topology.pp) + replica * width
    return tuple(range(start, start + width))


def rank_seats(setup: Setup, stages: Sequence[Stage], exchange_of: Mapping[int, int]) -> tuple[Seat, ...]:
    """Return a seat for every rank. ``exchange_of``: by replica, whose rows its ranks exchange."""
    return tuple(
        Seat((rank,), slots, replica, stage, stage_team(setup.topology, replica, stage), exchange_of[replica])
        for stage, slots in enumerate(stages)
        for replica in range(setup.topology.num_replicas)
        for rank in stage_team(setup.topology, replica, stage)
    )


def step_work(
    seats: tuple[Seat, ...],
    encoding: Encoding,
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


def _as_planned(plans: Sequence[StepPlan], setup: Setup, stages: Sequence[Stage]) -> Prepared:
    encoding = planned_encoding(plans, setup)
    group_of = {replica: plan.group for plan in plans for replica in plan.replicas}
    work = step_work(
        rank_seats(setup, stages, group_of),
        encoding,
        llm_work(placed_packs(plans), setup, num_microbatches=plans[0].num_microbatches),
        setup=setup,
        exchanges=planned_exchanges(plans, setup),
        shards=(encoder_shards(setup, encoding.hosts), llm_shards(setup)),
    )
    return Prepared(work, encoding)
