"""Finding keys that several shards have, without holding the keys of all shards.

Hashes are written to files by their first bits as they come; each file is then looked at alone, so memory is
that of one of ``NUM_FILES`` parts: 16 bytes x keys / 64, some 25 MB for a hundred million keys.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

import numpy as np

from loaders.check_findings import SHOWN_PLACES
from loaders.deny import Hashes

NUM_FILES = 64
_ENTRY = np.dtype([("hash", "<u8"), ("shard", "<i8")])


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Keys that several shards have.

    Args:
        count: How many keys; two keys with the same hash of 64 bits count as one.
        firsts: (hash, shard numbers) of some of them.
    """

    count: int
    firsts: tuple[tuple[int, tuple[int, ...]], ...]


class KeySpill:
    """Collects the hashes of the keys of many shards, in files that vanish with it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._files: list[IO[bytes]] = []

    def add(self, shard: int, hashes: Hashes) -> None:
        """Add the keys of one shard; each has a key once."""
        if not self._files:
            self._files = [self._open() for _ in range(NUM_FILES)]
        entries = np.empty(len(hashes), dtype=_ENTRY)
        entries["hash"], entries["shard"] = hashes, shard
        parts = (hashes % np.uint64(NUM_FILES)).astype(np.int64)
        order = np.argsort(parts, kind="stable")
        for file, part in zip(self._files, _split(entries[order], parts[order]), strict=True):
            file.write(part.tobytes())

    def shared(self) -> SharedKeys:
        """Return the keys that more than one shard has."""
        count = 0
        firsts: list[tuple[int, tuple[int, ...]]] = []
        for file in self._files:
            file.seek(0)
            entries = np.frombuffer(file.read(), dtype=_ENTRY)
            entries = entries[np.lexsort((entries["shard"], entries["hash"]))]
            hashes, starts, counts = np.unique(entries["hash"], return_index=True, return_counts=True)
            many = np.flatnonzero(counts > 1)
            count += len(many)
            for place in many[: SHOWN_PLACES - len(firsts)].tolist():
                shards = entries["shard"][starts[place] : starts[place] + counts[place]]
                firsts.append((int(hashes[place]), tuple(shards[:SHOWN_PLACES].tolist())))
        return SharedKeys(count, tuple(sorted(firsts, key=lambda first: first[1])))

    def _open(self) -> IO[bytes]:
        return self._stack.enter_context(tempfile.TemporaryFile())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _split(entries: np.ndarray, parts: np.ndarray) -> Sequence[np.ndarray]:
    return np.split(entries, np.searchsorted(parts, np.arange(1, NUM_FILES)))
