"""A small real run for system tests: four sources of real media, the tiny model, a run file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from balancer.hardware import save_hardware
from loaders.index import index_shards
from omni_pipeline.app.environment import Environment
from omni_pipeline.app.rank import RankRun
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.sinks import read_metrics
from omni_pipeline.core.config import load_config
from tests.support.hardware import flat_hardware
from tests.support.shards import caption_members, clip_members, talk_members, write_tar

RUN_FILE = """
[run]
dir = "{root}/run"
steps = {steps}
gallery_packs = 2

[[sources]]
name = "captions"
shards = "{root}/captions-*.tar"
layout = {{ kind = "fields", fields = ["jpg|png", "txt"] }}
weight = 0.5

[[sources]]
name = "talks"
shards = "{root}/talks-*.tar"
layout = {{ kind = "fields", fields = ["wav|flac|mp3", "txt"] }}
weight = 0.3

[[sources]]
name = "clips"
shards = "{root}/clips-*.tar"
layout = {{ kind = "fields", fields = ["mp4|webm", "txt"] }}
weight = 0.2

[order]
lanes = 4
packs_per_step = 4
seq_len = 160
look_ahead = 8

[model]
size = "tiny"

[balance]
group = "all"
hardware = "{root}/slow.toml"

[loader]
num_workers = 1

[optimizer]
lr = 1e-3
warmup_steps = 2

[checkpoint]
every_steps = 4
keep = 2

[[evaluation.sources]]
name = "held-out-captions"
shards = "{root}/held-captions-*.tar"
layout = {{ kind = "fields", fields = ["jpg|png", "txt"] }}
"""


def make_run(root: Path, *, steps: int = 12) -> Path:
    """Write shards, their indexes and a run file into ``root``; return the run file."""
    shards = [
        write_tar(root / "captions-000000.tar", caption_members(16)),
        write_tar(root / "captions-000001.tar", caption_members(10, first=16)),
        write_tar(root / "talks-000000.tar", talk_members(10)),
        write_tar(root / "clips-000000.tar", clip_members(6)),
        write_tar(root / "held-captions-000000.tar", caption_members(7, first=100)),
    ]
    reports = index_shards([str(shard) for shard in shards])
    assert not any(report.error for report in reports)
    # Slow ranks and quick links, so that plans move what they can.
    save_hardware(root / "slow.toml", flat_hardware(latency_s=1e-6), comment="Slow ranks.")
    path = root / "run.toml"
    path.write_text(RUN_FILE.format(root=root, steps=steps), encoding="utf-8")
    return path


def omni(*arguments: str, timeout_s: float = 100, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "omni_pipeline", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **environment},
    )


def start_omni(*arguments: str) -> subprocess.Popen[str]:
    """Start the command line."""
    return subprocess.Popen(
        [sys.executable, "-m", "omni_pipeline", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str], *, timeout_s: float = 60) -> tuple[int, str]:
    """Wait for a started command; return its exit code and standard error."""
    try:
        _, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, errors


def wait_for_step(run_dir: Path, step: int, *, timeout_s: float = 80) -> None:
    """Wait until the metrics of ``step`` are on file."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        path = run_dir / "metrics.jsonl"
        if path.exists() and any(f'"step": {step},' in line for line in path.read_text().splitlines()):
            return
        time.sleep(0.05)
    raise TimeoutError(f"no step {step} in {run_dir} after {timeout_s} s")


def losses(run_dir: Path) -> dict[int, float]:
    """Return the loss by step, the last attempt winning."""
    steps, values = read_metrics(run_dir / "metrics.jsonl")["trainer/loss"]
    return dict(zip(steps.tolist(), values.tolist(), strict=True))


def be_rank(
    rank: int, run_file: Path, world_size: int, flags: Sequence[str], ranks_per_node: int = 0
) -> None:
    """Be one rank of the run, on nodes of ``ranks_per_node`` if given.

    The process group exists already (see ``run_ranks``).
    """
    per_node = ranks_per_node or world_size
    place = Environment(
        rank=rank, world_size=world_size, local_rank=rank % per_node, local_world_size=per_node
    )
    run = RankRun(load_config(RunConfig, run_file, flags), place=place, device=torch.device("cpu"))
    run.prepare_model()
    run.train()
    if run.lock is not None:
        run.lock.close()
