"""How evenly a step used the experts, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.objective import Sums


@dataclass(frozen=True)
class ExpertNumbers:
    """Of the global batch, failed samples left out; equal on all ranks.

    Args:
        balance_loss: Load-balancing loss, mean over tokens of that of their sample; top_k is perfect balance.
        imbalance: Tokens of the busiest expert of a layer / mean over its experts; mean over sparse layers.
    """

    balance_loss: float
    imbalance: float


def expert_numbers(sums: Sequence[Sums], *, num_tokens: int) -> ExpertNumbers | None:
    """Return the numbers of a step; None, and no collective, for a model without experts.

    All ranks must call it.

    Args:
        sums: Of this rank's microbatches, at least one.
        num_tokens: Tokens of the global batch, those of failed samples left out.
    """
    counts = [item.expert_counts for item in sums if item.expert_counts is not None]
    losses = [item.balance for item in sums if item.balance is not None]
    if not counts:
        return None
    parts = [torch.stack(losses).double().sum().reshape(1), torch.stack(counts).double().sum(dim=0).flatten()]
    total = torch.cat(parts).cpu()
    dist.all_reduce(total)
    counts_AE = total[1:].view(counts[0].shape)
    imbalance_A = counts_AE.amax(dim=1) / counts_AE.mean(dim=1)
    return ExpertNumbers(float(total[0]) / num_tokens, float(imbalance_A.mean()))
