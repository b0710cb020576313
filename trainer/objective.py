"""What a step minimises: the one place where its terms are added.

Each term is a sum over the global batch divided by a count of the global batch, and a rank adds its
microbatches' part of it. So no placement, packing or order of samples can change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.config import ModelConfig
from trainer.model.llm import LlmOutput
from trainer.optimizer_config import OptimizerConfig


class Sums(NamedTuple):
    """What stays of a microbatch after its backward, on the device, off the graph.

    Args:
        cross_entropy: Sum over labels.
        z: Sum over labels of the z-loss; 0 if there is none.
        balance: See ``LlmOutput.balance_sum``.
        expert_counts: See ``LlmOutput``.
    """

    cross_entropy: Tensor
    z: Tensor
    balance: Tensor | None
    expert_counts: Tensor | None


@dataclass(frozen=True)
class Counts:
    """What the sums are divided by: counts of the global batch, at least 1.

    Args:
        num_labels: Labels.
        num_tokens: Tokens of the samples that have not failed, with or without a label.
    """

    num_labels: int
    num_tokens: int


@dataclass(frozen=True)
class Objective:
    """Cross entropy, mean over labels, and what is added to it.

    Args:
        balance_loss: Weight of the load-balancing loss, mean over tokens of that of their sample. Tokens, not
            labels: routers see every token, and the weight then means what it means for one sequence of the
            reference, however many of its tokens have a label.
        z_loss: Weight of the z-loss, mean over labels; see ``trainer.loss``.
    """

    balance_loss: float = 0.0
    z_loss: float = 0.0

    @classmethod
    def of(cls, model: ModelConfig, optimizer: OptimizerConfig) -> Objective:
        """Return what the settings of a run say."""
        experts = model.llm.experts
        return cls(balance_loss=0.0 if experts is None else experts.balance_loss, z_loss=optimizer.z_loss)

    def part(self, output: LlmOutput, counts: Counts) -> Tensor:
        """Return what one microbatch adds to the objective: a scalar on the graph."""
        # The z-loss is in that sum: its gradient is made beside that of the cross entropy.
        total = output.loss_sum / counts.num_labels
        if output.balance_sum is not None:
            total = total + self.balance_loss * output.balance_sum / counts.num_tokens
        return total

    def sums(self, output: LlmOutput) -> Sums:
        """Return the terms of one microbatch apart."""
        loss = output.loss_sum.detach()
        z = torch.zeros_like(loss) if output.z_sum is None else output.z_sum
        balance = None if output.balance_sum is None else output.balance_sum.detach()
        return Sums(loss - self.z_loss * z, z, balance, output.expert_counts)
