"""The file of one remote shard in a node's cache: its bytes, a checksum of each block, and whose they are.

``content | CRC-32 of each block of BLOCK_BYTES, little endian | identity as JSON``. The checksums stand in
the same file, so that one rename makes all of it visible. A read checks just the blocks that it touches: a
flipped byte is found whenever it is read, and no process ever reads a whole shard to trust it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zlib
from array import array
from dataclasses import asdict, dataclass

from loaders.storage import pread_all

BLOCK_BYTES = 1 << 16
_CRC_BYTES = 4


class DamagedFileError(Exception):
    """A cached file does not hold what was written; the text says what is wrong."""


@dataclass(frozen=True, slots=True)
class RemoteShard:
    """What a cached file is a copy of: never a shard that was replaced at the same address.

    Args:
        url: Of the shard.
        size: Bytes.
        version: Tag or time that the store gives its content.
    """

    url: str
    size: int
    version: str

    @property
    def name(self) -> str:
        """File name without ending, of all of the identity."""
        return hashlib.blake2b(self.footer, digest_size=16).hexdigest()

    @property
    def footer(self) -> bytes:
        """The end of the cached file."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @property
    def num_blocks(self) -> int:
        """Blocks, of which the last may be short."""
        return -(-self.size // BLOCK_BYTES)

    @property
    def file_bytes(self) -> int:
        """Size of the cached file."""
        return self.size + _CRC_BYTES * self.num_blocks + len(self.footer)


class CachedFileWriter:
    """Writes a cached file from its beginning.

    Args:
        descriptor: Open for writing; owned by the caller.
        shard: What is written.
    """

    def __init__(self, descriptor: int, shard: RemoteShard) -> None:
        self._descriptor = descriptor
        self._shard = shard
        self._position = 0
        self._crcs = array("I")

    def add(self, data: bytes) -> None:
        """Write the next bytes of the content: whole blocks, but for the last of the shard.

        Raises:
            OSError: The disk is full or fails.
        """
        for start in range(0, len(data), BLOCK_BYTES):
            self._crcs.append(zlib.crc32(data[start : start + BLOCK_BYTES]))
        self._write(data)

    def finish(self) -> None:
        """Write what follows the content.

        Raises:
            OSError: As ``add``.
        """
        if self._position != self._shard.size or len(self._crcs) != self._shard.num_blocks:
            raise ValueError(f"{self._position} bytes of {self._shard.size}, {len(self._crcs)} blocks")
        self._write(_little_endian(self._crcs).tobytes() + self._shard.footer)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._descriptor, view, self._position)
            self._position += count
            view = view[count:]


def read_cached(descriptor: int, shard: RemoteShard, offset: int, length: int) -> bytes:
    """Return ``length`` bytes of the shard from ``offset``, checked; they must be inside it.

    Raises:
        DamagedFileError: The file is not of that shard, cut, or has other bytes than were written.
        OSError: The disk fails.
    """
    size = os.fstat(descriptor).st_size
    if size != shard.file_bytes:
        raise DamagedFileError(f"has {size} bytes, not {shard.file_bytes}")
    footer = shard.footer
    if os.pread(descriptor, len(footer), size - len(footer)) != footer:
        raise DamagedFileError("is not of this shard")
    first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
    crcs = array("I")
    table = os.pread(descriptor, _CRC_BYTES * (last + 1 - first), shard.size + _CRC_BYTES * first)
    crcs.frombytes(table)
    begin = first * BLOCK_BYTES
    data = pread_all(descriptor, begin, min(shard.size, (last + 1) * BLOCK_BYTES) - begin)
    view = memoryview(data)
    for number, crc in enumerate(_little_endian(crcs)):
        if zlib.crc32(view[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]) != crc:
            raise DamagedFileError(
                f"has other bytes than were written, from byte {begin} to {begin + len(data)}"
            )
    return data[offset - begin : offset - begin + length]


def _little_endian(crcs: array[int]) -> array[int]:
    if sys.byteorder == "big":
        crcs = array("I", crcs)
        crcs.byteswap()
    return crcs
