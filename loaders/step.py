"""One step on one rank: plan it, ask for its pieces, lay them out. The loader's work, without its threads.

``StepPlanner`` decides and submits; ``StepAssembler`` waits and builds. Both are called once per step and in
step order. Free of torch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from loaders.assemble import (
    Array,
    ModelInputs,
    Piece,
    assemble_microbatch,
    misfit,
    pieces_of,
    planned_bytes,
    segment_of,
)
from loaders.budget import ByteBudget
from loaders.decode.segment import DecodeRequest, DecodeSettings
from loaders.loader_config import LoaderConfig
from loaders.pack_order import OrderCounts, PackOrder, count_step
from loaders.quarantine import PLAN_STAGE, ErrorBudget, QuarantineRecord
from loaders.workers import Decoded, Decoder, Failure
from omni_pipeline.core.batch import Batch, MicroBatch
from omni_pipeline.core.media import KINDS
from omni_pipeline.core.plan import Planner, StepPlan
from omni_pipeline.core.sample import Sample, SampleId, Segment
from omni_pipeline.core.topology import Topology

READ_SHARE = 0.6
WAIT_SHARE = 0.25
"""Of ``loader.deadline_s``: the longest remote read, and the longest wait for the cache before it."""


class FailureRecords(Protocol):
    """Knows what failed before, takes what fails; a ``Quarantine`` where a run is trained."""

    def known(self, step: int) -> frozenset[SampleId]:
        """Return the samples that failed at ``step`` when it was trained before."""
        ...

    def add(self, record: QuarantineRecord) -> None:
        """Take a failed sample."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a loader runs: one rank of a layout."""

    topology: Topology
    rank: int

    @property
    def group(self) -> int:
        """Group that it balances with."""
        return self.topology.group_of(self.rank)

    @property
    def replica(self) -> int:
        """Replica that it is part of."""
        return self.topology.replica_of(self.rank)

    @property
    def leads_group(self) -> bool:
        """Whether it writes what all members of the group see alike."""
        return self.rank == self.topology.ranks_of_group(self.group)[0]

    @property
    def reads_text(self) -> bool:
        """Whether it needs tokens or labels: the first pipeline stage embeds, the last has the loss."""
        ranks = self.topology.ranks_of_replica(self.replica)
        return self.rank in (
            *self.topology.row_owners(self.replica),
            *ranks[-len(ranks) // self.topology.pp :],
        )


@dataclass(slots=True)
class PlannedStep:
    """A step on its way: its plan and what was asked for.

    Args:
        plan: Plan of the group.
        pieces: What this rank fetches, by microbatch, and the units that it keeps of each; see ``pieces_of``.
        futures: By piece; pieces of samples that are known to fail have none.
        known: Samples that failed when this step was trained before.
        state: Loader state after this step.
        exhausted: As in ``Batch``.
        counts: What ``Batch`` says of the order.
        num_bytes: Planned, and held in the budget.
        plan_s: Seconds of planning.
    """

    plan: StepPlan
    pieces: tuple[Mapping[Piece, range], ...]
    futures: dict[Piece, Future[Decoded]]
    known: frozenset[SampleId]
    state: dict[str, Any] = field(repr=False)
    exhausted: bool
    counts: OrderCounts
    num_bytes: int
    plan_s: float


class StepPlanner:
    """Makes the next step's plan, waits for its bytes in the budget, submits its pieces.

    Args:
        order: Packs of the group's lanes.
        planner: Makes the plans.
        place: Layout and rank.
        model: What the model reads.
        decoder: Takes the pieces.
        budget: Bounds the bytes of all steps in flight.
        quarantine: Knows earlier failures, takes dropped samples.
        step: The first step.
        state_of: Makes the loader's state of (next step, state of the lanes).
    """

    def __init__(
        self,
        order: PackOrder,
        *,
        planner: Planner,
        place: Place,
        model: ModelInputs,
        decoder: Decoder,
        budget: ByteBudget,
        quarantine: FailureRecords,
        step: int,
        state_of: Callable[[int, dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._order = order
        self._planner = planner
        self._place = place
        self._model = model
        self._decoder = decoder
        self._budget = budget
        self._quarantine = quarantine
        self._step = step
        self._state_of = state_of
        self._left_out = Counter[tuple[str, str]]()

    def next_step(self) -> PlannedStep | None:
        """Return the next step, or None when the budget was closed."""
        begin = time.monotonic()
        packs = self._order.next_step(self._step)
        plan = self._planner.plan(packs, step=self._step, group=self._place.group)
        state = self._state_of(self._step + 1, self._order.state_dict())
        self._record_dropped()
        counts, self._left_out = count_step(self._order, left_out_before=self._left_out)
        rank, replica = self._place.rank, self._place.replica
        pieces = tuple(
            pieces_of(
                plan,
                microbatch=microbatch,
                rank=rank,
                replica=replica,
                with_text=self._place.reads_text,
                model=self._model,
            )
            for microbatch in range(plan.num_microbatches)
        )
        num_bytes = planned_bytes(plan, rank=rank, replica=replica, model=self._model)
        plan_s = time.monotonic() - begin
        if not self._budget.acquire(num_bytes):
            return None
        known = self._quarantine.known(self._step)
        self._step += 1
        return PlannedStep(
            plan=plan,
            pieces=pieces,
            futures=self._submit(plan, pieces, known),
            known=known,
            state=state,
            exhausted=self._order.exhausted and not any(pack.samples for pack in packs),
            counts=counts,
            num_bytes=num_bytes,
            plan_s=plan_s,
        )

    def _submit(
        self, plan: StepPlan, pieces: Sequence[Mapping[Piece, range]], known: frozenset[SampleId]
    ) -> dict[Piece, Future[Decoded]]:
        futures: dict[Piece, Future[Decoded]] = {}
        for piece, units in (item for of_microbatch in pieces for item in of_microbatch.items()):
            sample, segment = segment_of(plan, piece)
            if sample.id not in known:
                futures[piece] = self._decoder.submit(_request(sample, segment, units))
        return futures

    def _record_dropped(self) -> None:
        dropped = self._order.drain_dropped()
        if not self._place.leads_group:
            return
        for item in dropped:
            self._quarantine.add(
                QuarantineRecord(
                    step=self._step,
                    source=item.id.source,
                    shard=item.shard,
                    shard_index=item.id.shard,
                    row=item.id.row,
                    key=item.key,
                    member="",
                    offset=0,
                    length=0,
                    stage=PLAN_STAGE,
                    reason=item.reason,
                    rank=self._place.rank,
                )
            )


class StepAssembler:
    """Waits for the pieces of a step, sorts out what failed, and builds the batch.

    Args:
        planner: Makes this rank's part of the exchange.
        place: Layout and rank.
        model: What the model reads.
        quarantine: Takes the failures.
        max_bad_fraction: Error budget of each source.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        place: Place,
        model: ModelInputs,
        quarantine: FailureRecords,
        max_bad_fraction: float,
    ) -> None:
        self._planner = planner
        self._place = place
        self._model = model
        self._quarantine = quarantine
        self._budget = ErrorBudget(max_bad_fraction, rank=place.rank)

    def build(self, step: PlannedStep) -> Batch:
        """Return the batch of ``step``; all its microbatches are decoded.

        Raises:
            DataError: A source is past its error budget.
            WorkerError: The decode workers have ended.
        """
        arrays, failures, timings = self._collect(step)
        begin = time.monotonic()
        handled = {segment_of(step.plan, piece)[0].id for pieces in step.pieces for piece in pieces}
        met = self._record(step.plan, failures)
        # A repeated failure says nothing about the shards as they are: they may have been mended since.
        self._budget.count(handled - step.known, failed=met)
        failed = (step.known & handled) | met
        microbatches = tuple(
            self._assemble(step, microbatch, arrays=arrays, failed=failed)
            for microbatch in range(step.plan.num_microbatches)
        )
        return Batch(
            plan=step.plan,
            microbatches=microbatches,
            failed=failed,
            state=step.state,
            num_bytes=step.num_bytes,
            timings={**timings, "plan_s": step.plan_s, "assemble_s": time.monotonic() - begin},
            exhausted=step.exhausted,
            left=step.counts.left,
            dropped=step.counts.dropped,
            filtered=step.counts.filtered,
            used_up=step.counts.used_up,
        )

    def _collect(
        self, step: PlannedStep
    ) -> tuple[dict[Piece, Array], dict[Piece, Failure], dict[str, float]]:
        arrays: dict[Piece, Array] = {}
        failures: dict[Piece, Failure] = {}
        timings = {"fetch_s": 0.0, "decode_s": 0.0}
        units_of = {piece: units for pieces in step.pieces for piece, units in pieces.items()}
        # Popped, so that an array is not kept by its future after it was copied.
        while step.futures:
            piece = next(iter(step.futures))
            # Ends without a timeout here: the pool bounds every job, and fails all of them when it ends.
            decoded = step.futures.pop(piece).result()
            timings["fetch_s"] += decoded.fetch_s
            timings["decode_s"] += decoded.decode_s
            failure = decoded.failure
            if failure is None and decoded.array is not None:
                _, segment = segment_of(step.plan, piece)
                reason = misfit(segment, decoded.array, units=units_of[piece], model=self._model)
                failure = Failure("assemble", reason) if reason else None
                arrays[piece] = decoded.array
            if failure is not None:
                failures[piece] = failure
        return arrays, failures, timings

    def _record(self, plan: StepPlan, failures: Mapping[Piece, Failure]) -> frozenset[SampleId]:
        """Write one record per failed sample; return their ids."""
        failed: set[SampleId] = set()
        for piece, failure in failures.items():
            sample, segment = segment_of(plan, piece)
            if sample.id in failed:
                continue
            failed.add(sample.id)
            self._quarantine.add(
                QuarantineRecord(
                    step=plan.step,
                    source=sample.id.source,
                    shard=sample.shard,
                    shard_index=sample.id.shard,
                    row=sample.id.row,
                    key=sample.key,
                    member=segment.member,
                    offset=segment.offset,
                    length=segment.length,
                    stage=failure.stage,
                    reason=failure.reason,
                    rank=self._place.rank,
                )
            )
        return frozenset(failed)

    def _assemble(
        self, step: PlannedStep, microbatch: int, *, arrays: dict[Piece, Array], failed: frozenset[SampleId]
    ) -> MicroBatch:
        rank = self._place.rank
        built = assemble_microbatch(
            step.plan,
            self._planner.reshard(step.plan, microbatch=microbatch, rank=rank),
            microbatch=microbatch,
            rank=rank,
            replica=self._place.replica,
            arrays=arrays,
            failed=failed,
            model=self._model,
        )
        for piece in step.pieces[microbatch]:
            arrays.pop(piece, None)
        return built


def decode_settings(
    config: LoaderConfig, *, model: ModelInputs, tokenizer_path: Path | None
) -> DecodeSettings:
    """Return what a decoder of a run needs to know."""
    # A read must end before the deadline of its job, so that what is wrong with the store is told, and no
    # worker is killed for it.
    storage = config.storage.model_copy(
        update={
            "read_timeout_s": min(config.storage.read_timeout_s, READ_SHARE * config.deadline_s),
            "cache_wait_s": min(config.storage.cache_wait_s, WAIT_SHARE * config.deadline_s),
        }
    )
    return DecodeSettings(
        sizes=model.sizes,
        tokenizer_path=tokenizer_path,
        max_image_pixels=config.max_image_pixels,
        encoder_files=KINDS.files,
        storage=storage,
        video_backend=config.video_backend,
    )


def _request(sample: Sample, segment: Segment, units: range) -> DecodeRequest:
    shard = sample.shard.rpartition("/")[2]
    return DecodeRequest(
        url=sample.shard,
        offset=segment.offset,
        length=segment.length,
        modality=segment.modality,
        member=segment.member,
        grid=segment.grid,
        where=f"source {sample.id.source!r}, {shard}, member {segment.member}",
        units=None if len(units) == segment.num_units else (units.start, units.stop),
        is_track=segment.is_track,
    )
