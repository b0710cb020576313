"""Why a step took as long as it did: the rank that held the others up, and the heaviest samples it had.

A rank knows the samples of its own group only. So each puts the few heaviest of its own, as numbers, into
what the ranks gather after a step anyway; whoever holds all of it finds the slowest rank and has its samples
at once. No further message, and as many numbers per rank whatever the size of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from omni_pipeline.core.plan import Pack, StepPlan
from omni_pipeline.core.sample import SampleId, Segment
from trainer.stage_times import ENCODER, LLM, StageTimes

PARTS = ("encoder", "llm")
NUM_HEAVY = 3
"""Samples that each rank names for each part."""
_NUMBERS_PER_SAMPLE = 7
_NUMBERS_PER_RANK = NUM_HEAVY * _NUMBERS_PER_SAMPLE  # for each part

FloatArray = npt.NDArray[np.float64]


class Costs(Protocol):
    """Modelled work; equal arguments give equal numbers on all ranks."""

    def media_cost(self, segment: Segment) -> float:
        """Return the seconds to encode a media segment, forward and backward."""
        ...

    def pack_cost(self, pack: Pack) -> float:
        """Return the seconds of a pack in the LLM, forward and backward."""
        ...

    def media_flops(self, segment: Segment) -> float:
        """Return the operations to encode a media segment, forward and backward, nothing computed twice."""
        ...

    def pack_flops(self, pack: Pack) -> float:
        """Return the operations of a pack in the LLM, likewise."""
        ...


@dataclass(frozen=True, slots=True)
class HeavySample:
    """A sample on one rank.

    Args:
        id: Which.
        microbatch: Where it ran.
        units: What the encoder reads of it on this rank (patches, mel frames); its tokens in the LLM.
        modelled_s: Seconds that this rank needs for it by the cost model, forward and backward.
        num_ranks: Ranks that encode it, 1 unless it is split (LSSP); for the LLM 1.
    """

    id: SampleId
    microbatch: int
    units: int
    modelled_s: float
    num_ranks: int


@dataclass(frozen=True, slots=True)
class PartCause:
    """Who held the others up in the encoders, or in the LLM.

    Args:
        part: ``encoder`` or ``llm``.
        imbalance_before: Modelled, without balancing: largest / mean load, over the microbatches.
        imbalance_after: Modelled, under the plan.
        imbalance_measured: Of own work; None where it is not measured.
        rank: The rank furthest above the mean in a microbatch; if not measured, the one with the largest
            modelled load in the step.
        microbatch: That microbatch; -1 if not measured.
        own_s: Own work of the rank there; its modelled load in the step if not measured.
        mean_s: The mean over all ranks of the same.
        samples: The heaviest samples of that rank, those of the microbatch first.
    """

    part: str
    imbalance_before: float
    imbalance_after: float
    imbalance_measured: float | None
    rank: int
    microbatch: int
    own_s: float
    mean_s: float
    samples: tuple[HeavySample, ...]


@dataclass(frozen=True, slots=True)
class StepCause:
    """Why a step took so long.

    Args:
        step: Its number.
        step_s: Seconds of the slowest rank.
        wait_s: Of these, waiting for data.
        modelled_loss_s: Seconds that the model says are lost to imbalance: makespans less means.
        parts: Encoders and LLM.
    """

    step: int
    step_s: float
    wait_s: float
    modelled_loss_s: float
    parts: tuple[PartCause, ...]


def samples_of_rank(
    plan: StepPlan, *, rank: int, replica: int, costs: Costs
) -> dict[str, tuple[HeavySample, ...]]:
    """Return every sample that ``rank`` works on, by part, the heaviest first."""
    encoded: dict[tuple[SampleId, int], list[HeavySample]] = {}
    read = []
    for microbatch in range(plan.num_microbatches):
        for item in plan.media_of(rank=rank, microbatch=microbatch):
            sample = plan.packs[item.pack].samples[item.sample]
            segment = sample.segments[item.segment]
            share = len(item.rows_of(rank)) / item.num_rows
            piece = HeavySample(
                sample.id,
                microbatch,
                units=round(segment.num_units * share),
                modelled_s=costs.media_cost(segment) * share,
                num_ranks=len(item.ranks),
            )
            encoded.setdefault((sample.id, microbatch), []).append(piece)
        index = plan.pack_at(replica, microbatch)
        pack = Pack(0, 0, ()) if index is None else plan.packs[index]
        for sample in pack.samples:
            alone = Pack(pack.lane, pack.number, (sample,), pack.padded_len)
            read.append(HeavySample(sample.id, microbatch, sample.num_tokens, costs.pack_cost(alone), 1))
    return {
        "encoder": _heaviest_first([_joined(pieces) for pieces in encoded.values()]),
        "llm": _heaviest_first(read),
    }


def flops_of_rank(plan: StepPlan, *, rank: int, replica: int | None, costs: Costs) -> float:
    """Return the operations of what ``rank`` encodes and the packs of ``replica``, forward and backward."""
    flops = 0.0
    for microbatch in range(plan.num_microbatches):
        for item in plan.media_of(rank=rank, microbatch=microbatch):
            segment = plan.packs[item.pack].samples[item.sample].segments[item.segment]
            flops += costs.media_flops(segment) * len(item.rows_of(rank)) / item.num_rows
        index = None if replica is None else plan.pack_at(replica, microbatch)
        flops += 0.0 if index is None else costs.pack_flops(plan.packs[index])
    return flops


def rank_numbers(
    samples: Mapping[str, Sequence[HeavySample]], stages: StageTimes, *, sources: Sequence[str]
) -> list[float]:
    """Return what a rank tells the others, for ``part_causes``.

    Args:
        samples: All of the rank, by part; see ``samples_of_rank``.
        stages: What it measured.
        sources: Names of all sources, the same on all ranks.
    """
    own = [value for stage in (ENCODER, LLM) for value in stages.own.get(stage, ())]
    loads = [sum(item.modelled_s for item in samples.get(part, ())) for part in PARTS]
    heavy = [value for part in PARTS for value in _to_numbers(samples.get(part, ()), sources)]
    return [*loads, *heavy, *own]


def part_causes(
    table: FloatArray, *, sources: Sequence[str], imbalances: Mapping[str, tuple[float, float]]
) -> tuple[PartCause, ...]:
    """Return who held the others up in each part.

    Args:
        table: float64 [ranks, numbers]; the ``rank_numbers`` of every rank.
        sources: As given to ``rank_numbers``.
        imbalances: Modelled ones by part, before and after balancing.
    """
    loads, heavy, own = np.split(table, [len(PARTS), len(PARTS) * (1 + _NUMBERS_PER_RANK)], axis=1)
    own_of = np.split(own, len(PARTS), axis=1)
    found = []
    for index, part in enumerate(PARTS):
        is_measured = own_of[index].shape[1] > 0
        seconds = own_of[index] if is_measured else loads[:, index : index + 1]
        rank, column = _furthest_above_mean(seconds)
        numbers = heavy[rank, index * _NUMBERS_PER_RANK : (index + 1) * _NUMBERS_PER_RANK].tolist()
        microbatch = column if is_measured else -1
        samples = sorted(_from_numbers(numbers, sources), key=lambda item: item.microbatch != microbatch)
        found.append(
            PartCause(
                part=part,
                imbalance_before=imbalances[part][0],
                imbalance_after=imbalances[part][1],
                imbalance_measured=imbalance(seconds) if is_measured else None,
                rank=rank,
                microbatch=microbatch,
                own_s=float(seconds[rank, column]),
                mean_s=float(seconds[:, column].mean()),
                samples=tuple(samples),
            )
        )
    return tuple(found)


def imbalance(loads: FloatArray) -> float:
    """Return the makespan over the mean of ``loads`` [ranks, microbatches]: ranks meet in each microbatch."""
    mean = float(loads.mean(axis=0).sum()) if loads.size else 0.0
    return float(loads.max(axis=0).sum()) / mean if mean > 0 else 1.0


def _to_numbers(samples: Sequence[HeavySample], sources: Sequence[str]) -> list[float]:
    """Return the first ``NUM_HEAVY`` of ``samples`` as so many numbers, whatever their number."""
    numbers: list[float] = []
    for item in samples[:NUM_HEAVY]:
        numbers += [
            sources.index(item.id.source),
            item.id.shard,
            item.id.row,
            item.microbatch,
            item.units,
            item.modelled_s,
            item.num_ranks,
        ]
    return numbers + [-1.0] * (_NUMBERS_PER_RANK - len(numbers))


def _from_numbers(numbers: Sequence[float], sources: Sequence[str]) -> tuple[HeavySample, ...]:
    """Return the samples that ``_to_numbers`` was given."""
    found = []
    for first in range(0, len(numbers), _NUMBERS_PER_SAMPLE):
        source, shard, row, microbatch, units, modelled_s, num_ranks = numbers[
            first : first + _NUMBERS_PER_SAMPLE
        ]
        if source >= 0:
            sample = SampleId(sources[int(source)], int(shard), int(row))
            found.append(HeavySample(sample, int(microbatch), int(units), modelled_s, int(num_ranks)))
    return tuple(found)


def _furthest_above_mean(loads: FloatArray) -> tuple[int, int]:
    """Return (rank, column) of the load that is furthest above the mean of its column."""
    excess = loads - loads.mean(axis=0)
    rank, column = np.unravel_index(int(np.argmax(excess)), excess.shape)
    return int(rank), int(column)


def _joined(pieces: Sequence[HeavySample]) -> HeavySample:
    """Add up the segments of one sample."""
    first = pieces[0]
    return HeavySample(
        first.id,
        first.microbatch,
        units=sum(piece.units for piece in pieces),
        modelled_s=sum(piece.modelled_s for piece in pieces),
        num_ranks=max(piece.num_ranks for piece in pieces),
    )


def _heaviest_first(samples: Sequence[HeavySample]) -> tuple[HeavySample, ...]:
    return tuple(sorted(samples, key=lambda item: (-item.modelled_s, item.id, item.microbatch)))
