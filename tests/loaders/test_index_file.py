"""loaders.index_file, index_rows: rows in batches, what is said of the whole, and digests of the samples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from loaders import storage
from loaders.decode.text import ByteTokenizer
from loaders.index import build_index, index_shards
from loaders.index_file import (
    BATCH_ROWS,
    IndexFile,
    index_path,
    open_index,
    read_index,
    read_summary,
    write_index,
)
from loaders.index_rows import IndexSummary, ShardIndex, codes_of
from omni_pipeline.core.errors import ShardError
from omni_pipeline.core.sample import RawSize
from tests.support.shards import caption_members, image_bytes, write_tar

BYTES = ByteTokenizer()
Members = dict[str, bytes] | list[tuple[str, bytes]]


class WordTokenizer(ByteTokenizer):
    """Another fingerprint, other counts."""

    fingerprint = "words-1"

    def encode(self, text: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.arange(len(text.split()), dtype=np.int32)


def indexed(path: Path, members: Members) -> str:
    """Write and index a shard."""
    write_tar(path, members)
    build_index(str(path), tokenizer=BYTES, force=True)
    return str(path)


def plain(index: ShardIndex) -> list[Any]:
    """Return all that rows say, as plain lists."""
    columns = [index.keys, index.suffixes, index.modalities, index.errors]
    arrays = [*index.numbers.values(), *index.tokens.values(), np.diff(index.starts)]
    return [column.to_pylist() for column in columns] + [array.tolist() for array in arrays]


def test_batches_are_the_rows_of_the_whole_index(tmp_path: Path) -> None:
    num_samples = 2 * BATCH_ROWS + 7
    members = {f"{n:05d}.txt": b"x" * (n % 11) for n in range(num_samples)}
    members |= {f"{n:05d}.json": b"{}" for n in range(0, num_samples, 3)}
    shard = indexed(tmp_path / "s.tar", members)
    file, whole = open_index(shard), read_index(shard)
    batches = [file.batch(number) for number in (2, 0, 1)]
    assert [batch.num_samples for batch in batches] == [7, BATCH_ROWS, BATCH_ROWS]
    together = zip(*(plain(batch) for batch in (batches[1], batches[2], batches[0])), strict=True)
    assert [first + second + third for first, second, third in together] == plain(whole)
    with pytest.raises(ShardError, match="index is damaged"):
        file.batch(3)


def test_the_summary_is_read_without_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {"a.JPG": b"no picture", "a.txt": b"x", "b.jpg": image_bytes(), "b.txt": b"y", "c": b""}
    shard = indexed(tmp_path / "s.tar", members)
    monkeypatch.setattr(IndexFile, "batch", None)
    monkeypatch.setattr(IndexFile, "all_rows", None)
    summary = read_summary(shard)
    stat = os.stat(shard)
    assert summary == IndexSummary(
        num_samples=3,
        shard_bytes=stat.st_size,
        shard_version=str(stat.st_mtime_ns),
        damage="",
        num_bad=1,
        suffixes={"jpg": ["image", 2], "txt": ["text", 2], "": ["other", 1]},
        digest=summary.digest,
        token_digests={"bytes-1": summary.token_digests["bytes-1"]},
    )


def test_of_a_remote_index_only_the_end_is_read_for_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    members = {f"{random.integers(2**60):x}.txt": b"x" * int(random.integers(50)) for _ in range(1000)}
    shard = "memory://end/s.tar"
    storage.write_file(shard, Path(indexed(tmp_path / "s.tar", members)).read_bytes())
    build_index(shard, tokenizer=BYTES)
    size = storage.stat_shard(index_path(shard)).size
    monkeypatch.setattr(storage, "REMOTE_BUFFER_BYTES", size // 10)
    num_bytes = 0
    real = storage.read_range

    def counted(url: str, offset: int, length: int) -> bytes:
        nonlocal num_bytes
        num_bytes += length
        return real(url, offset, length)

    monkeypatch.setattr(storage, "read_range", counted)
    monkeypatch.setattr("loaders.index_file.read_file", None)
    assert read_summary(shard).num_samples == 1000
    assert 0 < num_bytes < size / 3
    storage.write_file("memory://end/bare.tar", b"")
    with pytest.raises(ShardError, match="shard has no index") as caught:
        read_summary("memory://end/bare.tar")
    assert caught.value.fix == "run `omni data index memory://end/bare.tar`"


def test_digests_see_samples_and_not_how_they_lie_in_the_shard(tmp_path: Path) -> None:
    def digest_of(members: Members) -> str:
        return read_summary(indexed(tmp_path / "s.tar", members)).digest

    picture, broken = image_bytes(40, 30), b"no picture"
    a = [("a.jpg", picture), ("a.txt", b"one")]
    b = [("b.jpg", picture), ("b.txt", b"two")]
    same = [
        a + b,
        [a[1], a[0], *b],
        [a[0], b[0], a[1], b[1]],
        [("a.json", b"{}"), *a, ("b.cls", b"7"), *b],
        [("a.JPG", picture), a[1], *b],
        [a[0], ("a.txt", b"eno"), *b],
    ]
    assert len({digest_of(members) for members in same}) == 1
    others = [
        b + a,
        a,
        [*a, ("c.jpg", picture), ("c.txt", b"two")],
        [*a, *b, ("c.json", b"{}")],
        [*a, ("b.png", picture), b[1]],
        [*a, ("b.jpg", image_bytes(30, 40)), b[1]],
        [*a, ("b.jpg", broken), b[1]],
        [*a, ("b.jpg", b""), b[1]],
        [*a, b[0], ("b.txt", "zwö".encode())],
        [*a, b[0]],
        [a[0], *b, ("b.question.txt", b"one")],
        [*a, b[0], ("b.txt", b"")],
        [*a, b[0], ("b.txt", b"\xff")],
        [*a, ("b.json", b"{}")],
        [a[0], ("b.txt", b"one"), ("b.json", b"{}")],
    ]
    digests = [digest_of(members) for members in others]
    assert digest_of(same[0]) not in digests
    # Why a picture is bad makes no other sample of it.
    assert digests[6] == digests[7]
    assert len(set(digests)) == len(digests) - 1


def test_each_tokenizer_has_its_digest_and_counting_again_keeps_the_others(tmp_path: Path) -> None:
    shard = indexed(tmp_path / "s.tar", {"a.txt": b"one two", "a.jpg": image_bytes(), "b.txt": b"\xff"})
    before = read_summary(shard)
    build_index(shard, tokenizer=WordTokenizer())
    after = read_summary(shard)
    assert after.digest == before.digest
    assert after.token_digests["bytes-1"] == before.token_digests["bytes-1"]
    assert set(after.token_digests) == {"bytes-1", "words-1"}
    assert after.token_digests["words-1"] != after.token_digests["bytes-1"]
    indexed(tmp_path / "s.tar", {"a.txt": b"one  wo", "a.jpg": image_bytes(), "b.txt": b"\xff"})
    build_index(shard, tokenizer=WordTokenizer())
    changed = read_summary(shard)
    assert changed.token_digests["bytes-1"] == after.token_digests["bytes-1"]
    indexed(tmp_path / "s.tar", {"a.txt": b"one-two", "a.jpg": image_bytes(), "b.txt": b"\xff"})
    build_index(shard, tokenizer=WordTokenizer())
    fewer = read_summary(shard)
    assert fewer.digest == before.digest
    assert fewer.token_digests["words-1"] != after.token_digests["words-1"]


@pytest.mark.parametrize("value", [2**31, -1])
def test_a_header_beyond_what_an_index_holds_makes_a_bad_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: int
) -> None:
    monkeypatch.setattr("loaders.index.image_size", lambda file: RawSize(height=5, width=value))
    members = {"a.jpg": image_bytes(), "a.txt": b"x"}
    index = read_index(indexed(tmp_path / "s.tar", members))
    assert index.errors.to_pylist() == [f"header says width {value}, limit 2147483647", ""]
    assert index.numbers["width"].tolist() == [0, 0]


def test_a_file_whose_rows_are_not_those_it_promises_is_damaged(tmp_path: Path) -> None:
    shard = indexed(tmp_path / "s.tar", caption_members(5))
    rows = open_index(shard).all_rows()
    schema = pa.ipc.open_file(index_path(shard)).schema
    with pa.ipc.new_file(index_path(shard), schema) as writer:
        first = [column.slice(0, 3) for column in rows.columns]
        writer.write_batch(pa.RecordBatch.from_arrays(first, schema=schema))
    with pytest.raises(ShardError, match="index is damaged: 3 rows in place of 5") as caught:
        open_index(shard).batch(0)
    assert caught.value.fix == f"run `omni data index {shard}`"
    assert index_shards([shard])[0].num_samples == 5


def test_columns_are_as_narrow_as_their_range_allows(tmp_path: Path) -> None:
    index = read_index(indexed(tmp_path / "s.tar", caption_members(3)))
    assert index.numbers["height"].dtype == index.tokens["bytes-1"].dtype == np.int32
    assert index.numbers["offset"].dtype == index.numbers["num_samples"].dtype == np.int64
    codes, words = codes_of(index.suffixes)
    assert [words[code] for code in codes] == ["jpg", "txt"] * 3
    shard = str(tmp_path / "s.tar")
    write_index(shard, open_index(shard).all_rows(), stat=storage.stat_shard(shard), damage="cut")
    assert read_index(shard).damage == read_summary(shard).damage == "cut"
