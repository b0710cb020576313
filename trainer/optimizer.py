"""AdamW over modules on different meshes: its groups, its schedule, one global gradient norm.

Encoders and LLM may be sharded over different meshes, and torch's ``clip_grad_norm_`` and its batched
updates refuse tensors of mixed meshes. So parameters are grouped by module, and the norm is one sum over
ranks in which every copy of a shard counts by its share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from trainer.optimizer_config import OptimizerConfig


def build_optimizer(modules: Mapping[str, nn.Module], config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters of ``modules``, two groups each: with decay and without.

    Norms and biases are the parameters of fewer than two dims. Groups depend on names and shapes only, so a
    checkpoint fits at any world size and sharding.
    """
    groups = []
    for module in modules.values():
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for weight_decay, members in (
            (config.weight_decay, [parameter for parameter in trainable if parameter.dim() >= 2]),
            (0.0, [parameter for parameter in trainable if parameter.dim() < 2]),
        ):
            if members:
                groups.append({"params": members, "weight_decay": weight_decay})
    # Fused: the default walks over DTensors one by one, some six times slower (benchmarks/host_work.py).
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def learning_rate(step: int, *, config: OptimizerConfig, num_steps: int) -> float:
    """Return the learning rate of ``step`` (from 0) in a run of ``num_steps``: linear warm-up, then cosine.

    The last step has ``lr * min_lr_ratio``, and steps after it keep that.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decay_steps = max(1, num_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    ratio = config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * ratio


def local_square_sum(parameters: Iterable[nn.Parameter], *, world_size: int) -> Tensor:
    """Return this rank's share of the squared global gradient norm, float64 scalar on the CPU.

    The sum over all ranks is the square of the norm. A gradient of which there are n equal copies counts as
    1 / n on each rank that holds one.
    """
    total = torch.zeros((), dtype=torch.float64)
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_copies.setdefault(_num_copies(parameter.grad, world_size=world_size), []).append(
                _local(parameter.grad)
            )
    for num_copies, gradients in by_copies.items():
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        total += norms.square().sum().cpu() / num_copies
    return total


def clip_gradients(parameters: Iterable[nn.Parameter], *, norm: float, limit: float) -> None:
    """Scale all gradients in place by ``limit / norm`` where ``norm`` is above ``limit``."""
    if norm <= limit:
        return
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, limit / norm)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _num_copies(gradient: Tensor, *, world_size: int) -> int:
    if not isinstance(gradient, DTensor):
        return world_size
    mesh = gradient.device_mesh
    copies = world_size // mesh.size()
    for dim, placement in enumerate(gradient.placements):
        if isinstance(placement, Replicate):
            copies *= mesh.size(dim)
    return copies
