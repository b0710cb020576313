"""Steps whose gradients are kept and whose weights stay."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from omni_pipeline.core.batch import Batch
from omni_pipeline.core.topology import Topology
from trainer.colocation import colocate
from trainer.config import ModelConfig
from trainer.model.omni import build_model
from trainer.parallel.mesh import make_rank_groups, pick_device
from trainer.step import Learner, StepResult, train_step


class Recorder(torch.optim.SGD):
    """Keeps the gradients of a step, which every trained parameter has, and changes nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.model = model
        self.gradients: dict[str, Tensor] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None, name
                continue
            assert isinstance(parameter.grad, DTensor), name
            self.gradients[name] = parameter.grad.full_tensor().clone()


def step_alone(
    rank: int, config: ModelConfig, weights: dict[str, Tensor], batch: Batch
) -> tuple[StepResult, dict[str, Tensor]]:
    """Do the step of a world of one rank; return what it says and the gradient of every parameter."""
    module = build_model(config)
    module.load_state_dict(weights)
    groups = make_rank_groups(Topology(world_size=1), device=pick_device())
    model = colocate(module, groups=groups, parallel={}, precision="fp32")
    recorder = Recorder(model.module)
    learner = Learner(model, recorder, learning_rate_at=lambda step: 1.0, grad_clip=math.inf, settings={})
    return train_step(learner, batch, step=0), recorder.gradients
