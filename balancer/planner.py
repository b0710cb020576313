"""The planner of a group: packs of a step in, StepPlan out; the same on every member without a message.

It composes the pure parts: costs (``balancer.cost``), pack and media placement (``balancer.reorder``), rows
to owners (``balancer.reshard``). Costs become whole ticks first: sums of whole numbers are exact in any
order, so machines with different vector units still make the same plan. The plan is never worse than the
unbalanced one, neither for the encoders nor for the LLM, and every plan is checked before it leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from balancer.check import check_memory, check_plan
from balancer.cost import CostModel
from balancer.exchange import ExchangePricer, ExchangeSetting
from balancer.layout import SequenceKind, SequenceLayout
from balancer.lssp import LsspConfig
from balancer.nodes import group_nodes
from balancer.partition import FloatArray
from balancer.placement import StepPlacement, does_not_fit, keeps_cap, place_balanced, place_in_order
from balancer.reorder import PackPlacement, lanes_of_group, num_microbatches
from balancer.reshard import build_routes, reshard_plan
from balancer.step_inputs import TICKS_PER_S, StepInputs, step_inputs
from omni_pipeline.core.errors import ConfigError, PlanError
from omni_pipeline.core.interleave import Runs
from omni_pipeline.core.plan import EXACT, Balance, MediaPlacement, Pack, PackSlot, StepPlan
from omni_pipeline.core.reshard import ReshardPlan
from omni_pipeline.core.sample import quick_constructor
from omni_pipeline.core.topology import Topology

# A step has thousands of these.
_pack_slot = quick_constructor(PackSlot)
_placement = quick_constructor(MediaPlacement)


class NodeGroup(BaseModel):
    """A group of some nodes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    nodes: int = Field(1, ge=1, description="Nodes of a group: the most replicas that fit in them.")


class BalanceConfig(BaseModel):
    """The ``balance`` section of a run file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(True, description="Reorder packs and media; off keeps them where they fall.")
    group: Literal["none", "node", "all"] | int | NodeGroup = Field(
        "node",
        description="Replicas that balance together: 'none' (each alone), 'node' (the most that fit in a "
        "node and divide the replicas of the run), 'all', a number (at least 1), or { nodes = k }.",
    )
    exchange: ExchangeSetting = Field(
        "auto",
        description="How rows travel to their owners: 'exact' (one all-to-all), 'symmetric' (a buffer summed "
        "over the group), 'two_level' (inside nodes, then between them), or 'auto', in each microbatch the "
        "quickest in the model (docs/reshard.md).",
    )
    lssp: LsspConfig = LsspConfig()
    encoder_memory_bytes: int = Field(
        0,
        ge=0,
        description="Most activation bytes of the encoders that a rank may keep of one microbatch; larger "
        "segments are shared, whatever the time. 0: no cap.",
    )
    llm_memory_bytes: int = Field(
        0,
        ge=0,
        description="Most activation bytes of the LLM that a replica may keep of one microbatch; a pack "
        "above it stops the run. 0: no cap.",
    )
    hardware: str = Field(
        "h100",
        description="Rates of the machine, for modelled costs: 'h100', 'h200', 'cpu', or the path of a TOML "
        "file (docs/costs.md).",
    )
    costs: Path | None = Field(
        None,
        description="Costs fitted to this machine by `omni profile --calibrate`; default: modelled ones.",
    )

    @field_validator("group", mode="before")
    @classmethod
    def _is_a_group(cls, value: object) -> object:
        """Say what is allowed in one sentence, not one for each kind of value."""
        count = value["nodes"] if isinstance(value, dict) and value.keys() == {"nodes"} else value
        is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 1
        if not (is_count or isinstance(value, NodeGroup) or value in ("none", "node", "all")):
            raise ValueError("must be 'none', 'node', 'all', at least 1, or { nodes = k }")
        return value

    def replicas_per_group(self, *, world_size: int, ranks_per_node: int, tp: int, cp: int, pp: int) -> int:
        """Return what ``Topology.replicas_per_group`` must be for this setting; 0 is all."""
        if self.group == "all":
            return 0
        if self.group == "none":
            return 1
        if isinstance(self.group, int):
            return self.group
        num_nodes = 1 if self.group == "node" else self.group.nodes
        num_replicas = max(1, world_size // (tp * cp * pp))
        # Stages of one replica are far apart, so a node holds the same stage of several replicas.
        per_node = max(1, ranks_per_node // (tp * cp))
        most = min(num_replicas, num_nodes * per_node)
        sizes = [size for size in range(1, most + 1) if num_replicas % size == 0]
        # Whole nodes where that can be: a group that ends inside a node shares its links with another.
        return max([size for size in sizes if size % per_node == 0] or sizes)


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
        sequence: How the ranks of a replica own its positions; see ``balancer.layout``.

    Raises:
        ConfigError: The lanes do not divide the packs, the cost model uses an encoder not in ``encoders``, or
            the groups do not have the kind of exchange that ``config`` asks for.
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
        sequence: SequenceKind = "contiguous",
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
        if config.exchange == "two_level":
            # A kind that some group does not have is told before the first plan.
            for group in range(topology.num_groups):
                ExchangePricer(cost_model, group_nodes(topology, group), config.exchange)
        self.layout = SequenceLayout(topology, seq_len, sequence)
        self.num_microbatches = num_microbatches(num_lanes, packs_per_step // num_lanes, topology)

    def plan(self, packs: Sequence[Pack], *, step: int, group: int) -> StepPlan:
        """Return the plan of ``group`` for ``step``. The order of ``packs`` is free.

        Raises:
            PlanError: A pack of another group's lane, twice the same, more packs than places, a pack longer
                than the sequence, a sample longer than its bucket or shorter than its segments.
            ConfigError: A segment of a modality that no encoder reads, or media or a pack above a memory cap.
        """
        ordered = tuple(sorted(packs, key=lambda pack: (pack.lane, pack.number)))
        self._check_packs(ordered, group)
        inputs = step_inputs(
            ordered,
            group=group,
            cost_model=self.cost_model,
            layout=self.layout,
            lssp=self.config.lssp if self.config.enabled else LsspConfig(kind="off"),
            encoder_memory_bytes=self.config.encoder_memory_bytes,
            exchange=self.config.exchange,
        )
        unbalanced = place_in_order(inputs)
        chosen = place_balanced(inputs, unbalanced) if self.config.enabled else unbalanced
        if not keeps_cap(inputs, chosen):
            raise does_not_fit(inputs)
        plan = StepPlan(
            step=step,
            group=group,
            ranks=inputs.ranks,
            replicas=inputs.replicas,
            num_microbatches=self.num_microbatches,
            packs=inputs.packs,
            slots=_slots(inputs, chosen.packs),
            media=_media(inputs, chosen),
            exchanges=tuple(chosen.exchanges.get(index, EXACT) for index in range(self.num_microbatches)),
            encoder_balance=_balance(
                inputs.media_costs, len(inputs.ranks), unbalanced.encoder_ticks, chosen.encoder_ticks
            ),
            llm_balance=_balance(
                inputs.pack_costs, len(inputs.replicas), unbalanced.llm_ticks, chosen.llm_ticks
            ),
        )
        check_plan(plan, self.topology)
        check_memory(
            plan,
            self.cost_model,
            encoder_memory_bytes=self.config.encoder_memory_bytes,
            llm_memory_bytes=self.config.llm_memory_bytes,
        )
        return plan

    def reshard(self, plan: StepPlan, *, microbatch: int, rank: int) -> ReshardPlan:
        """Return what ``rank`` sends and receives in ``microbatch``; see ``balancer.reshard``.

        Raises:
            PlanError: ``rank`` is not of the plan's group.
        """
        if rank not in plan.ranks:
            raise PlanError(f"rank {rank} is not one of the {len(plan.ranks)} ranks of group {plan.group}")
        routes = build_routes(plan, microbatch=microbatch, layout=self.layout, encoders=self.encoders)
        return reshard_plan(routes, kind=plan.exchanges[microbatch], member=plan.ranks.index(rank))

    def unbalanced(self, plan: StepPlan) -> StepPlan:
        """Return the same step with packs in order and media at home: what ``plan`` is compared with."""
        off = GroupPlanner(
            self.topology,
            cost_model=self.cost_model,
            # It may break caps that the plan keeps: it is what would be done without them.
            config=BalanceConfig(enabled=False, exchange=self.config.exchange),
            num_lanes=self.num_lanes,
            packs_per_step=self.packs_per_step,
            encoders=self.encoders,
            seq_len=self.layout.seq_len,
            sequence=self.layout.kind,
        )
        return off.plan(plan.packs, step=plan.step, group=plan.group)

    def _check_packs(self, packs: tuple[Pack, ...], group: int) -> None:
        where = f"group {group}"
        num_replicas = len(self.topology.replicas_of_group(group))
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
            self._check_samples(pack, where)
            if self.layout.seq_len and pack.num_positions > self.layout.seq_len:
                raise PlanError(
                    f"pack takes {pack.num_positions} positions, limit {self.layout.seq_len}",
                    where=f"{where}, lane {pack.lane}, pack {pack.number}",
                )

    def _check_samples(self, pack: Pack, where: str) -> None:
        for sample in pack.samples:
            num_tokens = 0
            for segment in sample.segments:
                num_tokens += segment.num_tokens
            if num_tokens > sample.num_tokens:
                what = f"segments take {num_tokens} tokens, the sample says {sample.num_tokens}"
            elif pack.padded_len and sample.num_tokens > pack.padded_len:
                what = f"sample has {sample.num_tokens} tokens, its bucket holds {pack.padded_len}"
            else:
                continue
            at = f"{where}, source {sample.id.source!r}, {sample.shard}, sample {sample.key}"
            raise PlanError(what, where=at)


def _slots(inputs: StepInputs, packs: PackPlacement) -> tuple[PackSlot, ...]:
    places = zip(packs.replicas.tolist(), packs.microbatches.tolist(), strict=True)
    return tuple(
        _pack_slot(index, inputs.replicas[replica], microbatch)
        for index, (replica, microbatch) in enumerate(places)
    )


def _media(inputs: StepInputs, choice: StepPlacement) -> tuple[MediaPlacement, ...]:
    pack, sample, segment, position, num_rows = inputs.media.T.tolist()
    microbatches, members = choice.packs.microbatches[inputs.media_packs], choice.encoding.members.tolist()
    alone: list[tuple[int, ...]] = [(rank,) for rank in inputs.ranks]
    ranks = [alone[member] for member in members]
    shares: list[tuple[int, ...]] = [(rows,) for rows in num_rows]
    joined = [False] * len(members)
    for item in choice.encoding.long_items:
        degree, first = int(choice.encoding.degrees[item]), members[item]
        found = inputs.shares(item, degree)
        assert found is not None, f"segment {item} does not divide into {degree}"
        ranks[item], shares[item] = inputs.ranks[first : first + degree], tuple(found.rows.tolist())
        joined[item] = found.joined
    runs: list[Runs] = [()] * len(members)
    for item, found_runs in inputs.media_runs.items():
        runs[item] = found_runs
    columns = (microbatches.tolist(), inputs.media_encoders, ranks, shares, joined, position, num_rows, runs)
    return tuple(map(_placement, pack, sample, segment, *columns))


def _balance(costs: FloatArray, num_bins: int, before: float, after: float) -> Balance:
    """In seconds. The mean is what each bin would hold if work were a liquid, summed over microbatches."""
    return Balance(
        mean=float(costs.sum()) / num_bins / TICKS_PER_S,
        makespan_before=before / TICKS_PER_S,
        makespan_after=after / TICKS_PER_S,
    )
