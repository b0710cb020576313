"""Samples to packs of one lane: best fit over a bounded look-ahead buffer, several budgets at once.

The oldest buffered sample always goes first, so a sample waits for at most ``look_ahead`` packs: nothing
starves. Then the largest sample (in tokens; ties: the oldest) that fits what is left of *every* budget is
added, the buffer is topped up, and so on until none fits. Best fit keeps the buffer sorted by size: one
pick is a bisection, plus a step down for each candidate that another budget refuses.

All of it works on numbers (``Entry``); nothing here needs to know what a sample is made of.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

UNLIMITED = 1 << 62
_ARRIVAL_BITS = 48
_LAST_ARRIVAL = (1 << _ARRIVAL_BITS) - 1


@dataclass(frozen=True, slots=True)
class Budgets:
    """The most that one pack may hold.

    Args:
        tokens: Sequence positions.
        patches: Vision patches, images and videos together.
        mel_frames: Mel frames of audio.
        samples: Samples.
    """

    tokens: int
    patches: int = UNLIMITED
    mel_frames: int = UNLIMITED
    samples: int = UNLIMITED


class Entry(NamedTuple):
    """A drawn sample as numbers.

    Args:
        source: Index of its source.
        position: Position in its lane of that source.
        ordinal: Place in the unshuffled concatenation of the source's shards.
        tokens: Sequence positions it takes, after cutting.
        patches: Vision patches.
        mel_frames: Mel frames of audio.
    """

    source: int
    position: int
    ordinal: int
    tokens: int
    patches: int
    mel_frames: int


class PackBuffer:
    """The look-ahead buffer of one lane.

    Args:
        budgets: Of one pack.
        look_ahead: Most samples buffered.
    """

    def __init__(self, budgets: Budgets, *, look_ahead: int) -> None:
        self._budgets = budgets
        self._look_ahead = look_ahead
        # A key orders entries by tokens, then oldest last; the dictionary keeps them by arrival.
        self._keys: list[int] = []
        self._entries: dict[int, Entry] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries, oldest first."""
        return iter(self._entries.values())

    def add(self, entry: Entry) -> None:
        """Put a drawn sample into the buffer; it must fit an empty pack."""
        key = (entry.tokens << _ARRIVAL_BITS) | (_LAST_ARRIVAL - self._arrivals)
        self._arrivals += 1
        insort(self._keys, key)
        self._entries[key] = entry

    def next_pack(self, draw: Callable[[], Entry | None]) -> list[Entry]:
        """Return the next pack's entries in sequence order; none if no sample is left.

        Args:
            draw: Gives the next sample of the lane, or None when there is none.
        """
        keys, entries, budgets = self._keys, self._entries, self._budgets
        tokens, patches, mel_frames = budgets.tokens, budgets.patches, budgets.mel_frames
        pack: list[Entry] = []
        while len(pack) < budgets.samples:
            while len(keys) < self._look_ahead and (drawn := draw()) is not None:
                self.add(drawn)
            if not pack:
                if not keys:
                    break
                index = bisect_left(keys, next(iter(entries)))
            else:
                index = self._best_fit(tokens, patches, mel_frames)
                if index < 0:
                    break
            entry = entries.pop(keys.pop(index))
            pack.append(entry)
            tokens -= entry.tokens
            patches -= entry.patches
            mel_frames -= entry.mel_frames
        return pack

    def _best_fit(self, tokens: int, patches: int, mel_frames: int) -> int:
        """Index in ``_keys`` of the largest entry that fits, -1 if none does."""
        index = bisect_left(self._keys, (tokens + 1) << _ARRIVAL_BITS) - 1
        while index >= 0:
            entry = self._entries[self._keys[index]]
            if entry.patches <= patches and entry.mel_frames <= mel_frames:
                return index
            index -= 1
        return -1
