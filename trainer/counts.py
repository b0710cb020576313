"""How many parameters a model has, from its settings alone: nothing is built. Free of torch."""

from __future__ import annotations

from trainer.config import ModelConfig


def vision_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of the vision encoder, its projection into the LLM included."""
    vision = config.vision
    hidden, inner = vision.hidden, vision.intermediate
    attention = 4 * (hidden * hidden + hidden)
    mlp = 2 * (hidden * inner + inner) + inner * hidden + hidden
    merged = hidden * config.sizes.vision.merge**2
    merger = hidden + merged * merged + merged + merged * config.llm.hidden + config.llm.hidden
    return config.patch_values * hidden + vision.layers * (attention + mlp + 2 * hidden) + merger


def audio_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of the audio encoder, its projection into the LLM included."""
    audio = config.audio
    hidden, inner = audio.hidden, audio.intermediate
    stem = 3 * config.sizes.audio.num_mels * hidden + hidden + 3 * hidden * hidden + hidden
    attention = 4 * hidden * hidden + 3 * hidden
    mlp = hidden * inner + inner + inner * hidden + hidden
    out = 2 * hidden + hidden * config.llm.hidden + config.llm.hidden
    return stem + audio.layers * (attention + mlp + 4 * hidden) + out


def llm_parameters(config: ModelConfig, *, active: bool = False) -> int:
    """Return the number of parameters of the LLM: a tied head counts once.

    Args:
        active: Count only those that one token passes: ``top_k`` experts of each sparse layer.
    """
    llm, experts = config.llm, config.llm.experts
    query, key_value = llm.heads * llm.head_dim, llm.kv_heads * llm.head_dim
    attention = llm.hidden * (query + 2 * key_value) + query * llm.hidden
    attention += llm.attention_bias * (query + 2 * key_value) + llm.qk_norm * 2 * llm.head_dim
    num_sparse = len(llm.sparse_layers)
    mlps = (llm.layers - num_sparse) * 3 * llm.hidden * llm.intermediate
    if experts is not None:
        num_experts = experts.top_k if active else experts.count
        mlps += num_sparse * llm.hidden * (experts.count + num_experts * 3 * experts.intermediate)
    tables = llm.vocab_size * llm.hidden * (1 if llm.tied_head else 2)
    return llm.layers * (attention + 2 * llm.hidden) + mlps + llm.hidden + tables


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Return the number of parameters by part: ``vision``, ``audio``, ``llm``."""
    return {
        "vision": vision_parameters(config),
        "audio": audio_parameters(config),
        "llm": llm_parameters(config),
    }
