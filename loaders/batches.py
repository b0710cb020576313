"""Sized rows of many shards, a batch at a time: a shard is opened when a row of it is wanted.

Memory does not depend on how many shards or rows there are: the batches used last are kept, ``KEPT_BATCHES``
of them (about 0.16 MB each with two fields), and the indexes opened last: ``KEPT_LOCAL`` open files, or
``KEPT_REMOTE`` whole remote ones in memory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from loaders.columns import SizedBatch, Sizing
from loaders.index_file import IndexFile, open_index
from loaders.storage import is_remote

KEPT_BATCHES = 256
KEPT_LOCAL = 16
KEPT_REMOTE = 64

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class Recent(Generic[KeyT, ValueT]):
    """Values by key, the ``limit`` used last of them; made when they are missing.

    Args:
        limit: Most values kept.
        make: Gives the value of a key.
    """

    def __init__(self, limit: int, make: Callable[[KeyT], ValueT]) -> None:
        self._limit = limit
        self._make = make
        self._values: OrderedDict[KeyT, ValueT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: KeyT) -> ValueT:
        """Return the value of ``key``."""
        found = self._values.get(key)
        if found is not None:
            self._values.move_to_end(key)
            return found
        made = self._make(key)
        while len(self._values) >= self._limit:
            self._values.popitem(last=False)
        self._values[key] = made
        return made


class Batches:
    """The batches of the shards of a source; may be used by several threads, and after a fork.

    Args:
        shards: Paths or URLs.
        sizing: Sizes the rows.
        check: Called with the number of a shard and its index when that is opened; raises if it is not the
            one that the source was opened with.
    """

    def __init__(
        self, shards: Sequence[str], sizing: Sizing, *, check: Callable[[int, IndexFile], None]
    ) -> None:
        self._shards = shards
        self._sizing = sizing
        self._check = check
        self._lock = threading.Lock()
        kept = KEPT_REMOTE if any(map(is_remote, shards)) else KEPT_LOCAL
        self._files: Recent[int, IndexFile] = Recent(kept, self._open)
        self._batches: Recent[tuple[int, int], SizedBatch] = Recent(KEPT_BATCHES, self._size)

    def get(self, shard: int, number: int) -> SizedBatch:
        """Return batch ``number`` of ``shard``.

        Raises:
            ShardError: Its index is missing, damaged or stale.
        """
        with self._lock:
            return self._batches.get((shard, number))

    def _open(self, shard: int) -> IndexFile:
        file = open_index(self._shards[shard])
        self._check(shard, file)
        return file

    def _size(self, place: tuple[int, int]) -> SizedBatch:
        shard, number = place
        return self._sizing(self._files.get(shard).batch(number))
