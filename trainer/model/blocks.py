"""Blocks of a part that are run in another way than plainly; names and numbers of parameters stay.

Recomputation (Chen et al. 2016, sublinear memory cost): a block keeps its input only and runs again in the
backward, collectives inside it too, in the same order on all ranks.
"""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_blocks(module: nn.Module) -> None:
    """Let every block of ``module.block_list`` run its forward again in the backward; before sharding.

    The forward of each block is replaced, not the block, so that the names of parameters stay. FSDP's hooks
    lie outside of it, so parameters are gathered once for both.
    """
    for block in _blocks(module):
        # The model draws no random number, so there is no state to bring back.
        plain = block.forward
        block.forward = functools.partial(checkpoint, plain, use_reentrant=False, preserve_rng_state=False)


def _blocks(module: nn.Module) -> nn.ModuleList:
    blocks = module.block_list
    assert isinstance(blocks, nn.ModuleList), type(blocks)
    return blocks
