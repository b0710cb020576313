"""The first weights of a run that are not made from its seed: read into a sharded model by all ranks."""

from __future__ import annotations

import logging
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from omni_pipeline.core.errors import StateMismatchError
from trainer.weights.folder import WeightsFolder
from trainer.weights.names import part_of

logger = logging.getLogger(__name__)


def load_weights(weights: WeightsFolder, model: nn.Module) -> tuple[str, ...]:
    """Copy the weights into the parameters of ``model``, in place; a collective of all ranks.

    Every rank reads the blocks that its shards touch. Numbers of another type are converted.

    Returns:
        The parts of the model that the weights do not have: they keep what they had.

    Raises:
        StateMismatchError: Parameters of a part that the weights have are missing or of another shape, or a
            file is damaged.
    """
    reader = FileSystemReader(weights.tensors)
    saved = reader.read_metadata().state_dict_metadata
    # Parameters of the model itself: what is loaded into them is in place.
    parameters = cast("dict[str, Tensor]", get_model_state_dict(model))
    parts = {name: part_of(name) for name in parameters}
    held = {part_of(name.removeprefix("model.")) for name in saved if name.startswith("model.")}
    wanted = {name: value for name, value in parameters.items() if parts[name] in held}
    problems = []
    for name, value in wanted.items():
        entry = saved.get(f"model.{name}")
        if not isinstance(entry, TensorStorageMetadata):
            problems.append(f"{name} is missing")
        elif entry.size != value.size():
            problems.append(f"{name} is {list(entry.size)}, the model has {list(value.size())}")
    if problems:
        raise StateMismatchError(
            f"the weights do not fit the model: {'; '.join(problems[:4])}"
            + (f"; and {len(problems) - 4} more" if len(problems) > 4 else ""),
            where=str(weights.path),
            fix="take weights of this model, or leave out the settings of [model] beside weights",
        )
    try:
        load_tensors({"model": wanted}, storage_reader=reader)
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items()))
        raise StateMismatchError(
            f"{weights.path} is damaged: {causes}", fix="import the weights again"
        ) from error
    lacking = tuple(dict.fromkeys(part for part in parts.values() if part not in held))
    if dist.get_rank() == 0:
        first = f"; first weights of {', '.join(lacking)} are made from the seed" if lacking else ""
        logger.info("weights from %s%s", weights.path, first)
    return lacking
