"""loaders.storage: exact ranges, whole files, patterns."""

from __future__ import annotations

import io
import os
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaders import storage
from omni_pipeline.core.errors import ConfigError, ShardError


def test_a_local_range_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    path.write_bytes(bytes(range(100)))
    assert storage.read_range(str(path), 10, 5) == bytes(range(10, 15))
    assert storage.read_range(f"file://{path}", 10, 5) == bytes(range(10, 15))
    assert storage.read_range(str(path), 10, 0) == b""


def test_a_short_read_names_shard_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    path.write_bytes(bytes(100))
    with pytest.raises(ShardError) as caught:
        storage.read_range(str(path), 90, 20)
    assert str(caught.value) == (
        "shard ends 10 bytes early: asked for 20, got 10\n"
        f"  where: {path}, byte 90\n"
        "  fix:   fetch the shard again, then run `omni data index`"
    )


def test_a_missing_shard_is_a_shard_error(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="there is no such file"):
        storage.read_range(str(tmp_path / "none"), 0, 1)
    with pytest.raises(ShardError, match="there is no such shard"):
        storage.read_range("memory://none.tar", 0, 1)


def test_a_remote_range_is_exact_and_a_short_one_an_error() -> None:
    fsspec.filesystem("memory").pipe_file("/box/s.bin", bytes(range(100)))
    assert storage.read_range("memory://box/s.bin", 10, 5) == bytes(range(10, 15))
    assert storage.stat_shard("memory://box/s.bin").size == 100
    with pytest.raises(ShardError, match="ends 10 bytes early"):
        storage.read_range("memory://box/s.bin", 90, 20)


def test_a_window_reads_as_a_file_does(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    path.write_bytes(bytes(range(256)) * 40)
    window = bytes(range(256)) * 40
    with storage.open_range(str(path), 100, 9000) as file, io.BytesIO(window[100:9100]) as model:
        for action, amount in (("r", 10), ("s", 8000), ("r", 2000), ("s", 0), ("r", 5), ("e", -7), ("r", 99)):
            if action == "r":
                assert file.read(amount) == model.read(amount)
            else:
                whence = io.SEEK_END if action == "e" else io.SEEK_SET
                assert file.seek(amount, whence) == model.seek(amount, whence)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "index"
    storage.write_file(str(path), b"old")
    storage.write_file(str(path), b"new")
    assert path.read_bytes() == b"new"
    assert [item.name for item in tmp_path.iterdir()] == ["index"]
    with pytest.raises(ShardError, match="cannot write"):
        storage.write_file(str(tmp_path / "no" / "index"), b"x")
    storage.write_file("memory://box/index", b"far")
    assert storage.read_file("memory://box/index") == b"far"
    assert storage.read_file("memory://box/none") is None
    assert storage.read_file(str(tmp_path / "none")) is None


def test_patterns_expand_in_order_and_name_each_shard_once(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"s-{number}.tar").touch()
    base = str(tmp_path)
    names = [f"{base}/s-{number}.tar" for number in range(3)]
    assert storage.expand_shards(f"{base}/s-{{0..2}}.tar") == names
    assert storage.expand_shards(f"{base}/*.tar") == names
    assert storage.expand_shards([f"{base}/s-2.tar", f"{base}/s-*.tar"]) == [names[2], names[0], names[1]]
    assert storage.expand_shards([f"{base}/./s-2.tar", f"{base}/s-*.tar"]) == [
        f"{base}/./s-2.tar",
        *names[:2],
    ]
    assert storage.expand_shards("s3://b/{a,b}.tar") == ["s3://b/a.tar", "s3://b/b.tar"]
    fsspec.filesystem("memory").pipe_file("/globbed/x.tar", b"")
    assert storage.expand_shards("memory://globbed/*.tar") == ["memory:///globbed/x.tar"]


@pytest.mark.parametrize("ending", ["", "/"])
def test_a_folder_is_told_to_be_named_by_a_pattern(tmp_path: Path, ending: str) -> None:
    with pytest.raises(ConfigError) as caught:
        storage.expand_shards(f"{tmp_path}{ending}")
    assert str(caught.value) == (
        f"{tmp_path}{ending} is a folder, not a shard\n"
        f"  fix:   give a pattern of the shards in it, like '{tmp_path}/*.tar'"
    )


def test_a_pattern_that_stands_for_nothing_is_a_setting_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        storage.expand_shards(f"{tmp_path}/*.tar")
    assert str(caught.value) == (
        f"no shard matches '{tmp_path}/*.tar'\n  fix:   check the pattern, from the folder you run in"
    )
    with pytest.raises(ConfigError) as caught:
        storage.expand_shards([f"{tmp_path}/none.tar"])
    assert str(caught.value) == (
        f"there is no such file: {tmp_path}/none.tar\n  fix:   check the path, from the folder you run in"
    )
    with pytest.raises(ConfigError, match=r"there is no such file: .*s-1\.tar"):
        storage.expand_shards(f"{tmp_path}/s-{{1..2}}.tar")
    with pytest.raises(ConfigError, match="unbalanced braces"):
        storage.expand_shards("s-{0..2.tar")


@given(parts=st.lists(st.sampled_from(["a", "b.tar", ".", "..", "...", ".a", "", "a b"]), max_size=6))
@pytest.mark.parametrize("start", ["", "/", "./", "../", "file:///"])
def test_two_spellings_of_a_path_are_one_file_where_the_system_says_so(start: str, parts: list[str]) -> None:
    url = start + "/".join(parts)
    plain = os.path.abspath(url.removeprefix("file://"))
    assert storage.first_places([plain, url, f"{plain}x"]) == [0, 2]
