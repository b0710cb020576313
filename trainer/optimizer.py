"""AdamW over modules on different meshes: its groups, its schedule, one global gradient norm.

Encoders and LLM may be sharded over different meshes, and torch's ``clip_grad_norm_`` and its batched
updates refuse tensors of mixed meshes. So parameters are grouped by part of the model (each lies on one
mesh), which also have learning rates of their own, and the norm is one sum over ranks in which every copy of
a shard counts by its share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from trainer.optimizer_config import OptimizerConfig


def build_optimizer(
    parts: Mapping[str, Iterable[nn.Parameter]], config: OptimizerConfig
) -> torch.optim.AdamW:
    """Return AdamW over the trained parameters of ``parts``, two groups each: with decay and without.

    Norms and biases are the parameters of fewer than two dims; the embedding table decays like any matrix
    (as in Megatron-LM and nanoGPT).
    """
    groups = []
    for name, parameters in parts.items():
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for weight_decay, members in (
            (config.decay_of(name), [parameter for parameter in trained if parameter.dim() >= 2]),
            (0.0, [parameter for parameter in trained if parameter.dim() < 2]),
        ):
            if members:
                groups.append(
                    {
                        "params": members,
                        "weight_decay": weight_decay,
                        "part": name,
                        "lr_ratio": config.lr_ratio(name),
                    }
                )
    # Fused: the default walks over DTensors one by one, some six times slower (benchmarks/host_work.py).
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> dict[str, float]:
    """Set the learning rate of every group; return those of the parts that have one of their own.

    Args:
        optimizer: From ``build_optimizer``, or any other, whose groups all get ``lr``.
        lr: Learning rate of the step for parts without one of their own.
    """
    own = {}
    for group in optimizer.param_groups:
        ratio = group.get("lr_ratio", 1.0)
        group["lr"] = lr * ratio
        if ratio != 1.0:
            own[group["part"]] = group["lr"]
    return own


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
