"""A run on shards in an S3-compatible store, through the cache of the node."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from tests.support.runs import losses, make_run, omni
from tests.support.s3_server import serve_s3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_two_ranks_train_on_a_bucket_as_on_a_folder(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, steps=2)
    local = omni("train", str(run_file), "--nproc", "2", "--run.dir", str(tmp_path / "local"))
    assert local.returncode == 0, local.stderr
    remote_file = tmp_path / "remote.toml"
    text = run_file.read_text(encoding="utf-8").replace(f'shards = "{tmp_path}/', 'shards = "s3://shards/')
    remote_file.write_text(text, encoding="utf-8")
    cache = tmp_path / "cache"
    with serve_s3("shards"):
        bucket = fsspec.filesystem("s3")
        for path in tmp_path.glob("*.tar"):
            bucket.put_file(str(path), f"shards/{path.name}")
        indexed = omni("data", "index", "s3://shards/*.tar")
        assert indexed.returncode == 0, indexed.stderr
        trained = omni("train", str(remote_file), "--nproc", "2", "--loader.storage.cache_dir", str(cache))
        assert trained.returncode == 0, trained.stderr
    assert losses(tmp_path / "run") == losses(tmp_path / "local")
    assert list(losses(tmp_path / "run")) == [0, 1]
    assert len(list(cache.glob("*.shard"))) >= 3
    assert "is not kept" not in trained.stderr
    assert (tmp_path / "run" / "report.html").exists()
