"""Rotary positions: plain along one axis, 2-D for pictures, M-RoPE for mixed sequences.

All three are one thing: frequency f of a head turns by the position along *its* axis times its own rate.
They differ only in which axis a frequency reads. The two halves of a head are the two coordinates of the
planes (the layout of GPT-NeoX and transformers).

Shapes: L rows, N heads, H head width, F = H / 2 frequencies, A axes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Rotary:
    """Cosines and sines of every row; made once per forward, used by every block.

    Not a dataclass or tuple on purpose: FSDP casts the tensors in those to its parameter type, and angles
    should stay in float32.

    Args:
        angle_LF: Radians, float32 or float64.
    """

    def __init__(self, angle_LF: Tensor) -> None:
        self.cos_L1F = angle_LF.cos().unsqueeze(1)
        self.sin_L1F = angle_LF.sin().unsqueeze(1)

    def rotate(self, x_LNH: Tensor) -> Tensor:
        """Return ``x`` turned, in its own type."""
        first_LNF, second_LNF = x_LNH.to(self.cos_L1F.dtype).chunk(2, dim=-1)
        turned = (
            first_LNF * self.cos_L1F - second_LNF * self.sin_L1F,
            second_LNF * self.cos_L1F + first_LNF * self.sin_L1F,
        )
        return torch.cat(turned, dim=-1).to(x_LNH.dtype)


def angle_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which angles are computed for activations of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def frequencies(count: int, *, theta: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return theta ** (-f / count) for f in 0 .. count - 1, with the very rounding of transformers.

    One unit in the last place is 0.003 radians at position 30000.
    """
    return 1 / theta ** (torch.arange(count, device=device, dtype=dtype) / count)


def mrope(positions_AL: Tensor, *, sections: Sequence[int], theta: float, dtype: torch.dtype) -> Rotary:
    """Return the M-RoPE of the LLM; equal positions on all axes give plain rotary positions.

    Args:
        positions_AL: int64 [3, L]: temporal, height and width position.
        sections: Frequencies that read each axis, lowest frequency index first; their sum is F.
        theta: Base of the frequencies.
        dtype: Type of the activations.
    """
    rate_F = frequencies(sum(sections), theta=theta, device=positions_AL.device, dtype=angle_dtype(dtype))
    rates = torch.split(rate_F, list(sections))
    angles = [
        position_L.unsqueeze(1) * rate for position_L, rate in zip(positions_AL.unbind(), rates, strict=True)
    ]
    return Rotary(torch.cat(angles, dim=1))


def rotary_2d(positions_AL: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Return the rotary positions of patches: half of the frequencies reads the row, the rest the column.

    Args:
        positions_AL: int64 [2, L]: row and column of each patch.
        head_dim: H, a multiple of 4.
        theta: Base; both halves use the same head_dim / 4 rates.
        dtype: Type of the activations.
    """
    rate_F = frequencies(head_dim // 4, theta=theta, device=positions_AL.device, dtype=angle_dtype(dtype))
    return Rotary(
        torch.cat([position_L.unsqueeze(1) * rate_F for position_L in positions_AL.unbind()], dim=1)
    )
