"""loaders.prepare: folders and manifests to indexed shards that WebDataset reads."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
from webdataset.tariterators import group_by_keys, tar_file_iterator

from loaders import prepare as prepare_module
from loaders.index import index_shards
from loaders.index_file import read_index
from loaders.prepare import prepare
from omni_pipeline.core.errors import ConfigError, DataError
from tests.support.shards import caption_members, image_bytes, video_bytes


def folder_of(path: Path, members: dict[str, bytes]) -> Path:
    """Write ``members`` as files below ``path``; return it."""
    for name, payload in members.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(payload)
    return path


def manifest_of(path: Path, lines: list[Any]) -> Path:
    """Write objects, or raw strings, as the lines of a manifest; return its path."""
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def names_of(shards: tuple[str, ...]) -> list[list[str]]:
    """Return the member names of each shard."""
    names = []
    for shard in shards:
        with tarfile.open(shard) as archive:
            names.append(archive.getnames())
    return names


def test_files_with_the_same_stem_become_one_sample(tmp_path: Path) -> None:
    root = folder_of(
        tmp_path / "in",
        {
            "b.jpg": image_bytes(),
            "b.txt": b"bee",
            "b.question.txt": b"?",
            "a.jpg": image_bytes(),
            "a.json": b"{}",
            "sub/22.05.png": image_bytes(kind="PNG"),
            "note.md": b"no sample",
            ".hidden.jpg": b"x",
        },
    )
    seen: list[tuple[int, int]] = []
    summary = prepare(root, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    assert names_of(summary.shards) == [
        ["a.jpg", "a.json", "b.jpg", "b.question.txt", "b.txt", "sub/22_05.png"]
    ]
    assert (summary.num_samples, summary.num_skipped, seen) == (3, 2, [(1, 3), (2, 3), (3, 3)])
    assert summary.num_members == {"image": 3, "other": 1, "text": 2}
    assert summary.num_bytes == sum(
        path.stat().st_size
        for path in root.rglob("*")
        if path.is_file() and path.name not in ("note.md", ".hidden.jpg")
    )
    assert read_index(summary.shards[0]).keys.to_pylist() == ["a", "b", "sub/22_05"]


def test_shards_are_full_never_empty_and_the_same_every_time(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "in", caption_members(6))
    first = prepare(root, tmp_path / "one", max_count=2)
    second = prepare(root, tmp_path / "two%d", max_count=2)
    assert [len(names) for names in names_of(first.shards)] == [4, 4, 4]
    for left, right in zip(first.shards, second.shards, strict=True):
        assert Path(left).read_bytes() == Path(right).read_bytes()
    small = prepare(root, tmp_path / "three", max_bytes=1)
    assert len(small.shards) == 6
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(
        f"shard-{n:06d}.tar{end}" for n in range(3) for end in ("", ".index.arrow")
    )


def test_webdataset_reads_what_was_prepared(tmp_path: Path) -> None:
    members = caption_members(3)
    summary = prepare(folder_of(tmp_path / "in", members), tmp_path / "out")
    with open(summary.shards[0], "rb") as shard:
        files = ({**file, "__url__": "shard"} for file in tar_file_iterator(shard))
        samples = list(group_by_keys(files))
    found = {f"{item['__key__']}.{suffix}": item[suffix] for item in samples for suffix in ("jpg", "txt")}
    assert found == members


def test_a_manifest_names_files_and_holds_text(tmp_path: Path) -> None:
    folder_of(
        tmp_path, {"m/a.jpg": image_bytes(), "m/b.PNG": image_bytes(kind="PNG"), "m/c.mp4": video_bytes()}
    )
    manifest = manifest_of(
        tmp_path / "list.jsonl",
        [
            {"key": "x.1", "image": "m/a.jpg", "text": "grün", "score": 3},
            "",
            {"left": "m/a.jpg", "right.png": "m/b.PNG", "answer.txt": "yes"},
            {"key": "x.1", "video": "m/c.mp4", "txt": "moves"},
        ],
    )
    summary = prepare(manifest, tmp_path / "out", name="pairs")
    assert names_of(summary.shards) == [
        [
            "x_1.jpg",
            "x_1.json",
            "x_1.txt",
            "000000003.answer.txt",
            "000000003.left.jpg",
            "000000003.right.png",
            "x_1-2.mp4",
            "x_1-2.txt",
        ]
    ]
    assert summary.num_members == {"image": 3, "other": 1, "text": 3, "video": 1}
    with tarfile.open(summary.shards[0]) as archive:
        content = {name: archive.extractfile(name) for name in ("x_1.txt", "x_1.json")}
        assert {name: file.read() for name, file in content.items() if file} == {
            "x_1.txt": "grün".encode(),
            "x_1.json": b'{"score": 3}',
        }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"image": "none.jpg"}, "field 'image' names a file that does not exist: none.jpg"),
        ({"caption": "a text in a field for files"}, "field 'caption' names a file that does not exist"),
        ("{broken", "line is no JSON"),
        ("[1]", "line holds a list, not an object"),
        ({"score": 1}, "sample has neither media nor text"),
        ({"text": "a", "txt": "b"}, "two fields give member 'txt'"),
        ({"../x": "a.jpg"}, "field '../x' cannot name a member"),
        ('{"text": "\\ud800"}', "text of field 'text' is not valid Unicode"),
    ],
)
def test_a_wrong_line_is_named_before_anything_is_written(tmp_path: Path, line: Any, message: str) -> None:
    manifest = manifest_of(tmp_path / "list.jsonl", [{"text": "good"}, line])
    with pytest.raises(ConfigError, match=message) as caught:
        prepare(manifest, tmp_path / "out")
    assert caught.value.where == f"{manifest}, line 2"
    assert caught.value.fix
    assert not (tmp_path / "out").exists()


def test_wrong_inputs_are_setting_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*nowhere"):
        prepare(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"neither a folder nor a \.jsonl manifest"):
        prepare(folder_of(tmp_path, {"x.csv": b""}) / "x.csv", tmp_path / "out")
    empty = folder_of(tmp_path / "in", {"x.md": b"x"})
    with pytest.raises(ConfigError, match="no sample in"):
        prepare(empty, tmp_path / "out")
    with pytest.raises(ConfigError, match="must be at least 1"):
        prepare(empty, tmp_path / "out", max_count=0)
    assert not (tmp_path / "out").exists()


def test_shards_of_an_earlier_run_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "in", caption_members(1))
    prepare(root, tmp_path / "out")
    with pytest.raises(ConfigError, match="already holds 1 shards of this name"):
        prepare(root, tmp_path / "out")
    assert prepare(root, tmp_path / "out", name="more").num_samples == 1


@pytest.mark.parametrize("stop_at", [1, 3, 5])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_call_leaves_nothing_and_the_next_one_works(
    tmp_path: Path, stop_at: int, error: type[BaseException]
) -> None:
    root = folder_of(tmp_path / "in", caption_members(6))
    out = tmp_path / "out"

    def stop(done: int, _: int) -> None:
        if done == stop_at:
            raise error

    with pytest.raises(error):
        prepare(root, out, max_count=2, progress=stop)
    assert not out.exists()
    folder_of(out, {"kept.txt": b"x"})
    with pytest.raises(error):
        prepare(root, out, max_count=2, progress=stop)
    assert [path.name for path in out.iterdir()] == ["kept.txt"]
    assert prepare(root, out, max_count=2).num_samples == 6


def test_a_call_that_is_interrupted_while_it_indexes_leaves_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folder_of(tmp_path / "in", caption_members(4))
    with monkeypatch.context() as patch:

        def stop(shards: list[str], **_: Any) -> None:
            index_shards(shards[:1])
            raise KeyboardInterrupt

        patch.setattr(prepare_module, "index_shards", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(root, tmp_path / "out", max_count=2)
    assert not (tmp_path / "out").exists()
    assert prepare(root, tmp_path / "out", max_count=2).num_samples == 4


def test_a_full_disk_is_told_without_a_traceback_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError, match="cannot write shards: No space left on device"):
        prepare(folder_of(tmp_path / "in", caption_members(1)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


STOPPED_BY = """
import os, sys
from pathlib import Path
from loaders.prepare import prepare
def stop(done, total):
    if done == 4:
        os.kill(os.getpid(), int(sys.argv[3]))
prepare(Path(sys.argv[1]), Path(sys.argv[2]), max_count=2, progress=stop)
"""


def stopped_by(number: int, root: Path, out: Path) -> int:
    """Run ``prepare`` in a process that sends itself a signal after four samples; return how it ended."""
    command = [sys.executable, "-c", STOPPED_BY, str(root), str(out), str(int(number))]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[2], timeout=60, check=False, capture_output=True
    )
    assert ended.stderr == b""
    return ended.returncode


def test_sigterm_ends_the_process_as_ever_but_leaves_nothing(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "in", caption_members(6))
    assert stopped_by(signal.SIGTERM, root, tmp_path / "out") == -signal.SIGTERM
    assert not (tmp_path / "out").exists()


def test_what_a_killed_call_left_is_not_taken_for_a_whole_set(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "in", caption_members(6))
    out = tmp_path / "out"
    assert stopped_by(signal.SIGKILL, root, out) == -signal.SIGKILL
    left = sorted(path.name for path in out.iterdir())
    assert left == ["shard-000000.tar", "shard-000001.tar.part"]
    with pytest.raises(
        ConfigError, match=r"earlier call was killed: the shards of this name \(1\)"
    ) as caught:
        prepare(root, out)
    assert caught.value.where == str(out / "shard-000001.tar.part")
    assert "remove those shards, their .index.arrow files and the .part" in caught.value.fix
    assert prepare(root, out, name="more").num_samples == 6
    for name in left:
        (out / name).unlink()
    assert prepare(root, out).num_samples == 6


def test_a_handler_of_sigterm_is_called_after_the_clean_up_and_stays(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "in", caption_members(6))
    out = tmp_path / "out"
    found: list[bool] = []

    def handler(*_: Any) -> None:
        found.append(out.exists())

    def stop(done: int, _: int) -> None:
        if done == 4:
            signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(SystemExit) as caught:
            prepare(root, out, max_count=2, progress=stop)
        assert (found, caught.value.code) == ([False], 143)
        assert signal.getsignal(signal.SIGTERM) is handler
        assert prepare(root, out).num_samples == 6
        assert signal.getsignal(signal.SIGTERM) is handler
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert prepare(root, out, name="more", max_count=2, progress=stop).num_samples == 6
    finally:
        signal.signal(signal.SIGTERM, before)


def test_it_works_outside_the_main_thread_too(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "in", caption_members(1))
    thread = threading.Thread(target=prepare, args=(root, tmp_path / "out"))
    thread.start()
    thread.join(60)
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == [
        "shard-000000.tar",
        "shard-000000.tar.index.arrow",
    ]


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a\\b", "a\0"])
def test_a_name_that_is_no_part_of_a_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot begin the name of a shard") as caught:
        prepare(folder_of(tmp_path / "in", caption_members(1)), tmp_path / "out", name=name)
    assert caught.value.fix
    assert not (tmp_path / "out").exists()


def test_a_name_with_signs_of_a_pattern_stands_for_itself(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "in", caption_members(1))
    prepare(root, tmp_path / "out", name="a[b]")
    with pytest.raises(ConfigError, match="already holds 1 shards"):
        prepare(root, tmp_path / "out", name="a[b]")


def test_an_output_that_is_a_file_or_below_one_is_refused(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "in", caption_members(1))
    with pytest.raises(ConfigError, match="is a file, not a folder") as caught:
        prepare(root, root / "000000.txt")
    assert caught.value.fix == "choose a folder for the shards"
    with pytest.raises(ConfigError, match=r"cannot make the folder .*: Not a directory"):
        prepare(root, root / "000000.txt" / "out")
