"""Which samples come in which pack of which step: lanes, mixture and packing joined.

``Order`` is a pure function of (settings, sources, seed, position): every member of a group builds one for
the lanes of its group and gets the same packs without a message. A step takes the same number of packs from
every lane, so the set of packs of a step does not depend on how lanes are spread over groups, ranks or
workers.

State per lane: the number of the next pack, the tokens drawn, position and credit of every source, and where
the buffered samples were drawn. So it holds at most ``look_ahead`` pairs, two numbers per source and two more
for each lane. A resume reads the buffered samples' sizes again, nothing else: its cost does not depend on the
step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loaders.bucketing import Buckets
from loaders.drawable import check_drawable
from loaders.fitting import Dropped, cut_text
from loaders.lane_cursor import LeftOut, SampleSource
from loaders.lane_packer import LanePacker, UsedUp
from loaders.lanes import LaneOrder
from loaders.mixture import Mixture, Moment
from loaders.order_config import OrderConfig
from loaders.packing import Entry
from loaders.quantiles import resolve_buckets
from loaders.weight import Weight
from omni_pipeline.core.errors import ConfigError, StateMismatchError
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Sample

__all__ = ["LanePack", "Order", "OrderConfig", "SampleSource", "merge_states", "restrict"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LanePack:
    """A pack as numbers: its lane, its running number there, and its entries in sequence order."""

    lane: int
    number: int
    entries: list[Entry]


class Order:
    """The packs of the given lanes, step by step.

    Args:
        config: Settings of the run.
        sources: All sources of the run, in any order; names must be unique.
        weights: By source name; one for each source.
        seed: Seed of the run.
        lanes: The lanes wanted here, each in [0, config.lanes).
        epochs: By source name, where it is not ``config.epochs``: times its rows are seen.
        group_of: As in ``Mixture``.
        groups: As in ``Mixture``.

    Raises:
        ConfigError: Names twice, weights that do not fit the sources, a source without rows or with none that
            can be drawn, or a lane out of range.
    """

    def __init__(
        self,
        config: OrderConfig,
        *,
        sources: Sequence[SampleSource],
        weights: Mapping[str, Weight],
        seed: int,
        lanes: Iterable[int],
        epochs: Mapping[str, int] | None = None,
        group_of: Mapping[str, str] | None = None,
        groups: Mapping[str, Weight] | None = None,
    ) -> None:
        self._config = config
        self._left_out = LeftOut()
        self._used_up: list[UsedUp] = []
        self._started = False
        self._mixture = Mixture(weights, group_of=group_of, groups=groups)
        self._sources = _by_name(sources, weights)
        caps = epochs or {}
        self._orders = [
            LaneOrder(
                source.shard_sizes,
                name=source.name,
                lanes=config.lanes,
                seed=seed,
                shuffle_block=config.shuffle_block,
                epochs=caps.get(source.name, config.epochs),
            )
            for source in self._sources
        ]
        ever = self._mixture.drawn_from(Moment(0))
        check_drawable([source for index, source in enumerate(self._sources) if index in ever], config)
        self._buckets = self._find_buckets()
        self._lanes = {lane: self._lane_packer(lane) for lane in _wanted(lanes, config)}

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lanes that this object holds, ascending."""
        return tuple(self._lanes)

    @property
    def source_names(self) -> tuple[str, ...]:
        """The sources in the order that ``Entry.source`` counts."""
        return self._mixture.names

    def lane_order(self, source: str) -> LaneOrder:
        """Return the order of one source in all lanes."""
        return self._orders[self._mixture.names.index(source)]

    @property
    def exhausted(self) -> bool:
        """Whether all of these lanes have given all their samples; never with endless epochs.

        Lanes of other groups may still have some: groups must agree before one of them stops.
        """
        return all(lane.exhausted for lane in self._lanes.values())

    @property
    def left_out(self) -> Counter[tuple[str, str]]:
        """Rows passed by since this object was made, by (source, reason): see ``lane_cursor.LeftOut``."""
        return self._left_out.counts.copy()

    def next_step(self, step: int) -> list[Pack]:
        """Return the next ``packs_per_lane`` packs of every lane, by lane then number.

        A lane that has no samples left gives packs without samples, so the geometry stays.

        Args:
            step: The step being filled, from 0; the weights are those of this step.

        Raises:
            DataError: A source gives nothing that can be drawn.
        """
        return [self.pack_of(found) for found in self.next_entries(step)]

    def next_entries(self, step: int) -> list[LanePack]:
        """Return the same packs as ``next_step`` would, as numbers: to follow many steps quickly.

        Raises:
            DataError: A source gives nothing that can be drawn.
        """
        self._started = True
        found = []
        for number, lane in self._lanes.items():
            lane.begin_step(step)
            found += [LanePack(number, *lane.next_pack()) for _ in range(self._config.packs_per_lane)]
        return found

    def pack_of(self, found: LanePack) -> Pack:
        """Return the pack with its samples."""
        samples = tuple([self._sample(entry) for entry in found.entries])
        padded_len = 0 if self._buckets is None else self._buckets.padded_len(found.entries)
        return Pack(found.lane, found.number, samples, padded_len)

    def remaining(self) -> Counter[str]:
        """Return the rows of these lanes that are not packed yet, by source; those without end are absent."""
        total: Counter[str] = Counter()
        for lane in self._lanes.values():
            total.update(lane.remaining())
        return total

    def drain_dropped(self) -> list[Dropped]:
        """Return the rows dropped since the last call, in the order they were met, and forget them."""
        dropped = list(self._left_out.dropped)
        self._left_out.dropped.clear()
        return dropped

    def drain_used_up(self) -> list[UsedUp]:
        """Return the (source, lane) pairs that ended since the last call, and forget them."""
        used_up = list(self._used_up)
        self._used_up.clear()
        return used_up

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the packs given so far, JSON-plain.

        ``{lane: {"number": of the next pack, "tokens": drawn, "sources": {name: {"position", "credit"}},
        "buffer": [[name, position], ...]}}``, the buffer oldest first.
        """
        return {str(number): lane.state_dict() for number, lane in self._lanes.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, which may hold more lanes than these.

        A source that the state does not know starts at its beginning; one that this run does not have is
        left out, with its buffered samples (logged by lane at DEBUG).

        Raises:
            StateMismatchError: A lane is missing, or what is saved of it does not fit.
            RuntimeError: Packs were already taken from this object.
        """
        if self._started:
            raise RuntimeError("load_state_dict after next_step: load into a fresh Order")
        own = restrict(state, self._lanes)
        for number, lane in self._lanes.items():
            lane.check(own[str(number)])
        for number, lane in self._lanes.items():
            lane.load_state_dict(own[str(number)])

    def _find_buckets(self) -> Buckets | None:
        config = self._config
        if config.bucketing is None:
            return None
        # The mean over the schedule, so that a source which comes later counts and a resume changes nothing.
        shares = np.mean([self._mixture.shares(moment) for moment in self._mixture.moments()], axis=0)
        buckets = resolve_buckets(
            config.bucketing,
            self._sources,
            shares.tolist(),
            by_tokens=config.unit == "tokens",
            budgets=config.budgets,
            oversize=config.oversize,
        )
        logger.debug("buckets: %s tokens, %s patches", buckets.boundaries, buckets.patch_boundaries)
        return buckets

    def _lane_packer(self, lane: int) -> LanePacker:
        return LanePacker(
            lane,
            self._config,
            mixture=self._mixture,
            sources=self._sources,
            orders=self._orders,
            left_out=self._left_out,
            used_up=self._used_up,
            buckets=self._buckets,
        )

    def _sample(self, entry: Entry) -> Sample:
        sample = self._sources[entry.source].sample(entry.ordinal)
        return cut_text(sample, max_tokens=entry.tokens)


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state with the lanes of all ``states``, by lane.

    Raises:
        StateMismatchError: Two states differ about a lane.
    """
    merged: dict[str, Any] = {}
    for state in states:
        for lane, value in state.items():
            if merged.setdefault(lane, value) != value:
                raise StateMismatchError(
                    f"two states differ about lane {lane}",
                    fix="merge states of the same step and run only",
                )
    return {lane: merged[lane] for lane in sorted(merged, key=int)}


def restrict(state: Mapping[str, Any], lanes: Iterable[int]) -> dict[str, Any]:
    """Return the part of ``state`` that is about ``lanes``.

    Raises:
        StateMismatchError: A lane is missing.
    """
    wanted = [str(lane) for lane in lanes]
    missing = [lane for lane in wanted if lane not in state]
    if missing:
        raise StateMismatchError(
            f"state has no lanes {', '.join(missing)}; it has {len(state)} lanes",
            fix="resume with the order.lanes it was saved with, and merge the states of all groups first",
        )
    return {lane: state[lane] for lane in wanted}


def _wanted(lanes: Iterable[int], config: OrderConfig) -> list[int]:
    wanted = sorted(set(lanes))
    if wanted and not (wanted[0] >= 0 and wanted[-1] < config.lanes):
        raise ConfigError(
            f"lanes {wanted} are not all in [0, {config.lanes})", fix="ask for lanes below order.lanes"
        )
    return wanted


def _by_name(sources: Sequence[SampleSource], weights: Mapping[str, Weight]) -> list[SampleSource]:
    ordered = sorted(sources, key=lambda source: source.name)
    names = [source.name for source in ordered]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"sources named twice: {', '.join(twice)}", fix="give each source its own name")
    if names != sorted(weights):
        raise ConfigError(
            f"weights are given for {sorted(weights)}, sources are {names}", fix="give one weight per source"
        )
    return ordered
