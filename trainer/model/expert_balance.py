"""The load-balancing loss of mixture-of-experts layers, of every sample by itself.

E x sum over experts of (share of the tokens that it gets) x (its mean probability): Switch Transformer (Fedus
et al. 2021, equations 4 to 6), both factors taken over all sparse layers together as transformers takes them
for Qwen3-MoE. It is K if all experts are used evenly. It is no sum over tokens: taken over a microbatch it
would depend on what runs beside a sample, so it is taken per sample, where it is the reference's for a
sequence of its own. Samples are then summed, each with its tokens as weight.

Shapes: S positions, N samples, E experts, K experts of a token, A sparse layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class RouterSums(NamedTuple):
    """What one layer did with each sample.

    Args:
        counts: [N, E], without gradient: tokens that chose each expert.
        probs: [N, E]: sum over tokens of the probability of each expert.
    """

    counts: Tensor
    probs: Tensor


class RoutedSamples:
    """Which rows are tokens of which sample. Rows of none (padding, failed samples) count nowhere.

    Not a dataclass: FSDP would rebuild it at every block and cast what it holds.

    Args:
        spans: Rows [start, end) of each sample; none is empty and no two overlap.
        num_rows: S.
        like: Where and in which type of activation rows are; sums are float32, or float64 if it is.

    Raises:
        ValueError: A span is empty or beyond the rows.
    """

    def __init__(self, spans: Sequence[Sequence[int]], *, num_rows: int, like: Tensor) -> None:
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        sample_S = np.full(num_rows, -1)
        for index, (start, end) in enumerate(spans):
            if not 0 <= start < end <= num_rows:
                raise ValueError(f"span {index} is rows {start} to {end} of {num_rows}")
            sample_S[start:end] = index
        sample_1S = torch.from_numpy(sample_S).to(like.device, non_blocking=True).unsqueeze(0)
        # As a matrix product the sums over samples run in a fixed order, and their backward is one too.
        self.is_of_NS = (torch.arange(len(spans), device=like.device).unsqueeze(1) == sample_1S).to(wide)
        lengths = [end - start for start, end in spans]
        self.lengths_N = torch.tensor(lengths, dtype=wide).to(like.device, non_blocking=True)

    def sums(self, probs_SE: Tensor, experts_SK: Tensor) -> RouterSums:
        """Return the sums over the rows of every sample."""
        chosen_SE = torch.zeros_like(probs_SE).scatter_(1, experts_SK, 1.0)
        return RouterSums(self.is_of_NS @ chosen_SE, self.is_of_NS @ probs_SE)

    def loss_sum(self, of_layers: Sequence[RouterSums]) -> Tensor:
        """Return the sum over samples of (tokens x load-balancing loss); 0, on the graph, without any."""
        counts_NE = torch.stack([sums.counts for sums in of_layers]).sum(dim=0)
        probs_NE = torch.stack([sums.probs for sums in of_layers]).sum(dim=0)
        num_experts = counts_NE.shape[1]
        scale_N = num_experts / (len(of_layers) ** 2 * self.lengths_N)
        return ((counts_NE * probs_NE).sum(dim=1) * scale_N).sum()
