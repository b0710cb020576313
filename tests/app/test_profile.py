"""Where the time of a run went, from numbers that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from balancer.hardware import load_hardware
from omni_pipeline.app.profile import OLD_RUN, BalanceRow, Spread, profile_run
from omni_pipeline.app.report_run import load_run
from omni_pipeline.app.run_dir import RunDir
from omni_pipeline.app.sinks import JsonlMetrics
from omni_pipeline.app.stages import stage_series
from omni_pipeline.app.worst_steps import SampleName, WorstSteps
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.sample import SampleId
from trainer.step_causes import HeavySample, PartCause, StepCause

STAGES = {
    "step_s": 1.0,
    "wait_s": 0.1,
    "agree_s": 0.05,
    "compute_s": 0.7,
    "optimizer_s": 0.1,
    "encoder_s": 0.3,
    "encoder_own_s": 0.2,
    "exchange_s": 0.1,
    "exchange_own_s": 0.01,
    "llm_s": 0.2,
    "llm_own_s": 0.15,
}


def write_run(run_dir: Path, *, num_steps: int = 11, hardware: str = "h100", stages: bool = True) -> Path:
    """Steps of one second but the first, which takes ten, and step 7, which takes two; saves take a tenth."""
    clock = [0.0]
    metrics = JsonlMetrics(run_dir / "metrics.jsonl", clock=lambda: clock[0])
    for step in range(num_steps):
        step_s = {0: 10.0, 7: 2.0}.get(step, 1.0)
        clock[0] += step_s + 0.1
        values = {
            "trainer/step_s": step_s,
            "trainer/tokens": 500.0 * step_s,
            "trainer/num_ranks": 4.0,
            "trainer/flops": 0.3 * step_s * 4 * 989e12,
            "loader/wait_s": 0.2 * step_s,
            "loader/padding": 0.25,
            "loader/pack_fill": 0.9,
            "loader/plan_s": 0.02 * step_s,
            "balancer/encoder_imbalance_before": 2.0 + step,
            "balancer/encoder_imbalance_after": 1.1,
            "balancer/encoder_imbalance_measured": 1.2,
            "balancer/llm_imbalance_before": 1.5,
            "balancer/llm_imbalance_after": 1.0,
        }
        if stages:
            values |= {f"trainer/mean/{name}": value * step_s for name, value in STAGES.items()}
        for name, value in values.items():
            metrics.record(name, value, step)
        metrics.flush()
    metrics.close()
    RunDir(run_dir).write_settings({"balance": {"hardware": hardware}})
    return run_dir


def test_the_first_step_of_a_start_counts_in_no_time(tmp_path: Path) -> None:
    found = profile_run(write_run(tmp_path))
    assert (found.num_steps, found.num_left_out, found.num_ranks, found.num_starts) == (11, 1, 4, 1)
    assert found.step_s == Spread(p50=1.0, p99=2.0, worst=2.0, worst_step=7)
    assert found.tokens_per_s == pytest.approx(500.0)
    assert found.data_stall == pytest.approx(0.2)
    assert (found.padding, found.pack_fill) == (0.25, 0.9)
    assert found.plan_share == pytest.approx(0.02)
    assert found.plan_s == Spread(p50=0.02, p99=0.04, worst=0.04, worst_step=7)
    assert found.outside_share == pytest.approx(1 / 12)


def test_one_step_is_told_though_it_is_the_first(tmp_path: Path) -> None:
    found = profile_run(write_run(tmp_path, num_steps=1))
    assert (found.num_left_out, found.step_s.p50) == (0, 10.0)


def test_the_first_steps_of_all_starts_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=4)
    metrics = JsonlMetrics(tmp_path / "metrics.jsonl")
    for step in (2, 3, 4):
        metrics.record("trainer/step_s", 50.0 if step == 2 else 1.0, step)
    metrics.close()
    found = profile_run(tmp_path)
    assert (found.num_steps, found.num_left_out, found.num_starts) == (5, 2, 2)
    assert found.step_s.worst == 1.0


def test_stages_add_up_to_the_step(tmp_path: Path) -> None:
    found = {row.name: row for row in profile_run(write_run(tmp_path)).stages}
    shares = {name: round(row.share, 6) for name, row in found.items()}
    assert shares == {
        "wait for data": 0.1,
        "agree on the step": 0.05,
        "encoders": 0.3,
        "exchange of rows": 0.1,
        "LLM": 0.2,
        "gather losses and norms": 0.1,
        "optimizer": 0.1,
        "other": 0.05,
    }
    assert found["encoders"].seconds == pytest.approx(0.3 * 11 / 10)
    assert found["encoders"].own_s == pytest.approx(0.2 * 11 / 10)
    assert found["optimizer"].own_s is None
    series = stage_series(load_run(tmp_path))
    assert sum(values[7] for _, values in series.values()) == pytest.approx(2.0)


def test_a_run_of_before_has_no_stages_and_says_so(tmp_path: Path) -> None:
    found = profile_run(write_run(tmp_path, stages=False))
    assert found.stages == []
    assert OLD_RUN in found.notes
    assert stage_series(load_run(tmp_path)) == {}


def test_imbalance_is_told_by_part_and_kind(tmp_path: Path) -> None:
    found = profile_run(write_run(tmp_path)).balance
    assert found[0] == BalanceRow("encoder", "before", Spread(p50=7.5, p99=12.0, worst=12.0, worst_step=10))
    kinds = [(row.part, row.kind) for row in found]
    assert kinds == [
        ("encoder", "before"),
        ("encoder", "after"),
        ("encoder", "measured"),
        ("llm", "before"),
        ("llm", "after"),
    ]


def test_the_mfu_is_of_the_machine_that_the_run_names(tmp_path: Path) -> None:
    found = profile_run(write_run(tmp_path))
    assert found.mfu == pytest.approx(0.3)
    assert (found.hardware, found.peak_flops_per_s) == ("h100", load_hardware("h100").flops_per_s)
    slow = profile_run(tmp_path, hardware="cpu")
    assert slow.mfu == pytest.approx(0.3 * 989e12 / load_hardware("cpu").flops_per_s)


def test_without_a_known_machine_there_is_no_mfu_and_the_reason_is_told(tmp_path: Path) -> None:
    found = profile_run(write_run(tmp_path, hardware="gone.toml"))
    assert found.mfu is None
    assert any("gone.toml" in note for note in found.notes)


def test_worst_steps_are_told_with_the_names_of_their_samples(tmp_path: Path) -> None:
    write_run(tmp_path)
    sample = HeavySample(SampleId("captions", 2, 9), 1, units=64, modelled_s=0.5, num_ranks=2)
    part = PartCause("encoder", 2.0, 1.5, 1.4, 3, 1, 0.7, 0.4, (sample,))
    path = RunDir(tmp_path).worst_steps_path
    worst = WorstSteps(path, first_step=0, name_of=lambda item: SampleName(item, "k9", "c-2.tar"))
    for step in range(11):
        worst.see(StepCause(step, 1.0 + (step == 7), 0.1, float(step == 5), (part,)))
    found = profile_run(tmp_path).to_dict()["worst"]
    assert [item["step"] for item in found][:1] == [7]
    assert 5 in [item["step"] for item in found]
    assert found[0]["parts"][0]["samples"] == [
        {
            "source": "captions",
            "key": "k9",
            "shard": "c-2.tar",
            "row": 9,
            "microbatch": 1,
            "units": 64,
            "modelled_s": 0.5,
            "num_ranks": 2,
        }
    ]
    json.dumps(found)


def test_a_run_without_step_times_is_a_config_error(tmp_path: Path) -> None:
    metrics = JsonlMetrics(tmp_path / "metrics.jsonl")
    metrics.record("trainer/loss", 1.0, 0)
    metrics.close()
    with pytest.raises(ConfigError, match="has no step times"):
        profile_run(tmp_path)
