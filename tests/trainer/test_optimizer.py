"""Schedule, parameter groups, and the global norm over several meshes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.ranks import run_ranks
from trainer.optimizer import build_optimizer, clip_gradients, learning_rate, local_square_sum
from trainer.optimizer_config import OptimizerConfig
from trainer.parallel.mesh import make_module_mesh
from trainer.parallel.sharding import shard_module

CONFIG = OptimizerConfig(lr=1.0, warmup_steps=4, min_lr_ratio=0.1, weight_decay=0.3)


def test_the_learning_rate_warms_up_linearly_and_falls_to_its_floor() -> None:
    rates = [learning_rate(step, config=CONFIG, num_steps=14) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:14] == sorted(rates[4:14], reverse=True)
    assert rates[13:] == pytest.approx([0.1] * 7)


def test_a_run_shorter_than_its_warm_up_never_decays() -> None:
    assert [learning_rate(step, config=CONFIG, num_steps=2) for step in range(2)] == [0.25, 0.5]


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    config = CONFIG.model_copy(update={"warmup_steps": 0})
    assert learning_rate(0, config=config, num_steps=1) == 1.0


def test_norms_biases_and_frozen_parameters_do_not_decay() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Embedding(4, 3))
    module[2].weight.requires_grad_(False)
    groups = build_optimizer({"one": module, "two": nn.Linear(1, 1, bias=False)}, CONFIG).param_groups
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [
        (0.3, 1),
        (0.0, 3),
        (0.3, 1),
    ]


def _norm_over_meshes(rank: int) -> tuple[float, float, list[float]]:
    torch.manual_seed(0)
    modules = [nn.Linear(5, 3) for _ in range(4)]
    for module, dp_shard in zip(modules, (4, 2, 1), strict=False):  # the last one stays whole on all ranks
        mesh = make_module_mesh(device=torch.device("cpu"), dp_shard=dp_shard, setting="x")
        shard_module(module, mesh=mesh, precision="fp32")
    for module in modules:
        module(torch.ones(2, 5)).square().sum().backward()
    parameters = [parameter for module in modules for parameter in module.parameters()]
    gradients = [
        gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for parameter in parameters
        if (gradient := parameter.grad) is not None
    ]
    expected = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    square = local_square_sum(parameters, world_size=4)
    torch.distributed.all_reduce(square)
    norm = math.sqrt(square.item())
    clip_gradients(parameters, norm=norm, limit=norm / 2)
    clipped = local_square_sum(parameters, world_size=4)
    torch.distributed.all_reduce(clipped)
    return norm, expected, [math.sqrt(clipped.item())]


def test_the_global_norm_counts_each_copy_of_a_shard_once() -> None:
    for norm, expected, (clipped,) in run_ranks(4, _norm_over_meshes):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert clipped == pytest.approx(norm / 2, rel=1e-6)


def test_gradients_below_the_limit_stay_bit_for_bit() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 0.1)
    clip_gradients([parameter], norm=0.2, limit=0.2)
    assert torch.equal(parameter.grad, torch.full((3,), 0.1))
