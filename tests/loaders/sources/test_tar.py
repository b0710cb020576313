"""loaders.sources.tar: members from headers, whatever the tar flavour, up to any damage."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaders.sources.tar import scan_tar, split_name
from omni_pipeline.core.errors import ShardError
from tests.support.shards import caption_members, write_tar


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_flavour_gives_names_and_payloads(tmp_path: Path, tar_format: int) -> None:
    long_name = "folder/" + "n" * 90 + ".txt"
    members = {"a.txt": b"one", long_name: b"two", "empty.txt": b"", "b.txt": b"x" * 1000}
    if tar_format != tarfile.USTAR_FORMAT:
        members["very/" + "l" * 200 + ".txt"] = b"long"
        members["größe 東京.txt"] = b"wide"
    path = write_tar(tmp_path / "s.tar", members, tar_format=tar_format)
    scan = scan_tar(str(path))
    data = path.read_bytes()
    assert scan.damage == ""
    assert {m.name: data[m.offset : m.offset + m.length] for m in scan.members} == members


def test_folders_and_links_are_passed_by(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    with tarfile.open(path, "w") as archive:
        for name, kind in (("dir", tarfile.DIRTYPE), ("soft", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.txt"
            archive.addfile(info)
        info = tarfile.TarInfo("a.txt")
        info.size = 2
        archive.addfile(info, io.BytesIO(b"ok"))
    assert [member.name for member in scan_tar(str(path)).members] == ["a.txt"]


def test_a_cut_tar_gives_every_member_before_the_cut_and_says_where_it_is(tmp_path: Path) -> None:
    members = {f"{n}.txt": bytes([65 + n]) * 600 for n in range(4)}
    path = write_tar(tmp_path / "s.tar", members)
    whole = path.read_bytes()
    size_of_member = 512 + 1024
    for cut in range(0, 4 * size_of_member + 512, 128):
        path.write_bytes(whole[:cut])
        scan = scan_tar(str(path))
        num_whole = sum(n * size_of_member + 512 + 600 <= cut for n in range(4))
        assert [member.name for member in scan.members] == list(members)[:num_whole], cut
        assert "byte" in scan.damage, cut


def test_the_message_of_a_cut_names_member_and_byte(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", {"a.txt": b"a" * 600, "b.txt": b"b" * 600})
    path.write_bytes(path.read_bytes()[: 1536 + 512 + 100])
    assert scan_tar(str(path)).damage == "cut inside member 'b.txt', at byte 2148"


def test_a_damaged_header_is_no_quiet_end(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", {"a.txt": b"a", "b.txt": b"b", "c.txt": b"c"})
    data = bytearray(path.read_bytes())
    data[1024:1100] = b"\xff" * 76
    path.write_bytes(data)
    scan = scan_tar(str(path))
    assert [member.name for member in scan.members] == ["a.txt"]
    assert scan.damage == "no tar header at byte 1024"


def test_a_tar_without_samples_is_whole(tmp_path: Path) -> None:
    scan = scan_tar(str(write_tar(tmp_path / "s.tar", {})))
    assert (scan.members, scan.damage) == ((), "")


def test_a_compressed_tar_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "s.tar.gz"
    path.write_bytes(gzip.compress(b"x" * 2000))
    with pytest.raises(ShardError) as caught:
        scan_tar(str(path))
    assert str(caught.value) == (
        "shard is compressed (gzip), so its members cannot be read by offset\n"
        f"  where: {path}\n"
        "  fix:   unpack it to a plain .tar (media do not shrink anyway)"
    )


def test_a_missing_tar_is_a_shard_error(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="there is no such file"):
        scan_tar(str(tmp_path / "none.tar"))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a.jpg", ("a", "jpg")),
        ("x/y/a.seg.png", ("x/y/a", "seg.png")),
        ("./a.txt", ("./a", "txt")),
        ("v1.0/a.txt", ("v1.0/a", "txt")),
        ("README", ("README", "")),
        ("x/.hidden", ("x/.hidden", "")),
        ("track 2.0 (x).mp3", ("track 2", "0 (x).mp3")),
    ],
)
def test_key_and_suffix_are_webdatasets(name: str, parts: tuple[str, str]) -> None:
    assert split_name(name) == parts


@given(st.text(alphabet="ab./ é", min_size=1))
def test_a_name_can_be_put_together_again(name: str) -> None:
    key, suffix = split_name(name)
    assert name == (f"{key}.{suffix}" if suffix else key) or name == f"{key}."


def test_offsets_are_those_that_webdataset_shards_have(tmp_path: Path) -> None:
    members = caption_members(3)
    path = write_tar(tmp_path / "s.tar", members)
    with tarfile.open(path) as archive:
        expected = [(info.name, info.offset_data, info.size) for info in archive]
    assert [(m.name, m.offset, m.length) for m in scan_tar(str(path)).members] == expected
