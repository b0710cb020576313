"""Forward only: loss and next-token accuracy by source, over held-out samples, each seen exactly once.

Ranks have different numbers of batches; those that have none left help the others with empty ones. Every
rank adds up what it sees, and the sums meet in one collective at the end, so a sample counts where it runs
and nowhere else. What was not judged is counted too: seen + failed + dropped + filtered is what the sources
have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from omni_pipeline.core.batch import IGNORE_LABEL, Batch, MicroBatch
from omni_pipeline.core.sample import SampleId
from trainer.batches import next_batch, rows_by_plan
from trainer.colocation import ColocatedModel
from trainer.step import PreparedStep, prepare_step, run_microbatch


@dataclass(frozen=True)
class EvalSums:
    """Sums over the samples of one source.

    Args:
        loss_sum: Cross entropy over all labels.
        num_labels: All labels.
        num_correct: Likeliest token equal to the label, end-of-sample labels left out.
        num_judged: Labels without those of the end of a sample.
        num_seen: Samples that ran.
        num_failed: Samples that could not be fetched or decoded, and so have no label.
        num_dropped: Samples that cannot be used, or fit no pack.
        num_filtered: Samples that filters and deny-lists leave out.
    """

    loss_sum: float = 0.0
    num_labels: int = 0
    num_correct: int = 0
    num_judged: int = 0
    num_seen: int = 0
    num_failed: int = 0
    num_dropped: int = 0
    num_filtered: int = 0

    @property
    def loss(self) -> float:
        """Mean over labels; NaN without any."""
        return self.loss_sum / self.num_labels if self.num_labels else math.nan

    @property
    def accuracy(self) -> float:
        """Share of correct tokens; NaN without any."""
        return self.num_correct / self.num_judged if self.num_judged else math.nan


NUM_SUMS = len(fields(EvalSums))
NUM_OF_LABELS = 4  # the first ones are sums over labels, the others count samples


def evaluate(
    model: ColocatedModel,
    batches: Iterable[Batch],
    *,
    sources: Sequence[str],
    eos: int,
    settings: Mapping[str, str],
) -> dict[str, EvalSums]:
    """Return the sums by source over all ``batches`` of all ranks; a collective.

    Args:
        model: Unchanged, and left in training mode (the model has no dropout).
        batches: Of this rank; they may end, or go on with exhausted ones.
        sources: Names of all sources, the same on all ranks.
        eos: The token that ends a sample; it counts in the loss, not in the accuracy.
        settings: See ``Learner``.

    Raises:
        StateMismatchError, RankError: As ``train_step``; also if the loader of any rank failed.
    """
    is_first = model.groups.rank == model.groups.members[0]
    totals = torch.zeros(len(sources), NUM_SUMS, dtype=torch.float64)
    iterator: Iterator[Batch] = iter(batches)
    step = 0
    while True:
        batch, problem = next_batch(iterator)
        if batch is not None and is_first:
            # Of the last, exhausted batch too: it may be the one that met them.
            totals[:, -2] += torch.tensor([batch.dropped.get(name, 0) for name in sources])
            totals[:, -1] += torch.tensor([batch.filtered.get(name, 0) for name in sources])
        prepared = prepare_step(model, batch, step=step, settings=settings, problem=problem)
        if prepared.batch is None:
            break
        totals += _step_sums(model, prepared, prepared.batch, sources=sources, eos=eos)
        step += 1
    dist.all_reduce(totals)
    rows: list[list[float]] = totals.tolist()
    return {
        name: EvalSums(row[0], *(int(value) for value in row[1:]))
        for name, row in zip(sources, rows, strict=True)
    }


def _step_sums(
    model: ColocatedModel, prepared: PreparedStep, batch: Batch, *, sources: Sequence[str], eos: int
) -> Tensor:
    """Run one batch forward and return what this rank adds, float64 [sources, sums]; a collective."""
    totals = torch.zeros(len(sources), NUM_SUMS, dtype=torch.float64)
    with torch.no_grad():
        for microbatch in batch.microbatches:
            num_rows = rows_by_plan(batch.plan, microbatch.index, rank=model.groups.rank)
            output = run_microbatch(
                model, microbatch, num_rows=num_rows, failed=prepared.failed, with_losses=True
            )
            assert output.losses is not None, "they were asked for"
            labels = torch.from_numpy(microbatch.labels_without(prepared.failed)).to(output.losses.device)
            of_positions = _position_values(output.losses, output.predictions, labels, eos=eos)
            totals[:, :NUM_OF_LABELS] += _source_of_position(microbatch, sources).double().T @ of_positions
            totals[:, NUM_OF_LABELS:-2] += _sample_counts(microbatch, sources, failed=prepared.failed)
    model.release()
    return totals


def _position_values(losses_S: Tensor, predictions_S: Tensor, labels_S: Tensor, *, eos: int) -> Tensor:
    """Return float64 [S, 4] on the CPU: loss, is label, is correct, is judged."""
    is_label = labels_S != IGNORE_LABEL
    is_judged = is_label & (labels_S != eos)
    is_correct = is_judged & (predictions_S == labels_S)
    columns = [losses_S, is_label, is_correct, is_judged]
    return torch.stack([column.double() for column in columns], dim=1).cpu()


def _source_of_position(microbatch: MicroBatch, sources: Sequence[str]) -> Tensor:
    """Return bool [S, sources]: whether the sample at a position is of a source."""
    of_source = torch.zeros(len(microbatch.tokens), len(sources), dtype=torch.bool)
    for span in microbatch.spans:
        of_source[span.start : span.end, sources.index(span.id.source)] = True
    return of_source


def _sample_counts(microbatch: MicroBatch, sources: Sequence[str], *, failed: frozenset[SampleId]) -> Tensor:
    """Return float64 [sources, 2]: samples seen, samples failed."""
    counts = torch.zeros(len(sources), 2, dtype=torch.float64)
    for span in microbatch.spans:
        counts[sources.index(span.id.source), int(span.id in failed)] += 1
    return counts
