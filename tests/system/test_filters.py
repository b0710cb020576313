"""The real command line with ``where`` and deny-lists: what one run could not read, the next leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from loaders.index import index_shards
from omni_pipeline.app.sinks import read_metrics
from tests.support.runs import losses, make_run, omni
from tests.support.shards import caption_members, image_bytes, write_tar

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_quarantine_becomes_a_deny_list_and_a_filter_stays_what_it_was(tmp_path: Path) -> None:
    run_file = str(make_run(tmp_path, steps=8))
    members = caption_members(10, first=16)
    noise = np.random.default_rng(0).integers(0, 255, (56, 84, 3), "u1")
    whole = image_bytes(84, 56, pixels=noise)
    # Its header is right, so that only decoding finds out.
    members["000020.jpg"] = whole[: len(whole) // 2]
    index_shards([str(write_tar(tmp_path / "captions-000001.tar", members))])
    one_epoch = ["--order.epochs=1", "--run.steps=50", "--loader.max_bad_fraction=1"]

    first = omni("train", run_file, *one_epoch, f"--run.dir={tmp_path}/1")
    assert first.returncode == 0, first.stderr
    quarantine = tmp_path / "1" / "quarantine.jsonl"
    assert [json.loads(line)["key"] for line in quarantine.read_text().splitlines()] == ["000020"]

    filtered = [*one_epoch, f"--run.dir={tmp_path}/2", f'--deny=["{quarantine}"]']
    where = ["--sources.0.where", "width >= 84 or height > 60"]
    second = omni("train", run_file, *filtered, *where, "--nproc", "2")
    assert second.returncode == 0, second.stderr
    assert "source captions: of 26 samples, 5 left out by `width >= 84 or height > 60`, 1 by deny-lists" in (
        second.stderr
    )
    assert not (tmp_path / "2" / "quarantine.jsonl").exists()
    metrics = read_metrics(tmp_path / "2" / "metrics.jsonl")
    assert sum(metrics["loader/samples/captions"][1]) == 20
    assert sum(metrics["loader/samples/talks"][1]) == 10
    assert sum(metrics["loader/samples/clips"][1]) == 6
    left_out = {name: sum(metrics[f"loader/filtered/{name}"][1]) for name in ("captions", "talks", "clips")}
    assert left_out == {"captions": 6, "talks": 0, "clips": 0}
    assert sum(metrics["loader/dropped/captions"][1]) == 0
    before = losses(tmp_path / "2")

    other = omni("train", run_file, *filtered, "--sources.0.where", "width >= 84")
    assert other.returncode == 2
    assert (
        "the filter of source 'captions' was `width >= 84 or height > 60` when saved, is `width >= 84` here"
        in other.stderr
    )
    nothing = omni("train", run_file, *filtered, "--sources.0.where", "width >= 1000")
    assert nothing.returncode == 2
    assert "no sample is left: of 26, 25 left out by `width >= 1000`, 1 by deny-lists" in nothing.stderr
    assert "Traceback" not in nothing.stderr + other.stderr
    assert losses(tmp_path / "2") == before
