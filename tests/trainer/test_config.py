"""Presets, overrides and messages of the model settings."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest
from pydantic import BaseModel

from omni_pipeline.core.config import validate
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.sizes import ModelSizes, VisionSizes
from trainer.config import LlmConfig, ModelConfig, ModelSize, VisionConfig
from trainer.counts import parameter_counts
from trainer.presets import LLM_PRESETS, PRESETS, VISION_PRESETS


class _Run(BaseModel):
    model: ModelConfig = ModelConfig()


@pytest.mark.parametrize(
    ("size", "counts"),
    # Sums by hand from the published widths; the LLM of 7b is the 7.6 billion of Qwen2.5-7B.
    [
        ("3b", (631_975_680, 36_708_608, 635_046_400, 2_626_048, 3_397_103_616)),
        ("7b", (631_975_680, 44_574_464, 635_046_400, 4_593_664, 7_615_616_512)),
    ],
)
def test_published_sizes_have_the_published_number_of_parameters(size: str, counts: tuple[int, ...]) -> None:
    config = ModelConfig.model_validate({"size": size})
    names = ("vision", "vision_projector", "audio", "audio_projector", "llm")
    assert parameter_counts(config) == dict(zip(names, counts, strict=True))


@pytest.mark.parametrize(
    ("part", "size", "billions"),
    [
        ("vision", "1b", 1.0),
        ("vision", "2.4b", 2.4),
        ("vision", "10b", 10.0),
        ("llm", "12b", 12.0),
        ("llm", "30b-a3b", 30.5),
        ("llm", "70b", 70.0),
        ("llm", "175b", 175.0),
    ],
)
def test_sizes_of_a_part_have_the_parameters_of_their_name(part: str, size: str, billions: float) -> None:
    config = ModelConfig.model_validate({"size": "demo", part: {"size": size}})
    assert parameter_counts(config)[part] == pytest.approx(billions * 1e9, rel=0.02)


def test_the_published_experts_have_the_published_number_of_parameters() -> None:
    """Sums by hand from the widths of Qwen3-30B-A3B; its card says 30.5 and 3.3 billion."""
    config = ModelConfig.model_validate({"llm": {"size": "30b-a3b"}})
    assert parameter_counts(config)["llm"] == 30_532_122_624
    assert parameter_counts(config, active=True)["llm"] == 3_353_032_704


def test_every_size_of_a_part_has_a_preset() -> None:
    for config, presets in ((VisionConfig, VISION_PRESETS), (LlmConfig, LLM_PRESETS)):
        named = get_args(get_args(config.model_fields["size"].annotation)[0])
        assert list(named) == list(presets)
    assert list(get_args(ModelSize)) == list(reversed(PRESETS))


def test_a_size_of_a_part_wins_over_that_of_the_model_and_a_number_over_both() -> None:
    config = ModelConfig.model_validate({"size": "demo", "llm": {"size": "70b", "layers": 3}})
    assert config.llm == LlmConfig(size="70b", layers=3)
    assert (config.llm.hidden, config.llm.layers) == (8192, 3)
    # Nothing of the whole model's preset stays in that part, and all of it elsewhere.
    assert (config.llm.vocab_size, config.llm.tied_head) == (152_064, False)
    assert config.vision == ModelConfig(size="demo").vision
    assert ModelConfig(size="demo", llm=LlmConfig(size="70b", layers=3)) == config
    assert ModelConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("size", sorted(PRESETS))
def test_one_override_keeps_the_rest_of_the_preset(size: str) -> None:
    preset = ModelConfig.model_validate({"size": size})
    changed = ModelConfig.model_validate({"size": size, "llm": {"layers": 5}})
    assert changed.llm.layers == 5
    assert changed.llm.model_copy(update={"layers": preset.llm.layers}) == preset.llm
    assert (changed.vision, changed.audio, changed.sizes) == (preset.vision, preset.audio, preset.sizes)


def test_overrides_reach_into_nested_tables_and_take_models() -> None:
    nested = ModelConfig.model_validate({"size": "demo", "sizes": {"vision": {"max_pixels": 784}}})
    assert nested.sizes.vision.max_pixels == 784
    assert nested.sizes.audio.num_mels == 80
    given = ModelConfig(size="demo", sizes=ModelSizes(vision=VisionSizes(max_pixels=784)))
    assert given.sizes.vision == nested.sizes.vision.model_copy(update={"min_pixels": 784})
    assert given == nested


@pytest.mark.parametrize("size", sorted(PRESETS))
def test_dumped_settings_read_back_equal(size: str) -> None:
    config = ModelConfig.model_validate({"size": size, "audio": {"chunk": 100}})
    assert ModelConfig.model_validate(config.model_dump(mode="json")) == config


def test_validation_does_not_change_the_presets() -> None:
    before = repr((PRESETS, LLM_PRESETS))
    ModelConfig.model_validate({"llm": {"size": "12b", "experts": {"count": 8}}})
    ModelConfig.model_validate({"size": "demo", "llm": {"layers": 1}, "sizes": {"audio": {"num_mels": 8}}})
    assert repr((PRESETS, LLM_PRESETS)) == before


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"llm": {"size": "13b"}},
            "setting 'model.llm.size': Input should be '12b', '30b-a3b', '70b' or '175b', got '13b'",
        ),
        ({"llm": {"layer": 3}}, "unknown setting 'model.llm.layer'; did you mean 'layers'?"),
        (
            {"llm": {"rope_sections": [1, 1, 1]}},
            "setting 'model.llm': rope_sections (1, 1, 1) do not sum to half of head_dim 32",
        ),
        *(
            (
                {"sizes": {"vision": {low: 500, high: 400}}},
                f"setting 'model': sizes.vision.{low} 500 is above {high} 400; set both",
            )
            for low, high in (
                ("min_pixels", "max_pixels"),
                ("video_min_pixels", "video_max_pixels"),
                ("video_min_frames", "video_max_frames"),
            )
        ),
        ({"llm": {"heads": 5}}, "setting 'model.llm': heads 5 is not a multiple of kv_heads 2"),
        (
            {"vision": {"layers": 1}},
            "setting 'model.vision': full_attention_layers names block 1, the blocks are 0 .. 0",
        ),
        (
            {"vision": {"hidden": 100}},
            "setting 'model.vision': hidden 100 is not a multiple of 4 x heads = 16",
        ),
        (
            {"vision": {"window": 30}},
            "setting 'model': vision.window 30 is not a multiple of sizes.vision.patch x merge = 28",
        ),
        ({"audio": {"chunk": 7}}, "setting 'model.audio': chunk 7 is odd; the convolution halves it"),
        ({"audio": {"heads": 5}}, "setting 'model.audio': hidden 96 is not an even multiple of heads 5"),
        (
            {"llm": {"experts": {"count": 4, "top_k": 5}}},
            "setting 'model.llm.experts': top_k 5 is more than count 4",
        ),
        (
            {"llm": {"experts": {"dense_layers": [0, 3]}}},
            "setting 'model.llm': experts.dense_layers names layer 3, the layers are 0 .. 2",
        ),
        (
            {"llm": {"experts": {"every": 2, "dense_layers": [1]}}},
            "setting 'model.llm': experts.every 2 and experts.dense_layers (1,) leave no sparse layer of 3",
        ),
    ],
)
def test_wrong_settings_are_named_with_value_and_limit(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(_Run, {"model": {"size": "demo", **table}}, where="run.toml")
    assert caught.value.what == message


def test_every_nth_layer_is_sparse_but_those_named() -> None:
    llm = LlmConfig.model_validate({"layers": 8, "experts": {"every": 2, "dense_layers": [3, 4]}})
    assert llm.sparse_layers == (1, 5, 7)
    assert LlmConfig(layers=8).sparse_layers == ()


def test_a_model_is_its_numbers_however_they_were_given() -> None:
    named = ModelConfig.model_validate({"size": "tiny", "llm": {"size": "12b"}})
    by_number = ModelConfig.model_validate({"size": "demo", **named.identity})
    assert by_number != named
    assert by_number.identity == named.identity
    other = ModelConfig.model_validate({"size": "tiny", "llm": {"size": "12b", "rope_theta": 10_000.0}})
    assert other.identity != named.identity


@pytest.mark.parametrize("size", ["70b", 3, ["demo"]])
def test_unknown_size_names_the_known_ones(size: object) -> None:
    with pytest.raises(
        ConfigError, match=r"setting 'model.size': Input should be 'tiny', 'demo', '3b' or '7b'"
    ):
        validate(_Run, {"model": {"size": size}}, where="run.toml")


def test_rows_of_heads_must_fill_sections_in_code_too() -> None:
    with pytest.raises(ValueError, match="rope_sections"):
        LlmConfig(head_dim=64)


def test_settings_load_without_torch() -> None:
    code = "import sys, trainer.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
