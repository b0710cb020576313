"""Parameters that cannot be trained on: never written, not finite, or a matrix of zeros. Looked for at start.

Storage starts as NaN (``model.init.make_storage``), so one look finds what neither first weights, nor
imported ones, nor a checkpoint have written, and what they have written wrongly.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omni_pipeline.core.errors import DataError

NAMED = 4


@torch.no_grad()
def check_parameters(model: nn.Module, *, source: str, fix: str) -> None:
    """Raise the same error on all ranks if a parameter of any rank is unfit; all ranks must call this.

    One pass over the parameters of this rank, and one small message.

    Args:
        model: Parameters may be DTensors.
        source: Where they come from, for the message.
        fix: What to do about it.

    Raises:
        DataError: Names the first few parameters that are not finite or, of two dims or more, all zero.
    """
    names, largest = _largest_values(model)
    # Of each parameter: is any number not finite, is any number not zero. A part on one rank is not all.
    found = torch.stack([~largest.isfinite(), largest != 0]).to(torch.int32).cpu()
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    is_matrix = torch.tensor([parameter.dim() >= 2 for parameter in model.parameters()])
    not_finite, zero = found[0] == 1, (found[1] == 0) & is_matrix
    lines = [
        f"{what}: {_listed([name for name, bad in zip(names, where.tolist(), strict=True) if bad])}"
        for what, where in (("not finite", not_finite), ("all zero", zero))
        if where.any()
    ]
    if lines:
        error = DataError(f"parameters cannot be trained on; {'; '.join(lines)}", where=source, fix=fix)
        error.is_shared = True
        raise error


def _largest_values(model: nn.Module) -> tuple[list[str], Tensor]:
    """Return all names, and of each parameter the largest absolute value on this rank; NaN if any is."""
    data = [parameter.data for parameter in model.parameters()]
    parts = [item.to_local() if isinstance(item, DTensor) else item for item in data]
    filled = [index for index, part in enumerate(parts) if part.numel()]
    largest = torch.zeros(len(parts), dtype=torch.float32)
    if filled:
        norms = torch._foreach_norm([parts[index] for index in filled], ord=float("inf"))
        largest[filled] = torch.stack(norms).float().cpu()
    return [name for name, _ in model.named_parameters()], largest


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"
