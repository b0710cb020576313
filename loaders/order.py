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

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from loaders.lanes import LaneOrder
from loaders.mixture import Mixture, Weight, charge, next_source, settle
from loaders.packing import UNLIMITED, Budgets, Dropped, Entry, PackBuffer, admit, media_units
from omni_pipeline.core.errors import ConfigError, DataError, StateMismatchError
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


class OrderConfig(BaseModel):
    """How samples are ordered and packed; all of it is part of the run's identity."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lanes: int = Field(
        64, ge=1, description="Independent sample streams; must divide packs_per_step. Groups share them out."
    )
    packs_per_step: int = Field(ge=1, description="Packs of one global batch; a multiple of lanes.")
    seq_len: int = Field(ge=1, description="Sequence positions of one pack, tokens.")
    look_ahead: int = Field(64, ge=1, description="Samples buffered per lane for best-fit packing.")
    shuffle_block: int = Field(
        1024,
        ge=1,
        description="Consecutive samples of a lane that are shuffled together; bounds open shards.",
    )
    max_patches: int | None = Field(
        None, ge=1, description="Most vision patches in one pack; unset: no limit."
    )
    max_mel_frames: int | None = Field(
        None, ge=1, description="Most mel frames of audio in one pack; unset: no limit."
    )
    unit: Literal["tokens", "samples"] = Field(
        "tokens", description="What the sources' weights are shares of."
    )
    oversize: Literal["drop", "cut"] = Field(
        "drop",
        description="A sample too large for a pack: drop and record it, or cut its last text (never media).",
    )
    epochs: int | None = Field(None, ge=1, description="Times that every source is seen; unset: endless.")

    @model_validator(mode="after")
    def _lanes_divide_packs(self) -> OrderConfig:
        if self.packs_per_step % self.lanes:
            above = (self.packs_per_step // self.lanes + 1) * self.lanes
            divisor = max(d for d in range(1, self.lanes + 1) if self.packs_per_step % d == 0)
            raise ValueError(
                f"order.packs_per_step = {self.packs_per_step} is no multiple of order.lanes = {self.lanes}: "
                f"set packs_per_step = {above}, or lanes = {divisor} (in a new run: it changes the order)"
            )
        return self

    @property
    def packs_per_lane(self) -> int:
        """Packs that every lane gives to a step."""
        return self.packs_per_step // self.lanes

    @property
    def budgets(self) -> Budgets:
        """What one pack may hold."""
        return Budgets(
            tokens=self.seq_len,
            patches=UNLIMITED if self.max_patches is None else self.max_patches,
            mel_frames=UNLIMITED if self.max_mel_frames is None else self.max_mel_frames,
        )


class Order:
    """The packs of the given lanes, step by step.

    Args:
        config: Settings of the run.
        sources: All sources of the run, in any order; names must be unique.
        weights: By source name; one for each source.
        seed: Seed of the run.
        lanes: The lanes wanted here, each in [0, config.lanes).

    Raises:
        ConfigError: Names twice, weights that do not fit the sources, a source without samples, or a lane
        out of range.
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
        wanted = sorted(set(lanes))
        if wanted and not (wanted[0] >= 0 and wanted[-1] < config.lanes):
            raise ConfigError(
                f"lanes {wanted} are not all in [0, {config.lanes})", fix="ask for lanes below order.lanes"
            )
        self._lanes = {
            lane: _Lane(
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
        ever = self._mixture.drawn_from(self._step)
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
        left out, with its buffered samples (logged).

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


class _Lane:
    """One lane: where it stands in every source, its credits, its buffer."""

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
            logger.warning(
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
        drawn = self._sources[source].sample(ordinals[position - first])
        sample, reason = admit(drawn, self._budgets, oversize=self._config.oversize)
        if reason:
            self._dropped.append(Dropped(sample.id, sample.key, sample.shard, self._lane, reason))
            return None
        patches, mel_frames = media_units(sample)
        return Entry(source, position, sample, sample.num_tokens, patches, mel_frames)

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
        self._shares = self._mixture.shares(self._step, used_up=self._used_up)
        settle(self._credit, self._shares)

    def _find_used_up(self) -> frozenset[int]:
        return frozenset(
            index
            for index, limit in enumerate(self._limits)
            if limit is not None and self._positions[index] >= limit
        )
