"""Settings of the reference's language models by themselves, to ours and back: Qwen2, Qwen3, Qwen3-MoE.

They become the LLM of a model whose encoders keep their first weights. Positions of text are equal on all
axes of M-RoPE, so any division of the frequencies is right for text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_pipeline.core.errors import ConfigError
from trainer.config import LlmConfig
from trainer.weights.settings_table import (
    LLM_FIXED,
    LLM_NUMBERS,
    Number,
    fixed_problems,
    numbers_of,
    put,
    refuse,
    value_of,
    with_rope,
    without_old_rope,
)

_NUMBERS: tuple[Number, ...] = tuple((ours, theirs, None) for ours, theirs, _ in LLM_NUMBERS)
_EXPERT_NUMBERS: tuple[Number, ...] = (
    ("llm.experts.count", "num_local_experts", None),
    ("llm.experts.top_k", "num_experts_per_tok", None),
    ("llm.experts.intermediate", "moe_intermediate_size", None),
    ("llm.experts.normalize_top_k", "norm_topk_prob", False),
    ("llm.experts.every", "decoder_sparse_step", 1),
    ("llm.experts.dense_layers", "mlp_only_layers", []),
    ("llm.experts.balance_loss", "router_aux_loss_coef", 0.001),
)


@dataclass(frozen=True)
class Kind:
    """A kind of language model.

    Args:
        class_name: Of the reference.
        qk_norm: Whether queries and keys are normalised.
        attention_bias: Whether their projections have biases.
        has_experts: Whether layers have experts.
    """

    class_name: str
    qk_norm: bool
    attention_bias: bool
    has_experts: bool

    @property
    def numbers(self) -> tuple[Number, ...]:
        """The numbers of its settings."""
        return _NUMBERS + _EXPERT_NUMBERS * self.has_experts


KINDS = {
    "qwen2": Kind("Qwen2ForCausalLM", qk_norm=False, attention_bias=True, has_experts=False),
    "qwen3": Kind("Qwen3ForCausalLM", qk_norm=True, attention_bias=False, has_experts=False),
    "qwen3_moe": Kind("Qwen3MoeForCausalLM", qk_norm=True, attention_bias=False, has_experts=True),
}
"""By ``model_type``."""


def describe_language_model(given: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the numbers of our model, as a run file gives them under ``[model]``, of its LLM only.

    Raises:
        ConfigError: A number is missing, or a setting is one that this project's model does not have.
    """
    kind = KINDS[given["model_type"]]
    data = with_rope(given)
    if "num_experts" in data:  # its name before version 5
        data["num_local_experts"] = data["num_experts"]
    missing = [
        theirs for _, theirs, default in kind.numbers if default is None and value_of(data, theirs) is None
    ]
    if missing:
        raise ConfigError(f"{missing[0]} is not given", where=where, fix="give a complete config.json")
    fixed = LLM_FIXED if kind.attention_bias else (*LLM_FIXED, ("attention_bias", False))
    refuse(fixed_problems(data, fixed), where=where)
    numbers = numbers_of(data, kind.numbers)
    llm = numbers["llm"]
    llm["head_dim"] = value_of(data, "head_dim", llm["hidden"] // llm["heads"])
    llm["tied_head"] = value_of(data, "tie_word_embeddings", False)
    llm["rope_sections"] = _sections(llm["head_dim"] // 2)
    llm |= {"qk_norm": kind.qk_norm, "attention_bias": kind.attention_bias}
    if not kind.has_experts:
        llm["experts"] = None
    return numbers


def language_model_settings(config: LlmConfig, *, like: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the ``config.json`` of a language model; see ``reference_config.thinker_settings``.

    Raises:
        ConfigError: The reference has no such language model.
    """
    name = _kind_of(config)
    kind = KINDS[name]
    # Settings of a whole thinker say nothing of a language model alone.
    data = dict(like) if like.get("model_type") == name else {}
    numbers = {"llm": config.model_dump(mode="json")}
    for ours, theirs, _ in kind.numbers:
        put(data, theirs, value_of(numbers, ours))
    for setting, value in LLM_FIXED:
        put(data, setting, value)
    without_old_rope(data)
    if not kind.attention_bias:
        data["attention_bias"] = False
    if name != "qwen2":
        data["head_dim"] = config.head_dim
    data |= {"tie_word_embeddings": config.tied_head}
    data |= {"model_type": name, "architectures": [kind.class_name], "dtype": dtype}
    for before in ("torch_dtype", "num_experts"):
        data.pop(before, None)
    return data


def _kind_of(config: LlmConfig) -> str:
    wanted = config.qk_norm, config.attention_bias, config.experts is not None
    for name, kind in KINDS.items():
        if (kind.qk_norm, kind.attention_bias, kind.has_experts) == wanted:
            return name
    raise ConfigError(
        f"the reference has no language model with llm.qk_norm = {wanted[0]}, "
        f"llm.attention_bias = {wanted[1]} and {'' if wanted[2] else 'no '}experts",
        fix=f"it has {', '.join(KINDS)}",
    )


def _sections(count: int) -> list[int]:
    """Return ``count`` frequencies divided as in the published model: 1/4, 3/8, 3/8."""
    spatial = 3 * count // 8
    return [count - 2 * spatial, spatial, spatial]
