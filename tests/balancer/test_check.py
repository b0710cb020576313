"""Every kind of damage to a plan is caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from balancer.check import check_memory, check_plan
from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.plan import MediaPlacement, Pack, PackSlot, StepPlan
from omni_pipeline.core.topology import Topology
from tests.balancer.worlds import LSSP, Step, clip_pack, cost_model, image_pack


def good_plan() -> tuple[Topology, StepPlan]:
    """A plan of two replicas with an image in each pack, and an empty microbatch slot left."""
    packs = tuple(image_pack(lane, num_images=1) for lane in range(2))
    step = Step(Topology(world_size=4, replicas_per_group=2), 4, 1, packs)
    pair = (packs[0], dataclasses.replace(packs[1], lane=2))
    return step.topology, step.planner().plan(pair, step=4, group=0)


def moved(item: MediaPlacement, **changes: Any) -> MediaPlacement:
    """The placement with some numbers changed."""
    return dataclasses.replace(item, **changes)


def long_plan() -> tuple[Topology, StepPlan]:
    """A plan of two nodes of four ranks, with a clip that the first node shares."""
    packs = (clip_pack(0, frames=16), Pack(lane=1, number=0, samples=()))
    step = Step(Topology(world_size=8, ranks_per_node=4), 2, 1, packs)
    return step.topology, step.planner(lssp=LSSP).plan(packs, step=4, group=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": (0, 1, 2)}, r"ranks \(0, 1, 2\) share media and are no subgroup of one node"),
        ({"ranks": (2, 3, 4, 5)}, r"ranks \(2, 3, 4, 5\) share media and are no subgroup"),
        ({"ranks": (1, 2), "shares": (128, 128)}, r"ranks \(1, 2\) share media and are no subgroup"),
        ({"ranks": (1, 0), "shares": (128, 128)}, r"ranks \(1, 0\) share media and are no subgroup"),
        ({"ranks": (0, 1, 2, 3, 4, 5, 6, 7), "shares": (32,) * 8}, "share media and are no subgroup"),
        ({"ranks": (0, 8)}, r"ranks \(0, 8\) share media and are no subgroup"),
        ({"ranks": (0, 1)}, r"make shares of \(64, 64, 64, 64\) rows, the segment has 256"),
        ({"shares": (64, 64, 64, 63)}, r"make shares of \(64, 64, 64, 63\) rows, the segment has 256"),
        ({"shares": (64, 64, 128, 0)}, "rows, one is empty"),
        ({"ranks": (0,), "shares": (256,), "joined": True}, "rank 0 joins a share with nobody"),
    ],
)
def test_damaged_shares_are_caught(changes: dict[str, Any], message: str) -> None:
    topology, plan = long_plan()
    check_plan(plan, topology)
    (item,) = plan.media
    assert item.ranks == (0, 1, 2, 3)
    with pytest.raises(PlanError, match=message):
        check_plan(dataclasses.replace(plan, media=(moved(item, **changes),)), topology)


def test_bytes_above_a_cap_are_caught() -> None:
    _, plan = long_plan()
    model = cost_model()
    share = model.media_bytes(plan.packs[0].samples[0].segments[0], 64)
    check_memory(plan, model, encoder_memory_bytes=share, llm_memory_bytes=0)
    with pytest.raises(PlanError, match=f"rank 0 keeps {share} bytes of media in microbatch 0, limit"):
        check_memory(plan, model, encoder_memory_bytes=share - 1, llm_memory_bytes=0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda plan: {"exchanges": ()}, "0 exchanges for 1 microbatches, not one each"),
        (lambda plan: {"exchanges": ("two_level",)}, "an exchange of two hops in a group without rails"),
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
            lambda plan: {"media": (moved(plan.media[0], runs=((5, 16),)), plan.media[1])},
            r"placed at \(\(5, 16\),\), should be at \(\)",
        ),
        (
            lambda plan: {"media": (moved(plan.media[0], ranks=(3,)), plan.media[1])},
            r"ranks \(3,\) share media and are no subgroup",
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
