"""SwiGLU (Shazeer 2020): a gate of the input scales its projection.

Shapes: L rows, D width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x)).

    Args:
        hidden: Width of input and output.
        intermediate: Inner width.
        bias: Whether the three projections have one.
    """

    def __init__(self, hidden: int, *, intermediate: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)

    def forward(self, x_LD: Tensor) -> Tensor:
        """Return [L, D]."""
        out_LD: Tensor = self.down_proj(F.silu(self.gate_proj(x_LD)) * self.up_proj(x_LD))
        return out_LD
