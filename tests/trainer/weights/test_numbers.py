"""A run that starts from weights has their numbers; it may repeat them, not contradict them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_pipeline.core.errors import ConfigError
from tests.trainer.weights.conftest import EXPERTS, config_of
from trainer.config import ModelConfig
from trainer.weights.importer import import_weights


@pytest.fixture(scope="module")
def imported(
    reference_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Give an imported folder by name."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("imported") / name
            import_weights(reference_folder(name), made[name], progress=lambda done, total: None)
        return made[name]

    return folder


def numbers(config: ModelConfig, *parts: str) -> dict[str, Any]:
    return config.model_dump(include=set(parts))


def test_numbers_are_those_of_the_weights(imported: Callable[[str], Path]) -> None:
    config = ModelConfig.model_validate({"weights": str(imported("bf16"))})
    tiny = config_of()
    assert numbers(config, "vision", "audio", "llm") == numbers(tiny, "vision", "audio", "llm")
    # What no weight depends on is as published, and may be set.
    assert config.sizes.vision.max_pixels == ModelConfig(size="7b").sizes.vision.max_pixels
    table = {"weights": str(imported("bf16")), "sizes": {"vision": {"max_pixels": 5000}}}
    assert ModelConfig.model_validate(table).sizes.vision.max_pixels == 5000
    assert ModelConfig.model_validate(table).sizes.audio.num_mels == 16


def test_numbers_may_be_repeated_and_resolved_settings_read_again(imported: Callable[[str], Path]) -> None:
    table = {"weights": str(imported("bf16")), "size": "tiny", "llm": {"layers": 2}}
    config = ModelConfig.model_validate(table)
    assert ModelConfig.model_validate(json.loads(config.model_dump_json())) == config
    # A size that fits gives what no weight depends on.
    assert config.sizes == config_of().sizes


def test_numbers_that_are_not_those_of_the_weights_are_named_with_both(
    imported: Callable[[str], Path],
) -> None:
    path = imported("bf16")
    with pytest.raises(ConfigError) as caught:
        ModelConfig.model_validate({"weights": str(path), "llm": {"layers": 3, "experts": {"count": 4}}})
    assert str(caught.value) == (
        "model.llm.layers is 3, the weights have 2\n"
        "model.llm.experts is {'count': 4}, the weights have None\n"
        f"  where: {path}\n"
        "  fix:   leave them out beside model.weights, as model.size that says them, or take other weights"
    )


@pytest.mark.parametrize(
    ("table", "first"),
    [
        ({"size": "demo"}, "model.sizes.audio.num_mels is 80, the weights have 16"),
        # Numbers that the preset does not have are those that all presets are laid over.
        ({"size": "7b"}, "model.sizes.audio.num_mels is 128, the weights have 16"),
        ({"llm": {"size": "12b"}}, "model.llm.layers is 40, the weights have 2"),
    ],
)
def test_a_size_that_says_other_numbers_is_refused(
    table: dict[str, Any], first: str, imported: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.model_validate({"weights": str(imported("bf16")), **table})
    assert caught.value.what.splitlines()[0] == first


def test_a_language_model_leaves_the_encoders_to_the_size(imported: Callable[[str], Path]) -> None:
    config = ModelConfig.model_validate({"weights": str(imported("qwen3_moe")), "size": "tiny"})
    assert numbers(config, "vision", "audio", "sizes") == numbers(config_of(), "vision", "audio", "sizes")
    assert config.llm == EXPERTS.llm


def test_missing_weights_name_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.model_validate({"weights": str(tmp_path / "none")})
    assert caught.value.what == f"{tmp_path / 'none'} holds no complete weights: there is no such folder"
    assert caught.value.where == "setting 'model.weights'"
    assert caught.value.fix.endswith("; a run that has gone on from them may name its own folder")
