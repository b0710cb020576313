"""Schedule, parameter groups, and the global norm over several meshes."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.ranks import run_ranks
from trainer.colocation import omni_anchors, parameters_by_part
from trainer.config import ModelConfig
from trainer.model.omni import build_model
from trainer.optimizer import (
    build_optimizer,
    clip_gradients,
    learning_rate,
    local_square_sum,
    set_learning_rate,
)
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
    parts = {"one": module.parameters(), "two": nn.Linear(1, 1, bias=False).parameters()}
    groups = build_optimizer(parts, CONFIG).param_groups
    assert [(group["part"], group["weight_decay"], len(group["params"])) for group in groups] == [
        ("one", 0.3, 1),
        ("one", 0.0, 3),
        ("two", 0.3, 1),
    ]


def _model_optimizer(
    config: OptimizerConfig, **model: Any
) -> tuple[torch.optim.AdamW, dict[nn.Parameter, str]]:
    built = build_model(ModelConfig.model_validate({"size": "tiny", **model}))
    names = {parameter: name for name, parameter in built.named_parameters()}
    return build_optimizer(parameters_by_part(omni_anchors(built), built.llm), config), names


def test_of_the_model_all_matrices_decay_and_no_norm_and_no_bias() -> None:
    optimizer, names = _model_optimizer(CONFIG, llm={"tied_head": True})
    decays = {
        names[parameter]: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert decays.keys() == set(names.values())
    without = {name for name, decay in decays.items() if decay == 0.0}
    norms = re.compile(r"norm|ln_post|ln_q")
    assert without == {name for name in decays if name.endswith(".bias") or norms.search(name)}
    assert decays["llm.embed_tokens.weight"] == 0.3
    assert decays["encoders.audio.conv1.weight"] == 0.3


def test_parts_have_learning_rates_and_decay_of_their_own_on_the_same_schedule() -> None:
    config = OptimizerConfig.model_validate(
        {
            "lr": 0.1,
            "weight_decay": 0.3,
            "parts": {"vision": {"lr": 0.01}, "audio_projector": {"weight_decay": 0.5}, "llm": {"lr": 0.2}},
        }
    )
    optimizer, names = _model_optimizer(config)
    assert set_learning_rate(optimizer, 0.04) == {"vision": pytest.approx(0.004), "llm": pytest.approx(0.08)}
    rates = {"vision": 0.004, "vision_projector": 0.04, "audio": 0.04, "audio_projector": 0.04, "llm": 0.08}
    decays = dict.fromkeys(rates, 0.3) | {"audio_projector": 0.5}
    for group in optimizer.param_groups:
        assert group["lr"] == pytest.approx(rates[group["part"]])
        assert group["weight_decay"] in (0.0, decays[group["part"]])
    assert {group["part"] for group in optimizer.param_groups} == rates.keys()
    (merger,) = [
        group
        for group in optimizer.param_groups
        if group["part"] == "vision_projector" and group["weight_decay"]
    ]
    assert [names[parameter] for parameter in merger["params"]] == [
        "encoders.vision.merger.mlp.0.weight",
        "encoders.vision.merger.mlp.2.weight",
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
