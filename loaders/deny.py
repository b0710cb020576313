"""Deny-lists: samples that a source leaves out by name, from lists of keys and quarantines of earlier runs.

A ``.jsonl`` file is the quarantine of an earlier run: it denies what failed in the source of that name. A
sample that only fitted no pack (stage "plan") is not denied: whether it fits is decided by the settings of
this run. Any other file is a list, one key per line (UTF-8; blank lines and lines that begin with ``#`` do
not count); a line whose beginning names a shard of the source, ``captions-00012.tar/000451``, denies that key
of that shard only.

A shard is known by its whole path, else by its file name, so that shards may move between runs. A key is
kept as a hash of 64 bits (its 8-byte words stirred one by one by the finalizer of SplitMix64: Steele, Lea,
Flood 2014), in sorted arrays: 8 bytes per key, 80 MB for ten million, three times that while they are read.
A sample that no file names is denied with chance ``entries / 2**64``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from loaders.quarantine import PLAN_STAGE, read_quarantine
from omni_pipeline.core.errors import ConfigError

QUARANTINE_SUFFIX = ".jsonl"
_BLOCK_BYTES = 1 << 24
_BOM = b"\xef\xbb\xbf"

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int32]
_NONE: Hashes = np.zeros(0, np.uint64)


@dataclass(frozen=True)
class DenyList:
    """The samples that one source leaves out; made by ``read_deny_lists``.

    Args:
        num_entries: Different keys, and different keys of a shard.
        digest: Of them; the same for the same entries in any order and files. Empty without entries.
    """

    num_entries: int = 0
    digest: str = ""
    _anywhere: Hashes = field(default_factory=lambda: _NONE, repr=False, compare=False)
    _by_shard: Mapping[str, Hashes] = field(default_factory=dict, repr=False, compare=False)

    def mask(self, shard: str, keys: pa.Array) -> npt.NDArray[np.bool_]:
        """Return bool [keys]: which ``keys`` of the source's shard at this path are denied."""
        denied = np.zeros(len(keys), dtype=np.bool_)
        lists = [part for part in (self._anywhere, self._by_shard.get(shard, _NONE)) if len(part)]
        if not lists:
            return denied
        hashes = hash_keys(keys)
        # In order, so that neighbouring searches touch the same memory: several times as fast.
        order = np.argsort(hashes)
        wanted = hashes[order]
        for part in lists:
            places = np.minimum(np.searchsorted(part, wanted), len(part) - 1)
            denied[order] |= part[places] == wanted
        return denied


def read_deny_lists(files: Sequence[Path], *, source: str, shards: Sequence[str]) -> DenyList:
    """Return what ``files`` deny of the source, whose shards these are; about 1 s per million keys.

    Raises:
        ConfigError: A file is missing or cannot be read, a list is no UTF-8 (names the line), or a
            ``.jsonl`` file holds no record of a quarantine.
    """
    names = _ShardNames(shards)
    parts: list[_Entries] = []
    for path in files:
        if path.suffix == QUARANTINE_SUFFIX:
            parts.append(_from_quarantine(path, source, names))
        else:
            parts.extend(_from_key_list(path, names))
    if not parts:
        return DenyList()
    anywhere = np.concatenate([part.anywhere for part in parts])
    anywhere.sort()
    anywhere = anywhere[_is_other(anywhere)]
    numbers = np.concatenate([part.numbers for part in parts])
    keys = np.concatenate([part.in_shards for part in parts])
    order = np.lexsort((keys, numbers))
    numbers, keys = numbers[order], keys[order]
    is_other = _is_other(numbers) | _is_other(keys)
    numbers, keys = numbers[is_other], keys[is_other]
    count = len(anywhere) + len(keys)
    firsts = np.flatnonzero(_is_other(numbers))
    parts_of = np.split(keys, firsts[1:]) if len(firsts) else []
    by_shard = {shards[number]: part for number, part in zip(numbers[firsts].tolist(), parts_of, strict=True)}
    return DenyList(count, _digest(anywhere, numbers, keys) if count else "", anywhere, by_shard)


def hash_keys(keys: pa.Array) -> Hashes:
    """Return uint64 [keys] of an Arrow array of strings; the same on every machine."""
    column = keys.cast(pa.large_string())
    _, offsets, data = column.buffers()
    count = len(column)
    ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + count + 1]
    content = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)[: ends[-1]]
    # Eight zeros at the end, so that the word at the last byte can be read whole.
    padded = np.concatenate([content, np.zeros(8, np.uint8)])
    words_at = np.ndarray((len(padded) - 7,), "<u8", buffer=padded, strides=(1,))
    starts, lengths = ends[:-1], np.diff(ends)
    hashes = _stir(lengths.astype(np.uint64))
    # Of the keys that are long enough for another word; few are much longer than the others.
    active = np.flatnonzero(lengths > 0)
    place = 0
    while len(active):
        left = np.minimum(lengths[active] - place, 8).astype(np.uint64)
        used = np.uint64(0xFFFFFFFFFFFFFFFF) >> (np.uint64(64) - np.uint64(8) * left)
        word = words_at[starts[active] + place].astype(np.uint64) & used
        hashes[active] = _stir(hashes[active] ^ word)
        place += 8
        active = active[lengths[active] > place]
    return hashes


def _stir(values: Hashes) -> Hashes:
    """Return one step of SplitMix64 of each: a bijection of 64 bits."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class _ShardNames:
    """Finds the numbers of shards by path, else by file name."""

    def __init__(self, shards: Sequence[str]) -> None:
        self._by_path = {shard: number for number, shard in enumerate(shards)}
        self._by_name: dict[str, list[int]] = {}
        for number, shard in enumerate(shards):
            self._by_name.setdefault(shard.rpartition("/")[2], []).append(number)

    def find(self, shard: str) -> Sequence[int]:
        """Return the numbers of the shards that ``shard`` may be; none if the source has no such shard."""
        exact = self._by_path.get(shard)
        return self._by_name.get(shard.rpartition("/")[2], ()) if exact is None else (exact,)

    def split(self, line: str) -> tuple[Sequence[int], str]:
        """Return (numbers of the shards that the line begins with, the key after it)."""
        at = line.find("/")
        while at >= 0:
            if found := self.find(line[:at]):
                return found, line[at + 1 :]
            at = line.find("/", at + 1)
        return (), line


class _Entries(NamedTuple):
    """What one file, or a part of one, denies: keys in any shard, and (shard number, key)."""

    anywhere: Hashes
    numbers: Numbers
    in_shards: Hashes


def _from_quarantine(path: Path, source: str, names: _ShardNames) -> _Entries:
    _check_is_file(path)
    try:
        records = read_quarantine(path)
        is_empty = not records and not path.read_bytes().strip()
    except OSError as error:
        raise _unreadable(path, error) from error
    if not records and not is_empty:
        raise ConfigError(
            "the file holds no record of a quarantine",
            where=f"deny-list {path}",
            fix="give a quarantine.jsonl of an earlier run; a list of keys must not be named .jsonl",
        )
    pairs = [
        (number, record.key)
        for record in records
        if record.source == source and record.stage != PLAN_STAGE
        for number in names.find(record.shard)
    ]
    return _entries([], pairs)


def _from_key_list(path: Path, names: _ShardNames) -> Iterator[_Entries]:
    """Yield the entries block by block: a long list is never held as text."""
    _check_is_file(path)
    try:
        with path.open("rb") as file:
            for text in _blocks(file, path):
                lines = [line for raw in text.split("\n") if (line := raw.strip()) and line[0] != "#"]
                anywhere: list[str] = []
                pairs: list[tuple[int, str]] = []
                for line in lines:
                    found, key = names.split(line) if "/" in line else ((), line)
                    if found:
                        pairs.extend((number, key) for number in found)
                    else:
                        anywhere.append(line)
                yield _entries(anywhere, pairs)
    except OSError as error:
        raise _unreadable(path, error) from error


def _entries(anywhere: list[str], pairs: list[tuple[int, str]]) -> _Entries:
    keys = pa.array([key for _, key in pairs], pa.large_string())
    numbers = np.array([number for number, _ in pairs], dtype=np.int32)
    return _Entries(hash_keys(pa.array(anywhere, pa.large_string())), numbers, hash_keys(keys))


def _is_other(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return bool [values]: which differ from the one before; the first does."""
    is_other = np.ones(len(values), dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_other[1:])
    return is_other


def _digest(anywhere: Hashes, numbers: Numbers, in_shards: Hashes) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array, kind in ((anywhere, "<u8"), (numbers, "<i4"), (in_shards, "<u8")):
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(array.astype(kind).data)
    return digest.hexdigest()


def _blocks(file: BinaryIO, path: Path) -> Iterator[str]:
    """Yield the file as text, some megabytes of whole lines at a time."""
    rest = file.read(len(_BOM)).removeprefix(_BOM)
    num_lines = 0
    while block := file.read(_BLOCK_BYTES):
        whole, newline, rest_of_block = block.rpartition(b"\n")
        if not newline:
            rest += block
            continue
        whole, rest = rest + whole, rest_of_block
        yield _decoded(whole, num_lines, path)
        num_lines += whole.count(b"\n") + 1
    yield _decoded(rest, num_lines, path)


def _decoded(data: bytes, num_lines: int, path: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = num_lines + data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"line {line} is no UTF-8 text (byte 0x{data[error.start]:02x})",
            where=f"deny-list {path}",
            fix="write one key per line, as UTF-8 text",
        ) from error


def _check_is_file(path: Path) -> None:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"the file {what}",
            where=f"deny-list {path}",
            fix="name a list of keys, or a quarantine.jsonl of an earlier run, in `deny`",
        )


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the file cannot be read: {error.strerror}", where=f"deny-list {path}", fix="make it readable"
    )
