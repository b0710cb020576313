"""The digest of a plan tells apart all that members must agree on, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

from omni_pipeline.core.plan import Balance, MediaPlacement, Pack, PackSlot, StepPlan
from omni_pipeline.core.sample import Modality, Sample, SampleId, Segment

LOAD = Balance(mean=1.0, makespan_before=2.0, makespan_after=1.5)


def image(rows: int) -> Segment:
    return Segment(Modality.IMAGE, "jpg", 0, 9, (1, 2, 2 * rows), rows, rows + 2)


def plan_of(*samples: Sample, **changed: Any) -> StepPlan:
    """A plan of one pack, whose first segment two of four ranks share."""
    media = MediaPlacement(0, 0, 0, 1, "vision", (1, 2), (3, 5), False, 1, 8)
    content: dict[str, Any] = {
        "step": 3,
        "group": 0,
        "ranks": (0, 1, 2, 3),
        "replicas": (0, 1),
        "num_microbatches": 2,
        "packs": (Pack(4, 5, samples or (sample(image(8)),)),),
        "slots": (PackSlot(0, 1, 1),),
        "media": (media,),
        "exchanges": ("exact", "exact"),
        "encoder_balance": LOAD,
        "llm_balance": LOAD,
    }
    return StepPlan(**{**content, **changed})


def sample(*segments: Segment, row: int = 7, **changed: Any) -> Sample:
    made = Sample(SampleId("web", 1, row), "k", "web.tar", segments, 12, 4)
    return dataclasses.replace(made, **changed)


def test_digests_tell_every_field_apart() -> None:
    plan = plan_of()
    (item,), (pack,), (slot,) = plan.media, plan.packs, plan.slots
    media = [
        {"pack": 1},
        {"sample": 1},
        {"segment": 1},
        {"position": 2},
        {"runs": ((1, 3), (9, 5))},
        {"runs": ((1, 4), (9, 4))},
        {"encoder": "audio"},
        {"joined": True},
        {"ranks": (1, 3)},
        {"shares": (4, 4)},
        {"ranks": (1,), "shares": (2, 3, 5)},
    ]
    others = [
        *(dataclasses.replace(plan, **{name: 1}) for name in ("step", "group", "num_microbatches")),
        dataclasses.replace(plan, ranks=(0, 1, 2)),
        dataclasses.replace(plan, replicas=(0, 1, 2)),
        dataclasses.replace(plan, ranks=(0, 1, 2), replicas=(3, 0, 1)),
        dataclasses.replace(plan, exchanges=("exact", "symmetric")),
        dataclasses.replace(plan, media=()),
        *(dataclasses.replace(plan, media=(dataclasses.replace(item, **change),)) for change in media),
        *(
            dataclasses.replace(plan, slots=(dataclasses.replace(slot, **{name: 9}),))
            for name in ("pack", "replica", "microbatch")
        ),
        *(
            dataclasses.replace(plan, packs=(dataclasses.replace(pack, **{name: 9}),))
            for name in ("lane", "number", "padded_len")
        ),
        plan_of(sample(image(8), num_tokens=13)),
        plan_of(sample(image(8), row=8)),
        plan_of(sample(image(8), id=SampleId("web2", 1, 7))),
        plan_of(sample(image(8), id=SampleId("web", 2, 7))),
        plan_of(sample(image(9))),
        plan_of(sample(image(8), image(8))),
        plan_of(sample(image(8)), sample()),
    ]
    digests = {plan.digest, *(other.digest for other in others)}
    assert len(digests) == 1 + len(others)
    assert all(0 <= digest < 2**63 for digest in digests)


def test_digests_do_not_depend_on_how_the_plan_came_about() -> None:
    assert plan_of().digest == plan_of().digest
    # Names of files and modelled loads are not what the step does.
    assert plan_of(sample(image(8), key="other", shard="moved.tar")).digest == plan_of().digest
    other = dataclasses.replace(LOAD, makespan_before=3.0)
    assert dataclasses.replace(plan_of(), encoder_balance=other).digest == plan_of().digest


def test_names_are_told_from_numbers() -> None:
    swapped = (sample(image(8), id=SampleId("a", 1, 7)), sample(id=SampleId("b", 1, 7)))
    one = plan_of(*swapped)
    two = plan_of(
        *(dataclasses.replace(item, id=other.id) for item, other in zip(swapped, swapped[::-1], strict=True))
    )
    assert one.digest != two.digest
