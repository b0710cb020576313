"""Position in a lane -> row of a source, and back: pure arithmetic, no replay.

A row of the index has its position whether a sample can be made of it or not: what filters and budgets leave
out is passed by when its position comes, and moves no other. In each epoch the shards of a source are
permuted by seed, concatenated, and rotated by a seeded offset; lane l of L owns the run ``[l*N//L,
(l+1)*N//L)`` of the N rows. The rotation gives a lane other rows in each epoch even where the source is one
single shard. A source with fewer rows than lanes takes ``K = ceil(L/N)`` epochs together as one *round* of
K*N positions, and lanes split the round; else K is 1. Inside its run a lane permutes blocks of
``shuffle_block`` consecutive positions, and begins at a seeded block, so that lanes of equal shards do not
all read the same part of a shard at the same time.

**Shards open at once.** A block covers consecutive positions of the concatenation, so reading a lane in order
touches, within one block, at most ``B = ceil((shuffle_block - 1) / s) + 1`` shards of a source, s the rows of
its smallest shard that is not empty. A node needs at most (its lanes) x (the sum of B over the sources)
shards open, and one for each sample that waits in a look-ahead buffer since an earlier block.

**Quality.** A batch takes as much from every lane, so from every part of the source. Against one permutation
of all rows: where a run is one block, the mean of anything over a batch varies no more. Where it has more
blocks, what is alike within a block comes together: neighbours meet in a batch (run length /
``shuffle_block``) times as often, and a mean may vary as if each lane gave one sample to a batch instead of
some. Epochs do not depend on each other (``tests/loaders/test_shuffle.py``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.seeding import generator

IntArray = npt.NDArray[np.int64]
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio


@dataclass(frozen=True, slots=True)
class _Epoch:
    """One epoch's concatenation: its shards in order, where each ends, its rotation, the turn of lanes."""

    shards: IntArray
    ends: IntArray
    shift: int
    turn: int


class LaneOrder:
    """The order of one source in all lanes.

    Deterministic in the arguments; keeps nothing but a small cache of shard permutations.

    Args:
        shard_sizes: Rows of each shard; empty shards are allowed.
        name: Name of the source; part of the seed.
        lanes: Number of lanes L of the run.
        seed: Seed of the run.
        shuffle_block: Positions permuted together.
        epochs: Times each row is seen over all lanes together; None is endless.

    Raises:
        ConfigError: The source has no rows.
    """

    def __init__(
        self,
        shard_sizes: Sequence[int],
        *,
        name: str,
        lanes: int,
        seed: int,
        shuffle_block: int,
        epochs: int | None = None,
    ) -> None:
        self._sizes = np.asarray(shard_sizes, dtype=np.int64).reshape(-1)
        self.num_rows = int(self._sizes.sum())
        if self.num_rows < 1:
            raise ConfigError(
                f"source {name!r} has no samples",
                where=f"source {name!r}, {len(self._sizes)} shards",
                fix="remove the source, or widen its shard pattern",
            )
        self._ends = np.cumsum(self._sizes)
        self._name, self._lanes, self._seed, self._block = name, lanes, seed, shuffle_block
        self.epochs_per_round = -(-lanes // self.num_rows)
        self._full_rounds: int | None = None if epochs is None else epochs // self.epochs_per_round
        self._rest_epochs = 0 if epochs is None else epochs % self.epochs_per_round
        self._cache: OrderedDict[int, _Epoch] = OrderedDict()

    def run_length(self, lane: int) -> int:
        """Return the positions that ``lane`` owns in one full round; at least 1."""
        start, end = self._run(lane, self.epochs_per_round)
        return end - start

    def num_positions(self, lane: int) -> int | None:
        """Return the positions of ``lane`` over all epochs, None if endless.

        The last round may have fewer epochs than the others, so some lanes of a tiny source may have none.
        """
        if self._full_rounds is None:
            return None
        start, end = self._run(lane, self._rest_epochs)
        return self._full_rounds * self.run_length(lane) + end - start

    def ordinal(self, lane: int, position: int) -> int:
        """Return the row at ``position`` of ``lane``, as its place in the unshuffled shards; O(1)."""
        first, ordinals = self.block(lane, position)
        return int(ordinals[position - first])

    def block(self, lane: int, position: int) -> tuple[int, IntArray]:
        """Return the first position of the block that holds ``position``, and the block's ordinals in order.

        Returns:
            Position of the block's first entry, and int64 [1 .. shuffle_block].

        Raises:
            ValueError: ``position`` is negative, or past the last epoch.
        """
        round_index, offset = divmod(position, self.run_length(lane))
        start, end = self._run(lane, self._epochs_in_round(round_index))
        if position < 0 or offset >= end - start:
            raise ValueError(f"lane {lane} of source {self._name!r} has no position {position}")
        length = end - start
        block_index, into = divmod((offset + self._turn(lane, round_index, length)) % length, self._block)
        first = block_index * self._block
        size = min(self._block, length - first)
        ordinals = self._ordinals(round_index, start + first, start + first + size)
        return position - into, ordinals[self._shuffle(lane, round_index, block_index, size)]

    def positions_of(self, ordinal: int, *, epoch: int) -> tuple[int, int]:
        """Return the lane, and the position in it, of ``ordinal`` in ``epoch``: ``ordinal`` backwards.

        Every row has exactly one place in every epoch. Costs as much as one block, and a look at the
        list of shards.

        Raises:
            ValueError: The source has no such row or no such epoch.
        """
        round_index, epoch_index = divmod(epoch, self.epochs_per_round)
        num_epochs = self._epochs_in_round(round_index)
        if not 0 <= ordinal < self.num_rows:
            raise ValueError(f"source {self._name!r} has no row {ordinal}: it has {self.num_rows}")
        if epoch < 0 or epoch_index >= num_epochs:
            raise ValueError(f"source {self._name!r} has no epoch {epoch}")
        found = self._epoch(epoch)
        shard = int(np.searchsorted(self._ends, ordinal, side="right"))
        slot = int(np.flatnonzero(found.shards == shard)[0])
        place = ordinal - int(self._ends[shard]) + int(found.ends[slot])
        place = epoch_index * self.num_rows + (place - found.shift) % self.num_rows
        # The last lane whose run starts at or before the place: empty runs start where the next one does.
        lane = ((place + 1) * self._lanes - 1) // (num_epochs * self.num_rows)
        start, end = self._run(lane, num_epochs)
        length = end - start
        block_index, into = divmod(place - start, self._block)
        first = block_index * self._block
        shuffle = self._shuffle(lane, round_index, block_index, min(self._block, length - first))
        drawn = first + int(np.flatnonzero(shuffle == into)[0])
        offset = (drawn - self._turn(lane, round_index, length)) % length
        return lane, round_index * self.run_length(lane) + offset

    def _turn(self, lane: int, round_index: int, length: int) -> int:
        """Where in its run a lane begins, always with a block; after the run's end comes its start."""
        num_blocks = -(-length // self._block)
        if num_blocks == 1:
            return 0
        # Multiplicative hashing with the golden ratio (Knuth, TAOCP 3, 6.4): spreads lanes more evenly than
        # random numbers would, and needs no generator.
        spread = (lane * _GOLDEN + self._epoch(round_index * self.epochs_per_round).turn) % 2**64
        return (spread * num_blocks >> 64) * self._block

    def _shuffle(self, lane: int, round_index: int, block_index: int, size: int) -> IntArray:
        """The permutation of one block: entry k is the place, within the block, of what comes k-th."""
        if size == 1:
            return np.zeros(1, dtype=np.int64)
        shuffle = generator(self._seed, f"lanes/block/{self._name}", lane, round_index, block_index)
        return shuffle.permutation(size)

    def _epochs_in_round(self, round_index: int) -> int:
        if self._full_rounds is None or round_index < self._full_rounds:
            return self.epochs_per_round
        return self._rest_epochs if round_index == self._full_rounds else 0

    def _run(self, lane: int, epochs: int) -> tuple[int, int]:
        total = epochs * self.num_rows
        return lane * total // self._lanes, (lane + 1) * total // self._lanes

    def _ordinals(self, round_index: int, first: int, last: int) -> IntArray:
        """Ordinals of positions [first, last) of a round, before the block shuffle."""
        pieces: list[IntArray] = []
        while first < last:
            epoch_index, offset = divmod(first, self.num_rows)
            epoch = self._epoch(round_index * self.epochs_per_round + epoch_index)
            start = (offset + epoch.shift) % self.num_rows
            end = start + min(last - first, self.num_rows - offset, self.num_rows - start)
            slots = slice(
                int(np.searchsorted(epoch.ends, start, side="right")),
                int(np.searchsorted(epoch.ends, end)) + 1,
            )
            counts = np.diff(np.minimum(epoch.ends[slots], end), prepend=start)
            to_ordinal = self._ends[epoch.shards[slots]] - epoch.ends[slots]
            pieces.append(np.arange(start, end, dtype=np.int64) + np.repeat(to_ordinal, counts))
            first += end - start
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _epoch(self, epoch: int) -> _Epoch:
        found = self._cache.get(epoch)
        if found is None:
            shuffle = generator(self._seed, f"lanes/shards/{self._name}", epoch)
            shards = shuffle.permutation(len(self._sizes))
            shift = int(shuffle.integers(self.num_rows))
            turn = int(shuffle.integers(2**63))
            found = _Epoch(shards, np.cumsum(self._sizes[shards]), shift, turn)
            # Lanes run a little apart and a round may hold several epochs.
            if len(self._cache) >= 2 * self.epochs_per_round + 2:
                self._cache.popitem(last=False)
            self._cache[epoch] = found
        else:
            self._cache.move_to_end(epoch)
        return found
