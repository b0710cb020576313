"""loaders.remote: stores that stall, cut off, reset and lie are read exactly, or end in an error in time."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

from loaders import remote, storage
from loaders.storage_config import StorageConfig
from omni_pipeline.core.errors import ConfigError, ShardError
from tests.support.http_server import Fault, Site, serve

CONTENT = bytes(range(256)) * 1000
QUICK = StorageConfig(timeout_s=0.4, read_timeout_s=4.0)


@pytest.fixture(scope="module")
def server() -> Iterator[Site]:
    with serve() as site:
        yield site


@pytest.fixture
def site(server: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(remote, "_limits", QUICK)
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    for kept in (server.faults, server.always, server.requests):
        kept.clear()
    server.cut = 1000
    return server


def test_ranges_over_http_are_exact(site: Site) -> None:
    url = site.put("/whole.tar", CONTENT)
    assert storage.read_range(url, 1000, 2000) == CONTENT[1000:3000]
    assert storage.read_range(url, 0, len(CONTENT)) == CONTENT
    assert storage.read_file(url) == CONTENT
    assert storage.stat_shard(url) == storage.ShardStat(len(CONTENT), '"v1"')
    assert storage.read_file(f"{site.url}/none.tar") is None


@pytest.mark.parametrize("fault", ["stall", "truncate", "reset", "long", "short", "busy", "shifted"])
def test_fault_18_a_read_goes_on_from_the_last_good_byte(
    site: Site, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    path = f"/{fault}.tar"
    url = site.put(path, CONTENT)
    site.faults[path] = [fault, fault]
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert storage.read_range(url, 500, 100_000) == CONTENT[500:100_500]
    assert time.monotonic() - began < 3
    starts = [first for name, first in site.requests if name == path and first]
    if fault in ("stall", "truncate", "short"):
        # A reset may take back bytes that were sent.
        assert starts == [500, 1500, 2500]
    assert (len(caplog.messages) >= 1) == (fault != "long")
    assert all(f"of {url}, byte " in message for message in caplog.messages)


def test_fault_18_a_store_that_always_closes_early_is_read_to_the_end(site: Site) -> None:
    content = CONTENT * 3
    url = site.put("/early.tar", content)
    site.always["/early.tar"] = "truncate"
    site.cut = remote.LEAST_PIECE_BYTES
    assert storage.read_range(url, 0, len(content)) == content
    assert len(site.requests) > QUICK.attempts + 1


@pytest.mark.parametrize("fault", ["stall", "truncate", "reset", "short", "busy", "shifted"])
def test_fault_18_a_store_that_always_fails_ends_in_an_error_in_time(site: Site, fault: Fault) -> None:
    path = f"/always-{fault}.tar"
    url = site.put(path, CONTENT)
    site.always[path] = fault
    site.cut = 10
    began = time.monotonic()
    with pytest.raises(ShardError, match=r"storage failed 4 times, last: .+") as caught:
        storage.read_range(url, 100, 10_000)
    assert time.monotonic() - began < QUICK.read_timeout_s
    if fault in ("stall", "truncate", "short"):
        assert caught.value.where == f"{url}, byte 140"
    assert caught.value.fix == "check the network and the store, or raise loader.storage.attempts"


def test_fault_18_the_whole_of_a_read_is_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = QUICK.model_copy(update={"attempts": 1000, "read_timeout_s": 1.0})
    monkeypatch.setattr(remote, "_limits", limits)
    url = site.put("/slow.tar", CONTENT)
    site.always["/slow.tar"] = "stall"
    began = time.monotonic()
    with pytest.raises(ShardError, match="storage failed") as caught:
        storage.read_range(url, 0, 50_000)
    assert time.monotonic() - began < 2
    assert caught.value.fix == "check the network and the store, or raise loader.storage.read_timeout_s"


def test_fault_19_a_short_body_is_compared_with_the_size_and_never_the_end(site: Site) -> None:
    url = site.put("/short.tar", CONTENT)
    with pytest.raises(ShardError) as caught:
        storage.read_range(url, len(CONTENT) - 10, 30)
    assert caught.value.what == "shard ends 20 bytes early: asked for 30, got 10"
    with pytest.raises(ShardError, match="ends 30 bytes early"):
        storage.read_range(url, len(CONTENT) + 10, 30)
    site.faults["/short.tar"] = ["short"]
    assert storage.read_range(url, len(CONTENT) - 3000, 3000) == CONTENT[-3000:]


def test_a_server_without_ranges_is_refused_and_not_read_wrongly(site: Site) -> None:
    url = site.put("/plain.tar", CONTENT)
    site.always["/plain.tar"] = "no-ranges"
    assert storage.read_range(url, 0, 100) == CONTENT[:100]
    with pytest.raises(ShardError, match="the server ignores ranges"):
        storage.read_range(url, 100, 100)


def test_what_will_not_pass_is_not_repeated(site: Site) -> None:
    url = site.put("/secret.tar", CONTENT)
    site.always["/secret.tar"] = "forbidden"
    with pytest.raises(ShardError, match="the store refuses access: 403 Forbidden"):
        storage.read_range(url, 0, 100)
    with pytest.raises(ShardError, match="there is no such shard"):
        storage.read_range(f"{site.url}/none.tar", 0, 100)
    assert [name for name, _ in site.requests] == ["/secret.tar", "/none.tar"]


def test_nobody_at_the_address_ends_in_an_error_in_time(site: Site) -> None:
    with serve() as other:
        url = other.put("/gone.tar", CONTENT)
    began = time.monotonic()
    with pytest.raises(ShardError, match="storage failed 4 times"):
        storage.stat_shard(url)
    assert time.monotonic() - began < 3


def _read_in_child(url: str, results: Any) -> None:
    results.put(storage.read_range(url, 7, 100))


def test_a_fork_reads_after_its_parent_has(site: Site) -> None:
    url = site.put("/fork.tar", CONTENT)
    assert storage.read_range(url, 0, 100) == CONTENT[:100]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_read_in_child, args=(url, results))
    child.start()
    try:
        assert results.get(timeout=20) == CONTENT[7:107]
    finally:
        child.kill()
        child.join()


def test_a_store_without_a_loop_is_left_when_it_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stalled:
        def cat_file(self, url: str, start: int, end: int) -> bytes:
            time.sleep(5)
            return b""

    monkeypatch.setattr(remote, "_limits", StorageConfig(timeout_s=0.05, attempts=2))
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(remote, "_filesystem_of", lambda protocol, pid: Stalled())
    began = time.monotonic()
    with pytest.raises(ShardError, match=r"storage failed 2 times, last: no answer within 0.05 s"):
        storage.read_range("fake://s.tar", 0, 4)
    assert time.monotonic() - began < 1


class Broken:
    """A store that fails a set number of times; the network is the edge that is faked."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.starts: list[int] = []

    def info(self, url: str) -> dict[str, Any]:
        return {"size": 4}

    def cat_file(self, url: str, start: int, end: int) -> bytes:
        self.starts.append(start)
        if len(self.starts) <= self.failures:
            raise ConnectionError("reset by peer")
        return b"data"[start : start + 2]


def test_failures_are_repeated_a_bounded_number_of_times_with_growing_pauses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("loaders.remote.time.sleep", pauses.append)
    store = Broken(2)
    monkeypatch.setattr(remote, "_filesystem_of", lambda protocol, pid: store)
    # Two failures, then half of it, then the rest.
    with caplog.at_level(logging.WARNING):
        assert storage.read_range("fake://s.tar", 0, 4) == b"data"
    assert store.starts == [0, 0, 0, 2]
    assert pauses == [0.5, 1.0, 2.0]
    assert caplog.messages == [
        "try 1 of fake://s.tar, byte 0 failed (reset by peer); next in 0.5 s",
        "try 2 of fake://s.tar, byte 0 failed (reset by peer); next in 1.0 s",
        "try 3 of fake://s.tar, byte 2 failed (got 2 of 4 bytes); next in 2.0 s",
    ]
    store = Broken(99)
    with pytest.raises(ShardError) as caught:
        storage.read_range("fake://s.tar", 0, 4)
    assert str(caught.value) == (
        "storage failed 4 times, last: reset by peer\n"
        "  where: fake://s.tar, byte 0\n"
        "  fix:   check the network and the store, or raise loader.storage.attempts"
    )
    assert len(store.starts) == 4


def test_a_store_that_sends_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Whole:
        def cat_file(self, url: str, start: int, end: int) -> bytes:
            return bytes(100)

    monkeypatch.setattr(remote, "_filesystem_of", lambda protocol, pid: Whole())
    with pytest.raises(ShardError, match="the store sent 100 bytes when asked for 4: it ignores ranges"):
        storage.read_range("fake://s.tar", 10, 4)


def test_a_large_read_is_made_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("memory").pipe_file("/box/pieces.bin", bytes(range(100)))
    monkeypatch.setattr(remote, "PIECE_BYTES", 7)
    assert storage.read_range("memory://box/pieces.bin", 10, 80) == bytes(range(10, 90))


def test_an_unknown_store_is_a_setting_error() -> None:
    with pytest.raises(ConfigError, match="cannot open nowhere:// shards") as caught:
        storage.read_range("nowhere://s.tar", 0, 1)
    assert "pip install 'omni-pipeline[remote]'" in str(caught.value.fix)
