"""What a run file says of its parts, as passes of the cost model."""

from __future__ import annotations

from typing import Any

from balancer.cost import Passes
from omni_pipeline.app.costs import cost_model
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.step_costs import StepCosts
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Modality
from tests.app.test_run_config import run_file
from tests.support.strategies import make_sample, media_segment, text_segment

IMAGE = media_segment(Modality.IMAGE, (1, 8, 8))
PACK = Pack(0, 0, (make_sample([text_segment(30)], source="a", row=0),))


def _config(*freeze: str, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        run_file({}, model={"size": "tiny"}, optimizer={"freeze": freeze}, **sections)
    )


def test_frozen_and_recomputed_parts_are_priced_by_what_they_compute() -> None:
    config = _config("vision", "llm", encoders={"vision": {"recompute": True}, "audio": {"recompute": True}})
    model = cost_model(config)
    assert model.passes == {
        "vision": Passes(backward=0, again=True),
        "audio": Passes(backward=2, again=True),
        "llm": Passes(backward=1),
    }
    # The projector of vision is trained, so gradients travel back.
    assert model.row_ways == 2
    encoders = ("vision", "vision_projector", "audio", "audio_projector")
    assert cost_model(_config(*encoders)).row_ways == 1


def test_operations_that_a_frozen_part_does_not_need_are_no_work() -> None:
    plain, frozen = StepCosts(cost_model(_config())), StepCosts(cost_model(_config("vision", "llm")))
    assert frozen.media_flops(IMAGE) == plain.media_flops(IMAGE) / 3
    assert frozen.pack_flops(PACK) == plain.pack_flops(PACK) * 2 / 3
