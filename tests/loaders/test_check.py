"""loaders.check: every kind of finding from its smallest trigger; counts exact, nothing ever crashes."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loaders.check_findings import MAX_WORDS, SHOWN_PLACES, Findings, MemberTable, Place
from loaders.check_keys import KeySpill
from loaders.check_kinds import KINDS_OF_FINDING, NOTE, PROBLEM
from loaders.check_members import CheckSettings, ShardJob
from loaders.check_shard import check_shard
from loaders.decode.segment import DecodeSettings
from loaders.deny import hash_keys
from loaders.index import build_index
from loaders.index_file import index_path
from loaders.packing import Budgets
from loaders.source_config import FieldsLayout
from omni_pipeline.core.sizes import AudioSizes, ModelSizes
from tests.support.checks import BYTES, checked, kinds, places
from tests.support.shards import audio_bytes, caption_members, image_bytes, write_tar


def test_a_clean_set_has_neither_problems_nor_notes(tmp_path: Path) -> None:
    shards = [write_tar(tmp_path / f"{n}.tar", caption_members(3, first=3 * n)) for n in range(2)]
    report = checked(*shards, decode=True)
    assert kinds(report) == {}
    assert (report.num_shards, report.num_samples, report.num_members, report.num_decoded) == (2, 6, 12, 12)
    assert report.num_bytes == sum(path.stat().st_size for path in shards)


def test_fault_1_a_cut_tar_keeps_every_sample_before_the_cut_and_the_next_shard(tmp_path: Path) -> None:
    cut = write_tar(tmp_path / "0.tar", {"a.txt": b"a" * 600, "b.txt": b"b" * 600})
    cut.write_bytes(cut.read_bytes()[: 1536 + 512 + 100])
    report = checked(cut, write_tar(tmp_path / "1.tar", {"c.txt": b"c"}))
    assert kinds(report) == {"cut": 1}
    assert report.found.places["cut"] == [
        Place(str(cut), byte=2148, what="cut inside member 'b.txt', at byte 2148")
    ]
    assert report.num_samples == 2


def test_fault_2_one_damaged_tar_of_twenty_is_named(tmp_path: Path) -> None:
    shards = [write_tar(tmp_path / f"{n:02d}.tar", {f"{n}.txt": b"x"}) for n in range(20)]
    data = bytearray(shards[13].read_bytes())
    data[:100] = b"\xff" * 100
    shards[13].write_bytes(data)
    found = checked(*shards).found
    assert found.counts == {"garbage": 1}
    assert [place.shard for place in found.places["garbage"]] == [str(shards[13])]


@pytest.mark.parametrize(
    "order",
    [
        "0.jpg 1.jpg 0.txt 1.txt",
        "0.jpg 1.jpg 2.jpg 0.txt 1.txt 2.txt",
        "0.jpg 1.jpg 0.txt 1.txt 0.b.txt 1.b.txt",
    ],
)
def test_fault_3_and_4_members_that_are_not_adjacent_are_told(tmp_path: Path, order: str) -> None:
    names = order.split()
    path = write_tar(tmp_path / "s.tar", [(n, image_bytes() if "jpg" in n else b"t") for n in names])
    report = checked(path)
    num_keys = len({name[0] for name in names})
    assert kinds(report) == {"not_adjacent": num_keys}
    assert places(report, "not_adjacent")[0] == ("0.txt", "again key '0'")
    assert report.num_samples == num_keys


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("track 2.0 (x).mp3", "0 (x).mp3"), ("22.05.png", "05.png"), ("1.5 m.TXT", "5 m.TXT")],
)
def test_fault_5_and_6_a_dot_in_the_base_name_is_no_quiet_suffix(
    tmp_path: Path, name: str, suffix: str
) -> None:
    payload = {"mp3": audio_bytes(kind="MP3"), "png": image_bytes(kind="PNG"), "TXT": b"x"}
    path = write_tar(tmp_path / "s.tar", {name: payload[name[-3:]]})
    report = checked(path)
    assert places(report, "dotted_name") == [(name, f"suffix {suffix!r}")]
    with_layout = checked(path, layout=FieldsLayout(fields=(name[-3:].lower(),)))  # type: ignore[arg-type]
    assert kinds(with_layout) == {"dotted_name": 1, "missing_member": 1, "no_such_member": 1}


def test_unicode_spaces_and_longer_suffixes_are_no_fault(tmp_path: Path) -> None:
    names = ["größe 東京.txt", "a b.txt", "v1.0/c.txt", "d.caption.txt", "d.seg_2.png"]
    members = {name: b"x" if name.endswith("txt") else image_bytes(kind="PNG") for name in names}
    path = write_tar(tmp_path / "s.tar", members, tar_format=tarfile.PAX_FORMAT)
    assert kinds(checked(path)) == {}


def test_fault_8_and_10_the_same_key_in_two_shards_is_a_note_that_names_both(tmp_path: Path) -> None:
    names = ("0.tar", "1.tar", "2.tar")
    shards = [write_tar(tmp_path / name, {"a.txt": b"x", f"{name[0]}.txt": b"y"}) for name in names]
    report = checked(*shards)
    assert kinds(report) == {"key_in_shards": 1}
    assert report.found.places["key_in_shards"] == [Place(str(shards[0]), "a", what="also in 1.tar, 2.tar")]
    assert report.num_samples == 6


def test_fault_11_long_names_are_whole_and_names_without_a_dot_are_told(tmp_path: Path) -> None:
    members = {"k" * 200 + ".txt": b"x", "README": b"y"}
    path = write_tar(tmp_path / "s.tar", members, tar_format=tarfile.GNU_FORMAT)
    report = checked(path)
    assert places(report, "unknown_suffix") == [("README", "no suffix")]
    assert report.num_members == 2


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_fault_12_links_and_devices_are_notes_and_folders_are_none(tmp_path: Path, tar_format: int) -> None:
    path = tmp_path / "s.tar"
    with tarfile.open(path, "w", format=tar_format) as archive:
        for name, kind in (
            ("dir", tarfile.DIRTYPE),
            ("b.txt", tarfile.SYMTYPE),
            ("c.txt", tarfile.LNKTYPE),
            ("d.txt", tarfile.FIFOTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.txt"
            archive.addfile(info)
        info = tarfile.TarInfo("a.txt")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"x"))
    report = checked(path)
    assert kinds(report) == {"link": 3}
    assert places(report, "link") == [
        ("b.txt", "symbolic link to 'a.txt', passed by"),
        ("c.txt", "hard link to 'a.txt', passed by"),
        ("d.txt", "no regular file, passed by"),
    ]


def test_fault_12_a_sparse_member_cannot_be_read_by_offset(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("a.txt")
        info.pax_headers = {
            "GNU.sparse.major": "0",
            "GNU.sparse.minor": "1",
            "GNU.sparse.map": "0,1",
            "GNU.sparse.size": "9",
        }
        info.size = 1
        archive.addfile(info, io.BytesIO(b"x"))
    assert kinds(checked(path)) == {"sparse_member": 1}


def test_fault_14_a_shard_without_samples_is_a_note(tmp_path: Path) -> None:
    report = checked(write_tar(tmp_path / "0.tar", {}), write_tar(tmp_path / "1.tar", {"a.txt": b"x"}))
    assert kinds(report) == {"empty_shard": 1}


def test_fault_15_a_writer_that_was_not_closed_leaves_no_end_mark(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", caption_members(3))
    data = path.read_bytes()
    with tarfile.open(path) as archive:
        last = archive.getmembers()[-1]
    path.write_bytes(data[: last.offset])
    report = checked(path)
    assert kinds(report) == {"no_end_mark": 1, "no_partner": 1}
    assert places(report, "no_partner") == [("000002", "no member 'txt'; it has jpg")]


def test_fault_16_a_field_that_no_sample_has_names_the_suffixes_there_are(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", caption_members(3))
    layout = FieldsLayout(fields=("jpeg", "txt"))  # type: ignore[arg-type]
    report = checked(path, layout=layout)
    assert kinds(report) == {"no_such_member": 1, "missing_member": 3}
    assert places(report, "no_such_member") == [
        ("", "no member 'jpeg' in any sample; the shards hold: jpg (3), txt (3)")
    ]
    assert places(report, "missing_member")[0] == ("000000", "no member 'jpeg'; it has jpg, txt")


def test_fault_18_and_19_a_missing_or_unreachable_shard_is_a_finding_and_the_others_are_read(
    tmp_path: Path,
) -> None:
    good = write_tar(tmp_path / "1.tar", {"a.txt": b"x"})
    build_index(str(good), tokenizer=BYTES)
    report = checked(tmp_path / "0.tar", good, indexed=False)
    assert kinds(report) == {"unreadable": 1}
    assert places(report, "unreadable") == [("", "there is no such file (fix: check the path of the shard)")]
    assert report.num_samples == 1


def test_a_compressed_tar_is_one_finding(tmp_path: Path) -> None:
    path = tmp_path / "s.tar.gz"
    path.write_bytes(gzip.compress(b"x" * 2000))
    report = checked(path, indexed=False)
    assert kinds(report) == {"compressed": 1}


def test_tars_joined_with_cat_lose_nothing_in_silence(tmp_path: Path) -> None:
    parts = [write_tar(tmp_path / name, {f"{name}.txt": b"x"}).read_bytes() for name in ("a", "b")]
    path = tmp_path / "s.tar"
    path.write_bytes(b"".join(parts))
    report = checked(path)
    assert kinds(report) == {"joined": 1}
    assert places(report, "joined") == [("", "data after the end mark, at byte 10240: not read")]
    assert report.num_samples == 1


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ("remove", "no_index"),
        ("touch", "stale_index"),
        ("version", "index_version"),
        ("cut", "damaged_index"),
        ("content", "wrong_index"),
        ("order", "wrong_index"),
        ("offsets", "wrong_index"),
    ],
)
def test_an_index_that_does_not_fit_is_found(tmp_path: Path, change: str, kind: str) -> None:
    members = [("a.txt", b"one"), ("a.x.txt", b"two")]
    path = write_tar(tmp_path / "s.tar", members)
    build_index(str(path), tokenizer=BYTES)
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    sidecar = Path(index_path(str(path)))
    if change == "remove":
        sidecar.unlink()
    elif change == "touch":
        os.utime(path, ns=(1, 1))
    elif change == "version":
        table = pa.table({"key": ["a"]}).replace_schema_metadata({"version": "1"})
        with pa.ipc.new_file(str(sidecar), table.schema) as writer:
            writer.write_table(table)
    elif change == "cut":
        sidecar.write_bytes(sidecar.read_bytes()[:100])
    else:
        # Size and time stay, as after `rsync -t` of another shard.
        if change == "content":
            write_tar(path, [("c.txt", b"one"), ("c.x.txt", b"two")])
        elif change == "order":
            write_tar(path, members[::-1])
        else:
            with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
                folder = tarfile.TarInfo("folder")
                folder.type = tarfile.DIRTYPE
                archive.addfile(folder)
                for name, payload in members:
                    info = tarfile.TarInfo(name)
                    info.size = len(payload)
                    archive.addfile(info, io.BytesIO(payload))
        os.utime(path, ns=times)
    report = checked(path, indexed=False)
    assert kinds(report) == {kind: 1}
    assert KINDS_OF_FINDING[kind].level == (NOTE if kind == "no_index" else PROBLEM)


def test_the_same_key_and_suffix_twice(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", [("a.txt", b"1"), ("a.TXT", b"2"), ("b.txt", b"3")])
    report = checked(path, deny_list=tmp_path / "deny.txt")
    assert kinds(report) == {"repeated_member": 2}
    assert report.num_denied == 1
    # Of what no field can take it does not matter which is meant.
    path = write_tar(tmp_path / "s.tar", [("a.txt", b"1"), ("a.npy", b"2"), ("a.npy", b"3")])
    report = checked(path, deny_list=tmp_path / "deny.txt")
    assert (kinds(report), report.num_denied) == ({"repeated_member": 2, "unknown_suffix": 2}, 0)


def test_keys_that_differ_by_case_only(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", {"IMG_1.jpg": image_bytes(), "img_1.txt": b"x"})
    report = checked(path)
    assert kinds(report) == {"case_of_key": 1, "no_partner": 2}
    assert places(report, "case_of_key") == [("img_1", "beside 'IMG_1'")]


def test_a_longer_suffix_that_few_have(tmp_path: Path) -> None:
    members = {f"{n}.txt": b"x" for n in range(40)} | {"9x.final.txt": b"y"}
    report = checked(write_tar(tmp_path / "s.tar", members))
    assert kinds(report) == {"rare_suffix": 1}
    assert places(report, "rare_suffix") == [("9x.final.txt", "suffix 'final.txt'; 40 members have 'txt'")]


def test_a_sample_without_the_partner_that_nearly_all_others_have(tmp_path: Path) -> None:
    members = caption_members(40) | {"x.jpg": image_bytes(), "y.png": image_bytes(kind="PNG"), "y.txt": b"y"}
    report = checked(write_tar(tmp_path / "s.tar", members), deny_list=tmp_path / "deny.txt")
    # The picture of y has another suffix, and that is no fault; x is not denied: it may be meant.
    assert kinds(report) == {"no_partner": 1}
    assert places(report, "no_partner") == [("x", "no member 'txt'; it has jpg")]
    assert report.num_denied == 0


def test_samples_of_two_sorts_lack_nothing(tmp_path: Path) -> None:
    texts = {f"t{n}.txt": b"x" for n in range(10)}
    assert kinds(checked(write_tar(tmp_path / "s.tar", caption_members(30) | texts))) == {}


@pytest.mark.parametrize(
    ("name", "payload", "kind"),
    [
        ("a.jpg", b"", "empty_member"),
        ("a.jpg", b"no picture", "bad_header"),
        ("a.wav", b"RIFF", "bad_header"),
        ("a.mp4", b"\0" * 40, "bad_header"),
        ("a.jpg", image_bytes(2, 500), "no_size"),
        ("a.txt", b"\xff\xfea", "bad_text"),
        ("a.txt", "ab".encode("utf-16"), "bad_text"),
        ("a.txt", b"\xed\xa0\x80", "bad_text"),
        ("a.txt", b"", "empty_text"),
        ("a.txt", b"\xef\xbb\xbfx", "text_bom"),
        ("a.txt", b"x\0", "text_nul"),
        ("a.txt", b"x" * ((1 << 20) + 1), "long_text"),
        ("a.npy", b"x", "unknown_suffix"),
        ("../a.txt", b"x", "outside_path"),
        ("/rooted/a.txt", b"x", "outside_path"),
        ("a..b/a.txt", b"x", ""),
    ],
)
def test_one_member_of_each_kind(tmp_path: Path, name: str, payload: bytes, kind: str) -> None:
    report = checked(write_tar(tmp_path / "s.tar", {name: payload, "ok.txt": b"fine"}), decode=True)
    assert set(kinds(report)) - {"no_partner"} == ({kind} if kind else set())
    if kind:
        assert report.found.places[kind][0].member == name
        assert report.found.places[kind][0].byte == 512


def test_a_name_that_is_no_utf8_is_read_and_told(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", {"a\udcff.txt": b"x"}, tar_format=tarfile.GNU_FORMAT)
    report = checked(path)
    assert kinds(report) == {"odd_name": 1}
    assert places(report, "odd_name")[0][0] == "a\\xff.txt"


def test_fault_25_and_26_a_huge_picture_is_known_from_its_header_with_its_name(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", {"a.png": image_bytes(300, 200, kind="PNG")})
    assert kinds(checked(path, decode=True)) == {}
    limit = CheckSettings(DecodeSettings(max_image_pixels=59_999))
    pictures = FieldsLayout(fields=("png",))  # type: ignore[arg-type]
    for layout in (None, pictures):
        report = checked(path, layout=layout, against=limit, deny_list=tmp_path / "deny.txt")
        assert report.num_denied == 1
    report = checked(path, decode=True, against=limit)
    assert kinds(report) == {"too_many_pixels": 1}
    assert places(report, "too_many_pixels") == [("a.png", "image header says 300 x 200 pixels, limit 59999")]
    assert report.num_decoded == 0


def test_recordings_longer_than_the_model_takes(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", {"a.wav": audio_bytes(2.0)})
    sizes = ModelSizes(audio=AudioSizes(max_duration_s=1.5))
    report = checked(path, against=CheckSettings(DecodeSettings(sizes=sizes)))
    assert places(report, "no_size") == [("a.wav", "recording lasts 2.0 s, limit 1.5 s")]


def test_a_sample_too_large_for_a_pack_of_the_run_is_a_note_and_not_denied(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", {"a.txt": b"x" * 50, "b.txt": b"x"})
    texts = FieldsLayout(fields=("txt",))  # type: ignore[arg-type]
    budgets = CheckSettings(budgets=Budgets(tokens=20))
    report = checked(path, layout=texts, against=budgets, deny_list=tmp_path / "deny.txt")
    assert kinds(report) == {"fits_no_pack": 1}
    assert places(report, "fits_no_pack") == [("a", "51 tokens, limit 20 (order.seq_len)")]
    assert report.num_denied == 0
    # Once, however many sources of the run have the shard.
    without_loss = FieldsLayout(fields=({"member": "txt", "loss": False},))  # type: ignore[arg-type]
    assert check_shard(ShardJob(str(path), (texts, without_loss)), budgets).found == report.found


def test_counts_are_exact_and_places_bounded(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", {f"{n}.txt": b"" for n in range(30)})
    report = checked(path)
    assert kinds(report) == {"empty_text": 30}
    assert len(report.found.places["empty_text"]) == SHOWN_PLACES


def test_tables_of_suffixes_stop_growing() -> None:
    table = MemberTable()
    for number in range(MAX_WORDS + 10):
        table.add_suffix(f"s{number}", "", 1, [])
        table.add_pattern(frozenset([f"s{number}"]), 1, [])
    assert (len(table.suffixes), len(table.patterns)) == (MAX_WORDS, MAX_WORDS)
    merged = MemberTable()
    merged.merge(table)
    assert merged.num_samples == table.num_samples == MAX_WORDS + 10


def test_a_kind_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no kind of finding is called 'odd'"):
        Findings().add("odd")


@settings(max_examples=20)
@given(st.lists(st.sets(st.integers(0, 60)), max_size=6))
def test_fault_22_shared_keys_are_counted_without_one_large_table(shards: list[set[int]]) -> None:
    with KeySpill() as spill:
        for number, held in enumerate(shards):
            spill.add(number, hash_keys(pa.array([str(key) for key in sorted(held)], pa.string())))
        shared = spill.shared()
    every = [key for held in shards for key in held]
    expected = {key for key in every if every.count(key) > 1}
    assert shared.count == len(expected)
    assert len(shared.firsts) == min(SHOWN_PLACES, len(expected))
    for _, numbers in shared.firsts:
        assert len(numbers) > 1


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.integers(0, 8000),
    noise=st.binary(min_size=1, max_size=600),
    cut=st.none() | st.integers(0, 8000),
)
def test_randomly_damaged_tars_never_crash_and_whole_members_are_counted(
    tmp_path: Path, at: int, noise: bytes, cut: int | None
) -> None:
    members = {f"{n}.txt": bytes([97 + n]) * 700 for n in range(4)}
    path = write_tar(tmp_path / "s.tar", members)
    data = bytearray(path.read_bytes())
    data[at : at + len(noise)] = noise
    path.write_bytes(bytes(data[:cut]))
    report = checked(path, indexed=False, decode=True)
    num_before = min(at, len(data) if cut is None else cut) // (512 + 1024)
    assert report.num_members >= min(num_before, 4) or "compressed" in kinds(report)
    assert "unreadable" not in kinds(report)  # what nobody expects: an error of the check itself


def test_every_kind_is_found_by_some_test() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_check*.py"))
    assert [name for name in KINDS_OF_FINDING if f'"{name}"' not in text] == []
    levels = [kind.level for kind in KINDS_OF_FINDING.values()]
    assert levels == sorted(levels, key=[PROBLEM, NOTE].index)
