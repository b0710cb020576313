"""Root mean square normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Scale the last axis to unit root mean square, times a learned weight; sums run in float32 or wider.

    Args:
        hidden: Size of the last axis.
        eps: Added to the mean square.
    """

    def __init__(self, hidden: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised ``x``, same shape."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
