"""What a run leaves in its folder, made by its loaders alone: states of the loader, metrics, quarantine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loaders.loader import OmniLoader, merge_states
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.run_dir import RunDir
from omni_pipeline.app.wire import build_loader, build_tokenizer, build_topology, training_stream
from omni_pipeline.core.batch import Batch
from omni_pipeline.core.config import load_config
from trainer.checkpoint_files import LOADER_NAME, SEAL_NAME, path_of


def config_of(run_file: Path, *flags: str) -> RunConfig:
    return load_config(RunConfig, run_file, flags)


def loader_of(config: RunConfig, *, rank: int, world_size: int) -> OmniLoader:
    """The loader of one rank, decoding in this process."""
    config = config.model_copy(update={"loader": config.loader.model_copy(update={"num_workers": 0})})
    tokenizer = build_tokenizer(config)
    return build_loader(
        config,
        training_stream(config, tokenizer),
        tokenizer=tokenizer,
        topology=build_topology(config, world_size=world_size, ranks_per_node=world_size),
        rank=rank,
        quarantine=RunDir(config.run.dir).quarantine_path,
    )


def load_steps(
    config: RunConfig, num_steps: int, *, world_size: int = 1, checkpoints: tuple[int, ...] = ()
) -> list[list[Batch]]:
    """Take the batches of all ranks, by step then rank, and leave checkpoints and metrics as a run would."""
    loaders = [loader_of(config, rank=rank, world_size=world_size) for rank in range(world_size)]
    steps = []
    for step in range(1, num_steps + 1):
        steps.append([next(loader) for loader in loaders])
        if step in checkpoints:
            save_checkpoint(config, merge_states([batch.state for batch in steps[-1]]))
    for loader in loaders:
        loader.close()
    write_metrics(config, num_steps)
    return steps


def save_checkpoint(config: RunConfig, state: dict[str, Any]) -> Path:
    """Write a complete checkpoint without any weights."""
    path = path_of(RunDir(config.run.dir).checkpoints, state["step"])
    path.mkdir(parents=True)
    (path / LOADER_NAME).write_text(json.dumps(state))
    size = (path / LOADER_NAME).stat().st_size
    (path / SEAL_NAME).write_text(json.dumps({"sizes_bytes": {LOADER_NAME: size}}))
    return path


def write_metrics(config: RunConfig, num_steps: int) -> None:
    """Say that so many steps were trained."""
    folder = RunDir(config.run.dir).make()
    lines = [json.dumps({"step": step, "time_s": step, "attempt": 0}) for step in range(num_steps)]
    folder.metrics_path.write_text("".join(f"{line}\n" for line in lines))
