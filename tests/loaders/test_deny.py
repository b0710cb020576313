"""loaders.deny: key lists and quarantines deny what they name, wherever shards moved, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders import deny
from loaders.deny import DenyList, hash_keys, read_deny_lists
from loaders.quarantine import PLAN_STAGE, QuarantineRecord
from omni_pipeline.core.errors import ConfigError

SHARDS = ["old/captions-0.tar", "old/captions-1.tar", "new/captions-1.tar"]
KEYS = pa.array(["a", "b", "dir/c", "#d", "e f", "\u00fc"])


def record(key: str, *, source: str = "s", shard: str = SHARDS[0], stage: str = "decode") -> QuarantineRecord:
    """Return a failure of this sample."""
    return QuarantineRecord(
        step=3,
        source=source,
        shard=shard,
        shard_index=7,
        row=0,
        key=key,
        member="jpg",
        offset=0,
        length=1,
        stage=stage,
        reason="broken",
        rank=0,
    )


def lines_of(records: Sequence[QuarantineRecord]) -> str:
    return "".join(json.dumps(dataclasses.asdict(item)) + "\n" for item in records)


def denied(folder: Path, files: dict[str, bytes | str]) -> tuple[DenyList, dict[int, list[str]]]:
    """Return what ``files`` deny of the source "s" of ``SHARDS``, and by shard the denied of ``KEYS``."""
    paths = []
    for name, content in files.items():
        paths.append(folder / name)
        paths[-1].write_bytes(content.encode() if isinstance(content, str) else content)
    found = read_deny_lists(paths, source="s", shards=SHARDS)
    by_shard = {
        shard: [KEYS[int(place)].as_py() for place in np.flatnonzero(found.mask(SHARDS[shard], KEYS))]
        for shard in range(3)
    }
    return found, by_shard


def test_a_list_of_keys_denies_them_in_every_shard(tmp_path: Path) -> None:
    text = "\ufeff# of the test set\r\n\r\na\r\n  dir/c \n\te f\n# b\nnobody\n\u00fc"
    found, by_shard = denied(tmp_path, {"keys.txt": text})
    assert by_shard == {shard: ["a", "dir/c", "e f", "\u00fc"] for shard in range(3)}
    assert found.num_entries == 5


def test_a_key_after_a_shard_is_denied_in_that_shard_only(tmp_path: Path) -> None:
    text = "captions-0.tar/a\nelsewhere/captions-0.tar/dir/c\ncaptions-0.tar/#d\nother-0.tar/b\n"
    assert denied(tmp_path, {"keys.txt": text})[1] == {0: ["a", "dir/c", "#d"], 1: [], 2: []}
    # Two shards have that name; the whole path tells them apart.
    assert denied(tmp_path, {"keys.txt": "captions-1.tar/a"})[1] == {0: [], 1: ["a"], 2: ["a"]}
    assert denied(tmp_path, {"keys.txt": "new/captions-1.tar/a"})[1] == {0: [], 1: [], 2: ["a"]}


def test_a_quarantine_denies_what_failed_in_the_source_of_that_name(tmp_path: Path) -> None:
    records = [
        record("a"),
        record("a"),
        record("b", stage=PLAN_STAGE),
        record("dir/c", source="another"),
        record("#d", shard="moved/to/captions-1.tar", stage="worker"),
        record("e f", shard="gone.tar"),
    ]
    found, by_shard = denied(tmp_path, {"quarantine.jsonl": lines_of(records)})
    assert by_shard == {0: ["a"], 1: ["#d"], 2: ["#d"]}
    assert found.num_entries == 3


def test_a_cut_last_line_of_a_quarantine_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = lines_of([record("a"), record("b")])
    with caplog.at_level(logging.WARNING):
        assert denied(tmp_path, {"q.jsonl": text[:-40]})[1][0] == ["a"]
    assert "skipped 1 lines that are no record" in caplog.text


def test_files_add_up_and_their_order_does_not_matter(tmp_path: Path) -> None:
    files: dict[str, bytes | str] = {
        "1.txt": "a\nb\n",
        "2.txt": "b\ncaptions-0.tar/e f\n",
        "q.jsonl": lines_of([record("#d")]),
    }
    found, by_shard = denied(tmp_path, files)
    assert by_shard == {0: ["a", "b", "#d", "e f"], 1: ["a", "b"], 2: ["a", "b"]}
    again, _ = denied(tmp_path, {name: files[name] for name in reversed(files)})
    assert again == found
    other, _ = denied(tmp_path, {"3.txt": "a\nb\ncaptions-0.tar/e f\ncaptions-1.tar/#d\n"})
    assert (other.num_entries, other.digest) != (found.num_entries, found.digest)
    assert len({found.digest, other.digest, denied(tmp_path, {"4.txt": "a\nb"})[0].digest}) == 3


def test_nothing_is_denied_without_entries(tmp_path: Path) -> None:
    for files in ({}, {"e.txt": ""}, {"e.txt": "\ufeff"}, {"e.txt": "# none\n\n"}, {"q.jsonl": "\n"}):
        found, by_shard = denied(tmp_path, dict(files))
        assert (found, by_shard) == (DenyList(), {0: [], 1: [], 2: []})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "keys.txt",
            b"a\nb\n\xff\n",
            "line 3 is no UTF-8 text (byte 0xff)\n  where: deny-list {path}\n"
            "  fix:   write one key per line, as UTF-8 text",
        ),
        (
            "other.jsonl",
            b'{"key": "a"}\n',
            "the file holds no record of a quarantine\n  where: deny-list {path}\n  fix:   give a "
            "quarantine.jsonl of an earlier run; a list of keys must not be named .jsonl",
        ),
        *(
            (
                name,
                None,
                "the file does not exist\n  where: deny-list {path}\n"
                "  fix:   name a list of keys, or a quarantine.jsonl of an earlier run, in `deny`",
            )
            for name in ("gone.txt", "gone.jsonl")
        ),
    ],
)
def test_files_that_cannot_be_used_are_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_deny_lists([path], source="s", shards=SHARDS)
    assert str(caught.value) == message.format(path=path)


def test_a_folder_is_no_deny_list(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the file is a folder"):
        read_deny_lists([tmp_path], source="s", shards=SHARDS)


def test_a_file_that_cannot_be_read_is_named() -> None:
    # A file for whoever asks, of which the first byte cannot be read, not even by root.
    path = Path("/proc/self/mem")
    with pytest.raises(ConfigError) as caught:
        read_deny_lists([path], source="s", shards=SHARDS)
    assert str(caught.value) == (
        "the file cannot be read: Input/output error\n"
        "  where: deny-list /proc/self/mem\n"
        "  fix:   make it readable"
    )


def test_lines_over_the_edge_of_a_block_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.txt"
    keys = [f"key-{number:03d}-\u00fc" for number in range(40)]
    path.write_text("\n".join(keys), encoding="utf-8")
    for block in (1, 2, 7, 10, 16, 1000):
        monkeypatch.setattr(deny, "_BLOCK_BYTES", block)
        found = read_deny_lists([path], source="s", shards=SHARDS)
        assert found.num_entries == 40, block
        assert (
            found.mask(SHARDS[0], pa.array([*keys, "key-040-\u00fc", "key"])).tolist()
            == [True] * 40 + [False] * 2
        )
        path.write_bytes("\n".join(keys).encode() + b"\n\xfe")
        with pytest.raises(ConfigError, match="line 41 is no UTF-8 text"):
            read_deny_lists([path], source="s", shards=SHARDS)
        path.write_text("\n".join(keys), encoding="utf-8")


names = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=30).filter(
    lambda text: text and text.strip() == text and not text.startswith("#") and "/" not in text
)


@settings(max_examples=100)
@given(
    st.sets(names, max_size=20), st.sets(names, max_size=20), st.lists(st.sampled_from([0, 1]), min_size=40)
)
def test_exactly_the_listed_keys_are_denied(
    tmp_path_factory: pytest.TempPathFactory, wanted: set[str], others: set[str], places: list[int]
) -> None:
    path = tmp_path_factory.mktemp("deny") / "keys.txt"
    in_shard = {key for key, place in zip(sorted(wanted), places, strict=False) if place}
    lines = [f"captions-0.tar/{key}" if key in in_shard else key for key in wanted]
    path.write_bytes("\n".join(lines).encode())
    found = read_deny_lists([path], source="s", shards=SHARDS)
    keys = sorted(wanted | others)
    assert found.mask(SHARDS[0], pa.array(keys, pa.string())).tolist() == [key in wanted for key in keys]
    assert found.mask(SHARDS[1], pa.array(keys, pa.string())).tolist() == [
        key in wanted - in_shard for key in keys
    ]
    assert found.num_entries == len(wanted)


def naive_hash(key: str) -> int:
    """One word after the other, with Python's integers."""
    data = key.encode()

    def stir(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
        return value ^ (value >> 31)

    hashed = stir(len(data))
    for first in range(0, len(data), 8):
        hashed = stir(hashed ^ int.from_bytes(data[first : first + 8], "little"))
    return hashed


@given(st.lists(st.text(max_size=40), max_size=10), st.integers(0, 3))
def test_a_hash_is_that_of_one_key_by_itself(keys: list[str], skipped: int) -> None:
    for kind in (pa.string(), pa.large_string()):
        column = pa.array(keys, kind).slice(min(skipped, len(keys)))
        assert hash_keys(column).tolist() == [naive_hash(key) for key in keys[skipped:]]


def test_hashes_of_like_keys_differ_in_about_half_of_their_bits() -> None:
    hashes = hash_keys(pa.array([f"{number:09d}" for number in range(100_000)]))
    assert len(np.unique(hashes)) == len(hashes)
    differing = np.unpackbits((hashes[1:] ^ hashes[:-1]).view(np.uint8)).mean()
    assert 0.495 < differing < 0.505
    # Spread evenly over 1024 drawers: chi-squared with 1023 degrees of freedom, five deviations.
    counts = np.bincount((hashes >> np.uint64(54)).astype(np.int64), minlength=1024)
    expected = len(hashes) / 1024
    assert abs(((counts - expected) ** 2 / expected).sum() - 1023) < 5 * np.sqrt(2 * 1023)
