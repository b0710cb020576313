"""The real command line: train, kill, resume, change the number of ranks, disagree, stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from loaders.index import index_shards
from omni_pipeline.app.sinks import read_metrics
from tests.support.runs import end, losses, make_run, omni, start_omni, wait_for_step
from tests.support.shards import caption_members, write_tar

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def rank_pids(launcher: int) -> dict[int, int]:
    """Process ids of the ranks by rank."""
    found = {}
    for child in psutil.Process(launcher).children():
        found[int(child.environ()["RANK"])] = child.pid
    return found


def test_a_killed_rank_ends_the_run_and_the_next_start_joins_exactly(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    done = omni("train", str(make_run(whole)), "--nproc", "2")
    assert done.returncode == 0, done.stderr

    run_file = make_run(broken)
    process = start_omni("train", str(run_file), "--nproc", "2")
    wait_for_step(broken / "run", 5)
    os.kill(rank_pids(process.pid)[1], signal.SIGKILL)
    killed = time.monotonic()
    code, errors = end(process)
    assert time.monotonic() - killed < 15
    assert code == 1
    assert "rank 1 was ended by SIGKILL" in errors
    assert "Traceback" not in errors

    again = omni("train", str(run_file), "--nproc", "2")
    assert again.returncode == 0, again.stderr
    assert "resumed from" in again.stderr
    assert losses(broken / "run") == losses(whole / "run")
    assert list(losses(whole / "run")) == list(range(12))
    assert (broken / "run" / "report.html").stat().st_size > 10_000

    # A finished run is left as it is.
    finished = omni("train", str(run_file), "--nproc", "2")
    assert finished.returncode == 0, finished.stderr
    assert losses(broken / "run") == losses(whole / "run")


def test_a_run_goes_on_with_another_number_of_ranks_on_the_same_samples(tmp_path: Path) -> None:
    # The learning rate must not depend on the number of steps of the first part.
    run = ["train", str(make_run(tmp_path)), "--optimizer.min_lr_ratio", "1"]
    first = omni(*run, "--nproc", "2", "--run.steps", "4")
    assert first.returncode == 0, first.stderr
    assert omni(*run, "--run.dir", str(tmp_path / "other"), "--run.steps", "8").returncode == 0
    second = omni(*run, "--run.steps", "8")
    assert second.returncode == 0, second.stderr
    one, two = tmp_path / "other", tmp_path / "run"
    assert losses(two) == pytest.approx(losses(one), rel=1e-3)
    for source in ("captions", "talks", "clips"):
        series = [read_metrics(run / "metrics.jsonl")[f"loader/tokens/{source}"] for run in (one, two)]
        assert series[0][1].tolist() == series[1][1].tolist()


def test_sigterm_saves_a_checkpoint_and_stops_on_all_ranks(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, steps=500)
    process = start_omni("train", str(run_file), "--nproc", "2", "--checkpoint.every_steps", "0")
    wait_for_step(tmp_path / "run", 1)
    process.send_signal(signal.SIGTERM)
    code, errors = end(process)
    assert code == 0, errors
    assert "a signal asked for it" in errors
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    last = max(losses(tmp_path / "run"))
    assert checkpoint.name == f"step-{last + 1:08d}"


def test_a_member_with_other_settings_is_named_within_seconds(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "omni_pipeline", "train", str(run_file), *flags],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, flags in enumerate([[], ["--optimizer.lr", "5e-4"]])
    ]
    ended = [end(process, timeout_s=60) for process in ranks]
    for code, errors in ended:
        assert code == 2, errors
        assert "ranks have other settings than rank 0: rank 1 in 'optimizer'" in errors
        assert "Traceback" not in errors


def test_a_bad_sample_is_quarantined_and_the_run_goes_on(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    members = caption_members(16)
    members["000003.jpg"] = members["000003.jpg"][: len(members["000003.jpg"]) * 2 // 3]  # its header is good
    index_shards([str(write_tar(tmp_path / "captions-000000.tar", members))])
    done = omni("train", str(run_file), "--nproc", "2", "--loader.max_bad_fraction", "0.5")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    kinds = {(record["source"], record["key"], record["stage"]) for record in records}
    assert kinds == {("captions", "000003", "decode")}
