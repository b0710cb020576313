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
    assert done.stderr.count("attention on cpu in fp32: one SDPA call per length of segment") == 1

    run_file = make_run(broken)
    process = start_omni("train", str(run_file), "--nproc", "2")
    wait_for_step(broken / "run", 5)
    os.kill(rank_pids(process.pid)[1], signal.SIGKILL)
    killed = time.monotonic()
    code, errors = end(process)
    # The launcher kills ranks that do not notice only after GRACE_S = 10 s, and says so.
    assert time.monotonic() - killed < 9
    assert code == 1
    assert "rank 0 ERROR omni_pipeline.app.rank: RankError: another rank left the run" in errors
    assert "rank 1 was ended by SIGKILL" in errors
    assert "did not notice" not in errors
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


def in_folders(commands: list[list[str]], folders: list[Path]) -> list[tuple[int, str]]:
    """Run each command as the one rank of a node of its own, in its folder; return codes and stderr."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "omni_pipeline", *command],
            cwd=folder,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(len(commands)),
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, (command, folder) in enumerate(zip(commands, folders, strict=True))
    ]
    return [end(process, timeout_s=60) for process in ranks]


def test_a_member_with_other_settings_is_named_within_seconds(tmp_path: Path) -> None:
    run_file = str(make_run(tmp_path))
    start = time.monotonic()
    ended = in_folders([["train", run_file], ["train", run_file, "--optimizer.lr", "5e-4"]], [tmp_path] * 2)
    assert time.monotonic() - start < 30
    for code, errors in ended:
        assert code == 2, errors
        assert "ranks have other settings than rank 0: rank 1 in 'optimizer'" in errors
        assert "Traceback" not in errors


def with_relative_run_dir(root: Path) -> str:
    """Make a run whose run.dir is ``run`` in the folder where a rank stands; return the run file."""
    run_file = make_run(root)
    run_file.write_text(run_file.read_text().replace(f'"{root}/run"', '"run"'))
    return str(run_file)


def test_a_rank_that_cannot_start_ends_the_others_with_its_reason(tmp_path: Path) -> None:
    run_file = with_relative_run_dir(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "run").write_text("a file where run.dir should be")
    ended = in_folders([["train", run_file]] * 2, [tmp_path, other])
    assert [code for code, _ in ended] == [1, 2], ended
    assert "rank 1 cannot go on: it cannot start: cannot make the folder run" in ended[0][1]
    assert "cannot make the folder run" in ended[1][1]


def test_a_rank_that_does_not_see_the_checkpoint_is_named(tmp_path: Path) -> None:
    run_file = with_relative_run_dir(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    first = in_folders([["train", run_file, "--run.steps", "4"]], [tmp_path])
    assert first[0][0] == 0, first
    ended = in_folders([["train", run_file]] * 2, [tmp_path, other])
    assert [code for code, _ in ended] == [1, 2], ended
    assert "rank 1 does not see the checkpoint run/checkpoints/step-00000004" in ended[1][1]
    assert "put run.dir on storage that all ranks share" in ended[0][1]


def test_the_held_out_samples_are_evaluated_even_if_a_kill_came_first(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, steps=4)
    done = omni("train", str(run_file), "--evaluation.sources", "[]")
    assert done.returncode == 0, done.stderr
    assert "evaluation/held-out-captions/loss" not in read_metrics(tmp_path / "run" / "metrics.jsonl")
    again = omni("train", str(run_file))
    assert again.returncode == 0, again.stderr
    steps, _ = read_metrics(tmp_path / "run" / "metrics.jsonl")["evaluation/held-out-captions/loss"]
    assert steps.tolist() == [3]


def test_groups_of_one_rank_and_an_end_of_the_data(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, steps=500)
    flags = ["--balance.group", "1", "--order.epochs", "1", "--evaluation.every_steps", "3"]
    done = omni("train", str(run_file), "--nproc", "2", *flags)
    assert done.returncode == 0, done.stderr
    assert "the data ended at step" in done.stderr
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    num_samples = {
        name: int(metrics[f"loader/samples/{name}"][1].sum()) for name in ("captions", "talks", "clips")
    }
    assert num_samples == {"captions": 26, "talks": 10, "clips": 6}
    steps = metrics["trainer/loss"][0].tolist()
    evaluated = metrics["evaluation/held-out-captions/loss"][0].tolist()
    assert evaluated == sorted({*range(2, len(steps), 3), steps[-1]})


def test_ctrl_c_saves_a_checkpoint_and_exits_130(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, steps=500)
    process = start_omni("train", str(run_file), "--nproc", "2", "--checkpoint.every_steps", "0")
    wait_for_step(tmp_path / "run", 1)
    process.send_signal(signal.SIGINT)
    code, errors = end(process)
    assert code == 130, errors
    assert "Ctrl-C: asking the ranks to save and end" in errors
    assert "Traceback" not in errors
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


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


def test_a_second_run_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, steps=500)
    process = start_omni("train", str(run_file))
    wait_for_step(tmp_path / "run", 1)
    second = omni("train", str(run_file))
    assert second.returncode == 2, second.stderr
    assert f"another run writes to {tmp_path / 'run'}" in second.stderr
    process.send_signal(signal.SIGTERM)
    code, errors = end(process)
    assert code == 0, errors


def test_ctrl_c_while_the_ranks_start_exits_130(tmp_path: Path) -> None:
    process = start_omni("train", str(make_run(tmp_path)), "--nproc", "2")
    deadline = time.monotonic() + 30
    while len(psutil.Process(process.pid).children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    code, errors = end(process)
    assert code == 130, errors
    assert "Traceback" not in errors
