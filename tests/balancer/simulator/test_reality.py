"""The comparison of simulated and measured steps: its packs, its sums, and one real round of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from balancer.fitted import FittedCost
from balancer.simulator.simulate import SimulatedStep
from benchmarks.reality import row_of, speedups, summary
from benchmarks.reality_steps import SEQ_LEN, Seen, Setting, make_packs, run_config, run_settings, slowed
from omni_pipeline.app.costs import cost_model
from tests.support.ranks import run_ranks
from trainer.stage_times import ENCODER, EXCHANGE, LLM

SETTING = Setting(0.5, "small", "step", balance=False)
STEP = SimulatedStep(
    step_s=3.0,
    num_tokens=10,
    tokens_per_s=1.0,
    mfu=0.1,
    bubble_fraction=0.0,
    encoder_imbalance=1.5,
    llm_imbalance=1.25,
    exchange_s=0.0,
    collective_s=0.5,
    peak_bytes=1.0,
    out_of_memory=False,
    busy_s={"encoder": 1.0, "llm": 0.8},
)


def seen(step_s: float, encoder: tuple[float, float], llm: tuple[float, float]) -> Seen:
    """Two steps of one microbatch each, on one rank."""
    own = {ENCODER: encoder, EXCHANGE: (9.0, 9.0), LLM: llm}
    return Seen(SETTING, step_s, 0.2, own, ranks_per_core=2.0, simulated=(STEP, STEP))


def test_a_row_compares_means_over_the_steps() -> None:
    row = row_of([seen(8.0, (1.0, 3.0), (1.0, 1.0)), seen(7.0, (2.0, 1.0), (1.0, 2.0))])
    assert (row["ranks"], row["mixture"], row["balance"]) == (2, 0.5, False)
    assert (row["measured_s"], row["simulated_s"], row["serial_s"]) == (4.0, 3.0, 3.5)
    assert (row["error"], row["error_serial"]) == (-0.25, -0.125)
    # In each stage and microbatch the slower rank: (2 + 3) + (1 + 2), over two steps.
    assert row["work_s"] == 4.0
    # 1.5 x 1.0 + 1.25 x 0.8 of a rank that has half a core.
    assert row["simulated_work_s"] == 1.25
    assert row["error_work"] == pytest.approx(1.25 / 4 - 1)
    assert row["outside_s"] == 0.1


def test_errors_are_absolute_by_ranks_and_pairs_differ_in_balance_alone() -> None:
    off = row_of([seen(8.0, (1.0, 3.0), (1.0, 1.0))])
    on = {**off, "balance": True, "measured_s": 2.0, "error": 0.5}
    other = {**on, "mixture": 0.9}
    assert summary([off, on])["median_error"] == {"1": 0.375}
    (pair,) = speedups([off, on, other])
    assert (pair["measured"], pair["simulated"], pair["mixture"]) == (2.0, 1.0, 0.5)


@pytest.mark.parametrize(("mixture", "num_media"), [(0.0, 0), (1.0, 8)])
def test_packs_are_full_and_of_one_kind(mixture: float, num_media: int) -> None:
    config = run_config("small", 4)
    packs = make_packs(config, mixture, seed=3)
    assert [pack.num_tokens for pack in packs] == [SEQ_LEN] * 8
    has_media = [
        any(segment.is_media for item in pack.samples for segment in item.segments) for pack in packs
    ]
    assert sum(has_media) == num_media
    for pack in packs:
        for sample in pack.samples:
            assert sample.num_tokens == sum(segment.num_tokens for segment in sample.segments) + 1
    assert packs == make_packs(config, mixture, seed=3)
    assert packs != make_packs(config, mixture, seed=4)


def test_ranks_that_share_a_core_are_as_much_slower() -> None:
    fit = FittedCost(
        pair_s=1.0,
        position_s=2.0,
        segment_s=3.0,
        microbatch_s=4.0,
        forward_fraction=0.3,
        median_error=0.1,
        max_error=0.2,
        worst="",
        num_measured=9,
        shape="",
    )
    model = replace(cost_model(run_config("small", 2)), fits={"llm": fit})
    found = slowed(model, 2.0).fits["llm"]
    assert (found.pair_s, found.position_s, found.segment_s, found.microbatch_s) == (2.0, 4.0, 6.0, 8.0)
    assert found.forward_fraction == 0.3


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_real_steps_are_measured_and_their_plans_simulated(tmp_path: Path) -> None:
    settings = (SETTING, replace(SETTING, balance=True))
    by_rank = run_ranks(2, run_settings, args=(2, tmp_path, settings, 1, 4, 12.0), timeout_s=180)
    rows = [row_of(of_ranks) for of_ranks in zip(*by_rank, strict=True)]
    for row in rows:
        assert min(row["measured_s"], row["simulated_s"], row["work_s"]) > 0
        # Far apart only if one of them is wrong, not noisy: the fits are of the same model and machine.
        assert 0.4 < row["simulated_work_s"] / row["work_s"] < 2.5
    (pair,) = speedups(rows)
    assert pair["simulated"] > 1.1
    assert pair["work"] > 1.1
