"""RunConfig: checks across sections, told by the setting that is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from loaders.weight import WeightTable
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.core.config import validate
from omni_pipeline.core.errors import ConfigError

LAYOUT = {"fields": ["txt"]}


def run_file(*sources: dict[str, Any], **sections: Any) -> dict[str, Any]:
    tables = [
        {"name": f"source-{number}", "shards": "a.tar", "layout": LAYOUT} | source
        for number, source in enumerate(sources)
    ]
    return {
        "run": {"dir": "runs/a", "steps": 10},
        "sources": tables,
        "order": {"lanes": 2, "packs_per_step": 4, "seq_len": 64},
        **sections,
    }


def problem(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(RunConfig, data, where="run.toml")
    return caught.value.what


def test_weights_of_sources_and_groups_take_all_forms_and_survive_a_round_trip() -> None:
    table = {"points": [[0, 1], [1_000_000, 0.5]], "over": "tokens", "curve": "cosine"}
    data = run_file(
        {"weight": 2, "group": "web/clean", "epochs": 3},
        {"weight": [[0, 1], [5, 0]]},
        {"weight": table},
        groups={"web": [[0, 1], [9, 2]], "web/clean": table},
    )
    config = validate(RunConfig, data, where="run.toml")
    assert config.groups["web/clean"] == WeightTable.model_validate(table)
    assert (config.sources[0].weight, config.sources[0].group, config.sources[0].epochs) == (
        2,
        "web/clean",
        3,
    )
    assert validate(RunConfig, config.model_dump(mode="json"), where="again") == config


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (
            run_file({"weight": -1}),
            "setting 'sources.0.weight': weight -1.0 is not a finite number of at least 0, got -1",
        ),
        (
            run_file({}, {"weight": {"points": [[0, 1]], "over": "step"}}),
            "setting 'sources.1.weight.over': Input should be 'steps' or 'tokens', got 'step'",
        ),
        (
            run_file({"group": "web"}, groups={"web": [[3, 1], [2, 1]]}),
            "setting 'groups.web': steps [3, 2] of the weight do not rise",
        ),
        (
            run_file({"epochs": 0}),
            "setting 'sources.0.epochs': Input should be greater than or equal to 1, got 0",
        ),
        (run_file({"group": "web"}), "groups: group 'web' of source 'source-0' has no weight"),
        (
            run_file({"group": "web"}, groups={"web": 1, "wep": 1}),
            "groups: no source is in group 'wep'; did you mean 'web'?",
        ),
        (run_file({"name": "a"}, {"name": "a"}), "source names must be unique; used twice: a"),
    ],
)
def test_a_wrong_setting_of_the_mixture_is_named(data: dict[str, Any], what: str) -> None:
    assert problem(data) == what


ENCODERS = ["vision", "vision_projector", "audio", "audio_projector"]


@pytest.mark.parametrize(
    ("optimizer", "what"),
    [
        (
            {"freeze": ["ears"]},
            "optimizer.freeze names 'ears'; parts of the model are vision, vision_projector, audio, "
            "audio_projector, llm",
        ),
        (
            {"parts": {"ears": {"lr": 1e-5}}},
            "optimizer.parts names 'ears'; parts of the model are vision, vision_projector, audio, "
            "audio_projector, llm",
        ),
        (
            {"freeze": [*ENCODERS, "llm"]},
            "optimizer.freeze names every part of the model, so there is nothing to train",
        ),
        (
            {"freeze": ["audio"], "parts": {"audio": {"lr": 1e-5}}},
            "setting 'optimizer': parts.audio is set, but freeze names 'audio'",
        ),
    ],
)
def test_a_wrong_setting_of_parts_is_named(optimizer: dict[str, Any], what: str) -> None:
    assert problem(run_file({}, optimizer=optimizer)) == what
