"""A step of a run made plain: its plan, and tables of it, without running or decoding anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from balancer.planner import GroupPlanner
from balancer.report import (
    ExchangeRow,
    PackRow,
    RankRow,
    exchange_rows,
    moved_rows_fraction,
    pack_rows,
    rank_rows,
)
from loaders.quarantine import QuarantineRecord, read_quarantine
from omni_pipeline.app.follow import KnownStates, Progress, Start, follow, no_progress
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.run_dir import RunDir
from omni_pipeline.app.sinks import num_steps_trained
from omni_pipeline.app.source_rows import SourceRow, source_rows
from omni_pipeline.app.wire import build_planner, build_tokenizer, build_topology, training_stream
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import MediaPlacement, StepPlan, plan_to_dict
from omni_pipeline.core.sample import Sample, Segment
from omni_pipeline.core.topology import Topology


@dataclass(frozen=True)
class SampleRow:
    """One sample of a plan.

    Args:
        sample: What the index says of it.
        replica: Where its pack runs.
        microbatch: Likewise.
        segments: Each segment in words: what it takes, and for media the rows that the encoder makes of it
            and the rank that does so, or the ranks and how many each.
    """

    sample: Sample
    replica: int
    microbatch: int
    segments: tuple[str, ...]


@dataclass(frozen=True)
class ExplainedGroup:
    """One step of one group.

    Args:
        plan: What it would do.
        packs: One row per (replica, microbatch).
        ranks: One row per rank: encoding before and after balancing.
        exchanges: One row per microbatch: how embedding rows travel.
    """

    plan: StepPlan
    packs: list[PackRow]
    ranks: list[RankRow]
    exchanges: list[ExchangeRow]

    @property
    def moved_fraction(self) -> float:
        """Share of embedding rows that cross from one rank to another."""
        return moved_rows_fraction(self.exchanges)

    def sample_rows(self) -> Iterator[SampleRow]:
        """Yield every sample, in plan order."""
        placed = {(item.pack, item.sample, item.segment): item for item in self.plan.media}
        for index, (pack, slot) in enumerate(zip(self.plan.packs, self.plan.slots, strict=True)):
            for number, sample in enumerate(pack.samples):
                segments = tuple(
                    _describe(segment, placed.get((index, number, place)))
                    for place, segment in enumerate(sample.segments)
                )
                yield SampleRow(sample, slot.replica, slot.microbatch, segments)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, with the rows of packs and ranks."""
        rows = {(row.lane, row.number): row for row in self.packs}
        content = plan_to_dict(self.plan)
        for pack in content["packs"]:
            row = rows[pack["lane"], pack["number"]]
            pack.update(
                num_positions=row.num_positions, fill=row.fill, llm_s=row.llm_s, encoder_s=row.encoder_s
            )
        return {
            **content,
            "encoding": [asdict(row) for row in self.ranks],
            "travel": [asdict(row) for row in self.exchanges],
            "moved_rows_fraction": self.moved_fraction,
        }


@dataclass(frozen=True)
class ExplainedStep:
    """One step of a run.

    Args:
        step: Which.
        topology: The layout it is planned for.
        start: The known state that the order was followed from.
        groups: The groups asked for.
        sources: How each source stands after the step, in the lanes of these groups.
        failures: What the run's quarantine says of the step.
        notes: What else there is to know, in sentences.
    """

    step: int
    topology: Topology
    start: Start
    groups: list[ExplainedGroup]
    sources: list[SourceRow]
    failures: list[QuarantineRecord]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "step": self.step,
            "ranks": self.topology.world_size,
            "num_groups": self.topology.num_groups,
            "followed_from": self.start.to_dict(),
            "groups": [group.to_dict() for group in self.groups],
            "sources": [asdict(row) for row in self.sources],
            "failures": [asdict(record) for record in self.failures],
            "notes": self.notes,
        }


def explain_step(
    config: RunConfig,
    *,
    step: int,
    world_size: int,
    ranks_per_node: int | None = None,
    groups: Sequence[int] | None = (0,),
    progress: Progress = no_progress,
) -> ExplainedStep:
    """Return what ``step`` would do on ``world_size`` ranks; no sample is read.

    Args:
        config: The run.
        step: From 0; may be beyond ``run.steps``.
        world_size: Ranks.
        ranks_per_node: Ranks of one machine; None: all of them.
        groups: Those wanted; None: all.
        progress: Told how far the order was followed.

    Raises:
        ConfigError: Wrong settings or data, or no such group.
    """
    topology = build_topology(config, world_size=world_size, ranks_per_node=ranks_per_node or world_size)
    wanted = range(topology.num_groups) if groups is None else groups
    _check_groups(wanted, topology)
    planner = build_planner(config, topology)
    stream = training_stream(config, build_tokenizer(config))
    lanes = {group: frozenset(stream.lanes_of_group(group, topology)) for group in wanted}
    states = KnownStates(config, stream)
    start, order = states.nearest(step, sorted(frozenset().union(*lanes.values())))
    for _, drawn in follow(order, range(start.step, step + 1), progress=progress):
        last = drawn
    packs = [order.pack_of(pack) for pack in last]
    plans = [
        planner.plan([pack for pack in packs if pack.lane in lanes[group]], step=step, group=group)
        for group in wanted
    ]
    failures, notes = _failures(config, step)
    return ExplainedStep(
        step=step,
        topology=topology,
        start=start,
        groups=[_explained(plan, planner, seq_len=config.order.seq_len) for plan in plans],
        sources=source_rows(stream, order, step=step),
        failures=failures,
        notes=[*states.notes(start, step), *_empty_packs(config, plans), *notes],
    )


def _explained(plan: StepPlan, planner: GroupPlanner, *, seq_len: int) -> ExplainedGroup:
    return ExplainedGroup(
        plan=plan,
        packs=pack_rows(plan, cost_model=planner.cost_model, seq_len=seq_len),
        ranks=rank_rows(plan, planner.unbalanced(plan), cost_model=planner.cost_model),
        exchanges=exchange_rows(
            plan, layout=planner.layout, encoders=planner.encoders, cost_model=planner.cost_model
        ),
    )


def _check_groups(groups: Sequence[int], topology: Topology) -> None:
    for group in groups:
        if not 0 <= group < topology.num_groups:
            raise ConfigError(
                f"there is no group {group}: {topology.world_size} ranks make {topology.num_groups}",
                fix="count groups from 0, or change balance.group",
            )


def _failures(config: RunConfig, step: int) -> tuple[list[QuarantineRecord], list[str]]:
    """What the quarantine says of a step, and what a plan cannot know."""
    folder = RunDir(config.run.dir)
    records = [record for record in read_quarantine(folder.quarantine_path) if record.step == step]
    if step < num_steps_trained(folder.metrics_path):
        return records, []
    return records, ["a plan cannot know which samples fail to decode: they keep their place, without labels"]


def _empty_packs(config: RunConfig, plans: Sequence[StepPlan]) -> list[str]:
    packs = [pack for plan in plans for pack in plan.packs]
    num_empty = sum(not pack.samples for pack in packs)
    if not num_empty:
        return []
    end = "; order.end = 'drop' ends the run before this step" if config.order.end == "drop" else ""
    return [f"{num_empty} of {len(packs)} packs are empty, since their lanes have no samples left{end}"]


def _describe(segment: Segment, placement: MediaPlacement | None) -> str:
    if placement is None:
        return f"{segment.modality} {segment.num_tokens}"
    if placement.is_long:
        shares = zip(placement.ranks, placement.shares, strict=True)
        ranks = " + ".join(f"{rank}: {rows}" for rank, rows in shares)
    else:
        ranks = str(placement.ranks[0])
    joined = " joined" if placement.joined else ""
    return f"{segment.modality} {segment.num_units} -> {segment.num_rows} @ {ranks}{joined}"
