"""Where one lane stands in one source: the next sample it can give, found without touching any other.

Positions count rows of the index, usable or not. Rows that are left out (filtered, denied, bad in the index,
too large for a pack) are passed by when the cursor comes to them, so a filter moves no position, and the
cursor always stands on a row that can be drawn, or behind the last.

Rows are looked at ``WINDOW`` at a time, in the order of the lane's shuffle. A cursor keeps the numbers of its
block and the sizes of its window, some 20 kB; there is one for every lane and source of an ``Order``.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from loaders.fitting import DENIED, FILTERED, UNUSABLE, Dropped, IntArray, Oversize, PackSizes, fit, misfit
from loaders.lanes import LaneOrder
from loaders.packing import Budgets, Entry
from omni_pipeline.core.errors import DataError
from omni_pipeline.core.sample import Sample, SampleId

REASONS = {FILTERED: "where", DENIED: "deny", UNUSABLE: "unusable"}
FILTERS = frozenset({"where", "deny"})
OVERSIZE = "oversize"
"""Reasons for which rows are left out, as ``LeftOut.counts`` names them."""
WINDOW = 256
"""Rows whose sizes are looked up at once."""
READY = 32
"""Entries that a cursor makes at once."""
MOST_PASSED = 100_000_000
"""Rows of an endless source that a lane passes by before it gives up, where the source has that many."""


# As Entry._make, in a third of the time: some thousand are made before the first step.
_entry = functools.partial(tuple.__new__, Entry)


class SampleSource(Protocol):
    """A named set of shards whose rows are known by their sizes; reads no payload."""

    @property
    def name(self) -> str:
        """Unique among the sources of a run."""
        ...

    @property
    def shard_sizes(self) -> Sequence[int]:
        """Rows of each shard, usable or not."""
        ...

    def sizes(self, ordinals: IntArray) -> PackSizes:
        """Return what these rows take of a pack; a row's ordinal is its place in the concatenated shards."""
        ...

    def sample(self, ordinal: int) -> Sample:
        """Return the sample of a usable row."""
        ...

    def identify(self, ordinal: int) -> tuple[SampleId, str, str]:
        """Return (id, key, shard) of any row."""
        ...

    def problem(self, ordinal: int) -> str:
        """Return why an UNUSABLE row cannot be used."""
        ...


@dataclass(slots=True)
class LeftOut:
    """What was passed by, for all lanes of an order: counts since it was made, and rows to record.

    Args:
        counts: Rows by (source, reason): "where", "deny", "unusable", "oversize".
        dropped: Rows that the user did not ask to leave out (the last two reasons), each time they are met in
            the first round of epochs.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    dropped: list[Dropped] = field(default_factory=list)


class LaneCursor:
    """The place of ``lane`` in one source.

    Args:
        lane: Number of the lane.
        index: Index of the source in the mixture.
        source: The source.
        order: Its order.
        budgets: Of one pack.
        oversize: What to do with too many tokens.
        left_out: Takes what is passed by.
    """

    def __init__(
        self,
        lane: int,
        *,
        index: int,
        source: SampleSource,
        order: LaneOrder,
        budgets: Budgets,
        oversize: Oversize,
        left_out: LeftOut,
    ) -> None:
        self.position = 0
        self.limit = order.num_positions(lane)
        self._lane, self._index = lane, index
        self._source, self._order = source, order
        self._budgets: Budgets = budgets
        self._oversize: Oversize = oversize
        self._left_out = left_out
        self._block_first = 0
        self._block: IntArray = np.zeros(0, dtype=np.int64)
        # Rows of the block from offset ``_window`` on, and their sizes, once they are looked up.
        self._window = 0
        self._sizes: PackSizes | None = None
        self._tokens: IntArray = self._block
        # Places in the window of the rows that can be drawn and are not in ``_ready`` yet.
        self._drawable: IntArray = self._block
        # The next samples, the first of them last.
        self._ready: list[Entry] = []

    @property
    def used_up(self) -> bool:
        """Whether the cursor is known to stand behind the last row."""
        return self.limit is not None and self.position >= self.limit

    def head(self) -> Entry | None:
        """Return the next sample, which stays next until ``advance``; None if the source is used up.

        Raises:
            DataError: An endless source gives nothing that can be drawn.
        """
        if self._ready and self._ready[-1].position == self.position:
            return self._ready[-1]
        return self._find_head()

    def advance(self) -> Entry | None:
        """Go past the sample that ``head`` returned; return the one after it, as ``head`` does."""
        ready = self._ready
        ready.pop()
        self.position += 1
        if ready and ready[-1].position == self.position:
            return ready[-1]
        return self._find_head()

    def seek(self, position: int) -> None:
        """Stand at ``position``."""
        self.position = position
        self._sizes = None
        self._ready.clear()

    def entries(self, positions: Sequence[int]) -> list[Entry | None]:
        """Return the samples at rising ``positions``, wherever it stands; None for what cannot be drawn."""
        wanted = np.asarray(positions, dtype=np.int64)
        ordinals = np.zeros(len(wanted), dtype=np.int64)
        start = 0
        while start < len(wanted):
            self._find_block(int(wanted[start]))
            end = int(np.searchsorted(wanted, self._block_first + len(self._block)))
            ordinals[start:end] = self._block[wanted[start:end] - self._block_first]
            start = end
        sizes = self._source.sizes(ordinals)
        tokens, fits = fit(sizes, self._budgets, oversize=self._oversize)
        found = self._make(wanted, ordinals, tokens, sizes)
        return [entry if is_drawable else None for entry, is_drawable in zip(found, fits, strict=True)]

    def _find_head(self) -> Entry | None:
        """Pass by what cannot be drawn; return the next sample that can, and have some after it ready."""
        passed = 0
        while not self.used_up:
            # Where a window had nothing, look at all of a block at once.
            end = self._find_window(at_most=len(self._block) if passed else WINDOW)
            if not self._ready:
                self._make_ready()
            stop = self._ready[-1].position if self._ready else end
            if stop > self.position:
                self._pass_by(self.position, stop)
                passed += stop - self.position
                self.position = stop
            if self._ready:
                return self._ready[-1]
            self._check_not_endless(passed)
        return None

    def _find_block(self, position: int) -> None:
        if not 0 <= position - self._block_first < len(self._block):
            self._block_first, self._block = self._order.block(self._lane, position)
            self._sizes = None
            self._ready.clear()

    def _find_window(self, *, at_most: int) -> int:
        """Look up the sizes of the rows from ``position`` on, unless they are; return where they end."""
        self._find_block(self.position)
        offset = self.position - self._block_first
        if self._sizes is None or not 0 <= offset - self._window < len(self._tokens):
            self._window = offset
            self._sizes = self._source.sizes(self._block[offset : offset + max(at_most, WINDOW)])
            self._tokens, fits = fit(self._sizes, self._budgets, oversize=self._oversize)
            self._drawable = np.flatnonzero(fits)
            self._ready.clear()
        return self._block_first + self._window + len(self._tokens)

    def _make_ready(self) -> None:
        """Make the next ``READY`` entries of the window."""
        places, self._drawable = self._drawable[:READY], self._drawable[READY:]
        sizes = self._sizes
        assert sizes is not None, "a window is looked up"
        taken = PackSizes(*(getattr(sizes, name)[places] for name in PackSizes.__slots__))
        offsets = places + self._window
        found = self._make(offsets + self._block_first, self._block[offsets], self._tokens[places], taken)
        self._ready = found[::-1]

    def _make(
        self, positions: IntArray, ordinals: IntArray, tokens: IntArray, sizes: PackSizes
    ) -> list[Entry]:
        columns = (positions, ordinals, tokens, sizes.patches, sizes.mel_frames)
        rows = zip(itertools.repeat(self._index), *(column.tolist() for column in columns), strict=False)
        return list(map(_entry, rows))

    def _pass_by(self, start: int, end: int) -> None:
        """Count the rows at positions [start, end) and record those that nobody asked to leave out."""
        sizes = self._sizes
        assert sizes is not None, "a window is looked up"
        window_first = self._block_first + self._window
        status = sizes.status[start - window_first : end - window_first]
        for code, count in Counter(status.tolist()).items():
            self._left_out.counts[self._source.name, REASONS.get(code, OVERSIZE)] += count
        if start < self._order.run_length(self._lane):
            unwanted = np.flatnonzero(np.isin(status, (FILTERED, DENIED), invert=True)) + start - window_first
            self._left_out.dropped += [self._dropped(place) for place in unwanted.tolist()]

    def _dropped(self, place: int) -> Dropped:
        """Say why the row at ``place`` of the window cannot be drawn."""
        sizes, ordinal = self._sizes, int(self._block[self._window + place])
        assert sizes is not None, "a window is looked up"
        if sizes.status[place] == UNUSABLE:
            reason = self._source.problem(ordinal)
        else:
            reason = misfit(sizes, place, budgets=self._budgets, oversize=self._oversize)
        return Dropped(*self._source.identify(ordinal), self._lane, reason)

    def _check_not_endless(self, passed: int) -> None:
        """Stop where an endless source gives nothing, instead of searching it for ever."""
        order = self._order
        # Rounds give a lane ever other rows, so only many of them say that there is none to be drawn.
        enough = max(2 * order.run_length(self._lane), min(64 * order.num_rows, MOST_PASSED))
        if self.limit is not None or passed <= enough:
            return
        name = self._source.name
        reasons = {
            reason: count for (source, reason), count in self._left_out.counts.items() if source == name
        }
        raise DataError(
            f"{passed} rows in a row cannot be drawn; left out so far: {reasons}",
            where=f"source {name!r}, lane {self._lane}",
            fix="widen its `where` and deny-lists, raise the budgets of [order], or remove the source",
        )
