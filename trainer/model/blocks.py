"""Blocks of a part that are run in another way than plainly; names and numbers of parameters stay.

Recomputation (Chen et al. 2016, sublinear memory cost): a block keeps its input only and runs again in the
backward, collectives inside it too, in the same order on all ranks.
"""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from omni_pipeline.core.errors import ConfigError


def recompute_blocks(module: nn.Module) -> None:
    """Let every block of ``module.block_list`` run its forward again in the backward; before sharding.

    The forward of each block is replaced, not the block, so that the names of parameters stay. FSDP's hooks
    lie outside of it, so parameters are gathered once for both.

    Raises:
        ConfigError: The module has no blocks that it names so.
    """
    for block in _blocks(module):
        # The model draws no random number, so there is no state to bring back.
        plain = block.forward
        block.forward = functools.partial(checkpoint, plain, use_reentrant=False, preserve_rng_state=False)


def _blocks(module: nn.Module) -> nn.ModuleList:
    blocks = getattr(module, "block_list", None)
    if not isinstance(blocks, nn.ModuleList):
        raise ConfigError(
            f"recompute is set, but {type(module).__name__} has no block_list to recompute",
            fix="unset it, or let the encoder's file keep its blocks in a ModuleList of that name",
        )
    return blocks
