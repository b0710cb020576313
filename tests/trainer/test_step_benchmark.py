"""benchmarks.step: mixtures that are what they say, and ratios of what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.step import summary
from benchmarks.step_worlds import MIXTURES, NUM_RANKS, RUN, SEQ_LEN, World, make_packs
from benchmarks.timed_steps import Timed, run_mixtures, work_s
from omni_pipeline.app.costs import cost_model
from omni_pipeline.core.plan import StepPlan
from tests.support.ranks import run_ranks

SEEDS = range(6)


@pytest.fixture(scope="module")
def world() -> World:
    return World.of(cost_model(RUN))


def _plans(world: World, mixture: str, seed: int) -> dict[str, StepPlan]:
    packs = make_packs(mixture, seed=seed)
    return {name: planner.plan(packs, step=0, group=0) for name, planner in world.planners.items()}


def _gain(above: StepPlan, below: StepPlan) -> float:
    times = [plan.encoder_balance.makespan_after + plan.llm_balance.makespan_after for plan in (above, below)]
    return times[0] / times[1]


@pytest.mark.parametrize("mixture", MIXTURES)
def test_packs_are_full_and_the_same_for_every_rank(mixture: str) -> None:
    for seed in SEEDS:
        packs = make_packs(mixture, seed=seed)
        assert packs == make_packs(mixture, seed=seed)
        assert [pack.num_tokens for pack in packs] == [SEQ_LEN] * 2 * NUM_RANKS


def test_skewed_packs_give_one_replica_all_media_and_a_balanced_plan_gains(world: World) -> None:
    for seed in SEEDS:
        plans = _plans(world, "skewed", seed)
        assert {item.ranks for item in plans["in_order"].media} == {(0,)}
        assert _gain(plans["in_order"], plans["balanced"]) > 1.3


def test_on_an_even_mixture_there_is_little_to_gain(world: World) -> None:
    for seed in SEEDS:
        plans = _plans(world, "even", seed)
        assert 1 <= _gain(plans["in_order"], plans["lssp"]) < 1.15


def test_long_media_gain_by_sharing_only_with_and_without_an_exchange(world: World) -> None:
    kinds = set()
    for seed in SEEDS:
        plans = _plans(world, "long", seed)
        assert _gain(plans["in_order"], plans["balanced"]) < 1.05
        assert _gain(plans["balanced"], plans["lssp"]) > 1.2
        kinds |= {item.joined for item in plans["lssp"].media if item.is_long}
    assert kinds == {True, False}


def test_ratios_are_medians_of_pairs_and_work_is_that_of_the_slowest_rank() -> None:
    steps = []
    for mixture, (first, second) in MIXTURES.items():
        for factor in (2.0, 3.0, 4.0):
            steps += [_step(mixture, first, factor), _step(mixture, second, 1.0)]
    result = summary(steps)
    assert (result["speedup_skewed"], result["speedup_lssp"], result["ratio_even"]) == (3.0, 3.0, 1 / 3)
    assert result["speedup_skewed_quartiles"] == [2.0, 4.0]
    assert result["speedup_skewed_modelled"] == 2.0
    assert result["step_ms"]["skewed"] == {"in_order": 3000.0, "balanced": 1000.0}
    assert work_s(steps[0]) == (2 + 3) + 4


def _step(mixture: str, variant: str, step_s: float) -> tuple[Timed, ...]:
    is_first = variant == MIXTURES[mixture][0]
    own = [{"encoder": (2.0, 1.0), "exchange": (0.0, 0.0), "llm": (0.0, 4.0)} for _ in range(2)]
    own[1]["encoder"] = (1.0, 3.0)
    return tuple(
        Timed(mixture, 0, variant, step_s, 2.0 if is_first else 1.0, own_s, loss=1.0) for own_s in own
    )


@pytest.mark.slow
def test_steps_of_all_variants_run_with_measured_costs(tmp_path: Path) -> None:
    by_rank = run_ranks(NUM_RANKS, run_mixtures, args=(tmp_path, 1, 1, 30.0), timeout_s=300)
    result = summary([tuple(step) for step in zip(*by_rank, strict=True)])
    assert {name: list(variants) for name, variants in result["step_ms"].items()} == {
        mixture: list(variants) for mixture, variants in MIXTURES.items()
    }
