"""Samples to packs of one lane by buckets: like lengths together, each sample padded to its bucket.

A bucket takes samples up to a length (and, if asked for, up to a number of patches); the last one takes all
that a pack can hold. A pack holds samples of one bucket, as many as the budgets allow when every sample is as
large as the bucket. The oldest buffered sample always goes first, with the next oldest of its bucket, and the
buffer is topped up until the pack is full or ``look_ahead`` samples of other buckets wait. So a sample waits
for at most ``look_ahead`` packs, as in packing, and the state is where the buffered samples were drawn.

Letting full buckets overtake the oldest sample was tried: log-normal lengths, 8 buckets. It fills packs 4 %
better at a look-ahead of 64 and no better at 256, and a sample of a rare bucket would starve.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from loaders.packing import Budgets, Entry

Bucket = tuple[int, int]
"""Index of the boundary in tokens, and of the one in patches."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """The boundaries of all buckets.

    Args:
        boundaries: Longest sample of each bucket, tokens, rising; the last is what a pack can hold.
        patch_boundaries: Likewise for patches, from 0; empty where buckets are by length alone.
    """

    boundaries: tuple[int, ...]
    patch_boundaries: tuple[int, ...] = ()

    def of(self, entry: Entry) -> Bucket:
        """Return the bucket of a sample."""
        return bisect_left(self.boundaries, entry.tokens), bisect_left(self.patch_boundaries, entry.patches)

    def max_samples(self, bucket: Bucket, budgets: Budgets) -> int:
        """Return the most samples of ``bucket`` in one pack, if all are as large as it takes."""
        length, patches = bucket
        most = min(budgets.samples, budgets.tokens // self.boundaries[length])
        most_patches = self.patch_boundaries[patches] if self.patch_boundaries else 0
        return min(most, budgets.patches // most_patches) if most_patches else most

    def padded_len(self, entries: Sequence[Entry]) -> int:
        """Return the positions that each sample of a pack takes, all of one bucket; 0 for no samples."""
        return self.boundaries[self.of(entries[0])[0]] if entries else 0


class BucketBuffer:
    """The look-ahead buffer of one lane, sorted into buckets.

    Args:
        buckets: Which there are.
        budgets: Of one pack.
        look_ahead: Most samples buffered.
    """

    def __init__(self, buckets: Buckets, budgets: Budgets, *, look_ahead: int) -> None:
        self._buckets = buckets
        self._budgets = budgets
        self._look_ahead = look_ahead
        # Each entry with the number of its arrival, which is unique: the oldest of a bucket is its first.
        self._waiting: dict[Bucket, deque[tuple[int, Entry]]] = {}
        self._arrivals = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries, oldest first."""
        return (entry for _, entry in heapq.merge(*self._waiting.values()))

    def add(self, entry: Entry) -> None:
        """Put a drawn sample into the buffer; it must fit an empty pack."""
        self._waiting.setdefault(self._buckets.of(entry), deque()).append((self._arrivals, entry))
        self._arrivals += 1
        self._size += 1

    def next_pack(self, draw: Callable[[], Entry | None]) -> list[Entry]:
        """Return the next pack's entries, all of one bucket, oldest first; none if no sample is left.

        Args:
            draw: Gives the next sample of the lane, or None when there is none.
        """
        if not self._size and not self._draw(draw):
            return []
        filled = [(waiting[0][0], bucket) for bucket, waiting in self._waiting.items() if waiting]
        _, bucket = min(filled)
        waiting = self._waiting[bucket]
        most = self._buckets.max_samples(bucket, self._budgets)
        patches, mel_frames = self._budgets.patches, self._budgets.mel_frames
        pack: list[Entry] = []
        while len(pack) < most:
            while not waiting and self._size < self._look_ahead and self._draw(draw):
                pass
            if not waiting or waiting[0][1].patches > patches or waiting[0][1].mel_frames > mel_frames:
                break
            _, entry = waiting.popleft()
            self._size -= 1
            pack.append(entry)
            patches -= entry.patches
            mel_frames -= entry.mel_frames
        return pack

    def _draw(self, draw: Callable[[], Entry | None]) -> bool:
        entry = draw()
        if entry is not None:
            self.add(entry)
        return entry is not None
