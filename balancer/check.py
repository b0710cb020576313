"""What every plan must keep: nothing lost, nothing twice, nobody from outside. Linear, so always run."""

from __future__ import annotations

import itertools
import operator
from collections import Counter

import numpy as np

from balancer.cost import CostModel
from balancer.encoding import subgroups
from balancer.lssp import DEGREES
from balancer.reshard import PLACE_FIELDS, media_places
from omni_pipeline.core.errors import ConfigError, PlanError
from omni_pipeline.core.plan import StepPlan
from omni_pipeline.core.topology import Topology

_PLACE_OF = operator.attrgetter(*PLACE_FIELDS, "microbatch")


def check_plan(plan: StepPlan, topology: Topology) -> None:
    """Raise unless the plan places each pack and each row of media exactly once, inside its group.

    Raises:
        PlanError: Names the first pack or segment that is lost, doubled, misplaced or outside the group, or
            shared by ranks that are no subgroup.
    """
    where = f"step {plan.step}, group {plan.group}"
    if plan.ranks != topology.ranks_of_group(plan.group):
        raise PlanError(f"plan has {len(plan.ranks)} ranks that are not those of its group", where=where)
    if plan.replicas != topology.replicas_of_group(plan.group):
        raise PlanError(f"plan has replicas {plan.replicas} that are not those of its group", where=where)
    if len(plan.exchanges) != plan.num_microbatches:
        raise PlanError(
            f"{len(plan.exchanges)} exchanges for {plan.num_microbatches} microbatches, not one each",
            where=where,
        )
    if "two_level" in plan.exchanges and not topology.rails_of_group(plan.group):
        raise PlanError("an exchange of two hops in a group without rails", where=where)
    _check_slots(plan, where)
    _check_media_places(plan, where)
    _check_shares(plan, topology, where)


def check_memory(
    plan: StepPlan, cost_model: CostModel, *, encoder_memory_bytes: int, llm_memory_bytes: int
) -> None:
    """Raise unless every rank and every replica keeps at most these bytes of a microbatch; 0 is no cap.

    Raises:
        PlanError: Media of one microbatch are above the cap on a rank: the planner should have said so.
        ConfigError: A pack is above the cap of the LLM, wherever it runs.
    """
    where = f"step {plan.step}, group {plan.group}"
    if llm_memory_bytes:
        for pack in plan.packs:
            num_bytes = cost_model.pack_bytes(pack)
            if num_bytes > llm_memory_bytes:
                raise ConfigError(
                    f"pack {pack.number} of lane {pack.lane} has {pack.num_positions} positions and keeps "
                    f"{num_bytes} bytes of activations in the LLM, limit {llm_memory_bytes}",
                    where=where,
                    fix="lower order.seq_len, or raise balance.llm_memory_bytes",
                )
    if encoder_memory_bytes:
        for (rank, microbatch), num_bytes in sorted(_encoder_bytes(plan, cost_model).items()):
            if num_bytes > encoder_memory_bytes:
                raise PlanError(
                    f"rank {rank} keeps {num_bytes} bytes of media in microbatch {microbatch}, "
                    f"limit {encoder_memory_bytes}",
                    where=where,
                )


def _encoder_bytes(plan: StepPlan, cost_model: CostModel) -> Counter[tuple[int, int]]:
    """Activation bytes by (rank, microbatch)."""
    found: Counter[tuple[int, int]] = Counter()
    for item in plan.media:
        segment = plan.packs[item.pack].samples[item.sample].segments[item.segment]
        for rank, rows in zip(item.ranks, item.shares, strict=True):
            found[rank, item.microbatch] += cost_model.media_bytes(segment, rows)
    return found


def _check_slots(plan: StepPlan, where: str) -> None:
    if [slot.pack for slot in plan.slots] != list(range(len(plan.packs))):
        raise PlanError(f"{len(plan.slots)} slots for {len(plan.packs)} packs, not one each", where=where)
    taken: dict[tuple[int, int], int] = {}
    replicas = set(plan.replicas)
    for slot in plan.slots:
        place = (slot.replica, slot.microbatch)
        if slot.replica not in replicas or not 0 <= slot.microbatch < plan.num_microbatches:
            raise PlanError(f"pack {slot.pack} is at (replica, microbatch) {place}, outside", where=where)
        if place in taken:
            raise PlanError(
                f"packs {taken[place]} and {slot.pack} share (replica, microbatch) {place}", where=where
            )
        taken[place] = slot.pack


def _check_media_places(plan: StepPlan, where: str) -> None:
    _, expected, runs = media_places(plan.packs)
    values = itertools.chain.from_iterable(map(_PLACE_OF, plan.media))
    *place, microbatch = np.fromiter(values, dtype=np.int64).reshape(-1, len(PLACE_FIELDS) + 1).T
    found = np.stack(place, axis=1)
    if not np.array_equal(found, expected):
        differing = next(
            (pair for pair in zip(found.tolist(), expected.tolist(), strict=False) if pair[0] != pair[1]),
            (len(found), len(expected)),
        )
        raise PlanError(
            f"media placements differ from the packs' media: has {differing[0]}, should be {differing[1]}",
            where=where,
        )
    for item, found_runs in enumerate([item.runs for item in plan.media]):
        if found_runs != runs.get(item, ()):
            raise PlanError(
                f"rows of segment {plan.media[item].segment} of pack {plan.media[item].pack} are placed at "
                f"{found_runs}, should be at {runs.get(item, ())}",
                where=where,
            )
    pack, _, segment, position, num_rows = place
    needed = np.asarray([slot.microbatch for slot in plan.slots], dtype=np.int64)[pack]
    for item in np.flatnonzero(microbatch != needed).tolist():
        raise PlanError(
            f"segment {segment[item]} of pack {pack[item]} is encoded in microbatch {microbatch[item]}, "
            f"needed in {needed[item]}",
            where=where,
        )
    lengths = np.asarray([pack.num_positions for pack in plan.packs], dtype=np.int64)[pack]
    ends = position + num_rows
    for item, item_runs in runs.items():
        ends[item] = sum(item_runs[-1])
    for item in np.flatnonzero(ends > lengths).tolist():
        raise PlanError(
            f"rows of pack {pack[item]} end at {ends[item]}, behind its {lengths[item]} positions",
            where=where,
        )


def _check_shares(plan: StepPlan, topology: Topology, where: str) -> None:
    nodes = topology.nodes_of_group(plan.group)
    allowed = {
        tuple(ranks)
        for degree in (1, *DEGREES)
        for ranks in np.asarray(plan.ranks)[subgroups(plan.ranks, nodes, degree)].tolist()
    }
    for item in plan.media:
        if item.ranks not in allowed:
            raise PlanError(
                f"ranks {item.ranks} share media and are no subgroup of one node of the group", where=where
            )
        if len(item.ranks) != len(item.shares) or sum(item.shares) != item.num_rows:
            raise PlanError(
                f"ranks {item.ranks} make shares of {item.shares} rows, the segment has {item.num_rows}",
                where=where,
            )
        if min(item.shares) < item.is_long:
            raise PlanError(
                f"ranks {item.ranks} make shares of {item.shares} rows, one is empty", where=where
            )
        if item.joined and not item.is_long:
            raise PlanError(f"rank {item.ranks[0]} joins a share with nobody", where=where)
