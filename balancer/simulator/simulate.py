"""One training step under one strategy: plans in, times and bytes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from balancer.partition import FloatArray
from balancer.simulator.build import build_programs
from balancer.simulator.engine import Timeline, run
from balancer.simulator.memory import peak_bytes
from balancer.simulator.program import Kind
from balancer.simulator.seats import Prepared
from balancer.simulator.setup import Setup
from balancer.simulator.strategies import strategy_named
from balancer.work import media_flops, sequence_flops
from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.plan import Pack, StepPlan


@dataclass(frozen=True)
class SimulatedStep:
    """What a step costs.

    Args:
        step_s: Its time.
        num_tokens: Tokens of samples in it.
        tokens_per_s: Of all ranks together.
        mfu: Operations of the models, without those done again, over what all ranks could do at their peak.
        bubble_fraction: Share of the time that ranks do not compute, mean over ranks: pipeline bubbles, waits
            for slower members, and what of exchanges and collectives is not hidden.
        encoder_imbalance: Largest over mean encoder load of the ranks that host encoders, summed over
            microbatches.
        llm_imbalance: Largest over mean LLM load of the replicas, summed over microbatches.
        exchange_s: Rows travelling, mean over ranks, hidden or not.
        collective_s: Parameters gathered and gradients summed, mean over ranks, hidden or not.
        peak_bytes: Memory of the fullest rank.
        out_of_memory: Whether that is more than a rank has; the times are those it would have otherwise.
        busy_s: Seconds by kind of operation, mean over ranks.
    """

    step_s: float
    num_tokens: int
    tokens_per_s: float
    mfu: float
    bubble_fraction: float
    encoder_imbalance: float
    llm_imbalance: float
    exchange_s: float
    collective_s: float
    peak_bytes: float
    out_of_memory: bool
    busy_s: dict[Kind, float]


def simulate_step(plans: Sequence[StepPlan], *, setup: Setup, strategy: str = "multiplexed") -> SimulatedStep:
    """Return what one step costs.

    Args:
        plans: One for each group of the run, made with the changes of ``plans_for(strategy)``.
        setup: The run.
        strategy: A name of ``STRATEGIES``.

    Raises:
        ConfigError: There is no such strategy, or the setup cannot be divided as it asks.
        PlanError: The plans are not one of each group, or ranks would wait for each other for ever.
    """
    groups = [plan.group for plan in plans]
    if groups != list(range(setup.topology.num_groups)):
        raise PlanError(f"plans of groups {groups[:8]} for a run of {setup.topology.num_groups} groups")
    prepared = strategy_named(strategy).prepare(plans, setup)
    timeline = run(build_programs(prepared.work, setup))
    return _summary(plans, setup, prepared, timeline)


def model_flops(packs: Sequence[Pack], setup: Setup) -> int:
    """Return the operations, forward and backward, that the models need for ``packs``."""
    model = setup.cost_model
    total = 0
    for pack in packs:
        for sample in pack.samples:
            total += sequence_flops(model.llm, sample.num_tokens)
            for segment in sample.segments:
                if segment.is_media:
                    total += media_flops(model.encoders[model.encoder_name(segment)], segment.grid)
    return total


def _summary(
    plans: Sequence[StepPlan], setup: Setup, prepared: Prepared, timeline: Timeline
) -> SimulatedStep:
    work, encoding = prepared.work, prepared.encoding
    packs = [pack for plan in plans for pack in plan.packs]
    num_tokens = sum(pack.num_tokens for pack in packs)
    step_s = timeline.step_s
    peak = float(peak_bytes(work, encoding.kept_bytes).max())
    could = step_s * setup.topology.world_size * setup.hardware.flops_per_s
    busy_s = {kind: float(seconds.mean()) for kind, seconds in timeline.busy_s.items()}
    return SimulatedStep(
        step_s=step_s,
        num_tokens=num_tokens,
        tokens_per_s=num_tokens / step_s,
        mfu=model_flops(packs, setup) / could,
        bubble_fraction=timeline.idle_fraction,
        encoder_imbalance=_imbalance(encoding.load_s[list(encoding.hosts)]),
        llm_imbalance=_imbalance(work.llm.forward_s + work.llm.backward_s),
        exchange_s=busy_s.get("exchange", 0.0),
        collective_s=busy_s.get("gather", 0.0) + busy_s.get("reduce", 0.0),
        peak_bytes=peak,
        out_of_memory=peak > setup.hardware.memory_bytes,
        busy_s=busy_s,
    )


def _imbalance(load_s: FloatArray) -> float:
    """Largest over mean, summed over microbatches; ``load_s``: float64 [ranks, microbatches]."""
    mean = float(np.sum(load_s.mean(axis=0)))
    return float(np.sum(load_s.max(axis=0))) / mean if mean else 1.0
