"""loaders.check with decoding: what only a decode shows, and workers that hang, die or are stopped."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from loaders import check
from loaders.check import check_shards
from loaders.check_members import CheckSettings, ShardJob
from loaders.check_shard import check_shard
from loaders.decode.segment import DecodeSettings
from loaders.index import build_index
from loaders.source_config import FieldsLayout
from loaders.workers import InlineDecoder
from omni_pipeline.core.errors import ShardError
from omni_pipeline.core.sizes import AudioSizes, ModelSizes
from tests.support.checks import BYTES, CAPTIONS, checked, kinds, places
from tests.support.shards import caption_members, image_bytes, video_bytes, write_tar


def test_fault_23_a_truncated_picture_is_found_by_decoding_alone(tmp_path: Path) -> None:
    members = caption_members(10)
    members["000003.jpg"] = members["000003.jpg"][:-40]
    path = write_tar(tmp_path / "s.tar", members)
    assert kinds(checked(path)) == {}
    report = checked(path, decode=True)
    assert kinds(report) == {"not_decoded": 1}
    assert [member for member, _ in places(report, "not_decoded")] == ["000003.jpg"]
    assert report.num_decoded == 20


def test_members_that_no_field_takes_are_not_judged(tmp_path: Path) -> None:
    members = caption_members(2) | {"000000.wav": b"RIFF", "000001.json": b""}
    path = write_tar(tmp_path / "s.tar", members)
    assert {"bad_header", "unknown_suffix", "empty_text"} <= set(kinds(checked(path)))
    assert set(kinds(checked(path, layout=CAPTIONS, decode=True))) == {"not_adjacent"}


def test_worker_processes_find_the_same(tmp_path: Path) -> None:
    shards = [
        write_tar(tmp_path / f"{n}.tar", caption_members(3, first=2 * n) | {f"{n}.json": b""})
        for n in range(3)
    ]
    alone = checked(*shards, decode=True)
    assert checked(*shards, decode=True, num_workers=2) == alone
    assert alone.found.num_notes


def test_the_sound_of_a_clip_is_sized_and_decoded_where_the_layout_asks_for_it(tmp_path: Path) -> None:
    clips = FieldsLayout(fields=({"member": "mp4", "sound": True},))  # type: ignore[arg-type]
    path = write_tar(tmp_path / "s.tar", {"a.mp4": video_bytes(sound_s=1.0), "b.mp4": video_bytes()})
    report = checked(path, layout=clips, decode=True)
    assert (kinds(report), report.num_decoded) == ({}, 3)
    short = DecodeSettings(sizes=ModelSizes(audio=AudioSizes(max_duration_s=0.5)))
    report = checked(path, layout=clips, against=CheckSettings(short), deny_list=tmp_path / "deny.txt")
    assert (kinds(report), report.num_denied) == ({"no_size": 1}, 1)
    assert places(report, "no_size")[0][1].startswith("sound of the clip: recording lasts")
    assert kinds(checked(path, against=CheckSettings(short))) == {}


def test_nothing_of_what_is_decoded_is_sent_back(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", caption_members(2))
    requests = check_shard(ShardJob(str(path)), CheckSettings(wants_requests=True)).requests
    assert [(key, request.member) for key, request in requests] == [
        (f"{n:06d}", f"{n:06d}.{suffix}") for n in range(2) for suffix in ("jpg", "txt")
    ]
    assert [
        InlineDecoder(DecodeSettings()).submit(request).result().array.size for _, request in requests
    ] == [0] * 4


def test_fault_18_bytes_that_cannot_be_read_are_told_and_nobody_is_denied_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tar(tmp_path / "s.tar", {"a.txt": b"x"})

    def fail(url: str, offset: int, _length: int) -> bytes:
        raise ShardError("storage failed", where=f"{url}, byte {offset}")

    monkeypatch.setattr("loaders.cache.read_payload", fail)
    report = checked(path, decode=True, deny_list=tmp_path / "deny.txt")
    assert kinds(report) == {"not_fetched": 1}
    assert (report.num_decoded, report.num_denied) == (1, 0)


@pytest.mark.parametrize(("name", "payload"), [("a.jpg", b"no picture"), ("a.jpg", image_bytes()[:-40])])
def test_a_shard_of_two_sources_is_held_against_both_and_denied_is_what_neither_can_use(
    tmp_path: Path, name: str, payload: bytes
) -> None:
    path = write_tar(tmp_path / "s.tar", {name: payload, "a.txt": b"x", "b.txt": b"\xff"})
    texts = FieldsLayout(fields=("txt",))  # type: ignore[arg-type]
    build_index(str(path), tokenizer=BYTES)
    for layouts, denied in (((CAPTIONS,), 2), ((CAPTIONS, texts), 1), ((texts, CAPTIONS), 1), ((texts,), 1)):
        report = check_shards(
            [ShardJob(str(path), layouts)],
            CheckSettings(),
            num_workers=0,
            decode=True,
            deny_list=tmp_path / "deny.txt",
        )
        assert report.num_denied == denied
        bad = {"bad_text", "bad_header", "not_decoded"} & kinds(report).keys()
        assert len(bad) == (1 if layouts == (texts,) else 2)


def test_fault_21_a_check_that_is_stopped_leaves_neither_processes_nor_files(tmp_path: Path) -> None:
    shards = [write_tar(tmp_path / f"{n}.tar", {"a.txt": b"x"}) for n in range(2)]

    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_shards(
            [ShardJob(str(path)) for path in shards],
            CheckSettings(),
            num_workers=1,
            deny_list=tmp_path / "deny.txt",
            progress=stop,
        )
    assert sorted(tmp_path.iterdir()) == shards
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode-")]


def hang(_request: object, _settings: object) -> tuple[object, float, float]:
    """A job that never ends."""
    threading.Event().wait()
    raise AssertionError("unreachable")


def test_fault_35_a_hang_is_a_finding_and_the_check_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tar(tmp_path / "s.tar", {"a.txt": b"x"})
    build_index(str(path), tokenizer=BYTES)
    monkeypatch.setattr(check, "DECODE_JOB", f"{__name__}:hang")
    report = check_shards(
        [ShardJob(str(path))], CheckSettings(), num_workers=1, decode=True, decode_deadline_s=0.3
    )
    assert kinds(report) == {"decode_stuck": 1}
    assert places(report, "decode_stuck") == [("a.txt", "deadline of 0.3 s passed")]
    monkeypatch.setattr(check, "CHECK_JOB", f"{__name__}:hang")
    monkeypatch.setattr(check, "HEADERS_DEADLINE_S", 0.3)
    report = check_shards([ShardJob(str(path))], CheckSettings(), num_workers=1)
    assert kinds(report) == {"stuck": 1}
