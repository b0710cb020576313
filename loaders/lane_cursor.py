"""Where one lane stands in one source: the next sample it can give, found without touching any other.

Positions count rows of the index, usable or not. Rows that are left out (filtered, denied, bad in the index,
too large for a pack) are passed by when the cursor comes to them, so a filter moves no position, and the
cursor always stands on a row that can be drawn, or behind the last.

Rows are looked at a block of the lane's shuffle at a time: one call of ``sizes`` for up to ``shuffle_block``
rows.
"""

from __future__ import annotations

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

_REASONS = {FILTERED: "where", DENIED: "deny", UNUSABLE: "unusable"}
OVERSIZE = "oversize"
"""Reasons for which rows are left out, as ``LeftOut.counts`` names them."""
MOST_PASSED = 100_000_000
"""Rows of an endless source that a lane passes by before it gives up, where the source has that many."""


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
        self._head: Entry | None = None
        self._block_first = 0
        self._block: IntArray = np.zeros(0, dtype=np.int64)
        self._sizes: PackSizes | None = None
        self._drawable: list[int] = []
        self._next = 0

    @property
    def used_up(self) -> bool:
        """Whether the cursor is known to stand behind the last row."""
        return self.limit is not None and self.position >= self.limit

    def head(self) -> Entry | None:
        """Return the next sample, which stays next until ``advance``; None if the source is used up.

        Raises:
            DataError: An endless source gives nothing that can be drawn.
        """
        if self._head is None and not self.used_up:
            self._find_head()
        return self._head

    def advance(self) -> None:
        """Go past the sample that ``head`` returned."""
        self.position += 1
        self._next += 1
        self._head = None

    def seek(self, position: int) -> None:
        """Stand at ``position``."""
        self.position = position
        self._head = None
        self._block = self._block[:0]
        self._drawable = []

    def entry(self, position: int) -> Entry | None:
        """Return the sample at ``position``, wherever the cursor is; None if it cannot be drawn."""
        ordinal = self._order.ordinal(self._lane, position)
        sizes = self._source.sizes(np.array([ordinal], dtype=np.int64))
        tokens, fits = fit(sizes, self._budgets, oversize=self._oversize)
        if not fits[0]:
            return None
        return Entry(
            self._index,
            position,
            ordinal,
            int(tokens[0]),
            int(sizes.patches[0]),
            int(sizes.mel_frames[0]),
        )

    def _find_head(self) -> None:
        passed_in_a_row = 0
        while not self.used_up:
            if not 0 <= self.position - self._block_first < len(self._block):
                self._load_block()
            offset = self.position - self._block_first
            drawable = self._drawable
            if self._next < len(drawable):
                found = drawable[self._next]
                if found > offset:
                    self._pass_by(offset, found)
                    self.position += found - offset
                self._head = self._entry_in_block(found)
                return
            self._pass_by(offset, len(self._block))
            passed_in_a_row += len(self._block) - offset
            self.position = self._block_first + len(self._block)
            self._check_not_endless(passed_in_a_row)

    def _load_block(self) -> None:
        self._block_first, self._block = self._order.block(self._lane, self.position)
        sizes = self._source.sizes(self._block)
        tokens, fits = fit(sizes, self._budgets, oversize=self._oversize)
        offset = self.position - self._block_first
        self._drawable = (np.flatnonzero(fits[offset:]) + offset).tolist()
        self._next = 0
        self._sizes = sizes
        self._tokens = tokens

    def _entry_in_block(self, offset: int) -> Entry:
        sizes = self._sizes
        assert sizes is not None, "a block is loaded"
        return Entry(
            self._index,
            self.position,
            int(self._block[offset]),
            int(self._tokens[offset]),
            int(sizes.patches[offset]),
            int(sizes.mel_frames[offset]),
        )

    def _pass_by(self, start: int, end: int) -> None:
        """Count rows [start, end) of the block, and record those that nobody asked to leave out."""
        sizes = self._sizes
        assert sizes is not None, "a block is loaded"
        is_first_round = self.position < self._order.run_length(self._lane)
        name = self._source.name
        for status in sizes.status[start:end].tolist():
            self._left_out.counts[name, _REASONS.get(status, OVERSIZE)] += 1
        if is_first_round:
            for offset in range(start, end):
                if sizes.status[offset] not in (FILTERED, DENIED):
                    self._left_out.dropped.append(self._dropped(offset))

    def _dropped(self, offset: int) -> Dropped:
        sizes, ordinal = self._sizes, int(self._block[offset])
        assert sizes is not None, "a block is loaded"
        if sizes.status[offset] == UNUSABLE:
            reason = self._source.problem(ordinal)
        else:
            reason = misfit(
                int(sizes.tokens[offset]),
                int(sizes.cut_tokens[offset]),
                int(sizes.patches[offset]),
                int(sizes.mel_frames[offset]),
                budgets=self._budgets,
                oversize=self._oversize,
            )
        return Dropped(*self._source.identify(ordinal), self._lane, reason)

    def _check_not_endless(self, passed: int) -> None:
        """Stop where an endless source gives nothing, instead of searching it for ever."""
        order = self._order
        # Rounds give a lane ever other rows, so only many of them say that there is none to be drawn.
        enough = max(2 * order.run_length(self._lane), min(64 * order.num_samples, MOST_PASSED))
        if self.limit is not None or passed <= enough:
            return
        last = self._left_out.dropped[-1] if self._left_out.dropped else None
        raise DataError(
            f"{passed} rows in a row cannot be drawn" + (f"; one of them: {last.reason}" if last else ""),
            where=f"source {self._source.name!r}, lane {self._lane}",
            fix="widen its `where` and deny-lists, raise the limit named above, or remove the source",
        )
