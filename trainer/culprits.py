"""Which samples made a loss or a gradient that is not finite. Runs only on the way to the end of a run.

Losses show it themselves: attention isolates samples, so one more forward tells the positions, and these the
samples. Gradients are summed over positions, microbatches and ranks before anyone can look at them. So every
microbatch is run again alone, and in one whose gradient is not finite the samples are found by halving: only
one half keeps its labels, the rest gets no gradient. All ranks decide by the same gathered numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from omni_pipeline.core.batch import Batch, MicroBatch, SampleSpan
from omni_pipeline.core.sample import SampleId
from trainer.agreement import global_sums

# Of the whole step: each costs a few passes over its microbatch.
SEARCHED_SAMPLES = 4
NAMED_SAMPLES = 4


@dataclass(frozen=True)
class Rerun:
    """How a microbatch is run again; both are collectives of all ranks and change no weight.

    Args:
        losses: ``losses(microbatch, failed) -> float [S]``: of each position, no gradient.
        grad_square: ``grad_square(microbatch, failed) -> float``: this rank's part of the squared global
            gradient norm of that microbatch alone.
    """

    losses: Callable[[MicroBatch, frozenset[SampleId]], torch.Tensor]
    grad_square: Callable[[MicroBatch, frozenset[SampleId]], torch.Tensor]


def find_culprits(batch: Batch, rerun: Rerun, *, failed: frozenset[SampleId]) -> str:
    """Return which samples of this rank are at fault, or ""; all ranks must call it.

    Args:
        batch: Of this rank.
        rerun: Runs its microbatches.
        failed: Samples without loss.
    """
    bad = [(item, _bad_losses(item, rerun, failed)) for item in batch.microbatches]
    if global_sums([sum(len(spans) for _, spans in bad)])[0]:
        return _told("loss", bad)
    bad = []
    missing = SEARCHED_SAMPLES
    for microbatch in batch.microbatches:
        found, spans = _bad_gradients(microbatch, rerun, failed, limit=missing)
        bad.append((microbatch, spans))
        missing -= found
    return _told("gradient", bad)


def _bad_losses(microbatch: MicroBatch, rerun: Rerun, failed: frozenset[SampleId]) -> list[SampleSpan]:
    is_bad = ~torch.isfinite(rerun.losses(microbatch, failed)).cpu()
    return [span for span in microbatch.spans if bool(is_bad[span.start : span.end].any())]


def _bad_gradients(
    microbatch: MicroBatch, rerun: Rerun, failed: frozenset[SampleId], *, limit: int
) -> tuple[int, list[SampleSpan]]:
    """Return how many samples at fault were found on all ranks, at most ``limit``, and those of this rank."""
    counts = _gathered_counts(len(microbatch.spans))
    first = sum(counts[: dist.get_rank()])
    numbers = {first + place: span for place, span in enumerate(microbatch.spans)}

    def is_bad(tried: range) -> bool:
        """Run with the labels of the samples of these numbers only."""
        silent = failed | {span.id for number, span in numbers.items() if number not in tried}
        square = rerun.grad_square(microbatch, silent).clone()
        dist.all_reduce(square)
        return not bool(torch.isfinite(square))

    found = find_by_halving(sum(counts), is_bad, limit=limit)
    return len(found), [numbers[number] for number in found if number in numbers]


def find_by_halving(count: int, is_bad: Callable[[range], bool], *, limit: int) -> list[int]:
    """Return the first ``limit`` of 0 .. count - 1 that are bad alone, ascending.

    A range is looked into only if it is bad as a whole, so a few bad ones cost a few times log2(count) calls.
    """
    found: list[int] = []
    waiting = [range(count)] if count else []
    while waiting and len(found) < limit:
        tried = waiting.pop()
        if not is_bad(tried):
            continue
        if len(tried) == 1:
            found.append(tried[0])
            continue
        middle = len(tried) // 2
        waiting += [tried[middle:], tried[:middle]]
    return found


def _gathered_counts(count: int) -> list[int]:
    own = torch.tensor([count], dtype=torch.int64)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [int(value) for value in gathered]


def _told(what: str, bad: Sequence[tuple[MicroBatch, Sequence[SampleSpan]]]) -> str:
    """Return one line on the samples at fault of this rank, or ""."""
    spans = [(microbatch.index, span) for microbatch, found in bad for span in found]
    if not spans:
        return ""
    names = [
        f"{span.id.source!r} shard {span.id.shard} sample {span.key} (microbatch {index})"
        for index, span in spans[:NAMED_SAMPLES]
    ]
    more = f" and {len(spans) - NAMED_SAMPLES} more" if len(spans) > NAMED_SAMPLES else ""
    num_samples = sum(len(microbatch.spans) for microbatch, _ in bad)
    everyone = f", all {num_samples} of its samples" if len(spans) == num_samples > 1 else ""
    return f"the {what} of {', '.join(names)}{more}{everyone}"
