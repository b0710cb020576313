"""Shards in a real S3-compatible store: written, listed, indexed, read, kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loaders import remote, storage
from loaders.cache import ShardCache
from loaders.decode.text import ByteTokenizer
from loaders.index import build_index
from loaders.index_file import read_index, read_summary
from loaders.storage_config import StorageConfig
from omni_pipeline.core.errors import ShardError
from tests.support.http_server import Fault, serve
from tests.support.s3_server import s3_at, serve_s3
from tests.support.shards import caption_members, write_tar


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with serve_s3("shards"):
        yield "s3://shards"


def test_a_shard_in_a_bucket_is_listed_indexed_read_and_kept(bucket: str, tmp_path: Path) -> None:
    content = write_tar(tmp_path / "s.tar", caption_members(5)).read_bytes()
    url = f"{bucket}/some folder/s-0.tar"
    storage.write_file(url, content)
    assert storage.expand_shards(f"{bucket}/some folder/*.tar") == [url]
    assert storage.read_file(url) == content
    assert storage.read_range(url, 600, 1000) == content[600:1600]
    report = build_index(url, tokenizer=ByteTokenizer())
    assert report.num_samples == 5
    assert not build_index(url, tokenizer=ByteTokenizer(), force=True).is_unchanged
    assert build_index(url, tokenizer=ByteTokenizer()).is_unchanged
    assert read_summary(url).num_samples == 5
    cache = ShardCache(tmp_path / "cache", limit_bytes=1 << 30, wait_s=20)
    assert cache.read(url, 600, 1000) == content[600:1600]
    # A shard that is written again has another tag.
    before = storage.stat_shard(url)
    storage.write_file(url, content[::-1])
    assert storage.stat_shard(url).version != before.version
    with pytest.raises(ShardError, match="index is stale"):
        read_index(url)


def test_ranges_of_a_bucket_end_where_the_shard_does(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{bucket}/r.tar"
    storage.write_file(url, bytes(range(200)))
    monkeypatch.setattr(remote, "PIECE_BYTES", 64)
    assert storage.read_range(url, 10, 190) == bytes(range(10, 200))
    with pytest.raises(ShardError, match="ends 20 bytes early"):
        storage.read_range(url, 100, 120)
    with pytest.raises(ShardError, match="ends 20 bytes early"):
        storage.read_range(url, 220, 20)
    with pytest.raises(ShardError, match="there is no such shard"):
        storage.read_range(f"{bucket}/none.tar", 0, 1)
    with pytest.raises(ShardError, match="there is no such shard"):
        storage.stat_shard(f"{bucket}/none.tar")
    assert storage.read_file(f"{bucket}/none.tar") is None


def test_an_empty_file_in_a_bucket_is_read(bucket: str) -> None:
    storage.write_file(f"{bucket}/empty", b"")
    assert storage.read_file(f"{bucket}/empty") == b""


@pytest.mark.parametrize("fault", ["stall", "truncate", "reset", "busy"])
def test_fault_18_a_bucket_that_fails_in_mid_body_is_read_exactly(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(range(256)) * 100
    monkeypatch.setattr(remote, "_limits", StorageConfig(timeout_s=0.4))
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    with serve() as site, s3_at(site.url):
        site.put("/box/s.tar", content)
        site.faults["/box/s.tar"] = [fault, fault]
        began = time.monotonic()
        assert storage.read_range("s3://box/s.tar", 100, 20_000) == content[100:20_100]
        assert not site.faults["/box/s.tar"]
        site.always["/box/s.tar"] = fault
        with pytest.raises(ShardError, match="storage failed 4 times"):
            storage.read_range("s3://box/s.tar", 100, 20_000)
        assert time.monotonic() - began < 8
