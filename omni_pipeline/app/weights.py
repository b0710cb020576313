"""Weights in and out: what `omni weights` does beyond the trainer, which knows no tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from loaders.decode.text import load_tokenizer
from omni_pipeline.core.errors import ConfigError
from trainer.parallel.sharding import DTYPES
from trainer.weights.exporter import Exported, ExportSettings, export_weights
from trainer.weights.folder import Progress, WeightsFolder, open_weights

Dtype = Literal["bf16", "fp32"]


def export(
    source: Path,
    out: Path,
    *,
    dtype: Dtype | None,
    max_shard_bytes: int,
    like: Path | None,
    llm_only: bool,
    progress: Progress,
) -> tuple[WeightsFolder, Exported]:
    """Export the weights in ``source``; see ``trainer.weights.exporter.export_weights``.

    Raises:
        ConfigError: There are no weights, ``out`` is taken, or the reference has no such model.
        DataError: The weights are damaged.
    """
    weights = open_weights(source)
    settings = ExportSettings(
        dtype=None if dtype is None else DTYPES[dtype],
        max_shard_bytes=max_shard_bytes,
        like=like,
        llm_only=llm_only,
        special=_special_tokens(weights),
    )
    return weights, export_weights(weights, out, settings, progress=progress)


def _special_tokens(weights: WeightsFolder) -> dict[str, int]:
    """Return the ids that samples of the run had; none if its tokenizer lacks some."""
    try:
        return dataclasses.asdict(load_tokenizer(weights.tokenizer).special)
    except ConfigError:
        return {}
