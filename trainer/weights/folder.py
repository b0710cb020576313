"""Folders with weights of ours: imported ones, checkpoints of a run, a run. Free of torch.

All hold the same tensors under the same names, so a run starts from any of them and all can be exported. An
imported folder says its model in ``model.json``, a checkpoint in the identity of its state. Beside them,
``reference/`` keeps what came with imported weights and is no weight: settings, tokenizer, and the tensors
that no forward reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_pipeline.core.errors import ConfigError
from trainer.checkpoint_files import STATE_NAME, TENSORS_NAME, is_complete, latest, numbered

MODEL_NAME = "model.json"
REFERENCE_NAME = "reference"
KEPT_NAME = "kept.safetensors"
TOKENIZER_NAME = "tokenizer.json"
CHECKPOINTS_NAME = "checkpoints"
VERSION = 1
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while tensors are read or written."""


@dataclass(frozen=True)
class WeightsFolder:
    """Weights that can be read.

    Args:
        path: The complete folder that holds them.
        model: Numbers of the model, as a run file gives them under ``[model]``; of the parts that are there.
        parts: Encoders by name, and ``llm``.
        reference: What was imported beside the weights, if anything was.
    """

    path: Path
    model: dict[str, Any]
    parts: tuple[str, ...]
    reference: Path | None

    @property
    def tensors(self) -> Path:
        """The distributed checkpoint of torch, with ``model.`` before the name of each parameter."""
        return self.path / TENSORS_NAME

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer that came with the weights."""
        path = None if self.reference is None else self.reference / TOKENIZER_NAME
        return path if path is not None and path.is_file() else None


def open_weights(path: Path) -> WeightsFolder:
    """Return the weights in ``path``: an imported folder, a checkpoint, or a run (its latest checkpoint).

    Raises:
        ConfigError: There are none, or they are incomplete.
    """
    runs = [folder for folder in (path / CHECKPOINTS_NAME, path) if numbered(folder)]
    found = latest(runs[0]) if runs else path
    if found is None or not is_complete(found):
        raise ConfigError(
            f"{path} holds no complete weights" + ("" if path.exists() else ": there is no such folder"),
            fix="give a folder of `omni weights import`, a checkpoint, or the folder of a run with one",
        )
    if (found / MODEL_NAME).is_file():
        data = _read(found / MODEL_NAME)
        if data.get("version") != VERSION:
            raise ConfigError(
                f"{found / MODEL_NAME} has version {data.get('version')!r}, this program reads {VERSION}",
                fix="import the weights again with this program",
            )
        reference = found / REFERENCE_NAME
        return WeightsFolder(found, data["model"], tuple(data["parts"]), reference)
    model = _read(found / STATE_NAME).get("identity", {}).get("model", {})
    reference = found.parent.parent / REFERENCE_NAME
    parts = ("vision", "audio", "llm")
    return WeightsFolder(found, model, parts, reference if reference.is_dir() else None)


def model_file(model: Mapping[str, Any], parts: tuple[str, ...]) -> dict[str, Any]:
    """Return the content of ``model.json``."""
    return {"version": VERSION, "parts": list(parts), "model": dict(model)}


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", fix="import the weights again") from error
    return data if isinstance(data, dict) else {}
