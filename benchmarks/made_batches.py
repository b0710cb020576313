"""Batches of made-up content, as a loader would hand them out for a plan; all ranks make equal content."""

from __future__ import annotations

from collections.abc import Sequence

from balancer.planner import GroupPlanner
from loaders.assemble import Array, ModelInputs, Piece, assemble_microbatch, pieces_of, segment_of
from omni_pipeline.core.batch import Batch
from omni_pipeline.core.plan import Pack, StepPlan
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.seeding import generator


def make_batch(planner: GroupPlanner, packs: Sequence[Pack], *, rank: int, model: ModelInputs) -> Batch:
    """Return the batch of ``rank``, the one rank of replica ``rank``, in a run of one group."""
    plan = planner.plan(packs, step=0, group=0)
    microbatches = []
    for index in range(plan.num_microbatches):
        pieces = pieces_of(plan, microbatch=index, rank=rank, replica=rank, with_text=True, model=model)
        microbatches.append(
            assemble_microbatch(
                plan,
                planner.reshard(plan, microbatch=index, rank=rank),
                microbatch=index,
                rank=rank,
                replica=rank,
                arrays={
                    piece: _content(plan, piece, model)[units.start : units.stop]
                    for piece, units in pieces.items()
                },
                failed=frozenset(),
                model=model,
            )
        )
    return Batch(plan, tuple(microbatches), failed=frozenset(), state={}, num_bytes=0, timings={})


def _content(plan: StepPlan, piece: Piece, model: ModelInputs) -> Array:
    """Noise that depends on the place of a piece alone."""
    _, segment = segment_of(plan, piece)
    lane = plan.packs[piece.pack].lane
    rng = generator(1, "benchmark.content", lane, piece.sample, piece.segment)
    if segment.modality is Modality.TEXT:
        return rng.integers(0, 256, segment.num_units, dtype="int32")
    shape = segment.num_units, model.width(segment.modality)
    if segment.modality is Modality.AUDIO:
        return rng.standard_normal(shape, dtype="float32")
    return rng.integers(0, 256, shape, dtype="uint8")
