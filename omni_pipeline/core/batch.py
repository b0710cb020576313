"""What a rank trains on: numpy arrays, and where each piece of them came from.

A ``Batch`` is one rank's part of one step. Samples lie end to end, or, in a bucket, each with its padding at
its end; boundaries are explicit in ``cu_seqlens``. Nothing here knows torch: the trainer makes tensors of it
on its own device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from omni_pipeline.core.plan import StepPlan
from omni_pipeline.core.reshard import ReshardPlan
from omni_pipeline.core.sample import SampleId

IGNORE_LABEL = -100

EndRule = Literal["pad", "drop"]
"""The end of the data: steps with empty packs until all is seen, or no step with an empty pack."""


@dataclass(frozen=True)
class JoinedSegment:
    """A media segment that members of the group encode together, attention crossing their shares (Ulysses).

    Every member of the group is told of every one, so that all know the splits of an exchange before it.

    Args:
        grid: Of the whole segment, (t, h, w) in patches.
        members: Those that share it, by their place in ``StepPlan.ranks``; in the order of their shares.
        shares: Embedding rows of each of them.
        place: Where this rank's share stands among all that it encodes, in plan order; -1 if it has none.
    """

    grid: tuple[int, int, int]
    members: tuple[int, ...]
    shares: tuple[int, ...]
    place: int


@dataclass(frozen=True)
class EncoderInput:
    """What one encoder reads in one microbatch on this rank; may hold no segment at all.

    A share whose attention stays inside it is a segment like any other, with a smaller grid.

    Args:
        values: Vision: uint8 [patches, channels * temporal_patch * patch * patch], RGB, laid out per patch;
            audio: float32 [mel frames, mels]. Those of ``grids`` in plan order, then this rank's shares of
            ``joined`` segments in plan order.
        grids: int64 [segments, 3]; (t, h, w) in patches, or (mel frames, 1, 1).
        joined: Those of the whole group in this microbatch, in plan order.
    """

    values: npt.NDArray[Any]
    grids: npt.NDArray[np.int64]
    joined: tuple[JoinedSegment, ...] = ()


def joined_segments(plan: StepPlan, *, microbatch: int, encoder: str, rank: int) -> tuple[JoinedSegment, ...]:
    """Return the joined segments of ``encoder`` in ``microbatch``, as ``rank`` is told of them."""
    joined = [item for item in plan.joined_of(microbatch) if item.encoder == encoder]
    if not joined:
        return ()
    own = [item for item in plan.media_of(rank=rank, microbatch=microbatch) if item.encoder == encoder]
    place_of = {id(item): place for place, item in enumerate(own)}
    member_of = {member: index for index, member in enumerate(plan.ranks)}
    return tuple(
        JoinedSegment(
            grid=plan.packs[item.pack].samples[item.sample].segments[item.segment].grid,
            members=tuple(member_of[member] for member in item.ranks),
            shares=item.shares,
            place=place_of.get(id(item), -1),
        )
        for item in joined
    )


@dataclass(frozen=True)
class SampleSpan:
    """The positions [start, end) of one sample in its pack, its padding left out."""

    id: SampleId
    key: str
    start: int
    end: int


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward of one rank.

    Args:
        index: Microbatch of the step.
        tokens: int64 [S]; media positions hold the placeholder token.
        labels: int64 [S]; the token to predict *after* each position, or -100.
        positions: int64 [3, S]; M-RoPE (temporal, height, width), restarting in every sample.
        cu_seqlens: int32 [N + 1]; boundaries of the samples, each with the padding at its end: no real token
            sees it under causal attention, and it has no label.
        spans: One per sample of the pack.
        inputs: By encoder name; every encoder of the run is present, possibly with zero rows.
        reshard: Rows that this rank sends and receives.
    """

    index: int
    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    cu_seqlens: npt.NDArray[np.int32]
    spans: tuple[SampleSpan, ...]
    inputs: dict[str, EncoderInput]
    reshard: ReshardPlan

    def labels_without(self, failed: frozenset[SampleId]) -> npt.NDArray[np.int64]:
        """Return the labels with all positions of the ``failed`` samples set to -100."""
        labels = self.labels.copy()
        for span in self.spans:
            if span.id in failed:
                labels[span.start : span.end] = IGNORE_LABEL
        return labels

    def spans_without(self, failed: frozenset[SampleId]) -> npt.NDArray[np.int64]:
        """Return int64 [samples, 2]: start and end of all samples but the ``failed``."""
        spans = [(span.start, span.end) for span in self.spans if span.id not in failed]
        return np.array(spans, dtype=np.int64).reshape(-1, 2)


@dataclass(frozen=True)
class Batch:
    """One rank's part of one step.

    Args:
        plan: The plan of its group.
        microbatches: In the order they run.
        failed: Samples of this step that *this rank* could not fetch or decode. The step unites them over
            the group before it trains.
        state: Loader state *after* this batch: a fresh loader with it yields the next batch.
        num_bytes: Size of the arrays.
        timings: Seconds spent on it, by stage (``plan_s``, ``fetch_s``, ``decode_s``, ``assemble_s``; summed
            over workers), and ``wait_s`` that the consumer waited for it.
        exhausted: Its group has no samples left and this batch holds none. Only when every group says so
            may a run stop: a group sees its own lanes only.
        left: Samples by source that the lanes of the group have put into no pack so far, this batch
            included; those of sources without an end are left out.
        dropped: Samples by source that were met while this step was packed and cannot be used, or fit no
            pack, in the lanes of the group.
        filtered: Likewise, those that the run's filters and deny-lists leave out.
        used_up: Sources that a lane of the group has drawn to their end while this step was packed, and the
            shares of all sources there from then on.
    """

    plan: StepPlan
    microbatches: tuple[MicroBatch, ...]
    failed: frozenset[SampleId]
    state: dict[str, Any] = field(repr=False)
    num_bytes: int
    timings: dict[str, float]
    exhausted: bool = False
    left: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    filtered: Mapping[str, int] = field(default_factory=dict)
    used_up: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def num_empty_packs(self) -> int:
        """Packs that the lanes of the group could not fill: their data has ended, or is not drawn yet."""
        return sum(not pack.samples for pack in self.plan.packs)
