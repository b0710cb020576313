"""Bytes of shards by position: local files with ``pread``, everything else as ``loaders.remote`` does.

A short read is never the end of a shard: it is an error that names shard and byte.
"""

from __future__ import annotations

import glob
import io
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loaders.remote import glob_remote, read_remote, remote_info, write_remote
from omni_pipeline.core.errors import ConfigError, ShardError

_DETOUR = re.compile(r"//|/\.\.?(?:/|$)|/$")

LOCAL_BUFFER_BYTES = 4096
REMOTE_BUFFER_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class ShardStat:
    """Size in bytes, and what changes when the content does (modification time, or the store's tag)."""

    size: int
    version: str


def is_remote(url: str) -> bool:
    """Return whether ``url`` names a store other than the local file system."""
    return "://" in url and not url.startswith("file://")


def local_path(url: str) -> str:
    """Return the path of a local ``url``."""
    return url.removeprefix("file://")


def first_places(urls: Iterable[str]) -> list[int]:
    """Return the places of the first spelling of each file; links are not followed."""
    first: dict[str, int] = {}
    here = os.getcwd()
    for place, url in enumerate(urls):
        first.setdefault(url if is_remote(url) else _spelling(local_path(url), here), place)
    return list(first.values())


def _spelling(path: str, here: str) -> str:
    """As os.path.abspath, in a fifth of the time where there is little to do: a source has many shards."""
    path = path if path.startswith("/") else f"{here}/{path}"
    return os.path.normpath(path) if _DETOUR.search(path) else path


def read_range(url: str, offset: int, length: int) -> bytes:
    """Return exactly ``length`` bytes of ``url`` from byte ``offset``.

    Raises:
        ShardError: Missing, unreadable, or ends before the last byte asked for.
    """
    if length == 0:
        return b""
    data = (read_remote if is_remote(url) else _pread)(url, offset, length)
    if len(data) != length:
        raise ShardError(
            f"shard ends {length - len(data)} bytes early: asked for {length}, got {len(data)}",
            where=f"{url}, byte {offset}",
            fix="fetch the shard again, then run `omni data index`",
        )
    return data


def stat_shard(url: str) -> ShardStat:
    """Return size and version of ``url``.

    Raises:
        ShardError: Missing or unreachable.
    """
    if is_remote(url):
        info = remote_info(url)
        tags = ("ETag", "etag", "md5", "LastModified", "last_modified", "mtime", "created")
        version = next((str(info[tag]) for tag in tags if info.get(tag)), "")
        return ShardStat(int(info["size"]), version)
    try:
        stat = os.stat(local_path(url))
    except OSError as error:
        raise _no_shard(url, error) from error
    return ShardStat(stat.st_size, str(stat.st_mtime_ns))


def read_file(url: str) -> bytes | None:
    """Return all bytes of ``url``; None when there is no such file.

    Raises:
        ShardError: It exists but cannot be read.
    """
    try:
        if is_remote(url):
            return read_range(url, 0, stat_shard(url).size)
        return Path(local_path(url)).read_bytes()
    except FileNotFoundError:
        return None
    except ShardError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    except OSError as error:
        raise _no_shard(url, error) from error


def write_file(url: str, data: bytes) -> None:
    """Write ``data`` as ``url``; a reader sees the old content or the new, never a part.

    Raises:
        ShardError: The place cannot be written.
    """
    if is_remote(url):
        write_remote(url, data)
        return
    path = local_path(url)
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        raise ShardError(
            f"cannot write: {error.strerror}", where=path, fix="make the folder writable, or free some space"
        ) from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def pread_all(descriptor: int, offset: int, length: int) -> bytes:
    """Return ``length`` bytes of an open file from byte ``offset``; fewer only where the file ends before.

    Raises:
        OSError: The file cannot be read.
    """
    pieces: list[bytes] = []
    while length > 0:
        piece = os.pread(descriptor, length, offset)
        if not piece:
            break
        pieces.append(piece)
        offset += len(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def open_range(url: str, offset: int, length: int) -> io.BufferedReader:
    """Return a seekable file of ``length`` bytes of ``url`` from ``offset``, read as far as it is used."""
    buffer_bytes = REMOTE_BUFFER_BYTES if is_remote(url) else LOCAL_BUFFER_BYTES
    return io.BufferedReader(RangeReader(url, offset, length), buffer_size=buffer_bytes)


class RangeReader(io.RawIOBase):
    """A window of a shard as a raw file; every read is one ``read_range``.

    Args:
        url: Path or URL of the shard.
        offset: First byte of the window.
        length: Bytes of the window.
    """

    def __init__(self, url: str, offset: int, length: int) -> None:
        super().__init__()
        self._url = url
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` as far as the window goes; return the number of bytes."""
        count = max(0, min(len(buffer), self._length - self._position))
        buffer[:count] = read_range(self._url, self._offset + self._position, count)
        self._position += count
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move as ``io.IOBase.seek`` does; return the position in the window."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise ValueError(f"cannot seek to {origin + offset}")
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        """Return the position in the window."""
        return self._position


def expand_shards(patterns: str | Iterable[str]) -> list[str]:
    """Return the shards that paths, brace patterns (``{0000..0099}``) and globs stand for.

    Braces keep their order, the matches of a glob are sorted, and a shard named twice, however spelled, is
    kept once, as first spelled.

    Raises:
        ConfigError: A glob matches nothing, a local path does not exist or is a folder, or a brace pattern is
            malformed.
    """
    import braceexpand  # pulls in nothing, but only opening a source needs it

    shards: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            expanded = list(braceexpand.braceexpand(pattern))
        except ValueError as error:
            raise ConfigError(
                f"pattern {pattern!r} has unbalanced braces", fix="write ranges as {0000..0099}"
            ) from error
        for path in expanded:
            shards += _glob(path)
    return [shards[place] for place in first_places(shards)]


def _glob(path: str) -> list[str]:
    if not is_remote(path) and os.path.exists(local_path(path)):
        if os.path.isdir(local_path(path)):
            raise ConfigError(
                f"{path} is a folder, not a shard",
                fix=f"give a pattern of the shards in it, like '{path.rstrip('/')}/*.tar'",
            )
        return [path]
    if not glob.has_magic(path):
        if is_remote(path):
            return [path]
        raise ConfigError(f"there is no such file: {path}", fix="check the path, from the folder you run in")
    found = glob_remote(path) if is_remote(path) else sorted(glob.glob(local_path(path), recursive=True))
    if not found:
        raise ConfigError(f"no shard matches {path!r}", fix="check the pattern, from the folder you run in")
    return found


def _pread(url: str, offset: int, length: int) -> bytes:
    try:
        descriptor = os.open(local_path(url), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _no_shard(url, error) from error
    try:
        return pread_all(descriptor, offset, length)
    except OSError as error:
        raise ShardError(
            f"cannot read: {error.strerror}", where=f"{url}, byte {offset}", fix="check the disk"
        ) from error
    finally:
        os.close(descriptor)


def _no_shard(url: str, error: OSError) -> ShardError:
    if isinstance(error, FileNotFoundError):
        return ShardError("there is no such file", where=url, fix="check the path of the shard")
    return ShardError(f"cannot read: {error.strerror}", where=url, fix="check the permissions")
