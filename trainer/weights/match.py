"""Tensors of the reference against the parameters of a model: what is there, missing, too much, or wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from omni_pipeline.core.errors import DataError
from trainer.config import ModelConfig
from trainer.model.omni import build_model
from trainer.weights.names import LEFT_OUT, UNUSED, Layout, Piece, Shape, pieces_of
from trainer.weights.safetensors_file import BLOCK_BYTES, DTYPES, StoredTensor, counted

FIX = "give weights of the model that config.json describes"


@dataclass(frozen=True)
class Match:
    """Which tensor is what.

    Args:
        pieces: Of each parameter that the files hold, by its name.
        kept: Tensors that no forward reads, named as ours would be.
        left_out: Names of tensors of parts that this project does not have.
    """

    pieces: Mapping[str, tuple[Piece, ...]]
    kept: Mapping[str, StoredTensor]
    left_out: tuple[str, ...]


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of all parameters of the model, by name, in its order."""
    return {name: tuple(item.shape) for name, item in build_model(config, device="meta").named_parameters()}


def match(listed: Mapping[str, StoredTensor], config: ModelConfig, *, layout: Layout, where: str) -> Match:
    """Return what each tensor of the files is.

    Args:
        listed: All tensors of the files, by name.
        config: Of the model.
        layout: Of the files; parts that it does not have are not looked for.
        where: The folder, for messages.

    Raises:
        DataError: One error for all tensors that are missing, unexpected, or of another shape or type.
    """
    pieces = {
        name: found
        for name, shape in parameter_shapes(config).items()
        if (found := pieces_of(name, shape, layout=layout, config=config))
    }
    wanted = {piece.name: piece for found in pieces.values() for piece in found}
    theirs = {name: renamed for name in UNUSED if (renamed := layout.rename(name)) is not None}
    kept = {name: listed[renamed] for name, renamed in theirs.items() if renamed in listed}
    left_out = tuple(sorted(name for name in listed if name.startswith(LEFT_OUT)))
    known = {*wanted, *theirs.values(), *left_out}
    problems = []
    if config.llm.tied_head:
        head, table = (layout.rename(f"llm.{name}.weight") or "" for name in ("lm_head", "embed_tokens"))
        known.add(head)
        if head in listed and table in listed and not _are_equal(listed[head], listed[table]):
            problems.append(f"{head} differs from {table}, and tie_word_embeddings is true")
    problems += _problems(listed, wanted, unexpected=sorted(set(listed) - known))
    if problems:
        raise DataError("\n".join(problems), where=where, fix=FIX)
    return Match(pieces, kept, left_out)


def _problems(
    listed: Mapping[str, StoredTensor], wanted: Mapping[str, Piece], *, unexpected: list[str]
) -> list[str]:
    missing = sorted(set(wanted) - set(listed))
    found = {name: listed[name] for name in wanted if name in listed}
    shapes = [
        f"{name} {list(tensor.shape)}, wanted {list(wanted[name].shape)}"
        for name, tensor in found.items()
        if tensor.shape != wanted[name].shape
    ]
    types = [f"{name} {tensor.dtype}" for name, tensor in found.items() if tensor.dtype not in DTYPES]
    lines = []
    if missing:
        lines.append(counted(missing, "missing tensor"))
    if unexpected:
        lines.append(counted(unexpected, "unexpected tensor"))
    if shapes:
        lines.append(counted(shapes, "tensor of another shape", plural="tensors of another shape"))
    if types:
        known = ", ".join(DTYPES)
        lines.append(counted(types, f"tensor not of {known}", plural=f"tensors not of {known}"))
    return lines


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape) or one.dtype not in DTYPES:
        return False
    total = one.num_elements
    step = BLOCK_BYTES // DTYPES[one.dtype].itemsize
    return all(
        torch.equal(one.read(first, size), other.read(first, size))
        for first in range(0, total, step)
        if (size := min(step, total - first))
    )
