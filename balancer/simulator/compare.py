"""Strategies side by side: the same packs, planned and simulated under each."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from balancer.planner import BalanceConfig, GroupPlanner
from balancer.reorder import lanes_of_group
from balancer.simulator.setup import Setup
from balancer.simulator.simulate import SimulatedStep, simulate_step
from balancer.simulator.strategies import plans_for
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import Pack, StepPlan

OURS = "multiplexed"

PUBLISHED_BASELINES = ("stage0", "disaggregated", "bubble_filling")
"""Those that the paper compares with: Megatron-LM, Megatron-Dist, Optimus."""
BASELINES = (*PUBLISHED_BASELINES, "static")
ABLATIONS = ("no_multiplexing", "no_balancing", "no_lssp", "upfront")
STRATEGY_NAMES = (OURS, *BASELINES, *ABLATIONS)


@dataclass(frozen=True)
class Compared:
    """One strategy over some steps.

    Args:
        strategy: Its name.
        step_s: Mean time of a step.
        tokens_per_s: Of all ranks, over all steps.
        mfu: Model operations over the peak of all ranks, 0 to 1.
        bubble_fraction: Share of the ranks' time without work, 0 to 1.
        encoder_imbalance: Largest load of a rank / mean, mean of the steps.
        llm_imbalance: Likewise.
        exchange_s: Rows travelling, mean of a step.
        collective_s: Parameters and gradients travelling, mean of a step.
        peak_bytes: The most that a rank needs at once.
        out_of_memory: Whether that is more than it has; times are then those of ranks with enough.
    """

    strategy: str
    step_s: float
    tokens_per_s: float
    mfu: float
    bubble_fraction: float
    encoder_imbalance: float
    llm_imbalance: float
    exchange_s: float
    collective_s: float
    peak_bytes: float
    out_of_memory: bool

    @property
    def peak_gb(self) -> float:
        """``peak_bytes`` in GB."""
        return self.peak_bytes / 1e9


PlannerOf = Callable[[BalanceConfig], GroupPlanner]


def compare(
    steps: Sequence[Sequence[Pack]],
    *,
    planner_of: PlannerOf,
    balance: BalanceConfig,
    setup: Setup,
    strategies: Sequence[str] = STRATEGY_NAMES,
    progress: Callable[[], None] = lambda: None,
    left_out: Callable[[str, ConfigError], None] | None = None,
) -> dict[str, Compared]:
    """Return each strategy over the same steps, by name.

    Plans are made by the planner only: a strategy says with which settings, and those that agree share them.

    Args:
        steps: All packs of each step.
        planner_of: Makes the planner of the run with these settings.
        balance: Settings of the run, that strategies change.
        setup: What is simulated.
        strategies: Which.
        progress: Called when a strategy is done with.
        left_out: Told of a strategy that the setup cannot be divided for, which is then missing; None: that
            is an error.

    Raises:
        ConfigError: The setup cannot be divided for a strategy, or the planner finds no plan.
    """
    planned: dict[BalanceConfig, list[list[StepPlan]]] = {}
    found = {}
    for strategy in strategies:
        config = BalanceConfig.model_validate({**balance.model_dump(), **plans_for(strategy)})
        if config not in planned:
            planner = planner_of(config)
            planned[config] = [plan_step(planner, packs, step=step) for step, packs in enumerate(steps)]
        try:
            simulated = [simulate_step(plans, setup=setup, strategy=strategy) for plans in planned[config]]
        except ConfigError as error:
            if left_out is None:
                raise
            left_out(strategy, error)
        else:
            found[strategy] = _compared(strategy, simulated)
        progress()
    return found


def known_strategies(names: Sequence[str]) -> tuple[str, ...]:
    """Return the named strategies in the usual order; all of them without names.

    Raises:
        ConfigError: No such strategy.
    """
    for name in names:
        if name not in STRATEGY_NAMES:
            near = difflib.get_close_matches(name, STRATEGY_NAMES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(STRATEGY_NAMES)}"
            raise ConfigError(f"there is no strategy {name!r}", fix=hint)
    return tuple(name for name in STRATEGY_NAMES if name in names or not names)


def plan_step(planner: GroupPlanner, packs: Iterable[Pack], *, step: int) -> list[StepPlan]:
    """Return the plans of all groups for one step.

    Args:
        planner: Of the run.
        packs: All packs of the step.
        step: Of the run.
    """
    topology = planner.topology
    group_of = {
        lane: group
        for group in range(topology.num_groups)
        for lane in lanes_of_group(group, planner.num_lanes, topology)
    }
    by_group: list[list[Pack]] = [[] for _ in range(topology.num_groups)]
    for pack in packs:
        by_group[group_of[pack.lane]].append(pack)
    return [planner.plan(found, step=step, group=group) for group, found in enumerate(by_group)]


def _compared(strategy: str, steps: Sequence[SimulatedStep]) -> Compared:
    """Means over steps; rates and shares of time are weighted by it."""
    total_s = sum(step.step_s for step in steps)

    def by_time(value: Callable[[SimulatedStep], float]) -> float:
        return sum(value(step) * step.step_s for step in steps) / total_s if total_s else 0.0

    def mean(value: Callable[[SimulatedStep], float]) -> float:
        return sum(value(step) for step in steps) / len(steps)

    return Compared(
        strategy=strategy,
        step_s=total_s / len(steps),
        tokens_per_s=sum(step.num_tokens for step in steps) / total_s if total_s else 0.0,
        mfu=by_time(lambda step: step.mfu),
        bubble_fraction=by_time(lambda step: step.bubble_fraction),
        encoder_imbalance=mean(lambda step: step.encoder_imbalance),
        llm_imbalance=mean(lambda step: step.llm_imbalance),
        exchange_s=mean(lambda step: step.exchange_s),
        collective_s=mean(lambda step: step.collective_s),
        peak_bytes=max(step.peak_bytes for step in steps),
        out_of_memory=any(step.out_of_memory for step in steps),
    )
