"""Strategies are compared on the same packs, under plans that only the planner makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from balancer.planner import BalanceConfig, GroupPlanner
from balancer.simulator import compare as module
from balancer.simulator.compare import STRATEGY_NAMES, compare, known_strategies, plan_step
from balancer.simulator.setup import Setup
from balancer.simulator.simulate import simulate_step
from balancer.simulator.strategies import STRATEGIES
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.topology import Topology
from tests.balancer.worlds import ENCODERS, cost_model, image_pack

TOPOLOGY = Topology(8, pp=2, replicas_per_group=2)
SETUP = Setup(topology=TOPOLOGY, cost_model=cost_model())


class Planners:
    """Makes planners, and counts them by their settings."""

    def __init__(self) -> None:
        self.asked: list[BalanceConfig] = []

    def __call__(self, config: BalanceConfig) -> GroupPlanner:
        self.asked.append(config)
        return GroupPlanner(
            TOPOLOGY,
            cost_model=SETUP.cost_model,
            config=config,
            num_lanes=4,
            packs_per_step=8,
            encoders=ENCODERS,
        )


def packs(*, first: int = 0) -> list[Pack]:
    """Two packs of each of four lanes; lane 0 has most images."""
    return [
        image_pack(lane, num_images=9 if lane == 0 else 2, number=first + number)
        for lane in range(4)
        for number in range(2)
    ]


def test_every_group_is_planned_with_the_packs_of_its_lanes() -> None:
    plans = plan_step(Planners()(BalanceConfig()), packs(), step=3)
    assert [(plan.step, plan.group) for plan in plans] == [(3, 0), (3, 1)]
    assert [{pack.lane for pack in plan.packs} for plan in plans] == [{0, 2}, {1, 3}]
    assert sum(len(plan.packs) for plan in plans) == 8


def test_strategies_with_the_same_settings_share_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Mapping[str, Any]] = {"upfront": {"enabled": False}}
    monkeypatch.setattr(module, "plans_for", lambda name: changes.get(name, {}))
    planners = Planners()
    steps = [packs(), packs(first=2)]
    told: list[None] = []
    found = compare(
        steps,
        planner_of=planners,
        balance=BalanceConfig(),
        setup=SETUP,
        strategies=("multiplexed", "upfront", "no_lssp"),
        progress=lambda: told.append(None),
    )
    assert list(found) == ["multiplexed", "upfront", "no_lssp"]
    assert {config.enabled for config in planners.asked} == {True, False}
    assert len(planners.asked) == 2
    assert len(told) == 3
    assert found["no_lssp"].step_s == found["multiplexed"].step_s
    assert found["upfront"].encoder_imbalance > found["multiplexed"].encoder_imbalance


def test_results_are_means_over_the_steps() -> None:
    def one(steps: list[list[Pack]]) -> module.Compared:
        return compare(
            steps, planner_of=Planners(), balance=BalanceConfig(), setup=SETUP, strategies=("multiplexed",)
        )["multiplexed"]

    light, heavy = (
        packs(),
        [image_pack(lane, num_images=20, number=2 + at) for lane in range(4) for at in (0, 1)],
    )
    first, second, both = one([light]), one([heavy]), one([light, heavy])
    alone = simulate_step(plan_step(Planners()(BalanceConfig()), light, step=0), setup=SETUP)
    assert first.mfu == pytest.approx(alone.mfu)
    assert first.bubble_fraction == pytest.approx(alone.bubble_fraction)
    assert both.step_s == pytest.approx((first.step_s + second.step_s) / 2)
    num_tokens = sum(pack.num_tokens for pack in (*light, *heavy))
    assert both.tokens_per_s == pytest.approx(num_tokens / (2 * both.step_s))
    assert both.peak_bytes == max(first.peak_bytes, second.peak_bytes)
    work = first.mfu * first.step_s + second.mfu * second.step_s
    assert both.mfu == pytest.approx(work / (first.step_s + second.step_s))


def test_names_are_those_of_the_simulator_in_one_order() -> None:
    assert set(STRATEGY_NAMES) == set(STRATEGIES)
    assert known_strategies(()) == STRATEGY_NAMES
    assert known_strategies(("upfront", "multiplexed")) == ("multiplexed", "upfront")
    with pytest.raises(ConfigError, match="did you mean 'stage0'"):
        known_strategies(("stage_0",))
    with pytest.raises(ConfigError, match="choose from multiplexed, stage0"):
        known_strategies(("zzz",))
