"""The numbers of a model that starts from weights: theirs, which a run file may repeat or leave out.

Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omni_pipeline.core.errors import ConfigError
from trainer.presets import LLM_PRESETS, PRESETS, VISION_PRESETS, merged
from trainer.weights.folder import WeightsFolder, open_weights

# Of the sizes of media, those that are shapes of weights; the others say how media are resized and cut.
SHAPES = (
    "sizes.vision.patch",
    "sizes.vision.merge",
    "sizes.vision.temporal_patch",
    "sizes.audio.num_mels",
)
# How routers are evened out in training.
BALANCE_LOSS = "llm.experts.balance_loss"
DEFAULT_SIZE = "demo"
_PART_PRESETS: dict[str, Mapping[str, Mapping[str, Any]]] = {"vision": VISION_PRESETS, "llm": LLM_PRESETS}


def laid_over_weights(
    given: Mapping[str, Any], path: Path, *, published: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the numbers of a model that starts from the weights in ``path``, as plain data.

    Parts that the weights do not have are filled from the preset ``size``, as without weights.

    Args:
        given: The table ``[model]`` of a run file.
        path: See ``open_weights``.
        published: All numbers that presets are laid over.

    Raises:
        ConfigError: There are no weights, or a number that is given is not theirs; names both.
    """
    try:
        weights = open_weights(path)
    except ConfigError as error:
        fix = f"{error.fix}; a run that has gone on from them may name its own folder"
        raise ConfigError(error.what, where="setting 'model.weights'", fix=fix) from error
    stated = _stated(given, weights, published)
    _check(stated, weights)
    size = given.get("size", DEFAULT_SIZE)
    preset = PRESETS.get(size, {}) if isinstance(size, str) else {}
    lacking = {name: table for name, table in preset.items() if name not in weights.model}
    return merged(merged(lacking, weights.model), stated)


def is_free(name: str) -> bool:
    """Return whether no weight depends on this number of the model, so that a run may set it."""
    return name == BALANCE_LOSS or (name.startswith("sizes.") and name not in SHAPES)


def _stated(given: Mapping[str, Any], weights: WeightsFolder, published: Mapping[str, Any]) -> dict[str, Any]:
    """Return every number that ``given`` asks for, by itself or by a preset."""
    stated: dict[str, Any] = {}
    # Of weights without encoders, size is that of the encoders.
    if isinstance(size := given.get("size"), str) and "vision" in weights.model:
        stated = merged(published, PRESETS[size]) if size in PRESETS else {}
    for name, presets in _PART_PRESETS.items():
        table = given.get(name)
        if isinstance(table, Mapping) and isinstance(table.get("size"), str):
            stated = {**stated, name: merged(published[name], presets.get(table["size"], {}))}
    return merged(stated, given)


def _check(stated: Mapping[str, Any], weights: WeightsFolder) -> None:
    problems = [
        f"model.{name} is {value!r}, the weights have {theirs!r}"
        for name, value, theirs in _differences(stated, weights.model)
        if not is_free(name)
    ]
    if problems:
        more = f"\nand {len(problems) - 6} more" if len(problems) > 6 else ""
        raise ConfigError(
            "\n".join(problems[:6]) + more,
            where=str(weights.path),
            fix="leave them out beside model.weights, as model.size that says them, or take other weights",
        )


def _differences(
    stated: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, stated, of the weights) of what both have and is not equal."""
    for key, value in stated.items():
        if key not in theirs or (prefix and key == "size"):
            continue
        other = theirs[key]
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from _differences(value, other, f"{prefix}{key}.")
        elif _plain(value) != _plain(other):
            yield f"{prefix}{key}", value, other


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
