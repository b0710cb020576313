"""Tiny models of the reference on disk, made once per process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.reference_library import transformers
from trainer.config import ModelConfig
from trainer.weights.language_config import language_model_settings
from trainer.weights.reference_config import thinker_settings

SPECIAL = {"image": 259, "video": 260, "audio": 263, "audio_start": 261, "audio_end": 262}


def make_thinker(config: ModelConfig, *, dtype: torch.dtype = torch.float32) -> Any:
    """Return a thinker of the library with random weights of that type."""
    settings = thinker_settings(config, like={}, special=SPECIAL, dtype=str(dtype).removeprefix("torch."))
    kind = transformers.Qwen2_5OmniThinkerForConditionalGeneration
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return kind(transformers.Qwen2_5OmniThinkerConfig(**settings)).to(dtype)


def make_language_model(config: ModelConfig) -> Any:
    """Return the library's language model of that size, in bfloat16."""
    settings = language_model_settings(config.llm, like={}, dtype="bfloat16")
    library = transformers.AutoConfig.for_model(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(8)
        return transformers.AutoModelForCausalLM.from_config(library).to(torch.bfloat16)


def config_of(**llm: Any) -> ModelConfig:
    """Return the tiny model with other numbers of its LLM."""
    return ModelConfig.model_validate({"size": "tiny", "llm": llm})


EXPERTS = config_of(
    qk_norm=True,
    attention_bias=False,
    experts={"count": 4, "top_k": 2, "intermediate": 16, "dense_layers": [0]},
)


@pytest.fixture(scope="session")
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give a folder of the reference by name; tests must not change it.

    ``bf16``, ``tied``: a thinker in one file; ``fp32``: one in several; ``experts``: a Qwen3-MoE.
    """
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            path = tmp_path_factory.mktemp("reference") / name
            if name == "experts":
                make_language_model(EXPERTS).save_pretrained(path)
            else:
                dtype = torch.float32 if name == "fp32" else torch.bfloat16
                model = make_thinker(config_of(tied_head=name == "tied"), dtype=dtype)
                model.save_pretrained(path, max_shard_size="100KB" if name == "fp32" else "5GB")
            (path / "tokenizer_config.json").write_text('{"model_max_length": 32768}')
            made[name] = path
        return made[name]

    return folder
