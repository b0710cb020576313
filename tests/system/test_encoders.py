"""The example of docs/encoders.md through the real command line: an encoder of one's own, end to end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from balancer.hardware import save_hardware
from omni_pipeline.app.sinks import read_metrics
from tests.support.depth import EXAMPLE, depth_map, depth_members
from tests.support.hardware import flat_hardware
from tests.support.runs import losses, omni
from tests.support.shards import write_tar
from trainer.checkpoint_files import latest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 8


TEXTS = """
[[sources]]
name = "texts"
weight = 6
shards = "{root}/texts-*.tar"
layout = {{ kind = "fields", fields = ["txt"] }}

[balance]
group = "all"
hardware = "{root}/slow.toml"
"""


def make_example(root: Path) -> list[str]:
    """Copy the example, with data and a second source of text alone; return the arguments of a run of it."""
    shutil.copytree(EXAMPLE, root / "example")
    # One map is far larger than the others, so that it pays to move some to the other rank; one is damaged.
    maps = depth_members(16) | {"big.depth.png": depth_map(160, 240, millimetres=800), "big.txt": b"near"}
    maps["0003.depth.png"] = depth_map(32, 32, millimetres=9)[:-30]
    write_tar(root / "depth-000000.tar", maps)
    write_tar(root / "texts-000000.tar", {f"{n}.txt": b"only words, no map" for n in range(12)})
    save_hardware(root / "slow.toml", flat_hardware(latency_s=1e-6), comment="Slow ranks.")
    run_file = root / "example" / "run.toml"
    text = run_file.read_text().replace("examples/depth", str(root / "example"))
    text = text.replace("data/depth-*.tar", f"{root}/depth-*.tar")
    run_file.write_text(text + TEXTS.format(root=root))
    flags = ["--checkpoint.every_steps", "4", "--loader.num_workers", "1"]
    return [str(run_file), "--run.steps", str(STEPS), *flags]


def run(*arguments: str) -> str:
    done = omni(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def plan_of(arguments: list[str], step: int) -> dict[str, Any]:
    (group,) = json.loads(run("plan", *arguments, "--ranks", "2", "--step", str(step), "--json"))["groups"]
    return group  # type: ignore[no-any-return]


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    whole = run_dir / f"{step}.pt"
    dcp_to_torch_save(run_dir / "checkpoints" / f"step-{step:08}" / "tensors", whole)
    return torch.load(whole, weights_only=True)["model"]  # type: ignore[no-any-return]


def test_an_encoder_of_ones_own_is_indexed_planned_trained_resumed_and_shown(tmp_path: Path) -> None:
    arguments = make_example(tmp_path)
    shards = [str(tmp_path / f"{name}-000000.tar") for name in ("depth", "texts")]
    encoder_file = str(tmp_path / "example" / "depth_encoder.py")
    run("data", "index", *shards)
    refused = omni("train", *arguments)
    assert refused.returncode == 2
    assert f"omni data index --encoder {encoder_file}" in refused.stderr
    assert "Traceback" not in refused.stderr
    run("data", "index", *shards, "--encoder", encoder_file)

    plans = [plan_of(arguments, step) for step in (1, 2)]
    assert {item["encoder"] for plan in plans for item in plan["media"]} == {"depth"}
    homes = [
        (item["ranks"], [plan["packs"][item["pack"]]["replica"]]) for plan in plans for item in plan["media"]
    ]
    assert any(ranks != home for ranks, home in homes)
    busy = [len({(item["microbatch"], *item["ranks"]) for item in plan["media"]}) for plan in plans]
    assert min(busy) < 2 * plans[0]["num_microbatches"], "no rank is without a map in any microbatch"

    folder = tmp_path / "two"
    two = [*arguments, "--run.dir", str(folder), "--checkpoint.keep", "9"]
    run("train", *two, "--nproc", "2")
    learned = losses(folder)
    assert learned[STEPS - 1] < 0.7 * learned[0]
    early, late = weights(folder, 4), weights(folder, STEPS)
    own = [name for name in late if name.startswith("encoders.depth.")]
    assert len(own) > 20
    assert all(not torch.equal(early[name], late[name]) for name in own)
    quarantine = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
    assert {record["key"] for record in quarantine} == {"0003"}
    assert "depth, no picture" in (folder / "report.html").read_text()

    # One rank computes the same, and so do two from a checkpoint on, at another number of ranks.
    alone = [*arguments, "--run.dir", str(tmp_path / "one")]
    run("train", *alone)
    assert losses(tmp_path / "one") == pytest.approx(learned, rel=1e-3)
    for number in (STEPS,):
        shutil.rmtree(folder / "checkpoints" / f"step-{number:08}")
    run("train", *two)
    assert losses(folder) == pytest.approx(learned, rel=1e-3)
    assert latest(folder / "checkpoints") is not None

    # What the weights mean is in the file: another one does not fit the checkpoint.
    path = Path(encoder_file)
    path.write_text(path.read_text().replace("* 4, HIDDEN", "* 4,  HIDDEN") + "\n# edited\n")
    refused = omni("train", *two, "--run.steps", str(STEPS + 1))
    assert refused.returncode == 2
    assert "encoders" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_frozen_encoder_of_ones_own_keeps_its_weights(tmp_path: Path) -> None:
    arguments = make_example(tmp_path)
    shards = [str(tmp_path / f"{name}-000000.tar") for name in ("depth", "texts")]
    run("data", "index", *shards, "--encoder", str(tmp_path / "example" / "depth_encoder.py"))
    folder = tmp_path / "frozen"
    flags = [
        "--run.dir",
        str(folder),
        "--optimizer.freeze",
        '["depth"]',
        "--encoders.depth.recompute",
        "true",
    ]
    run("train", *arguments, *flags, "--run.steps", "4", "--checkpoint.every_steps", "2", "--nproc", "2")
    early, late = weights(folder, 2), weights(folder, 4)
    changed = {name.split(".")[1] for name in late if not torch.equal(early[name], late[name])}
    assert "depth" not in changed
    assert "embed_tokens" in changed
    assert read_metrics(folder / "metrics.jsonl")["trainer/loss"][1].size == 4
