"""Tiny models of the reference on disk, saved by the library itself, made once per process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.reference_library import transformers
from tests.support.reference_thinker import reference_config
from trainer.config import ModelConfig

LANGUAGE_MODEL = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
}


def config_of(**llm: Any) -> ModelConfig:
    """Return the tiny model with other numbers of its LLM."""
    return ModelConfig.model_validate({"size": "tiny", "llm": llm})


EXPERTS = config_of(
    qk_norm=True,
    attention_bias=False,
    experts={"count": 4, "top_k": 2, "intermediate": 16, "dense_layers": [0]},
)


def make_thinker(config: ModelConfig, *, dtype: torch.dtype) -> Any:
    """Return a thinker of the library with random weights of that type."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return transformers.Qwen2_5OmniThinkerForConditionalGeneration(reference_config(config)).to(dtype)


def make_language_model(kind: str) -> Any:
    """Return a language model of the library, in bfloat16."""
    config = transformers.AutoConfig.for_model(kind, **LANGUAGE_MODEL, **LANGUAGE_MODELS[kind])
    with torch.random.fork_rng():
        torch.manual_seed(8)
        return transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)


@pytest.fixture(scope="session")
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give a folder of the reference by name; tests must not change it.

    ``bf16``, ``tied``: a thinker in one file; ``fp32``: one in several; else a language model of that kind.
    """
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            path = tmp_path_factory.mktemp("reference") / name
            if name in LANGUAGE_MODELS:
                make_language_model(name).save_pretrained(path)
            else:
                dtype = torch.float32 if name == "fp32" else torch.bfloat16
                model = make_thinker(config_of(tied_head=name == "tied"), dtype=dtype)
                model.save_pretrained(path, max_shard_size="100KB" if name == "fp32" else "5GB")
            (path / "tokenizer_config.json").write_text('{"model_max_length": 32768}')
            made[name] = path
        return made[name]

    return folder
