"""Encoders that a run file attaches: settings, costs, digests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from balancer.split import cut_segment
from omni_pipeline.app.costs import all_encoder_shapes, cost_model
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.wire import build_tokenizer, encoder_digests, model_inputs, section_digests
from omni_pipeline.core.config import validate
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.sample import Modality, Segment
from tests.support.depth import ENCODER_FILE, changed_file, kinds_restored

DEPTH = {"depth": {"file": str(ENCODER_FILE)}}


@pytest.fixture(autouse=True)
def _own_kinds() -> Iterator[None]:
    with kinds_restored():
        yield


def run_config(encoders: dict[str, Any] = DEPTH, *, vocab_size: int = 267, **sections: Any) -> RunConfig:
    data = {
        "run": {"dir": "runs/a", "steps": 10},
        "sources": [{"name": "s", "shards": "a.tar", "layout": {"fields": ["depth.png", "txt"]}}],
        "order": {"lanes": 2, "packs_per_step": 4, "seq_len": 64},
        "model": {"size": "tiny", "llm": {"vocab_size": vocab_size}},
        "encoders": encoders,
        **sections,
    }
    return validate(RunConfig, data, where="run.toml")


def problem(encoders: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        run_config(encoders, **sections)
    return caught.value.what


def test_an_attached_encoder_is_named_wherever_encoders_are() -> None:
    config = run_config(optimizer={"freeze": ["depth"], "parts": {"vision": {"lr": 1e-4}}})
    assert config.encoder_names == ("vision", "audio", "depth")
    inputs = model_inputs(config, build_tokenizer(config))
    assert inputs.encoders["depth"] == (Modality("depth"),)
    assert (inputs.width(Modality("depth")), str(inputs.dtype(Modality("depth")))) == (256, "float32")
    assert inputs.special.around(Modality("depth")) == (264, 265, 266)


def test_its_cost_follows_its_sizes_and_frames_are_where_it_is_cut() -> None:
    config = run_config()
    costs, shape = cost_model(config), all_encoder_shapes(config)["depth"]

    def seconds(grid: tuple[int, int, int]) -> float:
        return costs.media_cost(Segment(Modality("depth"), "m", 0, 1, grid, 9, 11))

    assert 0 < 1.9 * seconds((1, 4, 4)) < seconds((1, 8, 4)) < seconds((1, 8, 8)) / 1.9
    assert cut_segment(shape, (1, 8, 8), 2) is None
    cut = cut_segment(shape, (3, 4, 4), 2)
    assert cut is not None
    assert (cut.rows, cut.joined) == ((32, 16), False)


@pytest.mark.parametrize(
    ("encoders", "what"),
    [
        ({"depth": {}}, "setting 'encoders': depth is not built in, as vision and audio are: set depth.file"),
        (
            {"vision": {"file": str(ENCODER_FILE)}},
            "setting 'encoders': vision.file is not allowed: vision is built in",
        ),
        (
            {"range": {"file": str(ENCODER_FILE)}},
            f"setting 'encoders': the encoder of {ENCODER_FILE} is named 'depth': write [encoders.depth]",
        ),
        ({"depth": {"file": "gone.py"}}, "cannot read the encoder's file gone.py: No such file or directory"),
    ],
)
def test_a_wrong_encoder_is_told(encoders: dict[str, Any], what: str) -> None:
    assert problem(encoders).startswith(what)


def test_only_attached_encoders_are_parts() -> None:
    what = "optimizer.freeze names 'depth'; parts of the model are vision, vision_projector, audio, "
    assert problem({}, optimizer={"freeze": ["depth"]}) == what + "audio_projector, llm"
    everything = ["vision", "vision_projector", "audio", "audio_projector", "llm", "depth"]
    what = "optimizer.freeze names every part of the model, so there is nothing to train"
    assert problem(DEPTH, optimizer={"freeze": everything}) == what
    assert run_config(optimizer={"freeze": everything[:-1]}).optimizer.freeze == tuple(everything[:-1])


def test_its_tokens_need_room_in_the_vocabulary() -> None:
    with pytest.raises(ConfigError) as caught:
        build_tokenizer(run_config(vocab_size=266))
    assert caught.value.what == (
        "the tokens around media of depth are 3 more than the tokenizer's 264; the model has 266"
    )
    assert caught.value.fix == "set model.llm.vocab_size = 267"


def test_what_ranks_agree_on_is_the_content_of_the_file(tmp_path: Path) -> None:
    digests = []
    for change in (("PATCH", "PATCH"), ("import io\n", "import io\n"), ("2, 64, 4", "2, 64, 8")):
        path = changed_file(tmp_path, change).rename(tmp_path / f"{len(digests)}.py")
        with kinds_restored():
            config = run_config({"depth": {"file": str(path)}})
            digests.append((section_digests(config)["encoders"], encoder_digests(config)["depth"]))
    assert digests[0] == digests[1]
    assert digests[0][0] != digests[2][0]
    assert digests[0][1] != digests[2][1]
