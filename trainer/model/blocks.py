"""Blocks of a part that run in another way than plainly; names of parameters stay as they are.

Recomputation (Chen et al. 2016, sublinear memory cost): a block keeps its input only and runs again in the
backward, collectives inside it too, in the same order on all ranks.

Compilation: torch.compile fuses what lies between the attentions of a block. Attention, and whatever else
reads lengths of this one microbatch, is marked with ``outside_graphs``: its lengths are Python integers, so
in a graph every new microbatch would be compiled again.

Both replace the forward of each block, not the block. FSDP's hooks lie outside of it, so parameters are
gathered once, and what is compiled or run again sees plain tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import checkpoint

from omni_pipeline.core.errors import ConfigError

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def outside_graphs(function: FunctionT) -> FunctionT:
    """Leave ``function`` and all that it calls out of compiled graphs."""
    return cast(FunctionT, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def prepare_blocks(module: nn.Module, *, recompute: bool, compiled: bool, backend: str = "inductor") -> None:
    """Let every block of ``module.block_list`` be compiled, run again in the backward, or both.

    Call it before the module is sharded.

    Args:
        module: An encoder or the LLM.
        recompute: Keep only the input of each block, and run it again in the backward.
        compiled: Compile it when it first runs: once for all numbers of rows and samples from 2, and apart
            for none and for one.
        backend: Of torch.compile.

    Raises:
        ConfigError: The module has no blocks that it names so.
    """
    if not (recompute or compiled):
        return
    blocks = getattr(module, "block_list", None)
    if not isinstance(blocks, nn.ModuleList):
        raise ConfigError(
            f"recompute or compile is set, but {type(module).__name__} has no block_list",
            fix="unset them, or let the encoder's file keep its blocks in a ModuleList of that name",
        )
    for block in blocks:
        forward = block.forward
        if compiled:
            forward = torch.compile(forward, dynamic=True, backend=backend)
        if recompute:
            # The model draws no random number, so there is no state to bring back.
            forward = functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
        block.forward = forward


def check_compiler(device: torch.device, *, parts: Sequence[str]) -> None:
    """Compile and run something small, so that a machine that cannot says so before the run begins.

    Raises:
        ConfigError: There is no working compiler.
    """
    small: Callable[[Tensor], Tensor] = torch.compile(_small)
    try:
        small(torch.ones(3, device=device))
    except TorchDynamoException as error:
        raise ConfigError(
            f"compile is set for {', '.join(parts)}, and this machine cannot: {str(error).splitlines()[0]}",
            fix="install a C++ compiler (g++; for CUDA also triton), or leave compile out",
        ) from error


def _small(x: Tensor) -> Tensor:
    return x.sin() + 1
