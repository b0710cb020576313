"""loaders.index: one sidecar per shard, from headers only; bad members are listed, not fatal."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loaders import storage
from loaders.decode.text import ByteTokenizer
from loaders.index import REPEATED, build_index, index_shards, member_name
from loaders.index_file import index_path, open_index, read_index
from loaders.index_rows import ShardIndex
from omni_pipeline.core.errors import ShardError
from tests.support.shards import (
    audio_bytes,
    caption_members,
    image_bytes,
    m4a_bytes,
    video_bytes,
    write_tar,
)

BYTES = ByteTokenizer()


class WordTokenizer(ByteTokenizer):
    """Another fingerprint, other counts."""

    fingerprint = "words-1"

    def encode(self, text: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.arange(len(text.split()), dtype=np.int32)


def members_of(index: ShardIndex) -> dict[str, dict[str, object]]:
    """Return all members by name, with their columns."""
    found: dict[str, dict[str, object]] = {}
    for row, key in enumerate(index.keys.to_pylist()):
        for place in range(index.starts[row], index.starts[row + 1]):
            name = member_name(key, index.suffixes[place].as_py())
            assert name not in found
            found[name] = {
                "modality": index.modalities[place].as_py(),
                "error": index.errors[place].as_py(),
                **{column: values[place].item() for column, values in index.numbers.items()},
                **{column: values[place].item() for column, values in index.tokens.items()},
            }
    return found


def indexed(path: Path, members: dict[str, bytes] | list[tuple[str, bytes]]) -> ShardIndex:
    """Return the index of a shard written from ``members``."""
    write_tar(path, members)
    build_index(str(path), tokenizer=BYTES)
    return read_index(str(path))


def test_all_kinds_are_measured(tmp_path: Path) -> None:
    index = indexed(
        tmp_path / "s.tar",
        {
            "a.jpg": image_bytes(40, 30),
            "b.JPEG": image_bytes(40, 30, orientation=6),
            "c.png": image_bytes(50, 20, kind="PNG", orientation=5),
            "d.webp": image_bytes(50, 20, kind="WEBP"),
            "e.webp": image_bytes(50, 20, kind="WEBP", orientation=8),
            "f.webp": image_bytes(50, 20, kind="WEBP", lossless=True),
            "g.mp4": video_bytes(8, width=64, height=48, fps=8),
            "h.webm": video_bytes(6, width=64, height=48, fps=4, kind="webm"),
            "i.mp4": video_bytes(4, width=64, height=48, rotation=90, sound_s=0.75, sound_rate=32_000),
            "j.wav": audio_bytes(0.5, rate=8000, channels=2),
            "k.flac": audio_bytes(0.25, rate=44100, kind="FLAC"),
            "l.mp3": audio_bytes(1.0, rate=32000, kind="MP3"),
            "m.txt": "\ufeffgrün".encode(),
            "n.json": b"{}",
            "README": b"text",
        },
    )
    found = members_of(index)
    assert all(member["error"] == "" for member in found.values())
    sizes = {name[0]: (member["height"], member["width"]) for name, member in found.items()}
    assert sizes["a"] == (30, 40)
    assert sizes["b"] == (40, 30)
    assert sizes["c"] == sizes["e"] == (50, 20)
    assert sizes["d"] == sizes["f"] == (20, 50)
    assert sizes["g"] == sizes["h"] == (48, 64)
    assert sizes["i"] == (64, 48)
    assert (found["g.mp4"]["num_frames"], found["g.mp4"]["duration_s"]) == (8, 1.0)
    assert (found["h.webm"]["num_frames"], found["h.webm"]["duration_s"]) == (6, pytest.approx(1.5, abs=0.01))
    # With the lead-in of AAC, which players skip.
    assert (found["i.mp4"]["sample_rate"], found["i.mp4"]["num_samples"]) == (32_000, 24_000 + 1024)
    assert found["g.mp4"]["sample_rate"] == found["h.webm"]["num_samples"] == 0
    assert (found["j.wav"]["sample_rate"], found["j.wav"]["num_samples"]) == (8000, 4000)
    assert found["k.flac"]["num_samples"] == 11025
    assert found["l.mp3"]["num_samples"] == 32000
    assert (found["m.txt"]["num_chars"], found["m.txt"]["num_bytes"], found["m.txt"]["bytes-1"]) == (4, 8, 5)
    assert (found["n.json"]["modality"], found["README"]["modality"]) == ("other", "other")
    assert found["n.json"]["bytes-1"] == -1


def test_samples_of_m4a_are_counted_by_decoding(tmp_path: Path) -> None:
    found = members_of(indexed(tmp_path / "s.tar", {"a.m4a": m4a_bytes(1.0)}))
    # AAC frames of 1024 samples, with the encoder's lead-in: only a decode tells.
    assert abs(found["a.m4a"]["num_samples"] - 16000) <= 2048  # type: ignore[operator]


def test_indexing_reads_a_small_share_of_large_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (400, 600, 3), dtype=np.uint8)
    members = {
        **{f"{n}.jpg": image_bytes(pixels=noise, quality=95) for n in range(3)},
        **{f"{n}.png": image_bytes(pixels=noise, kind="PNG") for n in range(3)},
        **{f"{n}.webp": image_bytes(pixels=noise, kind="WEBP", orientation=6) for n in range(3)},
        "a.wav": audio_bytes(20.0, rate=44100),
    }
    path = write_tar(tmp_path / "s.tar", members)
    num_bytes = 0
    real = storage.read_range

    def counted(url: str, offset: int, length: int) -> bytes:
        nonlocal num_bytes
        num_bytes += length
        return real(url, offset, length)

    monkeypatch.setattr(storage, "read_range", counted)
    build_index(str(path), tokenizer=BYTES)
    assert 0 < num_bytes < 0.1 * path.stat().st_size


def test_a_header_behind_a_long_preface_is_found(tmp_path: Path) -> None:
    profile = bytes(200_000)
    found = members_of(
        indexed(tmp_path / "s.tar", {"a.jpg": image_bytes(40, 30, icc_profile=profile, orientation=6)})
    )
    assert (found["a.jpg"]["height"], found["a.jpg"]["width"]) == (40, 30)


def test_bad_members_are_listed_and_the_rest_is_indexed(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    index = indexed(
        path,
        {
            "a.jpg": b"no picture",
            "b.jpg": b"",
            "c.txt": b"\xff\xfe",
            "d.mp4": video_bytes()[:300],
            "e.wav": b"RIFF",
            "f.png": image_bytes(kind="PNG"),
            "g.webp": b"RIFF\0\0\0\0WEBPVP8 ",
        },
    )
    errors = {name: member["error"] for name, member in members_of(index).items()}
    assert [name for name, error in errors.items() if not error] == ["f.png"]
    assert errors["b.jpg"] == "member is empty"
    assert errors["c.txt"] == "text is not UTF-8 at byte 0: invalid start byte"
    report = build_index(str(path), tokenizer=BYTES)
    assert report.is_unchanged
    assert dict(report.bad) == {name: error for name, error in errors.items() if error}


def test_members_of_a_key_need_not_be_adjacent(tmp_path: Path) -> None:
    index = indexed(
        tmp_path / "s.tar", [("0.txt", b"a"), ("1.txt", b"b"), ("0.json", b"c"), ("1.json", b"d")]
    )
    assert index.keys.to_pylist() == ["0", "1"]
    assert index.starts.tolist() == [0, 2, 4]


def test_a_repeated_member_is_reported_on_both_and_never_split_into_halves(tmp_path: Path) -> None:
    index = indexed(tmp_path / "s.tar", [("0.txt", b"a"), ("0.json", b"b"), ("0.txt", b"c"), ("0.TXT", b"d")])
    assert index.keys.to_pylist() == ["0"]
    assert index.errors.to_pylist() == [REPEATED, "", REPEATED, REPEATED]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(st.from_regex(r"[ab]{1,2}(\.(txt|json|a\.txt))?", fullmatch=True), max_size=12))
def test_every_member_of_a_shard_is_in_exactly_one_sample(tmp_path: Path, names: list[str]) -> None:
    path = write_tar(tmp_path / "s.tar", [(name, b"x" * place) for place, name in enumerate(names)])
    build_index(str(path), tokenizer=BYTES, force=True)
    index = read_index(str(path))
    rows = np.repeat(index.keys.to_pylist(), np.diff(index.starts))
    found = [member_name(key, suffix) for key, suffix in zip(rows, index.suffixes.to_pylist(), strict=True)]
    with tarfile.open(path) as archive:
        expected = sorted((info.name, info.offset_data) for info in archive)
    assert sorted(zip(found, index.numbers["offset"].tolist(), strict=True)) == expected
    assert len(set(index.keys.to_pylist())) == index.num_samples


def test_a_cut_shard_keeps_the_samples_before_the_cut(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", caption_members(4))
    path.write_bytes(path.read_bytes()[:-12_000])
    report = build_index(str(path), tokenizer=BYTES)
    assert 0 < report.num_samples < 4
    assert report.damage
    assert read_index(str(path)).damage == report.damage


def test_a_shard_without_samples_has_an_index(tmp_path: Path) -> None:
    index = indexed(tmp_path / "s.tar", {})
    assert (index.num_samples, index.starts.tolist()) == (0, [0])


def test_an_unchanged_shard_is_passed_by(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", caption_members(2))
    first = index_shards([str(path)])[0]
    written = os.stat(index_path(str(path))).st_mtime_ns
    second = index_shards([str(path)])[0]
    assert (first.is_unchanged, second.is_unchanged) == (False, True)
    assert os.stat(index_path(str(path))).st_mtime_ns == written


def test_a_second_tokenizer_adds_its_counts_and_keeps_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tar(tmp_path / "s.tar", {"a.txt": b"one two", "a.json": b"{}", "b.txt": b"\xff"})
    build_index(str(path), tokenizer=BYTES)
    monkeypatch.setattr("loaders.index.scan_tar", None)
    build_index(str(path), tokenizer=WordTokenizer())
    tokens = read_index(str(path)).tokens
    assert {name: counts.tolist() for name, counts in tokens.items()} == {
        "bytes-1": [7, -1, -1],
        "words-1": [2, -1, -1],
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("grow", "index is stale: it is of a shard of"),
        ("touch", "index is stale: the shard was written after it"),
        ("remove", "shard has no index"),
        ("cut", "index is damaged"),
        ("version", "index has version 1, this program reads 3"),
    ],
)
def test_an_index_that_does_not_fit_is_refused_and_mended(tmp_path: Path, change: str, message: str) -> None:
    path = write_tar(tmp_path / "s.tar", caption_members(2))
    build_index(str(path), tokenizer=BYTES)
    sidecar = Path(index_path(str(path)))
    if change == "grow":
        write_tar(path, caption_members(9))
    elif change == "touch":
        os.utime(path, ns=(1, 1))
    elif change == "remove":
        sidecar.unlink()
    elif change == "cut":
        sidecar.write_bytes(sidecar.read_bytes()[:100])
    else:
        # A file as version 1 had it.
        table = pa.table({"key": ["000000"]}).replace_schema_metadata({"version": "1", "shard_size": "10240"})
        with pa.ipc.new_file(str(sidecar), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(ShardError, match=message) as caught:
        read_index(str(path))
    hint = "; if it was only copied, copy with `cp -p` or `rsync -t`, which keep times"
    assert caught.value.fix == f"run `omni data index {path}`{hint if change == 'touch' else ''}"
    build_index(str(path), tokenizer=BYTES)
    assert read_index(str(path)).num_samples == (9 if change == "grow" else 2)


def test_one_bad_shard_does_not_stop_the_others(tmp_path: Path) -> None:
    good = write_tar(tmp_path / "s.tar", caption_members(1))
    shards = [str(tmp_path / "none.tar"), str(good)]
    seen: list[str] = []
    reports = index_shards(shards, progress=lambda report: seen.append(report.shard))
    assert "there is no such file" in reports[0].error
    assert (reports[1].num_samples, reports[1].num_members) == (1, 2)
    assert seen == shards


def test_worker_processes_give_the_same_indexes(tmp_path: Path) -> None:
    paths = [str(write_tar(tmp_path / f"{n}.tar", caption_members(2, first=n))) for n in range(2)]
    alone = index_shards(paths)
    contents = [Path(index_path(path)).read_bytes() for path in paths]
    assert index_shards(paths, num_workers=2, force=True) == alone
    assert [Path(index_path(path)).read_bytes() for path in paths] == contents


def test_a_remote_shard_is_indexed_beside_itself(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", caption_members(2))
    storage.write_file("memory://far/s.tar", path.read_bytes())
    build_index("memory://far/s.tar", tokenizer=BYTES)
    assert read_index("memory://far/s.tar").num_samples == 2


def test_keys_alone_are_those_of_all_rows(tmp_path: Path) -> None:
    for num_samples in (0, 3, 2500):
        shard = str(write_tar(tmp_path / f"{num_samples}.tar", texts(num_samples)))
        index_shards([shard])
        assert open_index(shard).keys() == read_index(shard).keys
        assert len(open_index(shard).keys()) == num_samples


def texts(num_samples: int) -> dict[str, bytes]:
    return {f"{number:06d}.txt": b"text" for number in range(num_samples)}
