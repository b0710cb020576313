"""What every plan must keep: nothing lost, nothing twice, nobody from outside. Linear, so always run."""

from __future__ import annotations

from balancer.reshard import media_positions
from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.plan import StepPlan
from omni_pipeline.core.topology import Topology


def check_plan(plan: StepPlan, topology: Topology) -> None:
    """Raise unless the plan places each pack and each media segment exactly once, inside its group.

    Raises:
        PlanError: Names the first pack or segment that is lost, doubled, misplaced or outside the group.
    """
    where = f"step {plan.step}, group {plan.group}"
    if plan.ranks != topology.ranks_of_group(plan.group):
        raise PlanError(f"plan has {len(plan.ranks)} ranks that are not those of its group", where=where)
    if plan.replicas != topology.replicas_of_group(plan.group):
        raise PlanError(f"plan has replicas {plan.replicas} that are not those of its group", where=where)
    _check_slots(plan, where)
    _check_media(plan, where)


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


def _check_media(plan: StepPlan, where: str) -> None:
    expected = [
        (index, sample, segment, position, pack.samples[sample].segments[segment].num_rows)
        for index, pack in enumerate(plan.packs)
        for sample, segment, position in media_positions(pack)
    ]
    found = [(item.pack, item.sample, item.segment, item.position, item.num_rows) for item in plan.media]
    if found != expected:
        differing = next(
            (pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]),
            (len(found), len(expected)),
        )
        raise PlanError(
            f"media placements differ from the packs' media: has {differing[0]}, should be {differing[1]}",
            where=where,
        )
    ranks = set(plan.ranks)
    lengths = [pack.num_positions for pack in plan.packs]
    for item in plan.media:
        if not ranks.issuperset(item.ranks):
            raise PlanError(f"ranks {item.ranks} encode media and are not all of the group", where=where)
        if len(set(item.ranks)) != len(item.shares) or sum(item.shares) != item.num_rows:
            raise PlanError(
                f"ranks {item.ranks} make shares of {item.shares} rows, the segment has {item.num_rows}",
                where=where,
            )
        if min(item.shares) < (len(item.ranks) > 1):
            raise PlanError(
                f"ranks {item.ranks} make shares of {item.shares} rows, one is empty", where=where
            )
        if item.microbatch != plan.slots[item.pack].microbatch:
            raise PlanError(
                f"segment {item.segment} of pack {item.pack} is encoded in microbatch {item.microbatch}, "
                f"needed in {plan.slots[item.pack].microbatch}",
                where=where,
            )
        end = item.position + item.num_rows
        if end > lengths[item.pack]:
            raise PlanError(
                f"rows of pack {item.pack} end at {end}, behind its {lengths[item.pack]} positions",
                where=where,
            )
