"""Every kind of damage to a plan is caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from balancer.check import check_plan
from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.plan import MediaPlacement, PackSlot, StepPlan
from omni_pipeline.core.topology import Topology
from tests.balancer.worlds import Step, image_pack


def good_plan() -> tuple[Topology, StepPlan]:
    """A plan of two replicas with an image in each pack, and an empty microbatch slot left."""
    packs = tuple(image_pack(lane, num_images=1) for lane in range(2))
    step = Step(Topology(world_size=4, replicas_per_group=2), 4, 1, packs)
    pair = (packs[0], dataclasses.replace(packs[1], lane=2))
    return step.topology, step.planner().plan(pair, step=4, group=0)


def moved(item: MediaPlacement, **changes: Any) -> MediaPlacement:
    """The placement with some numbers changed."""
    return dataclasses.replace(item, **changes)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda plan: {"slots": plan.slots[:1]}, "1 slots for 2 packs, not one each"),
        (
            lambda plan: {"slots": (plan.slots[0], dataclasses.replace(plan.slots[0], pack=1))},
            r"packs 0 and 1 share \(replica, microbatch\)",
        ),
        (
            lambda plan: {"slots": (PackSlot(0, 2, 0), plan.slots[1])},
            r"pack 0 is at \(replica, microbatch\) \(2, 0\), outside",
        ),
        (
            lambda plan: {"slots": (PackSlot(0, 0, 9), plan.slots[1])},
            r"pack 0 is at \(replica, microbatch\) \(0, 9\), outside",
        ),
        (lambda plan: {"media": plan.media[:1]}, "media placements differ from the packs' media"),
        (lambda plan: {"media": (plan.media[0], plan.media[0])}, "media placements differ"),
        (
            lambda plan: {"media": (moved(plan.media[0], position=0), plan.media[1])},
            "media placements differ",
        ),
        (
            lambda plan: {"media": (moved(plan.media[0], ranks=(3,)), plan.media[1])},
            r"ranks \(3,\) encode media",
        ),
        (
            lambda plan: {"media": (moved(plan.media[0], microbatch=1), plan.media[1])},
            "is encoded in microbatch 1",
        ),
        (lambda plan: {"ranks": (0, 1, 2)}, "plan has 3 ranks that are not those of its group"),
        (lambda plan: {"replicas": (0, 2)}, r"plan has replicas \(0, 2\)"),
    ],
)
def test_a_damaged_plan_is_caught(damage: Callable[[StepPlan], dict[str, Any]], message: str) -> None:
    topology, plan = good_plan()
    check_plan(plan, topology)
    with pytest.raises(PlanError, match=message) as caught:
        check_plan(dataclasses.replace(plan, **damage(plan)), topology)
    assert caught.value.where == "step 4, group 0"
