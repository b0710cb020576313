"""Forward only: loss and next-token accuracy by source, over held-out samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from omni_pipeline.core.batch import IGNORE_LABEL, Batch, MicroBatch
from trainer.batches import rows_by_plan
from trainer.colocation import ColocatedModel
from trainer.step import prepare_step, run_microbatch

CHUNK = 1024


@dataclass(frozen=True)
class EvalSums:
    """Sums over the labels of one source.

    Args:
        loss_sum: Cross entropy over all labels.
        num_labels: All labels.
        num_correct: Likeliest token equal to the label, end-of-sample labels left out.
        num_judged: Labels without those of the end of a sample.
    """

    loss_sum: float = 0.0
    num_labels: int = 0
    num_correct: int = 0
    num_judged: int = 0

    @property
    def loss(self) -> float:
        """Mean over labels; NaN without any."""
        return self.loss_sum / self.num_labels if self.num_labels else math.nan

    @property
    def accuracy(self) -> float:
        """Share of correct tokens; NaN without any."""
        return self.num_correct / self.num_judged if self.num_judged else math.nan

    def __add__(self, other: EvalSums) -> EvalSums:
        return EvalSums(
            self.loss_sum + other.loss_sum,
            self.num_labels + other.num_labels,
            self.num_correct + other.num_correct,
            self.num_judged + other.num_judged,
        )


def evaluate(
    model: ColocatedModel,
    batches: Iterable[Batch],
    *,
    sources: Sequence[str],
    eos: int,
    settings: Mapping[str, str],
) -> dict[str, EvalSums]:
    """Return the sums by source over all ``batches`` of all ranks; a collective.

    Ranks may have different numbers of batches: those that have none left, or exhausted ones, help the
    others, until no rank has samples.
    """
    totals = {name: EvalSums() for name in sources}
    iterator: Iterator[Batch] = iter(batches)
    step = 0
    while (
        sums := eval_step(model, next(iterator, None), step=step, sources=sources, eos=eos, settings=settings)
    ) is not None:
        totals = {name: totals[name] + sums[name] for name in sources}
        step += 1
    return totals


def eval_step(
    model: ColocatedModel,
    batch: Batch | None,
    *,
    step: int,
    sources: Sequence[str],
    eos: int,
    settings: Mapping[str, str],
) -> dict[str, EvalSums] | None:
    """Run one batch forward; a collective of all ranks.

    Args:
        model: Unchanged, and left in training mode (the model has no dropout).
        batch: Of this rank; None or an exhausted one if it has no more.
        step: Its number, from 0.
        sources: Names of all sources, the same on all ranks.
        eos: The token that ends a sample; it counts in the loss, not in the accuracy.
        settings: See ``Learner``.

    Returns:
        Sums by source over all ranks; None when no rank had a batch with samples.

    Raises:
        StateMismatchError, RankError: As ``train_step``.
    """
    prepared = prepare_step(model, batch, step=step, settings=settings)
    if prepared.batch is None:
        return None
    totals = torch.zeros(len(sources), 4, dtype=torch.float64)
    with torch.no_grad():
        for microbatch in prepared.batch.microbatches:
            num_rows = rows_by_plan(prepared.batch.plan, microbatch.index, rank=model.groups.rank)
            output = run_microbatch(
                model, microbatch, num_rows=num_rows, failed=prepared.failed, with_logits=True
            )
            assert output.logits is not None, "they were asked for"
            labels = torch.from_numpy(microbatch.labels_without(prepared.failed)).to(output.logits.device)
            totals += _sums(output.logits, labels, _source_of_position(microbatch, sources), eos=eos)
    model.release()
    dist.all_reduce(totals)
    rows: list[list[float]] = totals.tolist()
    return {
        name: EvalSums(row[0], int(row[1]), int(row[2]), int(row[3]))
        for name, row in zip(sources, rows, strict=True)
    }


def _sums(logits_SV: Tensor, labels_S: Tensor, source_S: Tensor, *, eos: int) -> Tensor:
    """Return float64 [sources, 4] on the CPU: loss, labels, correct, judged."""
    losses = [
        F.cross_entropy(logits.float(), labels, ignore_index=IGNORE_LABEL, reduction="none")
        for logits, labels in zip(torch.split(logits_SV, CHUNK), torch.split(labels_S, CHUNK), strict=True)
    ]
    is_label = labels_S != IGNORE_LABEL
    is_judged = is_label & (labels_S != eos)
    is_correct = is_judged & (logits_SV.argmax(dim=-1) == labels_S)
    columns = [torch.cat(losses), is_label, is_correct, is_judged]
    values_S4 = torch.stack([column.double() for column in columns], dim=1).cpu()
    return source_S.double().T @ values_S4


def _source_of_position(microbatch: MicroBatch, sources: Sequence[str]) -> Tensor:
    """Return bool [S, sources]: whether the sample at a position is of a source."""
    of_source = torch.zeros(len(microbatch.tokens), len(sources), dtype=torch.bool)
    for span in microbatch.spans:
        of_source[span.start : span.end, sources.index(span.id.source)] = True
    return of_source
