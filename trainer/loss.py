"""Cross entropy of the next token, summed, without ever holding all logits.

Positions run in chunks, so the peak is a few times ``LOGITS_AT_ONCE`` instead of positions x vocabulary. The
gradient of a chunk is made beside its loss, while its logits are there: the sum of losses has one gradient
coming back, a number, and everything before it is linear in that. So nothing of a chunk is kept, and nothing
made again (Hsu et al. 2024, Liger Kernel; recomputing the logits would be a fourth product beside three).
The *sum* is returned: dividing by the count of the global batch is the step's business, so that no placement
of samples can change the loss.

The z-loss (Chowdhery et al. 2022, PaLM, section 5) is the square of the log-partition, log sum exp of the
logits, of each position with a label: it keeps logits from drifting, which cross entropy alone does not see.

Evaluation wants the loss of each position instead, without gradients: again one chunk of logits at a time.

Shapes: S positions, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from omni_pipeline.core.batch import IGNORE_LABEL

LOGITS_AT_ONCE = 1 << 26
"""Of one chunk: 256 MiB in float32. At a vocabulary of 152,064 a chunk has 441 positions: enough for products
at full rate, and little beside the gradient of such a head."""


def chunk_size_for(vocabulary: int) -> int:
    """Return how many positions make a chunk, at least 1."""
    return max(1, LOGITS_AT_ONCE // vocabulary)


class HeadLoss(NamedTuple):
    """What the head makes of all positions.

    Args:
        loss_sum: float32 scalar (float64 if the input is): cross entropy, and z-loss by its weight, summed
            over positions with a label.
        predictions: int64 [S], without gradient: the likeliest token at every position.
        z_sum: Scalar of the same type, without gradient: z-loss summed, without its weight; 0 if that is 0.
    """

    loss_sum: Tensor
    predictions: Tensor
    z_sum: Tensor


def chunked_cross_entropy(
    hidden_SD: Tensor, weight_VD: Tensor, labels_S: Tensor, *, chunk_size: int, z_loss: float = 0.0
) -> HeadLoss:
    """Return the summed loss over positions with a label, and what belongs to it.

    Args:
        hidden_SD: [S, D]; S may be 0.
        weight_VD: [V, D].
        labels_S: int64 [S]; -100 has no loss. With no label at all the loss is 0 and so are the gradients.
        chunk_size: Positions whose logits exist at one time, at least 1.
        z_loss: Weight of the z-loss in the sum.
    """
    with_gradient = torch.is_grad_enabled() and (hidden_SD.requires_grad or weight_VD.requires_grad)
    found: tuple[Tensor, Tensor, Tensor] = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden_SD, weight_VD, labels_S, chunk_size, z_loss, with_gradient
    )
    return HeadLoss(*found)


@torch.no_grad()
def token_losses(
    hidden_SD: Tensor, weight_VD: Tensor, labels_S: Tensor, *, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Return the loss and the likeliest token at every position; no gradient runs through them.

    Args:
        hidden_SD, weight_VD, labels_S, chunk_size: As for ``chunked_cross_entropy``.

    Returns:
        float32 [S] (float64 if ``hidden_SD`` is), 0 without a label; and int64 [S].
    """
    losses, predictions = [], []
    for hidden, labels in zip(
        torch.split(hidden_SD, chunk_size), torch.split(labels_S, chunk_size), strict=True
    ):
        logits_SV = _logits(hidden, weight_VD)
        losses.append(F.cross_entropy(logits_SV, labels, ignore_index=IGNORE_LABEL, reduction="none"))
        predictions.append(logits_SV.argmax(dim=-1))
    return torch.cat(losses), torch.cat(predictions)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: Tensor,
        weight_VD: Tensor,
        labels_S: Tensor,
        chunk_size: int,
        z_loss: float,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_hidden, needs_weight = (with_gradient and needed for needed in ctx.needs_input_grad[:2])
        hidden_grad_SD = torch.empty_like(hidden_SD) if needs_hidden else None
        weight_grad_VD = torch.zeros_like(weight_VD, dtype=_wide(hidden_SD)) if needs_weight else None
        predictions_S = torch.empty_like(labels_S)
        loss_sum, z_sum = hidden_SD.new_zeros(2, dtype=_wide(hidden_SD)).unbind()
        for start in range(0, len(labels_S), chunk_size):
            rows = slice(start, start + chunk_size)
            # A function of its own, so that nothing of a chunk lives into the next one.
            grad_SV = _run_chunk(
                hidden_SD[rows],
                weight_VD,
                labels_S[rows],
                loss_sum=loss_sum,
                z_sum=z_sum,
                predictions_S=predictions_S[rows],
                z_loss=z_loss,
                with_gradient=needs_hidden or needs_weight,
            )
            if hidden_grad_SD is not None:
                torch.mm(grad_SV, weight_VD, out=hidden_grad_SD[rows])
            if weight_grad_VD is not None:
                _add_product(weight_grad_VD, grad_SV, hidden_SD[rows])
            del grad_SV
        ctx.save_for_backward(hidden_grad_SD, weight_grad_VD)
        ctx.weight_dtype = weight_VD.dtype
        ctx.mark_non_differentiable(predictions_S, z_sum)
        return loss_sum + z_loss * z_sum, predictions_S, z_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad_SD, weight_grad_VD = ctx.saved_tensors
        hidden_grad_SD = _scaled(hidden_grad_SD, scale)
        return hidden_grad_SD, _scaled(weight_grad_VD, scale, dtype=ctx.weight_dtype), None, None, None, None


def _run_chunk(
    hidden_SD: Tensor,
    weight_VD: Tensor,
    labels_S: Tensor,
    *,
    loss_sum: Tensor,
    z_sum: Tensor,
    predictions_S: Tensor,
    z_loss: float,
    with_gradient: bool,
) -> Tensor:
    """Add to the sums, write ``predictions_S``, and return the gradient by the logits, if asked for."""
    logits_SV = _logits(hidden_SD, weight_VD)
    torch.argmax(logits_SV, dim=-1, out=predictions_S)
    log_probs_SV = F.log_softmax(logits_SV, dim=-1)
    has_label_S1 = labels_S.unsqueeze(1) != IGNORE_LABEL
    label_S1 = labels_S.unsqueeze(1).clamp_min(0)
    label_log_probs_S1 = log_probs_SV.gather(1, label_S1)
    loss_sum -= label_log_probs_S1.masked_fill(~has_label_S1, 0).sum()
    log_partition_S1 = logits_SV.gather(1, label_S1) - label_log_probs_S1 if z_loss else None
    if log_partition_S1 is not None:
        z_sum += log_partition_S1.square().masked_fill(~has_label_S1, 0).sum()
    if not with_gradient:
        return log_probs_SV
    grad_SV = log_probs_SV.exp_()
    if log_partition_S1 is not None:
        grad_SV.mul_(1 + 2 * z_loss * log_partition_S1)
    # The gradient is the probabilities, less one at the label. One index a row: nothing collides.
    grad_SV.scatter_add_(1, label_S1, -torch.ones_like(grad_SV[:, :1]))
    return grad_SV.masked_fill_(~has_label_S1, 0).to(hidden_SD.dtype)


def _add_product(sum_VD: Tensor, grad_SV: Tensor, hidden_SD: Tensor) -> None:
    """Add the product of a chunk. Between chunks the sum stays wide: in bfloat16 every chunk would round it,
    and a hundred of them are ten times as wrong as one product. By blocks of rows, so that no second gradient
    of the whole head exists.
    """
    if grad_SV.dtype == sum_VD.dtype:
        sum_VD.addmm_(grad_SV.T, hidden_SD)
        return
    block = chunk_size_for(sum_VD.shape[1])
    for out, grad in zip(torch.split(sum_VD, block), torch.split(grad_SV, block, dim=1), strict=True):
        out += grad.T @ hidden_SD


def _scaled(gradient: Tensor | None, scale: Tensor, *, dtype: torch.dtype | None = None) -> Tensor | None:
    """Multiply in the type of ``scale``, by blocks: in bfloat16 a scale of 1 / tokens would lose 16 bits."""
    if gradient is None:
        return None
    scaled = torch.empty_like(gradient, dtype=dtype)
    block = chunk_size_for(gradient.shape[1])
    for rows, out in zip(torch.split(gradient, block), torch.split(scaled, block), strict=True):
        torch.mul(rows.to(scale.dtype), scale, out=out)
    return scaled


def _logits(hidden_SD: Tensor, weight_VD: Tensor) -> Tensor:
    return F.linear(hidden_SD, weight_VD).to(_wide(hidden_SD))


def _wide(hidden_SD: Tensor) -> torch.dtype:
    """Return the type in which losses are computed and summed."""
    return torch.float64 if hidden_SD.dtype == torch.float64 else torch.float32
