"""A loader over shards of a server: what its decode workers get of the settings, and what a failure means."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from loaders import remote
from loaders.cache import set_up_storage
from loaders.decode.text import ByteTokenizer
from loaders.index import index_shards
from loaders.loader_config import LoaderConfig
from loaders.quarantine import read_quarantine
from loaders.source import open_source
from loaders.source_config import SourceConfig
from loaders.step import decode_settings
from loaders.storage_config import StorageConfig
from tests.support.http_server import Site, serve
from tests.support.loading import MODEL, SIZES, Data, make_loader, take
from tests.support.shards import caption_members, write_tar


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[Site, Data]]:
    """Captions in two shards of a server."""
    with serve() as site:
        for number in range(2):
            path = write_tar(folder / f"s-{number}.tar", caption_members(8, first=8 * number))
            site.put(f"/s-{number}.tar", path.read_bytes())
        shards = [f"{site.url}/s-{number}.tar" for number in range(2)]
        assert not any(report.error for report in index_shards(shards, num_workers=0))
        config = SourceConfig.model_validate(
            {
                "name": "captions",
                "shards": shards,
                "layout": {"kind": "fields", "fields": ["jpg", "txt"]},
            }
        )
        try:
            yield site, Data((open_source(config, sizes=SIZES, tokenizer=ByteTokenizer()),), folder)
        finally:
            set_up_storage(StorageConfig())


def test_decode_workers_read_through_the_cache_and_batches_are_the_same(
    tmp_path: Path, quarantine: Path
) -> None:
    with served(tmp_path) as (site, data):
        sent = site.num_bytes
        kept = {"cache_dir": tmp_path / "cache"}
        with make_loader(data, quarantine=quarantine, num_workers=2, storage=kept) as loader:
            cached = take(loader, 4)
        assert len(list((tmp_path / "cache").glob("*.shard"))) == 2
        # Payload of each shard once; besides, single bytes to learn size and tag.
        whole = sum(len(content) for path, content in site.files.items() if path.endswith(".tar"))
        assert whole <= site.num_bytes - sent < whole + 20
        with make_loader(data, quarantine=quarantine) as loader:
            assert take(loader, 4) == cached
    assert not quarantine.exists()


def test_fault_93_what_could_not_be_read_fails_again_on_resume_though_the_store_is_mended(
    tmp_path: Path, quarantine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)
    with served(tmp_path) as (site, data):
        site.always["/s-1.tar"] = "busy"
        loader = make_loader(data, quarantine=quarantine)
        start = loader.state_dict()
        first = take(loader, 3)
        assert any(item[1] for item in first)
        records = read_quarantine(quarantine)
        assert {record.stage for record in records} == {"fetch"}
        assert "storage failed 4 times, last: the server says 503" in records[0].reason
        site.always.clear()
        again = make_loader(data, quarantine=quarantine)
        again.load_state_dict(start, honour_until=3)
        assert take(again, 3) == first


def test_a_read_in_a_worker_ends_before_the_deadline_of_its_job() -> None:
    def settings(**changes: float) -> StorageConfig:
        config = LoaderConfig.model_validate(changes)
        return decode_settings(config, model=MODEL, tokenizer_path=None).storage

    assert (settings().read_timeout_s, settings().cache_wait_s) == (36.0, 15.0)
    long = settings(deadline_s=1000)
    assert (long.read_timeout_s, long.cache_wait_s) == (45.0, 20.0)
