"""One lane's packs: its place in every source, its mixture, its look-ahead buffer, and their state.

A lane is a deterministic machine: the same settings and the same state give the same next pack, whoever
runs it. What it keeps is at most ``look_ahead`` buffered samples and two numbers per source; drawn samples
that no pack can hold go to a list that all lanes share.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from loaders.lanes import LaneOrder
from loaders.mixture import Mixture, Moment, charge, next_source, settle
from loaders.order_config import OrderConfig
from loaders.packing import Dropped, Entry, PackBuffer, PackSizes, admit
from omni_pipeline.core.errors import DataError, StateMismatchError
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Sample

logger = logging.getLogger(__name__)


class SampleSource(Protocol):
    """A named set of shards whose samples are known by their sizes."""

    @property
    def name(self) -> str:
        """Unique among the sources of a run."""
        ...

    @property
    def shard_sizes(self) -> Sequence[int]:
        """Usable samples of each shard."""
        ...

    def sample(self, ordinal: int) -> Sample:
        """Return the sample at this place in the unshuffled concatenation of the shards; reads no payload."""
        ...


@runtime_checkable
class SizedSource(SampleSource, Protocol):
    """A source that knows the sizes of all its samples at once, so that they can be checked beforehand."""

    def pack_sizes(self) -> PackSizes:
        """Return what each sample takes of a pack, by ordinal."""
        ...


class LanePacker:
    """One lane: where it stands in every source, its credits, its buffer.

    Args:
        lane: Its number.
        config: Settings of the run.
        mixture: The weights; shared by all lanes.
        sources: In the order of ``mixture.names``.
        orders: The sources' orders, likewise.
        dropped: Takes the samples that no pack can hold.
    """

    def __init__(
        self,
        lane: int,
        config: OrderConfig,
        *,
        mixture: Mixture,
        sources: Sequence[SampleSource],
        orders: Sequence[LaneOrder],
        dropped: list[Dropped],
    ) -> None:
        self._lane = lane
        self._config = config
        self._budgets = config.budgets
        self._by_tokens = config.unit == "tokens"
        self._mixture = mixture
        self._sources = sources
        self._orders = orders
        self._dropped = dropped
        self._limits = [order.num_positions(lane) for order in orders]
        self._blocks: list[tuple[int, list[int]]] = [(0, []) for _ in orders]
        self._drops_in_a_row = [0] * len(orders)
        self._number = 0
        self._step = 0
        self._positions = [0] * len(orders)
        self._credit = [0.0] * len(orders)
        self._buffer = PackBuffer(self._budgets, look_ahead=config.look_ahead)
        self._used_up = self._find_used_up()
        self._shares: tuple[float, ...] = (0.0,) * len(orders)

    def exhausted(self, ever: frozenset[int]) -> bool:
        """Whether the buffer is empty and no source that is ever drawn has samples left."""
        return not len(self._buffer) and ever <= self._used_up

    def next_pack(self, step: int) -> Pack:
        """Return the next pack, filled at the weights of ``step``."""
        self._step = step
        self._set_shares()
        entries = self._buffer.next_pack(self._draw)
        pack = Pack(self._lane, self._number, tuple([entry.sample for entry in entries]))
        self._number += 1
        return pack

    def state_dict(self) -> dict[str, Any]:
        """Return this lane's part of ``Order.state_dict``."""
        names = self._mixture.names
        return {
            "number": self._number,
            "sources": {
                name: {"position": position, "credit": credit}
                for name, position, credit in zip(names, self._positions, self._credit, strict=True)
            },
            "buffer": [[names[entry.source], entry.position] for entry in self._buffer],
        }

    def check(self, state: Any) -> None:
        """Raise ``StateMismatchError`` unless ``state`` can be loaded."""
        try:
            used = {str(name): int(saved["position"]) for name, saved in state["sources"].items()}
            fits = int(state["number"]) >= 0 and all(
                0 <= int(position) < used[name] for name, position in state["buffer"]
            )
            _ = [float(saved["credit"]) for saved in state["sources"].values()]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateMismatchError(
                f"state of lane {self._lane} is malformed: {error!r}", fix="resume from another checkpoint"
            ) from error
        if not fits:
            raise StateMismatchError(
                f"state of lane {self._lane} buffers samples past the positions it says were drawn",
                fix="resume from another checkpoint",
            )
        for index, name in enumerate(self._mixture.names):
            limit = self._limits[index]
            if limit is not None and used.get(name, 0) > limit:
                raise StateMismatchError(
                    f"lane {self._lane} had {used[name]} samples of source {name!r}, which has {limit} here",
                    fix="resume with the shards and order.epochs it was saved with",
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that ``check`` let pass; reads the buffered samples' sizes again."""
        names = self._mixture.names
        saved = state["sources"]
        gone = sorted(set(saved) - set(names))
        self._number = int(state["number"])
        self._positions = [int(saved[name]["position"]) if name in saved else 0 for name in names]
        self._credit = [float(saved[name]["credit"]) if name in saved else 0.0 for name in names]
        if any(saved[name]["credit"] != 0 for name in gone):
            self._credit = [0.0] * len(names)
        index_of = {name: index for index, name in enumerate(names)}
        kept = [(index_of[name], int(position)) for name, position in state["buffer"] if name in index_of]
        if gone:
            logger.debug(
                "lane %s: sources %s are no longer in the run; left out with %s buffered samples",
                self._lane,
                ", ".join(gone),
                len(state["buffer"]) - len(kept),
            )
        self._buffer = PackBuffer(self._budgets, look_ahead=self._config.look_ahead)
        for source, position in kept:
            entry = self._entry(source, position)
            if entry is not None:
                self._buffer.add(entry)
        self._used_up = self._find_used_up()

    def _draw(self) -> Entry | None:
        """Draw the next sample that a pack can hold; None when no source has one."""
        while True:
            source = next_source(self._credit, self._shares)
            if source is None:
                return None
            position = self._positions[source]
            self._positions[source] = position + 1
            entry = self._entry(source, position)
            if entry is None:
                self._count_drop(source)
            else:
                self._drops_in_a_row[source] = 0
                size = entry.tokens if self._by_tokens else 1
                charge(self._credit, self._shares, source=source, size=size)
            if position + 1 == self._limits[source]:
                self._used_up = self._used_up | {source}
                self._set_shares()
            if entry is not None:
                return entry

    def _entry(self, source: int, position: int) -> Entry | None:
        """The sample at ``position``, or None where it is dropped (and recorded)."""
        first, ordinals = self._blocks[source]
        if not 0 <= position - first < len(ordinals):
            first, block = self._orders[source].block(self._lane, position)
            ordinals = block.tolist()
            self._blocks[source] = (first, ordinals)
        sample = self._sources[source].sample(ordinals[position - first])
        entry = admit(sample, self._budgets, oversize=self._config.oversize, source=source, position=position)
        if isinstance(entry, Entry):
            return entry
        self._dropped.append(Dropped(sample.id, sample.key, sample.shard, self._lane, entry))
        return None

    def _count_drop(self, source: int) -> None:
        """Stop where a source gives nothing that fits, instead of searching an endless stream for ever."""
        self._drops_in_a_row[source] += 1
        order = self._orders[source]
        limit = max(2 * order.run_length(self._lane), 64 * min(order.num_samples, self._config.lanes))
        if self._drops_in_a_row[source] > limit and self._limits[source] is None:
            raise DataError(
                f"{limit} samples in a row fit no pack; the last one: {self._dropped[-1].reason}",
                where=f"source {self._mixture.names[source]!r}, lane {self._lane}, {self._dropped[-1].shard}",
                fix="raise the limit named above, set order.oversize = 'cut', or remove the source",
            )

    def _set_shares(self) -> None:
        self._shares = self._mixture.shares(Moment(self._step), used_up=self._used_up)
        settle(self._credit, self._shares)

    def _find_used_up(self) -> frozenset[int]:
        return frozenset(
            index
            for index, limit in enumerate(self._limits)
            if limit is not None and self._positions[index] >= limit
        )
