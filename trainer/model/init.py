"""First weights: a pure function of (seed, name, shape), so any rank can make any part of them.

Every parameter has a generator of its own, on the CPU, so neither the layout, the device nor the order of
modules changes a number. A sharded parameter keeps its part of the whole tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from omni_pipeline.core.seeding import generator

EMBEDDING_STD = 0.02
EXPERTS = ".mlp.experts."
RESIDUAL_OUTPUTS = ("o_proj", "out_proj", "down_proj", "fc2", "attn.proj")


@torch.no_grad()
def make_storage(model: nn.Module, *, device: torch.device | str) -> None:
    """Give a model on the meta device storage on ``device``, every parameter NaN until it is written.

    Memory that is merely not written is often zero, and a model of zeros trains without an error: its loss
    is ln(vocabulary) and its gradient zero for ever (https://github.com/ByteDance-Seed/VeOmni/issues/118).
    """
    model.to_empty(device=device)
    for parameter in model.parameters():
        parameter.fill_(math.nan)


@torch.no_grad()
def init_weights(model: nn.Module, *, seed: int, num_layers: dict[str, int]) -> None:
    """Write the first weights of every parameter of ``model``; no collective.

    Matrices are normal with deviation 1 / sqrt(inputs), so that a narrow model starts as lively as a wide one
    (at width 2500 it is the usual 0.02); those of experts, which share a tensor, like any other. Those that
    write into a residual stream are scaled down by sqrt(2 x layers) (GPT-2). The embedding table has
    deviation 0.02. Vectors are 1, biases 0.

    Args:
        model: On a real device; parameters may be DTensors.
        seed: Of the run.
        num_layers: Blocks by the prefix of a parameter's name.
    """
    for name, parameter in model.named_parameters():
        prefix = next(prefix for prefix in num_layers if name.startswith(prefix))
        _fill(parameter, _first_value(name, parameter.shape, seed=seed, num_layers=num_layers[prefix]))


def _first_value(name: str, shape: torch.Size, *, seed: int, num_layers: int) -> Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    is_residual = name.removesuffix(".weight").endswith(RESIDUAL_OUTPUTS)
    num_inputs = shape[-1] if EXPERTS in name else math.prod(shape[1:])
    std = EMBEDDING_STD if "embed_tokens" in name else 1 / math.sqrt(num_inputs)
    if is_residual:
        std /= math.sqrt(2 * num_layers)
    random = torch.Generator().manual_seed(int(generator(seed, f"init/{name}").integers(2**63)))
    return torch.empty(shape).normal_(std=std, generator=random)


def _fill(parameter: nn.Parameter, value: Tensor) -> None:
    data: Tensor = parameter.data
    if isinstance(data, DTensor):
        # src_data_rank=None: every rank has the whole value already, nothing is sent.
        whole = value.to(data.device)
        part = distribute_tensor(whole, data.device_mesh, data.placements, src_data_rank=None)
        data.to_local().copy_(part.to_local())
    else:
        data.copy_(value)
