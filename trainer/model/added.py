"""Encoders that are not of the model family: built by their factory, and checked before ranks rely on them.

An encoder runs on every rank in every microbatch, also where it has nothing to encode, and then a parameter
outside of the graph would leave the other ranks waiting in the backward. So that is asked here, on the meta
device, where it costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.media import MediaEncoder

FIX = "see docs/encoders.md for what build() must return"


def build_added(encoder: MediaEncoder, *, width: int) -> nn.Module:
    """Return the module of an added encoder on the meta device, for an LLM of this width.

    Raises:
        ConfigError: It is no module, has buffers (nothing would fill them), or without segments it does not
            return 0 rows that hang on all of its parameters.
    """
    where = encoder.file.path
    with torch.device("meta"):
        module = encoder.build(width)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"build() returns a {type(module).__name__}, no module", where=where, fix=FIX)
    buffer = next((name for name, _ in module.named_buffers()), None)
    if buffer is not None:
        raise ConfigError(
            f"the module has a buffer, {buffer!r}", where=where, fix="make it in forward, or a parameter"
        )
    dtype = getattr(torch, encoder.kind.unit_dtype)
    nothing = torch.empty((0, encoder.kind.unit_values), dtype=dtype, device="meta")
    rows = module(nothing, np.zeros((0, 3), dtype=np.int64))
    if rows.shape != (0, width):
        raise ConfigError(
            f"without segments the module returns {tuple(rows.shape)}, wanted {(0, width)}",
            where=where,
            fix=FIX,
        )
    parameters = dict(module.named_parameters())
    found: Sequence[Tensor | None] = [None] * len(parameters)
    if rows.requires_grad:
        found = torch.autograd.grad(rows.sum(), list(parameters.values()), allow_unused=True)
    lost = next((name for name, gradient in zip(parameters, found, strict=True) if gradient is None), None)
    if lost is not None:
        raise ConfigError(
            f"without segments no row depends on parameter {lost!r}, so other ranks would wait for it",
            where=where,
            fix="let every parameter take part also in a forward over 0 units",
        )
    return module
