"""Where samples run on a given number of ranks: the plan of each step in which they are packed.

A plan takes all packs of a group, so all lanes of the group are followed; more work than finding the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from balancer.planner import GroupPlanner
from loaders.order import LanePack
from omni_pipeline.app.follow import KnownStates, Progress, follow
from omni_pipeline.app.wire import Stream
from omni_pipeline.core.plan import StepPlan


class SampleVisit(NamedTuple):
    """A position of a source in a lane, and the step and number of the pack that it is in."""

    source: str
    lane: int
    position: int
    step: int
    pack: int


@dataclass(frozen=True)
class VisitPlace:
    """Where a sample runs.

    Args:
        group: Group of replicas that owns its lane.
        replica: Replica that runs its pack.
        microbatch: Microbatch of the step.
        ranks: Ranks that own its positions.
        encoded_by: Rank of each of its media segments, in sequence order.
    """

    group: int
    replica: int
    microbatch: int
    ranks: tuple[int, ...]
    encoded_by: tuple[int, ...]


def places_of(
    visits: Iterable[SampleVisit],
    stream: Stream,
    *,
    states: KnownStates,
    planner: GroupPlanner,
    progress: Progress,
) -> dict[SampleVisit, VisitPlace]:
    """Return the place of each visit; every group involved is followed once, to its last visit."""
    topology = planner.topology
    by_group: dict[int, dict[int, list[SampleVisit]]] = {}
    for visit in visits:
        group = visit.lane % topology.num_groups
        by_group.setdefault(group, {}).setdefault(visit.step, []).append(visit)
    places: dict[SampleVisit, VisitPlace] = {}
    for group, by_step in by_group.items():
        start, order = states.nearest(min(by_step), stream.lanes_of_group(group, topology))
        for step, packs in follow(order, range(start.step, max(by_step) + 1), progress=progress):
            if step not in by_step:
                continue
            plan = planner.plan([order.pack_of(pack) for pack in packs], step=step, group=group)
            for visit in by_step[step]:
                sample = _index_of(visit, packs, order.source_names)
                places[visit] = _place(visit, sample, plan, planner)
    return places


def _index_of(visit: SampleVisit, packs: Iterable[LanePack], names: Sequence[str]) -> int:
    """Return the index of the visit's sample in its pack, which may hold the sample twice."""
    (pack,) = [pack for pack in packs if (pack.lane, pack.number) == (visit.lane, visit.pack)]
    drawn = [(names[entry.source], entry.position) for entry in pack.entries]
    return drawn.index((visit.source, visit.position))


def _place(visit: SampleVisit, sample: int, plan: StepPlan, planner: GroupPlanner) -> VisitPlace:
    pack = [(pack.lane, pack.number) for pack in plan.packs].index((visit.lane, visit.pack))
    slot = plan.slots[pack]
    return VisitPlace(
        group=plan.group,
        replica=slot.replica,
        microbatch=slot.microbatch,
        ranks=planner.topology.row_owners(slot.replica),
        encoded_by=tuple(
            rank for item in plan.media if (item.pack, item.sample) == (pack, sample) for rank in item.ranks
        ),
    )
