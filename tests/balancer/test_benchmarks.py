"""The benchmarks of plans price what the plans price, and compare like with like."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.balance import (
    MIXTURES,
    encoder_loads,
    llm_loads,
    make_planner,
    measure_groups,
    measure_mixture,
    step_packs,
    step_s,
)
from benchmarks.joint import measure, optimal_step
from benchmarks.partition import DISTRIBUTIONS, summary
from benchmarks.partition import measure as measure_partition
from benchmarks.rivals import optimal_makespan
from benchmarks.synthetic import SEQ_LEN, cost_model, make_packs


def test_loads_of_ranks_sum_to_the_balance_of_the_plan() -> None:
    planner = make_planner(8)
    plan = planner.plan(step_packs(8, MIXTURES["three modalities"], seed=1), step=0, group=0)
    encoder, llm = encoder_loads(plan, cost_model()), llm_loads(plan, cost_model())
    assert encoder.max(axis=1).sum() == pytest.approx(plan.encoder_balance.makespan_after)
    assert llm.max(axis=1).sum() == pytest.approx(plan.llm_balance.makespan_after)
    assert encoder.mean(axis=1).sum() == pytest.approx(plan.encoder_balance.mean)


def test_larger_groups_have_shorter_steps_on_even_mixtures() -> None:
    rows = measure_groups("5:5", worlds=(16,), seed=0)
    assert [row["group"] for row in rows] == [1, 8, 16]
    steps = [row["step_s"] for row in rows]
    assert steps == sorted(steps, reverse=True)
    planner = make_planner(16, lssp="off")
    plan = planner.plan(step_packs(16, MIXTURES["5:5"], seed=0), step=0, group=0)
    assert steps[-1] == pytest.approx(step_s(plan))


def test_mixtures_are_drawn_at_their_shares() -> None:
    for name in ("2:8", "8:2"):
        packs = step_packs(16, MIXTURES[name], seed=0)
        tokens = [(s.num_tokens, any(g.is_media for g in s.segments)) for p in packs for s in p.samples]
        share = sum(size for size, has_media in tokens if has_media) / sum(size for size, _ in tokens)
        assert share == pytest.approx(int(name[0]) / 10, abs=0.05)
        assert all(pack.num_tokens <= SEQ_LEN for pack in packs)
        assert np.mean([pack.num_tokens for pack in packs]) > 0.8 * SEQ_LEN


def test_balance_lowers_both_imbalances_of_a_mixture() -> None:
    row = measure_mixture(MIXTURES["5:5"], num_ranks=8, seed=0)
    assert 1 <= row["encoder"]["after"] < row["encoder"]["before"]
    assert 1 <= row["llm"]["after"] < row["llm"]["before"]


def test_the_best_step_of_two_microbatches_is_the_least_of_all_orders() -> None:
    model = cost_model()
    packs = make_packs(MIXTURES["video"], num_lanes=4, packs_per_lane=1, seed=3)
    media = [
        [model.media_cost(g) for sample in pack.samples for g in sample.segments if g.is_media]
        for pack in packs
    ]

    def seconds(*chosen: int) -> float:
        costs = np.asarray([cost for pack in chosen for cost in media[pack]])
        return max(model.pack_cost(packs[pack]) for pack in chosen) + optimal_makespan(costs, 2)

    least = min(seconds(a, b) + seconds(c, d) for a, b, c, d in itertools.permutations(range(4)))
    assert optimal_step(packs, model, num_replicas=2) == pytest.approx(least, rel=1e-3)


def test_plans_are_close_to_the_best_of_all_plans() -> None:
    row = measure("video", num_replicas=2, num_microbatches=3, draws=10)
    assert 1 - 1e-3 <= row["ratio"] < 1.01
    assert row["ratio"] < row["unbalanced"]


def test_partitions_are_never_below_their_bounds() -> None:
    cases = [
        measure_partition(draw, 3, 9, seeds=range(3), bound_of=optimal_makespan) for draw in DISTRIBUTIONS
    ]
    for row in summary(cases).values():
        assert row["ratio"] >= 1
        assert row["worst"] >= row["ratio"]
    assert summary(cases)["balance"]["ratio"] <= summary(cases)["lpt"]["ratio"]
