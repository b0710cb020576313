"""A mixture of experts in place of one SwiGLU, as in Qwen3-MoE: every token passes top_k of E experts.

Tokens are sorted by expert and every expert multiplies its own run of rows, all of them in one grouped
product (Gale et al. 2022, MegaBlocks). Experts have no capacity: no token is dropped and none is padded, so
what a token gets depends on nothing that runs beside it. Rows are moved by gathers in both directions, never
added where they collide: the same input gives the same bits.

Shapes: S positions, D width, E experts, K experts of a token, M = S x K rows, F inner width, O outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.experts_config import ExpertsConfig
from trainer.model.blocks import outside_graphs
from trainer.model.expert_balance import RoutedSamples, RouterSums

GROUPED_ALIGNMENT_BYTES = 16


class Routing(NamedTuple):
    """Where tokens go.

    Args:
        probs: float32 [S, E] (float64 if the input is): probability of every expert, sum 1.
        weights: [S, K] of the input's type: what the output of each chosen expert is multiplied by.
        experts: int64 [S, K]: the chosen experts, likeliest first.
    """

    probs: Tensor
    weights: Tensor
    experts: Tensor


class Router(nn.Module):
    """Chooses the top_k likeliest experts of every token.

    Args:
        hidden: Width of the input.
        config: Of the experts.
    """

    def __init__(self, hidden: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.normalize = config.normalize_top_k
        self.weight = nn.Parameter(torch.empty(config.count, hidden))

    def forward(self, x_SD: Tensor) -> Routing:
        """Return where the rows of ``x`` go; the softmax runs in float32 or wider."""
        logits_SE = F.linear(x_SD, self.weight)
        wide = torch.float64 if x_SD.dtype == torch.float64 else torch.float32
        probs_SE = torch.softmax(logits_SE, dim=-1, dtype=wide)
        weights_SK, experts_SK = torch.topk(probs_SE, self.top_k, dim=-1)
        if self.normalize:
            weights_SK = weights_SK / weights_SK.sum(dim=-1, keepdim=True)
        return Routing(probs_SE, weights_SK.to(x_SD.dtype), experts_SK)


class Experts(nn.Module):
    """The experts' matrices, each kind one parameter; names and layout are the reference's in memory.

    Args:
        hidden: Width of input and output.
        config: Of the experts.
    """

    def __init__(self, hidden: int, config: ExpertsConfig) -> None:
        super().__init__()
        count, inner = config.count, config.intermediate
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))

    def forward(self, x_SD: Tensor, routing: Routing) -> Tensor:
        """Return [S, D]: for every token the weighted sum of what its experts make of it."""
        num_experts, top_k = self.down_proj.shape[0], routing.experts.shape[1]
        expert_M, order_M = torch.sort(routing.experts.flatten(), stable=True)
        inverse_M = torch.argsort(order_M)
        experts_E = torch.arange(num_experts, device=expert_M.device)
        ends_E = torch.searchsorted(expert_M, experts_E, right=True, out_int32=True)
        x_MD = _gather(x_SD, order_M // top_k, inverse_M, top_k)
        gate_MF, up_MF = grouped_linear(x_MD, self.gate_up_proj, ends_E).chunk(2, dim=-1)
        out_MD = grouped_linear(F.silu(gate_MF) * up_MF, self.down_proj, ends_E)
        out_SKD = _gather(out_MD, inverse_M, order_M, 1).view(*routing.experts.shape, x_SD.shape[1])
        out_SD: Tensor = (out_SKD * routing.weights.unsqueeze(-1)).sum(dim=1)
        return out_SD


class SparseMlp(nn.Module):
    """Router and experts.

    Args:
        hidden: Width of input and output.
        config: Of the experts.
    """

    def __init__(self, hidden: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.gate = Router(hidden, config)
        self.experts = Experts(hidden, config)

    # How many tokens an expert gets changes with every microbatch.
    @outside_graphs
    def forward(self, x_SD: Tensor, samples: RoutedSamples | None) -> tuple[Tensor, RouterSums | None]:
        """Return [S, D], and the sums that the load-balancing loss needs, if there are ``samples``."""
        routing: Routing = self.gate(x_SD)
        out_SD: Tensor = self.experts(x_SD, routing)
        return out_SD, None if samples is None else samples.sums(routing.probs, routing.experts)


def grouped_linear(x_MD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """Return [M, O]: run e of the rows, which ends before row ``ends[e]``, times the e-th matrix.

    Runs may be empty, and M may be 0: the result is on the graph of x and the weights all the same.

    Args:
        x_MD: Rows.
        weight_EOD: One matrix for every run.
        ends_E: int32, ascending; the last one is M. Read on its device, so CUDA does not wait for the host;
            but for float64, and for widths of which 16 bytes are no divisor.
    """
    if _has_kernel(weight_EOD):
        return F.grouped_mm(x_MD, weight_EOD.transpose(-2, -1), offs=ends_E)
    ends: list[int] = ends_E.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    runs = zip(torch.split(x_MD, sizes), weight_EOD.unbind(), strict=True)
    # An expert without rows costs nothing; its gradient is 0, because unbind fills in what is missing.
    outs = [F.linear(rows, weight) for rows, weight in runs if len(rows)]
    return torch.cat(outs) if outs else F.linear(x_MD, weight_EOD[0])


def _has_kernel(weight_EOD: Tensor) -> bool:
    """Whether ``grouped_mm`` takes these matrices; each row of both factors must begin on 16 bytes."""
    row_bytes = (size * weight_EOD.element_size() for size in weight_EOD.shape[1:])
    return weight_EOD.dtype != torch.float64 and all(
        size % GROUPED_ALIGNMENT_BYTES == 0 for size in row_bytes
    )


class _Gather(torch.autograd.Function):
    """x[index], where every row of x is taken ``copies`` times.

    The backward gathers too, and adds the copies side by side. Torch's own would add rows into colliding
    places, which is atomic, so of no fixed order, on CUDA.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index_M: Tensor, inverse_M: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse_M)
        ctx.copies = copies
        return x.index_select(0, index_M)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_M,) = ctx.saved_tensors
        rows_MD = gradients[0].index_select(0, inverse_M)
        num_rows = len(rows_MD) // ctx.copies
        return rows_MD.view(num_rows, ctx.copies, rows_MD.shape[1]).sum(dim=1), None, None, None


def _gather(x: Tensor, index_M: Tensor, inverse_M: Tensor, copies: int) -> Tensor:
    """Return x[index]; ``inverse`` brings the result into the order of x, its copies side by side."""
    out: Tensor = _Gather.apply(x, index_M, inverse_M, copies)  # type: ignore[no-untyped-call]
    return out
