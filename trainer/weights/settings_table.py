"""Tables that tie numbers of ours to settings of the reference, and how both are read and written.

What this project's model cannot do otherwise (activation, sliding window, type of rotary positions, dropout)
is a fixed value: another one is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from omni_pipeline.core.errors import ConfigError

Number = tuple[str, str, Any]
"""Dotted name of ours, dotted name of theirs, and what theirs is if it is not given."""
Fixed = tuple[str, Any]
"""Dotted name of theirs, and the only value that this project's model has."""

ROPE = "rope_parameters"
LLM_NUMBERS: tuple[Number, ...] = (
    ("llm.layers", "num_hidden_layers", 28),
    ("llm.hidden", "hidden_size", 3584),
    ("llm.intermediate", "intermediate_size", 18944),
    ("llm.heads", "num_attention_heads", 28),
    ("llm.kv_heads", "num_key_value_heads", 4),
    ("llm.vocab_size", "vocab_size", 152_064),
    ("llm.norm_eps", "rms_norm_eps", 1e-6),
    ("llm.rope_theta", f"{ROPE}.rope_theta", 1_000_000.0),
)
"""Of a language model; the defaults are those of the thinker's."""
LLM_FIXED: tuple[Fixed, ...] = (
    ("hidden_act", "silu"),
    ("use_sliding_window", False),
    ("attention_dropout", 0.0),
    (f"{ROPE}.rope_type", "default"),
)


def value_of(data: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return the value of a dotted name; ``default`` if it, or a table on the way, is not there or null."""
    here: Any = data
    for part in name.split("."):
        here = here.get(part) if isinstance(here, Mapping) else None
    return default if here is None else here


def put(data: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted name; tables on the way are made, or copied before they are changed."""
    *parents, last = name.split(".")
    for part in parents:
        table = data.get(part)
        data[part] = dict(table) if isinstance(table, Mapping) else {}
        data = data[part]
    data[last] = value


def numbers_of(data: Mapping[str, Any], table: Iterable[Number]) -> dict[str, Any]:
    """Return numbers of ours as a run file gives them, read from settings of the reference."""
    numbers: dict[str, Any] = {}
    for ours, theirs, default in table:
        put(numbers, ours, value_of(data, theirs, default))
    return numbers


def fixed_problems(data: Mapping[str, Any], table: Iterable[Fixed], *, prefix: str = "") -> list[str]:
    """Return a line for each setting that our model does not have; ``prefix`` is put before its name."""
    problems = [
        f"{prefix}{name} is {found!r}, this model has {wanted!r}"
        for name, wanted in table
        if (found := value_of(data, name, wanted)) != wanted
    ]
    others = {*(data.get("layer_types") or ())} - {"full_attention"}
    for other in sorted(others)[:1]:
        problems.append(f"{prefix}layer_types has {other!r}, this model has 'full_attention'")
    return problems


def refuse(problems: list[str], *, where: str) -> None:
    """Raise a ``ConfigError`` that names all of ``problems``, if there are any."""
    if problems:
        raise ConfigError("\n".join(problems), where=where, fix="these weights need a model that does this")


def with_rope(table: Any) -> dict[str, Any]:
    """Return ``table`` with rotary settings of earlier versions of the reference in their present place."""
    found = dict(table) if isinstance(table, Mapping) else {}
    if isinstance(found.get(ROPE), Mapping):
        return found
    rope = dict(found.get("rope_scaling") or {})
    kind = rope.pop("rope_type", rope.get("type"))
    rope.pop("type", None)
    if kind is not None:
        rope["rope_type"] = "default" if kind == "mrope" else kind
    if "rope_theta" in found:
        rope["rope_theta"] = found["rope_theta"]
    return {**found, ROPE: rope}


def without_old_rope(table: dict[str, Any]) -> None:
    """Remove rotary settings of earlier versions, which would contradict ``ROPE``."""
    for name in ("rope_theta", "rope_scaling"):
        table.pop(name, None)
