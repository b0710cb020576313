"""Cross entropy of the next token, summed, without ever holding all logits.

Positions run in chunks whose logits are made again in backward (Chen et al. 2016, sublinear memory), so the
peak is chunk_size x vocabulary instead of positions x vocabulary. The *sum* is returned: dividing by the
count of the global batch is the step's business, so that no placement of samples can change the loss.

Evaluation wants the loss of each position instead, without gradients: again one chunk of logits at a time.

Shapes: S positions, D width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from omni_pipeline.core.batch import IGNORE_LABEL


def chunked_cross_entropy(
    hidden_SD: Tensor, weight_VD: Tensor, labels_S: Tensor, *, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Return the summed loss over positions with a label, and the likeliest token at every position.

    Args:
        hidden_SD: [S, D]; S may be 0.
        weight_VD: [V, D].
        labels_S: int64 [S]; -100 has no loss. With no label at all the loss is 0 and so are the gradients.
        chunk_size: Positions whose logits exist at one time, at least 1.

    Returns:
        float32 scalar (float64 if ``hidden_SD`` is), and int64 [S] without gradient.
    """
    wide = torch.float64 if hidden_SD.dtype == torch.float64 else torch.float32
    loss_sum = hidden_SD.new_zeros((), dtype=wide)
    predictions = []
    for hidden, labels in zip(
        torch.split(hidden_SD, chunk_size), torch.split(labels_S, chunk_size), strict=True
    ):
        loss, predicted = checkpoint(
            _chunk_loss, hidden, weight_VD, labels, wide, use_reentrant=False, preserve_rng_state=False
        )
        loss_sum = loss_sum + loss
        predictions.append(predicted)
    return loss_sum, torch.cat(predictions)


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
    wide = torch.float64 if hidden_SD.dtype == torch.float64 else torch.float32
    losses, predictions = [], []
    for hidden, labels in zip(
        torch.split(hidden_SD, chunk_size), torch.split(labels_S, chunk_size), strict=True
    ):
        logits_SV = F.linear(hidden, weight_VD).to(wide)
        losses.append(F.cross_entropy(logits_SV, labels, ignore_index=IGNORE_LABEL, reduction="none"))
        predictions.append(logits_SV.argmax(dim=-1))
    return torch.cat(losses), torch.cat(predictions)


def _chunk_loss(
    hidden_SD: Tensor, weight_VD: Tensor, labels_S: Tensor, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    logits_SV = F.linear(hidden_SD, weight_VD).to(wide)
    loss = F.cross_entropy(logits_SV, labels_S, ignore_index=IGNORE_LABEL, reduction="sum")
    return loss, logits_SV.detach().argmax(dim=-1)
