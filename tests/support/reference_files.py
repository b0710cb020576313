"""A thinker on disk as the reference saves it, made of our own model: quick, and without the library."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from loaders.decode.text import ByteTokenizer
from trainer.config import ModelConfig
from trainer.model.omni import build_model
from trainer.weights.names import THINKER, UNUSED, to_reference
from trainer.weights.reference_config import thinker_settings


def write_thinker(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype = torch.bfloat16, seed: int = 5
) -> Path:
    """Write first weights of ``config`` and what belongs to them; return ``folder``."""
    folder.mkdir()
    theirs = to_reference(dict(build_model(config, seed=seed).state_dict()), layout=THINKER, config=config)
    for name in UNUSED:
        theirs[THINKER.rename(name) or ""] = torch.ones(2, config.llm.hidden)
    save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in theirs.items()},
        folder / "model.safetensors",
    )
    special = {"image": ByteTokenizer.special.image}
    settings = thinker_settings(config, like={}, special=special, dtype=str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(settings))
    return folder
