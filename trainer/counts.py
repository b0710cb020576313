"""How many parameters each part of a model has, from its settings alone: nothing is built. Free of torch."""

from __future__ import annotations

from trainer.config import ModelConfig


def parameter_counts(config: ModelConfig, *, active: bool = False) -> dict[str, int]:
    """Return the number of parameters by part; a projector leads from its encoder into the LLM.

    Args:
        active: Count only those that one token passes: ``top_k`` experts of each sparse layer.
    """
    return {
        "vision": _vision(config),
        "vision_projector": _vision_projector(config),
        "audio": _audio(config),
        "audio_projector": _audio_projector(config),
        "llm": _llm(config, active=active),
    }


def _vision(config: ModelConfig) -> int:
    vision = config.vision
    hidden, inner = vision.hidden, vision.intermediate
    attention = 4 * (hidden * hidden + hidden)
    mlp = 2 * (hidden * inner + inner) + inner * hidden + hidden
    return config.patch_values * hidden + vision.layers * (attention + mlp + 2 * hidden)


def _vision_projector(config: ModelConfig) -> int:
    """Count the merger: a norm, and two layers over merge x merge patches."""
    hidden, wide = config.vision.hidden, config.llm.hidden
    merged = hidden * config.sizes.vision.merge**2
    return hidden + merged * merged + merged + merged * wide + wide


def _audio(config: ModelConfig) -> int:
    audio = config.audio
    hidden, inner = audio.hidden, audio.intermediate
    stem = 3 * config.sizes.audio.num_mels * hidden + hidden + 3 * hidden * hidden + hidden
    attention = 4 * hidden * hidden + 3 * hidden
    mlp = hidden * inner + inner + inner * hidden + hidden
    return stem + audio.layers * (attention + mlp + 4 * hidden)


def _audio_projector(config: ModelConfig) -> int:
    """Count the last norm and the layer behind it."""
    hidden, wide = config.audio.hidden, config.llm.hidden
    return 2 * hidden + hidden * wide + wide


def _llm(config: ModelConfig, *, active: bool) -> int:
    """Count the LLM; a tied head is the table of embeddings and counts once."""
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
