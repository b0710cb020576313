"""Members of a tar shard, found from headers alone: payloads are seeked over, never read.

Reads ustar, GNU long names and PAX headers; folders are passed by, links and devices too, with a note. A
member belongs to the sample that its name says, by WebDataset's rule: folder and file name up to the first
dot are the key, the rest is the suffix. A damaged tar gives every member before the damage, and says where
that is.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from loaders.storage import open_range, stat_shard
from omni_pipeline.core.errors import ShardError

BLOCK_BYTES = 512
PADDING_BYTES = 20 * BLOCK_BYTES
"""Read at a time behind the end mark: zeros up to a multiple of this, in a tar of the common record size."""
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(frozen=True, slots=True)
class TarMember:
    """One regular file in a tar: its name, and where its payload lies.

    ``error`` is empty, or says why the payload cannot be read by offset.
    """

    name: str
    offset: int
    length: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class TarNote:
    """Something in a tar that is not an error: the name of the entry, where it lies, and what is with it."""

    name: str
    offset: int
    what: str


@dataclass(frozen=True, slots=True)
class TarScan:
    """What the headers of a tar say.

    Args:
        members: In file order; all of them have their whole payload in the shard.
        damage: Empty, or what is wrong and at which byte the readable part ends.
        notes: Entries that were passed by or have odd names, in file order.
    """

    members: tuple[TarMember, ...]
    damage: str
    notes: tuple[TarNote, ...] = ()


def split_name(name: str) -> tuple[str, str]:
    """Return (key, suffix) of a member name; without a dot after its first letter the suffix is empty.

    >>> split_name("train/000.seg.png")
    ('train/000', 'seg.png')
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    if not dot or not stem:
        return name, ""
    return f"{folder}{slash}{stem}", suffix


def scan_tar(url: str) -> TarScan:
    """Return the members of the tar at ``url``, as far as it is whole.

    Raises:
        ShardError: Missing, unreadable, or compressed (then nothing in it has an offset).
    """
    size = stat_shard(url).size
    members: list[TarMember] = []
    notes: list[TarNote] = []
    damage = ""
    with open_range(url, 0, size) as file:
        _refuse_compressed(file, url)
        try:
            for member in _headers(file, notes):
                if member.offset + member.length > size:
                    damage = f"cut inside member {member.name!r}, at byte {size}"
                    break
                members.append(member)
        except _DamageError as error:
            damage = str(error)
    return TarScan(tuple(members), damage, tuple(notes))


class _DamageError(Exception):
    """Reading on is impossible; the text says what and where."""


def _headers(file: IO[bytes], notes: list[TarNote]) -> Iterator[TarMember]:
    """Yield regular members, and add to ``notes``.

    Raises:
        _DamageError: The headers end in anything but the end mark, or it is not the end.
    """
    offset = 0
    try:
        archive = tarfile.open(fileobj=file, mode="r:", encoding="utf-8")  # noqa: SIM115 - owns no file
        while (info := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # else it keeps every header of the shard
            offset = archive.offset
            name = _readable(info.name)
            if what := _oddity(info, is_readable=name == info.name):
                notes.append(TarNote(name, info.offset, what))
            if info.isreg():
                yield _member(info, name)
        offset = archive.offset
    except (tarfile.TarError, ValueError, EOFError, OverflowError) as error:
        raise _DamageError(f"header cannot be read at byte {offset}: {error}") from error
    # tarfile ends quietly at whatever is no header; only a block of zeros is the end of an archive.
    file.seek(offset)
    block = file.read(BLOCK_BYTES)
    if len(block) < BLOCK_BYTES:
        raise _DamageError(f"ends without an end mark at byte {offset + len(block)}")
    if block.strip(b"\0"):
        raise _DamageError(f"no tar header at byte {offset}")
    _check_end(file, offset)


def _check_end(file: IO[bytes], offset: int) -> None:
    """Raise ``_DamageError`` if members may follow the end mark, as in tars that were joined with `cat`."""
    file.seek(offset)
    while data := file.read(PADDING_BYTES):
        if data.strip(b"\0"):
            begin = offset + len(data) - len(data.lstrip(b"\0"))
            raise _DamageError(f"data after the end mark, at byte {begin}: not read")
        offset += len(data)


def _readable(name: str) -> str:
    # Names that are no UTF-8 come with surrogates, which neither Arrow nor JSON can hold.
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _oddity(info: tarfile.TarInfo, *, is_readable: bool) -> str:
    if info.issym() or info.islnk():
        return f"{'symbolic' if info.issym() else 'hard'} link to {_readable(info.linkname)!r}, passed by"
    if not info.isreg() and not info.isdir():
        return "no regular file, passed by"
    return "" if is_readable else "name is no UTF-8; its bytes are read as shown"


def _member(info: tarfile.TarInfo, name: str) -> TarMember:
    if info.issparse():
        return TarMember(name, info.offset_data, 0, error="sparse member: its payload is not in one piece")
    return TarMember(name, info.offset_data, info.size)


def _refuse_compressed(file: io.BufferedReader, url: str) -> None:
    head = file.read(6)
    file.seek(0)
    for magic, kind in COMPRESSED.items():
        if head.startswith(magic):
            raise ShardError(
                f"shard is compressed ({kind}), so its members cannot be read by offset",
                where=url,
                fix="unpack it to a plain .tar (media do not shrink anyway)",
            )
