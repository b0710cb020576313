"""A step of a run made plain: its plan, and tables of it, without running or decoding anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from balancer.report import PackRow, RankRow, moved_rows_fraction, pack_rows, rank_rows
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.wire import build_planner, build_tokenizer, build_topology, training_stream
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import StepPlan
from omni_pipeline.core.sample import Segment


@dataclass(frozen=True)
class ExplainedStep:
    """One step of one group.

    Args:
        plan: What it would do.
        packs: One row per (replica, microbatch).
        ranks: One row per rank: encoding before and after balancing.
        moved_fraction: Share of embedding rows that cross from one rank to another.
    """

    plan: StepPlan
    packs: list[PackRow]
    ranks: list[RankRow]
    moved_fraction: float

    def sample_rows(self) -> Iterator[tuple[str, str, int, str]]:
        """Yield (place, source/key, tokens, segments) of every sample, in plan order."""
        ranks = {(item.pack, item.sample, item.segment): item.rank for item in self.plan.media}
        for index, (pack, slot) in enumerate(zip(self.plan.packs, self.plan.slots, strict=True)):
            for number, sample in enumerate(pack.samples):
                segments = ", ".join(
                    _describe(segment, rank=ranks.get((index, number, place)))
                    for place, segment in enumerate(sample.segments)
                )
                where = f"replica {slot.replica}, microbatch {slot.microbatch}"
                yield where, f"{sample.id.source}/{sample.key}", sample.num_tokens, segments


def explain_step(config: RunConfig, *, step: int, world_size: int, group: int) -> ExplainedStep:
    """Return what ``step`` would do on ``world_size`` ranks.

    The order is followed from step 0, because packs depend on those before; no sample is read.

    Raises:
        ConfigError: Wrong settings or data, or no such group.
    """
    topology = build_topology(config, world_size=world_size, ranks_per_node=world_size)
    if group >= topology.num_groups:
        raise ConfigError(
            f"there is no group {group}: {world_size} ranks make {topology.num_groups}",
            fix="count groups from 0, or change balance.group",
        )
    planner = build_planner(config, topology)
    order = training_stream(config, build_tokenizer(config)).order_of_group(group, topology)
    for earlier in range(step):
        order.next_step(earlier)
    plan = planner.plan(order.next_step(step), step=step, group=group)
    unbalanced = planner.unbalanced(plan)
    model = planner.cost_model
    return ExplainedStep(
        plan=plan,
        packs=pack_rows(plan, cost_model=model, seq_len=config.order.seq_len),
        ranks=rank_rows(plan, unbalanced, cost_model=model),
        moved_fraction=moved_rows_fraction(plan, topology),
    )


def _describe(segment: Segment, *, rank: int | None) -> str:
    if rank is None:
        return f"{segment.modality} {segment.num_tokens}"
    return f"{segment.modality} {segment.num_units} -> {segment.num_rows} @ {rank}"
