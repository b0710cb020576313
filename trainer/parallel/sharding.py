"""Shard a module's parameters over its mesh (FSDP2), with gradients *summed* over the ranks.

The loss of a rank is already divided by the global count of labels, so the gradient of the step is the sum
over ranks. The default of FSDP is the mean; a mean over another number of ranks than the loss was made on
is what dilutes encoder gradients in other systems. Sums have no number of ranks in them.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer.parallel.config import ParallelConfig, Precision

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Types of forward and backward."""


def shard_module(
    module: nn.Module, *, mesh: DeviceMesh, precision: Precision, reshard: str = "microbatch"
) -> None:
    """Shard ``module`` in place: every block of its ``ModuleList``s by itself, the rest as one unit.

    Parameters stay float32; with ``bf16`` they are gathered and computed with in bfloat16, and
    gradients are still summed in float32. All ranks of the mesh must call this, and enter the module the
    same number of times per step, forward and backward, with or without data. Frozen parameters (that ask
    for no gradient) are gathered like the others, and there is no gradient of theirs to sum.
    """
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)
    for block in _blocks_of(module):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard == "microbatch")
    # The root keeps its parameters after forward: the loss reads the head outside of the LLM's forward.
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            # Without this, gloo is asked for a premultiplied sum, which it does not have.
            part.set_force_sum_reduction_for_comms(True)


def begin_backward(module: nn.Module, config: ParallelConfig, *, is_last: bool) -> None:
    """Tell a sharded module what its next backward ends; ``is_last`` is the last microbatch of the step.

    With ``reshard = "step"`` gradients stay whole on each rank until the last backward, which sums them.
    """
    if isinstance(module, FSDPModule):
        ends_something = is_last or config.reshard == "microbatch"
        module.set_requires_gradient_sync(ends_something)
        module.set_reshard_after_backward(ends_something)
        module.set_is_last_backward(is_last)


def end_without_backward(module: nn.Module) -> None:
    """Free the gathered parameters of a sharded module that ran forward and gets no backward.

    FSDP keeps the root's until one, and a growing list of what ran.
    """
    if isinstance(module, FSDPModule):
        module.reset_iter_state()


def _blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the outermost ``ModuleList`` elements; lists inside a block (experts) belong to the block."""
    blocks: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            blocks += [block for block in child if any(True for _ in block.parameters())]
        else:
            blocks += _blocks_of(child)
    return blocks
