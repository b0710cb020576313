"""loaders.cache: one fetch per node, right bytes whatever happens to the folder, no wait without end."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loaders import cache as cache_module
from loaders import remote
from loaders.cache import ShardCache, read_payload, set_up_storage
from loaders.cached_file import BLOCK_BYTES, CachedFileWriter, DamagedFileError, RemoteShard, read_cached
from loaders.storage_config import StorageConfig
from omni_pipeline.core.errors import ShardError
from tests.support.http_server import Site, serve

CONTENT = random.Random(0).randbytes(5 * BLOCK_BYTES + 123)
QUICK = StorageConfig(timeout_s=0.4, read_timeout_s=2.0)
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def server() -> Iterator[Site]:
    with serve() as site:
        yield site


@pytest.fixture
def site(server: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(remote, "_limits", QUICK)
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    for kept in (server.files, server.faults, server.always, server.requests):
        kept.clear()
    server.cut, server.num_bytes = 1000, 0
    return server


def cache_of(folder: Path, *, limit: int = 1 << 30, wait_s: float = 20.0, keep_s: float = 60.0) -> ShardCache:
    return ShardCache(folder, limit_bytes=limit, wait_s=wait_s, keep_s=keep_s)


def kept(folder: Path, ending: str = "shard") -> list[Path]:
    return sorted(folder.glob(f"*.{ending}"))


def age(folder: Path, url: str, seconds: float) -> Path:
    """Make the kept copy of ``url`` look unused for so long."""
    (path,) = [item for item in kept(folder) if url.encode() in item.read_bytes()[-300:]]
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


@contextlib.contextmanager
def process(function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    child = FORK.Process(target=function, args=arguments)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join()


def wait_until(done: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_a_shard_is_fetched_once_and_then_read_from_the_disk(tmp_path: Path, site: Site) -> None:
    url = site.put("/s.tar", CONTENT)
    cache = cache_of(tmp_path / "made" / "cache")
    chosen = random.Random(1)
    for _ in range(50):
        offset = chosen.randrange(len(CONTENT))
        length = chosen.randrange(1, len(CONTENT) + 1 - offset)
        assert cache.read(url, offset, length) == CONTENT[offset : offset + length]
    # Besides the shard, the first byte is read to learn size and tag.
    assert len(CONTENT) <= site.num_bytes <= len(CONTENT) + 3
    requests = len(site.requests)
    assert cache.read(url, 0, len(CONTENT)) == CONTENT
    assert len(site.requests) == requests
    assert not kept(tmp_path / "made" / "cache", "part")


def _read_parts(folder: Path, url: str, seed: int, results: Any) -> None:
    cache = cache_of(folder)
    chosen = random.Random(seed)
    same = True
    for _ in range(20):
        offset = chosen.randrange(len(CONTENT) - 10)
        same &= cache.read(url, offset, 10) == CONTENT[offset : offset + 10]
    results.put(same)


def test_fault_90_many_processes_share_one_fetch_without_a_barrier(tmp_path: Path, site: Site) -> None:
    url = site.put("/s.tar", CONTENT)
    results = FORK.Queue()
    with contextlib.ExitStack() as stack:
        for seed in range(6):
            stack.enter_context(process(_read_parts, tmp_path, url, seed, results))
        assert [results.get(timeout=30) for _ in range(6)] == [True] * 6
    assert site.num_bytes < len(CONTENT) + 20
    assert len(kept(tmp_path)) == 1


def test_fault_89_what_a_killed_process_leaves_is_in_nobodys_way(tmp_path: Path, site: Site) -> None:
    url = site.put("/s.tar", CONTENT)
    site.faults["/s.tar"] = ["stall"]
    site.cut = 2 * BLOCK_BYTES

    def fetch() -> None:
        remote.set_limits(StorageConfig(timeout_s=60))
        cache_of(tmp_path).read(url, 0, 10)

    with process(fetch) as child:
        wait_until(lambda: site.num_bytes > BLOCK_BYTES and bool(kept(tmp_path, "part")))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    assert len(kept(tmp_path, "part")) == 1
    began = time.monotonic()
    cache = cache_of(tmp_path)
    assert not kept(tmp_path, "part")
    assert cache.read(url, 5, 100) == CONTENT[5:105]
    assert time.monotonic() - began < 5
    assert len(kept(tmp_path)) == 1


def test_fault_89_a_waiting_process_takes_over_from_a_killed_one(tmp_path: Path, site: Site) -> None:
    url = site.put("/s.tar", CONTENT)
    cache = cache_of(tmp_path)
    site.faults["/s.tar"] = ["stall"]

    def fetch() -> None:
        remote.set_limits(StorageConfig(timeout_s=60))
        cache_of(tmp_path).read(url, 0, 10)

    got: list[bytes | None] = []
    reader = threading.Thread(target=lambda: got.append(cache.read(url, 5, 100)))
    with process(fetch) as child:
        wait_until(lambda: any(path.stat().st_size for path in kept(tmp_path, "part")))
        wait_until(lambda: site.num_bytes >= 1000)
        reader.start()
        time.sleep(0.2)
        assert not got
        os.kill(child.pid, signal.SIGKILL)
        reader.join(timeout=20)
    assert got == [CONTENT[5:105]]


def test_a_stopped_process_holds_nobody_up(tmp_path: Path, site: Site) -> None:
    url = site.put("/s.tar", CONTENT)
    site.faults["/s.tar"] = ["stall"]

    def fetch() -> None:
        remote.set_limits(StorageConfig(timeout_s=60))
        cache_of(tmp_path).read(url, 0, 10)

    with process(fetch) as child:
        wait_until(lambda: site.num_bytes >= 1000)
        os.kill(child.pid, signal.SIGSTOP)
        cache = cache_of(tmp_path, wait_s=0.3)
        began = time.monotonic()
        assert cache.read(url, 0, 10) is None
        waited = time.monotonic() - began
        assert 0.3 <= waited < 3
        # It does not wait for the same shard twice.
        began = time.monotonic()
        assert cache.read(url, 0, 10) is None
        assert time.monotonic() - began < 0.25
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert cache.read(url, 0, 10) is None or kept(tmp_path)
        cache.close()
        assert cache.read(url, 0, 10) == CONTENT[:10]


def test_a_read_that_waits_no_longer_leaves_the_fetch_going(tmp_path: Path, site: Site) -> None:
    url = site.put("/s.tar", CONTENT)
    cache = cache_of(tmp_path, wait_s=0.0)
    assert cache.read(url, 0, 10) is None
    cache.close()
    assert cache.read(url, 0, 10) == CONTENT[:10]


def test_fault_91_the_longest_unused_goes_first_and_none_that_was_just_used(
    tmp_path: Path, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    urls = [site.put(f"/{number}.tar", CONTENT) for number in range(4)]
    cache = cache_of(tmp_path, limit=int(2.5 * len(CONTENT)))
    for url in urls[:2]:
        assert cache.read(url, 0, 10) == CONTENT[:10]
    # Both are in use: the third is read directly, and told once.
    with caplog.at_level(logging.WARNING):
        assert cache.read(urls[2], 0, 10) is None
    assert [message for message in caplog.messages if "is full of shards that are in use" in message]
    age(tmp_path, urls[0], 100)
    first = age(tmp_path, urls[1], 200)
    # A use makes it young again.
    assert cache.read(urls[1], 0, 10) == CONTENT[:10]
    assert cache.read(urls[3], 0, 10) == CONTENT[:10]
    assert first in kept(tmp_path)
    assert len(kept(tmp_path)) == 2
    # Of two that may go, the one that was used before the other.
    age(tmp_path, urls[1], 100)
    longest = age(tmp_path, urls[3], 200)
    assert cache.read(urls[0], 0, 10) == CONTENT[:10]
    assert first in kept(tmp_path)
    assert longest not in kept(tmp_path)


def test_fault_91_a_shard_that_is_thrown_out_is_read_to_the_end_by_who_has_it_open(
    tmp_path: Path, site: Site
) -> None:
    urls = [site.put(f"/{number}.tar", CONTENT) for number in range(2)]
    cache = cache_of(tmp_path, limit=int(1.5 * len(CONTENT)))
    assert cache.read(urls[0], 0, 10) == CONTENT[:10]
    path = age(tmp_path, urls[0], 100)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert cache.read(urls[1], 0, 10) == CONTENT[:10]
        assert not path.exists()
        shard = RemoteShard(urls[0], len(CONTENT), '"v1"')
        assert read_cached(descriptor, shard, 0, len(CONTENT)) == CONTENT
    finally:
        os.close(descriptor)
    # And fetched again when it is wanted again.
    age(tmp_path, urls[1], 100)
    assert cache.read(urls[0], 0, 10) == CONTENT[:10]


def _lock_and_wait(path: Path, ready: Any) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    assert cache_module._try_lock(descriptor, shared=True)
    ready.set()
    time.sleep(60)


def test_fault_91_a_shard_that_a_live_process_reads_stays_and_a_dead_ones_goes(
    tmp_path: Path, site: Site
) -> None:
    urls = [site.put(f"/{number}.tar", CONTENT) for number in range(2)]
    cache = cache_of(tmp_path, limit=int(1.5 * len(CONTENT)), keep_s=1.0)
    assert cache.read(urls[0], 0, 10) == CONTENT[:10]
    path = age(tmp_path, urls[0], 100)
    ready = FORK.Event()
    with process(_lock_and_wait, path, ready) as child:
        assert ready.wait(20)
        assert cache.read(urls[1], 0, 10) is None
        assert path.exists()
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    fresh = cache_of(tmp_path, limit=int(1.5 * len(CONTENT)))
    assert fresh.read(urls[1], 0, 10) == CONTENT[:10]
    assert not path.exists()


def _churn(folder: Path, urls: list[str], contents: list[bytes], seed: int, results: Any) -> None:
    cache = cache_of(folder, limit=int(2.5 * len(CONTENT)), keep_s=0.0, wait_s=5.0)
    chosen = random.Random(seed)
    hits, same = 0, True
    for _ in range(40):
        number, offset = chosen.randrange(len(urls)), chosen.randrange(len(CONTENT) - 100)
        data = cache.read(urls[number], offset, 100)
        hits += data is not None
        same &= data in (None, contents[number][offset : offset + 100])
    used = sum(path.stat().st_size for path in kept(folder))
    results.put((hits, same, used))


def test_fault_91_processes_that_chase_shards_out_read_right_bytes_within_the_limit(
    tmp_path: Path, site: Site
) -> None:
    contents = [random.Random(number).randbytes(len(CONTENT)) for number in range(5)]
    urls = [site.put(f"/{number}.tar", content) for number, content in enumerate(contents)]
    results = FORK.Queue()
    with contextlib.ExitStack() as stack:
        for seed in range(3):
            stack.enter_context(process(_churn, tmp_path, urls, contents, seed, results))
        ends = [results.get(timeout=60) for _ in range(3)]
    assert all(same and hits for hits, same, _ in ends)
    assert max(used for *_, used in ends) <= 2.5 * len(CONTENT)


def test_fault_93_a_flipped_byte_is_found_and_the_shard_fetched_again(
    tmp_path: Path, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    url = site.put("/s.tar", CONTENT)
    cache = cache_of(tmp_path)
    assert cache.read(url, 0, 10) == CONTENT[:10]
    chosen = random.Random(3)
    for _ in range(5):
        (path,) = kept(tmp_path)
        place = chosen.randrange(len(CONTENT))
        content = bytearray(path.read_bytes())
        content[place] ^= 1 << chosen.randrange(8)
        path.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            assert cache.read(url, max(0, place - 5), 10) == CONTENT[max(0, place - 5) :][:10]
        assert "has other bytes than were written" in caplog.text
        caplog.clear()
    assert cache.read(url, 0, len(CONTENT)) == CONTENT


@pytest.mark.parametrize("damage", ["cut", "empty", "longer", "table", "footer"])
def test_fault_93_a_damaged_copy_is_never_read(tmp_path: Path, site: Site, damage: str) -> None:
    url = site.put("/s.tar", CONTENT)
    cache = cache_of(tmp_path)
    assert cache.read(url, 0, 10) == CONTENT[:10]
    (path,) = kept(tmp_path)
    content = bytearray(path.read_bytes())
    if damage == "table":
        content[len(CONTENT)] ^= 1
    if damage == "footer":
        content[-5] ^= 1
    changed = {"cut": content[:-1], "empty": b"", "longer": bytes(content) + b"x"}.get(damage, content)
    path.write_bytes(changed)
    fetched = site.num_bytes
    assert cache.read(url, 0, len(CONTENT)) == CONTENT
    assert site.num_bytes - fetched >= len(CONTENT)


def test_a_shard_that_was_replaced_is_another_shard(tmp_path: Path, site: Site) -> None:
    url = site.put("/s.tar", CONTENT)
    assert cache_of(tmp_path).read(url, 0, 10) == CONTENT[:10]
    other = CONTENT[::-1]
    site.put("/s.tar", other, tag="v2")
    assert cache_of(tmp_path).read(url, 0, 10) == other[:10]


def test_a_shard_that_is_replaced_while_it_is_fetched_is_not_kept(
    tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = site.put("/s.tar", CONTENT)
    monkeypatch.setattr(cache_module, "PIECE_BYTES", BLOCK_BYTES)
    real = cache_module.read_range

    def replacing(url: str, offset: int, length: int) -> bytes:
        if offset == 2 * BLOCK_BYTES:
            site.put("/s.tar", CONTENT[::-1], tag="v2")
        return real(url, offset, length)

    monkeypatch.setattr(cache_module, "read_range", replacing)
    assert cache_of(tmp_path).read(url, 0, 10) is None
    assert not kept(tmp_path)
    assert not kept(tmp_path, "part")


def test_a_shard_without_a_version_is_not_kept(
    tmp_path: Path, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    url = site.put("/s.tar", CONTENT, tag="")
    cache = cache_of(tmp_path)
    assert [cache.read(url, 0, 10) for _ in range(3)] == [None] * 3
    assert len([message for message in caplog.messages if "neither a tag nor a time" in message]) == 1
    assert not kept(tmp_path)


def test_a_shard_larger_than_the_cache_is_told_once(
    tmp_path: Path, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    url = site.put("/s.tar", CONTENT)
    cache = cache_of(tmp_path, limit=1000)
    assert [cache.read(url, 0, 10) for _ in range(3)] == [None] * 3
    assert caplog.messages == [
        f"{url} is not kept: it has {len(CONTENT)} bytes, loader.storage.cache_bytes is 1000"
    ]


def _read_with_small_files(folder: Path, urls: list[str], results: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * BLOCK_BYTES, resource.RLIM_INFINITY))
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("loaders").addHandler(handler)
    set_up_storage(StorageConfig(cache_dir=folder))
    results.put(([read_payload(url, 5, 100) for url in urls for _ in range(2)], warned))


def test_a_disk_that_takes_no_more_is_told_once_and_the_store_is_read(tmp_path: Path, site: Site) -> None:
    urls = [site.put(f"/{number}.tar", CONTENT) for number in range(3)]
    results = FORK.Queue()
    with process(_read_with_small_files, tmp_path, urls, results):
        data, warned = results.get(timeout=30)
    assert data == [CONTENT[5:105]] * 6
    assert warned == [
        f"the cache {tmp_path} cannot take shards (File too large), so they are read directly; free some "
        "space there, or lower loader.storage.cache_bytes"
    ]
    assert not kept(tmp_path, "part")


def test_a_disk_that_fills_up_in_mid_fetch_leaves_no_part(
    tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = site.put("/s.tar", CONTENT)
    real = os.pwrite

    def full(descriptor: int, data: Any, offset: int) -> int:
        if offset >= BLOCK_BYTES:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:BLOCK_BYTES], offset)

    monkeypatch.setattr("loaders.cached_file.os.pwrite", full)
    cache = cache_of(tmp_path)
    assert [cache.read(url, 0, 10) for _ in range(3)] == [None] * 3
    assert len(caplog.messages) == 1
    assert "No space left on device" in caplog.text
    assert not list(tmp_path.glob("*.part"))


def test_a_disk_without_room_is_known_before_anything_is_fetched(
    tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = site.put("/s.tar", CONTENT)
    found = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize = 1, found.f_frsize

    monkeypatch.setattr("loaders.cache.os.statvfs", lambda path: Full)
    assert cache_of(tmp_path).read(url, 0, 10) is None
    assert "No space left on device" in caplog.text
    assert site.num_bytes <= 2


def test_a_folder_that_cannot_be_made_is_told_and_the_store_is_read(
    tmp_path: Path, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    url = site.put("/s.tar", CONTENT)
    (tmp_path / "file").touch()
    assert cache_of(tmp_path / "file").read(url, 0, 10) is None
    assert len(caplog.messages) == 1
    assert "cannot take shards (File exists)" in caplog.text


def test_a_store_that_fails_in_mid_fetch_is_read_directly(
    tmp_path: Path, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    url = site.put("/s.tar", CONTENT)
    site.always["/s.tar"] = "busy"
    cache = cache_of(tmp_path)
    began = time.monotonic()
    assert cache.read(url, 0, 10) is None
    assert time.monotonic() - began < 5
    assert f"{url} is not kept, but read directly: storage failed 4 times" in caplog.text
    site.always.clear()
    requests = len(site.requests)
    assert cache.read(url, 0, 10) is None  # not fetched again at once
    cache.close()
    assert len(site.requests) == requests


def test_reads_of_a_process_go_through_the_cache_that_is_set_up(tmp_path: Path, site: Site) -> None:
    url = site.put("/s.tar", CONTENT)
    try:
        set_up_storage(QUICK.model_copy(update={"cache_dir": tmp_path}))
        assert read_payload(url, 5, 100) == CONTENT[5:105]
        assert kept(tmp_path)
        requests = len(site.requests)
        assert read_payload(url, 50, 100) == CONTENT[50:150]
        assert read_payload(url, 50, 0) == b""
        assert len(site.requests) == requests
        local = tmp_path / "local"
        local.write_bytes(CONTENT)
        assert read_payload(str(local), 5, 100) == CONTENT[5:105]
        with pytest.raises(ShardError, match="ends 10 bytes early"):
            read_payload(url, len(CONTENT) - 10, 20)
        with pytest.raises(ShardError, match="there is no such shard"):
            read_payload(f"{site.url}/none.tar", 0, 20)
    finally:
        set_up_storage(StorageConfig())


def test_a_file_of_another_shard_is_not_taken_for_it(tmp_path: Path) -> None:
    one, two = RemoteShard("s3://b/1", 10, "a"), RemoteShard("s3://b/2", 10, "a")
    assert len({one.name, two.name, RemoteShard("s3://b/1", 10, "b").name}) == 3
    path = tmp_path / "x"
    with path.open("w+b") as file:
        writer = CachedFileWriter(file.fileno(), one)
        with pytest.raises(ValueError, match="0 bytes of 10"):
            writer.finish()
        writer.add(b"0123456789")
        writer.finish()
        assert read_cached(file.fileno(), one, 2, 3) == b"234"
        with pytest.raises(DamagedFileError, match="is not of this shard"):
            read_cached(file.fileno(), two, 2, 3)
