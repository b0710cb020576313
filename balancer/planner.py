"""The planner of a group: packs of a step in, StepPlan out; the same on every member without a message.

It composes the pure parts: costs (``balancer.cost``), pack and media placement (``balancer.reorder``), rows
to owners (``balancer.reshard``). Costs become whole ticks first: sums of whole numbers are exact in any
order, so machines with different vector units still make the same plan. The plan is never worse than the
unbalanced one, neither for the encoders nor for the LLM, and every plan is checked before it leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from balancer.check import check_plan
from balancer.cost import CostModel
from balancer.partition import FloatArray, IntArray
from balancer.reorder import (
    MediaLoad,
    PackPlacement,
    exchange_time,
    lanes_of_group,
    member_loads,
    num_microbatches,
    packs_by_cost,
    packs_in_order,
    place_media,
    step_makespan,
)
from balancer.reshard import SequenceLayout, media_positions, reshard_plan, row_owners
from omni_pipeline.core.errors import ConfigError, PlanError
from omni_pipeline.core.plan import Balance, MediaPlacement, Pack, PackSlot, ReshardPlan, StepPlan
from omni_pipeline.core.topology import Topology

# Below 2^53 ticks (25 hours of modelled time in a group and step) sums are exact.
TICKS_PER_S = 1e11


class BalanceConfig(BaseModel):
    """The ``balance`` section of a run file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(True, description="Reorder packs and media; off keeps them where they fall.")
    group: Literal["all", "node"] | int = Field(
        "node",
        description="Replicas that balance together: a number (at least 1), 'all', or 'node', the most that "
        "fit in a node and divide the replicas of the run.",
    )
    flops_per_s: float = Field(
        4e14, gt=0, description="Rate that a rank attains, floating-point operations/s."
    )
    bytes_per_s: float = Field(1e11, gt=0, description="Rate at which a rank sends embeddings, bytes/s.")
    latency_s: float = Field(2e-5, ge=0, description="Time of one message between ranks, seconds.")

    @field_validator("group")
    @classmethod
    def _positive(cls, value: str | int) -> str | int:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be 'all', 'node', or at least 1")
        return value

    def replicas_per_group(self, *, world_size: int, ranks_per_node: int, tp: int, cp: int, pp: int) -> int:
        """Return what ``Topology.replicas_per_group`` must be for this setting; 0 is all."""
        if self.group == "all":
            return 0
        if isinstance(self.group, int):
            return self.group
        num_replicas = max(1, world_size // (tp * cp * pp))
        # Stages of one replica are far apart, so a node holds the same stage of several replicas.
        fitting = min(num_replicas, max(1, ranks_per_node // (tp * cp)))
        return max(size for size in range(1, fitting + 1) if num_replicas % size == 0)


class GroupPlanner:
    """Makes the plans of a run's groups; without state between steps, so any member may plan any group.

    Args:
        topology: The layout of the run.
        cost_model: Modelled seconds of packs, media and transfers.
        config: Whether to balance.
        num_lanes: Lanes of the run.
        packs_per_step: Packs of the global batch; a multiple of ``num_lanes``.
        encoders: All encoders of the run, in the order in which their outputs are concatenated.
        seq_len: Positions of every sequence where packs are padded to one length; 0 where they are not.

    Raises:
        ConfigError: The lanes do not divide the packs, or the cost model uses an encoder not in ``encoders``.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        cost_model: CostModel,
        config: BalanceConfig,
        num_lanes: int,
        packs_per_step: int,
        encoders: tuple[str, ...],
        seq_len: int = 0,
    ) -> None:
        if num_lanes < 1 or packs_per_step < 1 or packs_per_step % num_lanes:
            raise ConfigError(
                f"{packs_per_step} packs per step do not divide into {num_lanes} lanes",
                fix="make order.packs_per_step a multiple of order.lanes",
            )
        unknown = sorted(set(cost_model.encoder_of.values()) - set(encoders))
        if unknown:
            raise ConfigError(
                f"the cost model uses encoder {unknown[0]!r}, the run has {', '.join(encoders) or 'none'}",
                fix="name the same encoders in both",
            )
        self.topology = topology
        self.cost_model = cost_model
        self.config = config
        self.num_lanes = num_lanes
        self.packs_per_step = packs_per_step
        self.encoders = encoders
        self.layout = SequenceLayout(topology, seq_len)
        self.num_microbatches = num_microbatches(num_lanes, packs_per_step // num_lanes, topology)

    def plan(self, packs: Sequence[Pack], *, step: int, group: int) -> StepPlan:
        """Return the plan of ``group`` for ``step``. The order of ``packs`` is free.

        Raises:
            PlanError: A pack of another group's lane, twice the same, more packs than places, or a pack
                longer than the sequence.
            ConfigError: A segment of a modality that no encoder reads.
        """
        inputs = self._inputs(packs, group)
        unbalanced = self._in_order(inputs)
        chosen = self._choose(inputs, unbalanced) if self.config.enabled else unbalanced
        plan = StepPlan(
            step=step,
            group=group,
            ranks=inputs.ranks,
            replicas=inputs.replicas,
            num_microbatches=self.num_microbatches,
            packs=inputs.packs,
            slots=_slots(inputs, chosen.packs),
            media=_media(inputs, chosen),
            encoder_balance=_balance(
                inputs.media_costs, len(inputs.ranks), unbalanced.encoder_ticks, chosen.encoder_ticks
            ),
            llm_balance=_balance(
                inputs.pack_costs, len(inputs.replicas), unbalanced.llm_ticks, chosen.llm_ticks
            ),
        )
        check_plan(plan, self.topology)
        return plan

    def reshard(self, plan: StepPlan, *, microbatch: int, rank: int) -> ReshardPlan:
        """Return what ``rank`` sends and receives in ``microbatch``; see ``balancer.reshard``.

        Raises:
            PlanError: ``rank`` is not of the plan's group.
        """
        return reshard_plan(
            plan, microbatch=microbatch, rank=rank, layout=self.layout, encoders=self.encoders
        )

    def unbalanced(self, plan: StepPlan) -> StepPlan:
        """Return the same step with packs in order and media at home: what ``plan`` is compared with."""
        off = GroupPlanner(
            self.topology,
            cost_model=self.cost_model,
            config=self.config.model_copy(update={"enabled": False}),
            num_lanes=self.num_lanes,
            packs_per_step=self.packs_per_step,
            encoders=self.encoders,
            seq_len=self.layout.seq_len,
        )
        return off.plan(plan.packs, step=plan.step, group=plan.group)

    def _inputs(self, packs: Sequence[Pack], group: int) -> _Inputs:
        ordered = tuple(sorted(packs, key=lambda pack: (pack.lane, pack.number)))
        replicas = self.topology.replicas_of_group(group)
        self._check_packs(ordered, group, len(replicas))
        media = [
            _Media(index, sample, segment, position, pack.samples[sample].segments[segment].num_rows)
            for index, pack in enumerate(ordered)
            for sample, segment, position in media_positions(pack)
        ]
        segments = [ordered[item.pack].samples[item.sample].segments[item.segment] for item in media]
        ranks = self.topology.ranks_of_group(group)
        owners = [row_owners(self.topology, replica) for replica in replicas]
        per_rank = TICKS_PER_S / self.topology.ranks_per_replica
        return _Inputs(
            packs=ordered,
            ranks=ranks,
            replicas=replicas,
            owners=np.searchsorted(np.asarray(ranks), np.asarray(owners)),
            pack_costs=np.rint(_array([self.cost_model.pack_cost(pack) * per_rank for pack in ordered])),
            media=tuple(media),
            media_encoders=tuple(self.cost_model.encoder_name(segment) for segment in segments),
            media_packs=np.asarray([item.pack for item in media], dtype=np.int64),
            media_costs=np.rint(_array([self.cost_model.media_cost(s) * TICKS_PER_S for s in segments])),
            pieces=_pieces(media, [self.layout.chunk(pack) for pack in ordered]),
        )

    def _check_packs(self, packs: tuple[Pack, ...], group: int, num_replicas: int) -> None:
        where = f"group {group}"
        lanes = set(lanes_of_group(group, self.num_lanes, self.topology))
        if len(packs) > num_replicas * self.num_microbatches:
            raise PlanError(
                f"{len(packs)} packs for {num_replicas} replicas x {self.num_microbatches} microbatches",
                where=where,
            )
        if len({(pack.lane, pack.number) for pack in packs}) < len(packs):
            raise PlanError("the same pack was given twice", where=where)
        for pack in packs:
            if pack.lane not in lanes:
                raise PlanError(f"pack {pack.number} of lane {pack.lane} is of another group", where=where)
            if self.layout.seq_len and pack.num_tokens > self.layout.seq_len:
                raise PlanError(
                    f"pack has {pack.num_tokens} tokens, limit {self.layout.seq_len}",
                    where=f"{where}, lane {pack.lane}, pack {pack.number}",
                )

    def _in_order(self, inputs: _Inputs) -> _Choice:
        return self._with_media(inputs, packs_in_order(len(inputs.packs), len(inputs.replicas)), at_home=True)

    def _choose(self, inputs: _Inputs, unbalanced: _Choice) -> _Choice:
        """Of some pack placements take the shortest step without a makespan above the unbalanced one.

        Packs sorted by LLM cost are the optimum of the LLM, but they may spread media-heavy packs over more
        microbatches and so lengthen the encoders' part; the packs in order always qualify.
        """
        num_replicas, costs = len(inputs.replicas), inputs.pack_costs
        media_of_pack = np.bincount(inputs.media_packs, weights=inputs.media_costs, minlength=len(costs))
        placements = (
            packs_in_order(len(costs), num_replicas),
            packs_by_cost(costs, costs, num_replicas),
            packs_by_cost(costs + media_of_pack / len(inputs.ranks), costs, num_replicas),
        )
        choices = [self._with_media(inputs, placement, at_home=False) for placement in placements]
        return min(
            (
                choice
                for choice in choices
                if choice.encoder_ticks <= unbalanced.encoder_ticks
                and choice.llm_ticks <= unbalanced.llm_ticks
            ),
            key=lambda choice: choice.step_ticks,
        )

    def _with_media(self, inputs: _Inputs, packs: PackPlacement, *, at_home: bool) -> _Choice:
        members = np.zeros(len(inputs.media), dtype=np.int64)
        encoder_ticks = exchange_ticks = 0.0
        for microbatch in range(self.num_microbatches):
            items = np.flatnonzero(packs.microbatches[inputs.media_packs] == microbatch)
            if not len(items):
                continue
            load = _media_load(inputs, packs, items)
            placed = load.home if at_home else place_media(load, self._transfer_ticks)
            members[items] = placed
            encoder_ticks += float(member_loads(load, placed).max())
            exchange_ticks += exchange_time(load, placed, self._transfer_ticks)
        return _Choice(
            packs=packs,
            members=members,
            encoder_ticks=encoder_ticks,
            exchange_ticks=exchange_ticks,
            llm_ticks=step_makespan(inputs.pack_costs, packs.microbatches),
        )

    def _transfer_ticks(self, num_rows: int, num_messages: int) -> float:
        seconds = self.cost_model.transfer_cost(num_rows=num_rows, num_messages=num_messages)
        return float(round(seconds * TICKS_PER_S))


@dataclass(frozen=True, slots=True)
class _Media:
    """One media segment: where it is, and where its rows go."""

    pack: int
    sample: int
    segment: int
    position: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What one sequence chunk holds of one segment's rows, int64 [pieces] each."""

    item: IntArray
    chunk: IntArray
    rows: IntArray


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A step as arrays; costs in ticks. ``owners``: int64 [replicas, chunks], member that owns each chunk."""

    packs: tuple[Pack, ...]
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    owners: IntArray
    pack_costs: FloatArray
    media: tuple[_Media, ...]
    media_encoders: tuple[str, ...]
    media_packs: IntArray
    media_costs: FloatArray
    pieces: _Pieces


@dataclass(frozen=True, slots=True)
class _Choice:
    """One way to run the step; ``members``: int64 [media], who encodes each segment."""

    packs: PackPlacement
    members: IntArray
    encoder_ticks: float
    exchange_ticks: float
    llm_ticks: float

    @property
    def step_ticks(self) -> float:
        """Modelled time of the step."""
        return self.encoder_ticks + self.exchange_ticks + self.llm_ticks


def _array(values: list[float]) -> FloatArray:
    return np.asarray(values, dtype=np.float64)


def _pieces(media: Sequence[_Media], chunks: Sequence[int]) -> _Pieces:
    """Cut the rows of each segment at the chunk borders of its pack."""
    found = []
    for item, place in enumerate(media):
        size = chunks[place.pack]
        end = place.position + place.num_rows
        for chunk in range(place.position // size, (end - 1) // size + 1):
            rows = min(end, (chunk + 1) * size) - max(place.position, chunk * size)
            found.append((item, chunk, rows))
    columns = np.asarray(found, dtype=np.int64).reshape(-1, 3).T
    return _Pieces(item=columns[0], chunk=columns[1], rows=columns[2])


def _media_load(inputs: _Inputs, packs: PackPlacement, items: IntArray) -> MediaLoad:
    """The segments ``items`` (ascending) of one microbatch, renumbered from 0."""
    number = np.full(len(inputs.media), -1, dtype=np.int64)
    number[items] = np.arange(len(items))
    here = number[inputs.pieces.item] >= 0
    piece_item = inputs.pieces.item[here]
    replica = packs.replicas[inputs.media_packs]
    return MediaLoad(
        costs=inputs.media_costs[items],
        home=inputs.owners[replica[items], 0],
        piece_item=number[piece_item],
        piece_owner=inputs.owners[replica[piece_item], inputs.pieces.chunk[here]],
        piece_rows=inputs.pieces.rows[here],
        num_members=len(inputs.ranks),
    )


def _slots(inputs: _Inputs, packs: PackPlacement) -> tuple[PackSlot, ...]:
    places = zip(packs.replicas.tolist(), packs.microbatches.tolist(), strict=True)
    return tuple(
        PackSlot(pack=index, replica=inputs.replicas[replica], microbatch=microbatch)
        for index, (replica, microbatch) in enumerate(places)
    )


def _media(inputs: _Inputs, choice: _Choice) -> tuple[MediaPlacement, ...]:
    microbatches = choice.packs.microbatches.tolist()
    placed = zip(inputs.media, inputs.media_encoders, choice.members.tolist(), strict=True)
    return tuple(
        MediaPlacement(
            pack=item.pack,
            sample=item.sample,
            segment=item.segment,
            microbatch=microbatches[item.pack],
            encoder=encoder,
            rank=inputs.ranks[member],
            position=item.position,
            num_rows=item.num_rows,
        )
        for item, encoder, member in placed
    )


def _balance(costs: FloatArray, num_bins: int, before: float, after: float) -> Balance:
    """In seconds. The mean is what each bin would hold if work were a liquid, summed over microbatches."""
    return Balance(
        mean=float(costs.sum()) / num_bins / TICKS_PER_S,
        makespan_before=before / TICKS_PER_S,
        makespan_after=after / TICKS_PER_S,
    )
