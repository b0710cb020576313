"""Sequence layouts as data: which rank of a replica owns which positions of its sequence.

A sequence is cut into equal chunks; each *holder* has one or more of them, laid end to end, and its tensor-
parallel ranks cut that into equal contiguous parts. Three layouts are such tables:

- ``contiguous``: a chunk for each of the tp x cp ranks (sequence parallelism, Ulysses);
- ``zigzag``: 2 cp chunks, the i-th holder has chunks i and 2 cp - 1 - i, so that under a causal mask all
  holders have equal work (ring attention of Llama 3, section 3.3.2; Megatron-LM), and tp cuts inside;
- ``stage0``: one chunk, of the first rank of pipeline stage 0.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from balancer.partition import IntArray
from omni_pipeline.core.interleave import Runs, runs_of_rows
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.topology import Topology

SequenceKind = Literal["contiguous", "zigzag", "stage0"]


@dataclass(frozen=True, slots=True)
class RowPieces:
    """Runs of rows of one item that lie with one owner at consecutive positions; int64 [pieces] each.

    Args:
        item: Which item; ascending, and in the order of its rows.
        owner: Which owner, an index in ``SequenceLayout.owners``.
        rows: How many rows, at least 1.
        first_row: The first of them, counted from the first row of the item.
        local: Position of that row in the owner's part of the sequence.
    """

    item: IntArray
    owner: IntArray
    rows: IntArray
    first_row: IntArray
    local: IntArray


@functools.lru_cache(maxsize=4096)
def row_owners(topology: Topology, replica: int) -> tuple[int, ...]:
    """Return ``topology.row_owners(replica)``, remembered: planning asks for it in each step."""
    return topology.row_owners(replica)


def runs_of_shares(runs: Sequence[Runs], shares: Sequence[tuple[int, int, int, int]]) -> dict[int, Runs]:
    """Return the runs of each share of an item that has some, by number of the share.

    Args:
        runs: Of each item; empty where its rows follow each other.
        shares: Item, rank, first row and rows of each.
    """
    if not any(runs):
        return {}
    return {
        share: runs_of_rows(runs[item], first, rows)
        for share, (item, _, first, rows) in enumerate(shares)
        if runs[item]
    }


@dataclass(frozen=True)
class SequenceLayout:
    """Who owns which sequence positions.

    Args:
        topology: The layout of the run.
        seq_len: Positions of every sequence where packs are padded to one length; 0 where each pack keeps its
            own length.
        kind: See the module.
    """

    topology: Topology
    seq_len: int = 0
    kind: SequenceKind = "contiguous"

    def owners(self, replica: int) -> tuple[int, ...]:
        """Return the ranks that own positions of ``replica``'s sequence, in the order of their numbers."""
        return row_owners(self.topology, replica)[: self.num_owners]

    @property
    def num_owners(self) -> int:
        """Ranks of a replica that own positions."""
        return 1 if self.kind == "stage0" else self.topology.tp * self.topology.cp

    def length(self, pack: Pack) -> int:
        """Return the positions of the sequence that ``pack`` runs in."""
        return self.seq_len or pack.num_positions

    def cut(
        self,
        positions: IntArray,
        num_rows: IntArray,
        lengths: IntArray,
        runs: Mapping[int, Runs] | None = None,
    ) -> RowPieces:
        """Cut runs of rows where their owner changes, or their place with it.

        Args:
            positions: int64 [items]; sequence position of each item's first row.
            num_rows: int64 [items]; its rows.
            lengths: int64 [items]; the length of the sequence it is in, see ``length``.
            runs: By item: where its rows are, if they do not all follow ``positions``.
        """
        if runs:
            return self._cut_runs(positions, num_rows, lengths, runs)
        holders, slots, parts = self._table
        chunk = np.maximum(1, -(-lengths // len(holders)))
        part = -(-chunk * (1 + max(slots)) // parts)
        first = self._run_of(positions, chunk, part)
        last = self._run_of(positions + num_rows - 1, chunk, part)
        counts = np.where(num_rows > 0, last - first + 1, 0)
        item = np.repeat(np.arange(len(positions)), counts)
        run = first[item] + np.arange(len(item)) - (np.cumsum(counts) - counts)[item]
        # A run is what one part has of one chunk: some are empty, where a part ends with a chunk.
        number, index = run // parts, run % parts
        chunk, part = chunk[item], part[item]
        inside, before = number * chunk, np.asarray(slots)[number] * chunk
        start = inside + np.clip(index * part - before, 0, chunk)
        end = inside + np.clip((index + 1) * part - before, 0, chunk)
        start = np.maximum(start, positions[item])
        end = np.minimum(end, (positions + num_rows)[item])
        kept = end > start
        return RowPieces(
            item=item[kept],
            owner=(np.asarray(holders)[number] * parts + index)[kept],
            rows=(end - start)[kept],
            first_row=(start - positions[item])[kept],
            local=(start - inside + before - index * part)[kept],
        )

    def _cut_runs(
        self, positions: IntArray, num_rows: IntArray, lengths: IntArray, runs: Mapping[int, Runs]
    ) -> RowPieces:
        """Cut the runs as items of their own."""
        pairs = enumerate(zip(positions.tolist(), num_rows.tolist(), strict=True))
        found = [(item, *run) for item, whole in pairs for run in runs.get(item, (whole,))]
        item, position, rows = np.asarray(found, dtype=np.int64).reshape(-1, 3).T
        before = np.cumsum(rows) - rows
        first_row = before - before[np.searchsorted(item, item)]
        pieces = self.cut(position, rows, lengths[item])
        return replace(pieces, item=item[pieces.item], first_row=first_row[pieces.item] + pieces.first_row)

    @functools.cached_property
    def _table(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the holder of each chunk, which of the holder's chunks it is, and the parts of a holder."""
        tp, cp = self.topology.tp, self.topology.cp
        if self.kind == "zigzag":
            return (*range(cp), *reversed(range(cp))), (0,) * cp + (1,) * cp, tp
        chunks = tuple(range(self.num_owners))
        return chunks, (0,) * len(chunks), 1

    def _run_of(self, positions: IntArray, chunk: IntArray, part: IntArray) -> IntArray:
        """Return the run of each position, which grows with the position: chunk x parts + part."""
        _, slots, parts = self._table
        number = positions // chunk
        run: IntArray = number * parts + (np.asarray(slots)[number] * chunk + positions % chunk) // part
        return run
