"""Settings of the reference (``config.json``) to ours and back: which model a folder holds, and the thinker.

Every number of ours has one place there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_pipeline.core.errors import ConfigError
from trainer.config import CHANNELS, ModelConfig
from trainer.presets import merged
from trainer.weights.language_config import KINDS, describe_language_model
from trainer.weights.names import LLM, THINKER, WHOLE, Layout
from trainer.weights.settings_table import (
    LLM_FIXED,
    LLM_NUMBERS,
    ROPE,
    Fixed,
    Number,
    fixed_problems,
    numbers_of,
    put,
    refuse,
    value_of,
    with_rope,
    without_old_rope,
)

_VISION_NUMBERS: tuple[Number, ...] = (
    ("vision.layers", "depth", 32),
    ("vision.hidden", "hidden_size", 3584),
    ("vision.intermediate", "intermediate_size", 3420),
    ("vision.heads", "num_heads", 16),
    ("vision.window", "window_size", 112),
    ("vision.full_attention_layers", "fullatt_block_indexes", [7, 15, 23, 31]),
    ("vision.rope_theta", f"{ROPE}.rope_theta", 10_000.0),
    ("sizes.vision.patch", "patch_size", 14),
    ("sizes.vision.merge", "spatial_merge_size", 2),
    ("sizes.vision.temporal_patch", "temporal_patch_size", 2),
)
_AUDIO_NUMBERS: tuple[Number, ...] = (
    ("audio.layers", "encoder_layers", 32),
    ("audio.hidden", "d_model", 1280),
    ("audio.intermediate", "encoder_ffn_dim", 5120),
    ("audio.heads", "encoder_attention_heads", 20),
    ("sizes.audio.num_mels", "num_mel_bins", 128),
)
_VISION_FIXED: tuple[Fixed, ...] = (
    ("hidden_act", "silu"),
    ("in_channels", CHANNELS),
    (f"{ROPE}.rope_type", "axial"),
)
_AUDIO_FIXED: tuple[Fixed, ...] = (
    ("activation_function", "gelu"),
    ("scale_embedding", False),
    ("dropout", 0.0),
    ("attention_dropout", 0.0),
    ("activation_dropout", 0.0),
)
_THINKER_FIXED: tuple[Fixed, ...] = (("position_id_per_seconds", 25), ("seconds_per_chunk", 2))
_TABLES = {
    "vision_config": (_VISION_NUMBERS, _VISION_FIXED),
    "audio_config": (_AUDIO_NUMBERS, _AUDIO_FIXED),
    "text_config": (LLM_NUMBERS, LLM_FIXED),
}
# Epsilons that the reference has in its code, not in its settings.
VISION_EPS, AUDIO_EPS = 1e-6, 1e-5
THINKER_CLASS = "Qwen2_5OmniThinkerForConditionalGeneration"


@dataclass(frozen=True)
class Described:
    """What a ``config.json`` says.

    Args:
        model: Numbers of our model as a run file gives them under ``[model]``; of the parts it has.
        parts: Names of the parts: encoders, and ``llm``.
        layout: How files with these settings name their tensors.
    """

    model: dict[str, Any]
    parts: tuple[str, ...]
    layout: Layout


def describe(data: Mapping[str, Any], *, where: str) -> Described:
    """Return what the content of a ``config.json`` says.

    Args:
        data: The content: of a thinker, of the published model that holds one, or of a language model.
        where: Its path, for messages.

    Raises:
        ConfigError: Of another family, or with a setting that this project's model does not have.
    """
    kind = data.get("model_type")
    if kind == "qwen2_5_omni":
        inner = _thinker(data.get("thinker_config") or {}, where=f"{where}, thinker_config")
        return dataclasses.replace(inner, layout=WHOLE)
    if kind == "qwen2_5_omni_thinker":
        return _thinker(data, where=where)
    if kind in KINDS:
        return Described(describe_language_model(data, where=where), ("llm",), LLM)
    known = ", ".join(["qwen2_5_omni", "qwen2_5_omni_thinker", *KINDS])
    raise ConfigError(
        f"model_type is {kind!r}; known are {known}",
        where=where,
        fix="give a folder of one of these models",
    )


def thinker_settings(
    config: ModelConfig, *, like: Mapping[str, Any], special: Mapping[str, int], dtype: str
) -> dict[str, Any]:
    """Return the ``config.json`` of a thinker.

    Args:
        config: The model.
        like: A ``config.json`` that gives all that is not a number of the model; may be empty.
        special: Ids of special tokens by role, for what ``like`` does not give.
        dtype: Type of the weights, e.g. ``bfloat16``.

    Raises:
        ConfigError: The reference has no such model.
    """
    _check_thinker(config)
    data = dict(like.get("thinker_config", like if "text_config" in like else {}))
    numbers = config.model_dump(mode="json")
    for name, (table, fixed) in _TABLES.items():
        settings = dict(data.get(name) or {})
        for ours, theirs, _ in table:
            put(settings, theirs, value_of(numbers, ours))
        for theirs, value in fixed:
            put(settings, theirs, value)
        without_old_rope(settings)
        data[name] = settings
    data |= _THINKER_FIXED
    put(data, f"text_config.{ROPE}.mrope_section", list(config.llm.rope_sections))
    put(data, "audio_config.n_window", config.audio.chunk // 2)
    put(data, "vision_config.out_hidden_size", config.llm.hidden)
    put(data, "audio_config.output_dim", config.llm.hidden)
    data["tie_word_embeddings"] = data["text_config"]["tie_word_embeddings"] = config.llm.tied_head
    for role, name in _TOKENS.items():
        if role in special:
            data.setdefault(name, special[role])
    data |= {"model_type": "qwen2_5_omni_thinker", "architectures": [THINKER_CLASS], "dtype": dtype}
    data.pop("torch_dtype", None)
    return data


def _check_thinker(config: ModelConfig) -> None:
    llm = config.llm
    for name, value, wanted in (
        ("vision.norm_eps", config.vision.norm_eps, VISION_EPS),
        ("audio.norm_eps", config.audio.norm_eps, AUDIO_EPS),
        ("llm.heads x llm.head_dim", llm.heads * llm.head_dim, llm.hidden),
        ("llm.attention_bias", llm.attention_bias, True),
        ("llm.qk_norm", llm.qk_norm, False),
        ("llm.experts", llm.experts and "given", None),
    ):
        if value != wanted:
            raise ConfigError(
                f"the reference has no thinker like this: {name} is {value}, a thinker has {wanted}",
                fix="export the language model alone with --llm-only, if the reference has that",
            )


_TOKENS = {
    "image": "image_token_index",
    "video": "video_token_index",
    "audio": "audio_token_index",
    "audio_start": "audio_start_token_id",
    "audio_end": "audio_end_token_id",
    # Not among its declared settings, but its positions of pictures are counted from this token.
    "vision_start": "vision_start_token_id",
    "vision_end": "vision_end_token_id",
}
"""Our role of a special token: the setting of a thinker that holds its id."""


def _thinker(given: Mapping[str, Any], *, where: str) -> Described:
    data = {**given, **{name: with_rope(given.get(name)) for name in _TABLES}}
    numbers: dict[str, Any] = {}
    problems = fixed_problems(data, _THINKER_FIXED)
    for name, (table, fixed) in _TABLES.items():
        numbers = merged(numbers, numbers_of(data[name], table))
        problems += fixed_problems(data[name], fixed, prefix=f"{name}.")
    text, hidden = data["text_config"], numbers["llm"]["hidden"]
    for name in ("vision_config.out_hidden_size", "audio_config.output_dim"):
        if (found := value_of(data, name, 3584)) != hidden:
            problems.append(f"{name} is {found!r}, text_config.hidden_size {hidden}")
    refuse(problems, where=where)
    tied = data.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    numbers["llm"] |= {
        "head_dim": hidden // numbers["llm"]["heads"],
        "tied_head": tied,
        "rope_sections": value_of(text, f"{ROPE}.mrope_section", [16, 24, 24]),
    }
    numbers["vision"]["norm_eps"] = VISION_EPS
    numbers["audio"] |= {"norm_eps": AUDIO_EPS, "chunk": 2 * value_of(data, "audio_config.n_window", 100)}
    return Described(numbers, ("vision", "audio", "llm"), THINKER)
