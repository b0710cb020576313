"""``omni demo`` as a user runs it: the whole path, and its numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.runs import omni

KINDS = {"image", "video", "audio"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_learns_survives_a_kill_and_reports(tmp_path: Path) -> None:
    done = omni("demo", "--out", str(tmp_path / "demo"), "--json", timeout_s=590)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["accuracy"]) == set(result["accuracy_swapped"]) == KINDS
    assert min(result["accuracy"].values()) >= 0.9, result["accuracy"]
    # Chance is 1/4, 1/4, 1/3; 64 to 96 samples spread by some 0.06.
    assert max(result["accuracy_swapped"].values()) <= 0.5, result["accuracy_swapped"]
    assert result["loss_last"] < result["loss_first"] / 3
    assert 0 < result["resumed_at_step"] < result["steps"]
    assert result["replayed_steps"] > 0
    assert result["replayed_loss_difference"] == 0
    assert result["quarantined"] == 2
    balance = result["imbalance"]
    assert 1 <= balance["encoder"]["after"] < balance["encoder"]["before"]
    assert 1 <= balance["llm"]["after"] <= balance["llm"]["before"]
    assert 0 <= result["padding_fraction"] < 0.1
    assert all(count > 0 for count in result["samples_per_source"].values())
    report = Path(result["report"]).read_text(encoding="utf-8")
    assert "killed (SIGKILL)" in report
    assert "http://" not in report.split("</head>")[0]


@pytest.mark.timeout(120)
def test_the_demo_leaves_a_folder_of_others_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    done = omni("demo", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "is not empty and was not made by omni demo" in done.stderr
    assert (tmp_path / "precious.txt").read_text() == "mine"
