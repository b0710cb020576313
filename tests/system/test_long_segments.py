"""The real command line with long segments: shards, decode workers and ranks that share what they decode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omni_pipeline.app.sinks import read_metrics
from tests.support.runs import losses, make_run, omni

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LSSP = ["--balance.lssp.kind", "fixed", "--balance.lssp.min_rows", "2"]


def test_a_run_that_shares_segments_learns_what_one_rank_learns(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "shared").mkdir()
    alone, shared = make_run(tmp_path / "alone", steps=6), make_run(tmp_path / "shared", steps=6)
    kinds = set()
    for step in range(6):
        plan = omni("plan", str(shared), "--ranks", "2", "--step", str(step), "--json", *LSSP)
        assert plan.returncode == 0, plan.stderr
        (found,) = json.loads(plan.stdout)["groups"]
        kinds |= {(item["encoder"], item["joined"]) for item in found["media"] if len(item["ranks"]) > 1}
    assert {("vision", True), ("vision", False)} <= kinds

    for command in (["train", str(alone)], ["train", str(shared), "--nproc", "2", *LSSP]):
        done = omni(*command)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "shared" / "run") == pytest.approx(losses(tmp_path / "alone" / "run"), rel=1e-3)
    series = [read_metrics(tmp_path / name / "run" / "metrics.jsonl") for name in ("alone", "shared")]
    name = next(name for name in series[0] if name.startswith("evaluation/") and "loss" in name)
    assert series[1][name][1].tolist() == pytest.approx(series[0][name][1].tolist(), rel=1e-3)
