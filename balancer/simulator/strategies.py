"""How encoders and the LLM share the ranks: our way, the baselines, and our way with a part left out.

All run on one engine with one cost model, one network and one memory model; each says what it assumes. None
is tuned to a published figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from balancer.cost import LLM
from balancer.simulator.bubbles import bubble_filling
from balancer.simulator.disaggregated import disaggregated
from balancer.simulator.exchanges import planned_exchanges
from balancer.simulator.placing import placed_with_shares, places_by_cost
from balancer.simulator.schedule import Stage, first_stage, on_demand, upfront
from balancer.simulator.seats import Prepared, all_packs, placed_packs, seats_of, stage_team, step_work
from balancer.simulator.setup import Setup, profile_of
from balancer.simulator.shards import encoder_shards, llm_shards
from balancer.simulator.stage0 import encoders_in_stage_0
from balancer.simulator.work import PlacedSegment, encode, llm_work, planned_segments
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import StepPlan

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
    """Ours: every rank hosts the encoders, all ranks encode each microbatch just before it is needed.

    Assumes: placement, shares and exchanges are the plan's. Encoders are whole on every rank but for FSDP.
    Rows travel in one exchange per group and microbatch; stage 0 waits for it, other stages go on.
    """
    return _multiplexed(plans, setup, planned_segments(plans, setup), _on_demand(plans, setup))


def encode_upfront(plans: Sequence[StepPlan], setup: Setup) -> Prepared:
    """Ours with mode ``upfront``: all ranks encode all microbatches first, all backwards come last.

    Assumes what ``multiplexed`` does; the encoders' activations of all microbatches are kept.
    """
    stages = upfront(setup.topology.pp, plans[0].num_microbatches)
    return _multiplexed(plans, setup, planned_segments(plans, setup), stages)


def without_balancing(plans: Sequence[StepPlan], setup: Setup) -> Prepared:
    """Ours without any decision by cost: packs run where they fall, nothing is shared by several ranks.

    Assumes: the media of a pack are dealt in their order over all ranks of its replica, one each in turn, as
    data-parallel encoders without a plan would have them.
    """
    dealt: dict[tuple[int, int], int] = {}
    ranks_of = [setup.topology.ranks_of_replica(replica) for replica in range(setup.topology.num_replicas)]
    segments = []
    for item in planned_segments(plans, setup):
        ranks = ranks_of[item.replica]
        number = dealt.get((item.replica, item.microbatch), 0)
        dealt[item.replica, item.microbatch] = number + 1
        segments.append(item.moved_to(ranks[number % len(ranks)]))
    return _multiplexed(plans, setup, segments, _on_demand(plans, setup))


def average_assignment(plans: Sequence[StepPlan], setup: Setup) -> Prepared:
    """One static assignment (like Entrain, arXiv 2605.27918): by average costs, never those of the data.

    Assumes: packs run where they fall; in each microbatch of a group every segment counts as long as the mean
    of its encoder in the profile, and goes to the rank with the least so far, longest first (LPT) over all
    ranks. Else it is ours: multiplexed, on demand.
    """
    mean_s = (setup.profile or profile_of(all_packs(plans), setup.cost_model)).segment_s
    segments = planned_segments(plans, setup)
    costs = [mean_s[setup.cost_model.encoder_name(item.segment)] for item in segments]
    group_of = {replica: plan.group for plan in plans for replica in plan.replicas}
    num_ranks = len(plans[0].ranks)
    places = places_by_cost(segments, costs, group_of=group_of, num_places=num_ranks)
    ranks_of = {plan.group: plan.ranks for plan in plans}
    moved = [
        item.moved_to(ranks_of[group_of[item.replica]][place])
        for item, place in zip(segments, places, strict=True)
    ]
    return _multiplexed(plans, setup, moved, _on_demand(plans, setup))


def without_multiplexing(plans: Sequence[StepPlan], setup: Setup) -> Prepared:
    """Ours with encoders on the ranks of stage 0 only; with one stage that is no difference.

    Assumes: packs run where the plan has them; a segment is shared by as many ranks as in the plan; the media
    of each microbatch of a group are placed by cost, longest first, on the group's ranks of stage 0, which
    hold the encoders whole but for FSDP. The encoders' work is part of stage 0's slots.
    """
    topology, num_microbatches = setup.topology, plans[0].num_microbatches
    hosts_of = {
        plan.group: [rank for replica in plan.replicas for rank in stage_team(topology, replica, 0)]
        for plan in plans
    }
    group_of = {replica: plan.group for plan in plans for replica in plan.replicas}
    segments = placed_with_shares(
        planned_segments(plans, setup),
        {replica: hosts_of[group] for replica, group in group_of.items()},
        setup,
    )
    hosts = sorted(rank for ranks in hosts_of.values() for rank in ranks)
    encoding = encode(segments, setup, hosts=hosts, num_microbatches=num_microbatches)
    exchanges = {
        place: replace(item, makers=tuple(hosts_of[place[0]]), owners=tuple(hosts_of[place[0]]))
        for place, item in planned_exchanges(plans, segments, setup).items()
    }
    stages = first_stage(topology.pp, num_microbatches)
    work = step_work(
        seats_of(setup, stages, group_of, alone=(0,)),
        encoding,
        llm_work(placed_packs(plans), setup, num_microbatches=num_microbatches),
        setup=setup,
        exchanges=exchanges,
        shards=(encoder_shards(setup, hosts), llm_shards(setup)),
    )
    return Prepared(work, encoding)


NO_PLAN: Mapping[str, Any] = {"enabled": False}
STRATEGIES: dict[str, Strategy] = {
    "multiplexed": Strategy(multiplexed, {}),
    "stage0": Strategy(encoders_in_stage_0, NO_PLAN),
    "disaggregated": Strategy(disaggregated, NO_PLAN),
    "bubble_filling": Strategy(bubble_filling, NO_PLAN),
    "static": Strategy(average_assignment, NO_PLAN),
    "no_multiplexing": Strategy(without_multiplexing, {}),
    "no_balancing": Strategy(without_balancing, NO_PLAN),
    "no_lssp": Strategy(multiplexed, {"lssp": {"kind": "off"}}),
    "upfront": Strategy(encode_upfront, {}),
}
"""By name: ours, the baselines, then ours with a part left out."""


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


def _on_demand(plans: Sequence[StepPlan], setup: Setup) -> Sequence[Stage]:
    fraction = setup.cost_model.forward_fraction(LLM)
    return on_demand(setup.topology.pp, plans[0].num_microbatches, forward_fraction=fraction)


def _multiplexed(
    plans: Sequence[StepPlan], setup: Setup, segments: Sequence[PlacedSegment], stages: Sequence[Stage]
) -> Prepared:
    """Encoders on all ranks, as ``segments`` say who encodes what."""
    topology, num_microbatches = setup.topology, plans[0].num_microbatches
    everyone = range(topology.world_size)
    encoding = encode(segments, setup, hosts=everyone, num_microbatches=num_microbatches)
    group_of = {replica: plan.group for plan in plans for replica in plan.replicas}
    work = step_work(
        seats_of(setup, stages, group_of, alone=range(topology.pp)),
        encoding,
        llm_work(placed_packs(plans), setup, num_microbatches=num_microbatches),
        setup=setup,
        exchanges=planned_exchanges(plans, segments, setup),
        shards=(encoder_shards(setup, everyone), llm_shards(setup)),
    )
    return Prepared(work, encoding)
