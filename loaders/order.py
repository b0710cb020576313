"""Which samples come in which pack of which step: lanes, mixture and packing joined.

``Order`` is a pure function of (settings, sources, seed, position): every member of a group builds one for
the lanes of its group and gets the same packs without a message. A step takes the same number of packs from
every lane, so the set of packs of a step does not depend on how lanes are spread over groups, ranks or
workers.

State per lane: the number of the next pack, position and credit of every source, and where the buffered
samples were drawn. So it holds at most ``look_ahead`` pairs and two numbers per source for each lane, and a
resume reads the buffered samples' sizes again, nothing else: its cost does not depend on the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from loaders.lane_packer import LanePacker, SampleSource, SizedSource
from loaders.lanes import LaneOrder
from loaders.mixture import Mixture, Moment
from loaders.order_config import OrderConfig
from loaders.packing import Dropped, admit
from loaders.weight import Weight
from omni_pipeline.core.errors import ConfigError, StateMismatchError
from omni_pipeline.core.plan import Pack

__all__ = ["Order", "OrderConfig", "SampleSource", "check_fits", "merge_states", "restrict"]


class Order:
    """The packs of the given lanes, step by step.

    Args:
        config: Settings of the run.
        sources: All sources of the run, in any order; names must be unique.
        weights: By source name; one for each source.
        seed: Seed of the run.
        lanes: The lanes wanted here, each in [0, config.lanes).

    Raises:
        ConfigError: Names twice, weights that do not fit the sources, a source without samples or with none
            that fits a pack, or a lane out of range.
    """

    def __init__(
        self,
        config: OrderConfig,
        *,
        sources: Sequence[SampleSource],
        weights: Mapping[str, Weight],
        seed: int,
        lanes: Iterable[int],
    ) -> None:
        self._config = config
        self._dropped: list[Dropped] = []
        self._started = False
        self._step = 0
        self._mixture = Mixture(weights)
        ordered = _by_name(sources, weights)
        orders = [
            LaneOrder(
                source.shard_sizes,
                name=source.name,
                lanes=config.lanes,
                seed=seed,
                shuffle_block=config.shuffle_block,
                epochs=config.epochs,
            )
            for source in ordered
        ]
        ever = self._mixture.drawn_from(Moment(0))
        check_fits([source for index, source in enumerate(ordered) if index in ever], config)
        wanted = sorted(set(lanes))
        if wanted and not (wanted[0] >= 0 and wanted[-1] < config.lanes):
            raise ConfigError(
                f"lanes {wanted} are not all in [0, {config.lanes})", fix="ask for lanes below order.lanes"
            )
        self._lanes = {
            lane: LanePacker(
                lane, config, mixture=self._mixture, sources=ordered, orders=orders, dropped=self._dropped
            )
            for lane in wanted
        }

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lanes that this object holds, ascending."""
        return tuple(self._lanes)

    @property
    def exhausted(self) -> bool:
        """Whether all of these lanes have given all their samples; never with endless epochs.

        Lanes of other groups may still have some: groups must agree before one of them stops.
        """
        if self._config.epochs is None:
            return False
        ever = self._mixture.drawn_from(Moment(self._step))
        return all(lane.exhausted(ever) for lane in self._lanes.values())

    def next_step(self, step: int) -> list[Pack]:
        """Return the next ``packs_per_lane`` packs of every lane, by lane then number.

        A lane that has no samples left gives packs without samples, so the geometry stays.

        Args:
            step: The step being filled, from 0; the weights are those of this step.

        Raises:
            DataError: A source gives nothing but samples that fit no pack.
        """
        self._started = True
        self._step = step
        per_lane = self._config.packs_per_lane
        return [lane.next_pack(step) for lane in self._lanes.values() for _ in range(per_lane)]

    def drain_dropped(self) -> list[Dropped]:
        """Return the samples dropped since the last call, in the order they were met, and forget them."""
        dropped = list(self._dropped)
        self._dropped.clear()
        return dropped

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the packs given so far, JSON-plain.

        ``{lane: {"number": of the next pack, "sources": {name: {"position", "credit"}}, "buffer": [[name,
        position], ...]}}``, the buffer oldest first.
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


def check_fits(sources: Iterable[SampleSource], config: OrderConfig) -> None:
    """Raise unless every source has a sample that fits a pack; under 0.2 s per million samples.

    Sources that do not know all their sizes (no ``SizedSource``) are passed by.

    Raises:
        ConfigError: Names source, its smallest sample, and the limit.
    """
    budgets = config.budgets
    for source in sources:
        if not isinstance(source, SizedSource):
            continue
        sizes = source.pack_sizes()
        tokens = sizes.tokens if config.oversize == "drop" else sizes.cut_tokens
        fits = (
            (tokens <= budgets.tokens)
            & (sizes.patches <= budgets.patches)
            & (sizes.mel_frames <= budgets.mel_frames)
        )
        if fits.any():
            continue
        shares = (
            tokens / budgets.tokens,
            sizes.patches / budgets.patches,
            sizes.mel_frames / budgets.mel_frames,
        )
        smallest = int(np.maximum.reduce(shares).argmin())
        sample = source.sample(smallest)
        reason = admit(sample, budgets, oversize=config.oversize, source=0, position=0)
        raise ConfigError(
            f"none of {len(tokens)} samples fits a pack; the smallest has {reason}",
            where=f"source {source.name!r}, {sample.shard}, sample {sample.key}",
            fix="raise the limit named above, or remove the source",
        )


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
