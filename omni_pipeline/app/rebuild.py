"""The exact arrays that one rank gets at one step, made again anywhere: no GPU, no process group, no torch.

The same ``StepPlanner`` and ``StepAssembler`` as in a run, with a decoder in this process. What a start of
the run would make fail again at this step (see ``loaders.quarantine``) fails here too; what fails beyond that
is told, and written nowhere.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from loaders.assemble import Array
from loaders.budget import ByteBudget
from loaders.order import Order
from loaders.quarantine import Quarantine, QuarantineRecord
from loaders.step import Place, StepAssembler, StepPlanner, decode_settings
from loaders.workers import InlineDecoder
from omni_pipeline.app.follow import KnownStates, Progress, Start, follow, no_progress
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.run_dir import RunDir
from omni_pipeline.app.sinks import num_steps_trained
from omni_pipeline.app.wire import (
    build_planner,
    build_tokenizer,
    build_topology,
    model_inputs,
    training_stream,
)
from omni_pipeline.core.batch import Batch, JoinedSegment, MicroBatch
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.sample import SampleId


@dataclass(frozen=True)
class ArrayRow:
    """One array of a rebuilt batch: its name in the file, and a digest of its type, shape and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class Rebuilt:
    """What one rank gets of one step.

    Args:
        rank: The rank.
        batch: As the loader of that rank would hand it out.
        start: The known state that the order was followed from.
        repeated: Samples of the step that failed in the run, and fail here for that reason alone.
        failures: What failed here beyond that.
        notes: What else there is to know, in sentences.
    """

    rank: int
    batch: Batch
    start: Start
    repeated: frozenset[SampleId]
    failures: list[QuarantineRecord]
    notes: list[str]

    def arrays(self, microbatch: int | None = None) -> dict[str, Array]:
        """Return the arrays by ``<microbatch>/<name>``, of one microbatch or of all.

        Raises:
            ConfigError: There is no such microbatch.
        """
        found = self.batch.microbatches
        if microbatch is None:
            chosen = found
        elif 0 <= microbatch < len(found):
            chosen = (found[microbatch],)
        else:
            raise ConfigError(
                f"there is no microbatch {microbatch}: the step has {len(found)}",
                fix="count microbatches from 0",
            )
        arrays: dict[str, Array] = {}
        for item in chosen:
            arrays.update({f"{item.index}/{name}": array for name, array in _arrays_of(item).items()})
        return arrays

    def to_dict(self) -> dict[str, Any]:
        """Return what there is to know beside the arrays, as plain data."""
        plan = self.batch.plan
        return {
            "step": plan.step,
            "rank": self.rank,
            "group": plan.group,
            "digest": f"{plan.digest:016x}",
            "num_microbatches": plan.num_microbatches,
            "followed_from": self.start.to_dict(),
            "repeated_failures": [asdict(item) for item in sorted(self.repeated)],
            "failures": [asdict(record) for record in self.failures],
            "notes": self.notes,
        }


class _Records:
    """What failed before, read from the run's file; what fails now, kept here."""

    def __init__(self, known: frozenset[SampleId]) -> None:
        self._known = known
        self.added: list[QuarantineRecord] = []

    def known(self, step: int) -> frozenset[SampleId]:
        return self._known

    def add(self, record: QuarantineRecord) -> None:
        self.added.append(record)


def rebuild(
    config: RunConfig,
    *,
    step: int,
    rank: int,
    world_size: int,
    ranks_per_node: int | None = None,
    progress: Progress = no_progress,
) -> Rebuilt:
    """Fetch and decode what ``rank`` of ``world_size`` needs at ``step``, and lay it out as its loader does.

    Raises:
        ConfigError: Wrong settings or data, or no such rank.
    """
    if not 0 <= rank < world_size:
        ranks = "rank 0 only" if world_size == 1 else f"ranks 0 to {world_size - 1}"
        raise ConfigError(f"there is no rank {rank}: a run on {world_size} has {ranks}", fix="set --ranks")
    topology = build_topology(config, world_size=world_size, ranks_per_node=ranks_per_node or world_size)
    place = Place(topology, rank)
    stream = training_stream(config, build_tokenizer(config))
    states = KnownStates(config, stream)
    start, order = states.nearest(step, stream.lanes_of_group(place.group, topology))
    for _ in follow(order, range(start.step, step), progress=progress):
        pass
    records = _Records(_failed_before(config, step, rank=rank))
    batch = _build(config, order, step=step, place=place, records=records)
    return Rebuilt(
        rank=rank,
        batch=batch,
        start=start,
        repeated=batch.failed & records.known(step),
        failures=[record for record in records.added if record.sample_id in batch.failed],
        notes=states.notes(start, step),
    )


def table_of(arrays: Mapping[str, Array]) -> list[ArrayRow]:
    """Return one row per array, in order."""
    rows = []
    for name, array in arrays.items():
        head = f"{array.dtype.str} {array.shape}".encode()
        digest = hashlib.blake2b(head + np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()
        rows.append(ArrayRow(name, str(array.dtype), array.shape, digest))
    return rows


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write a file that ``numpy.load`` reads without pickle; whole or not at all.

    Raises:
        ConfigError: It cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            np.savez(file, **dict[str, Any](arrays))
        os.replace(draft, path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", fix="give --out in a folder that exists and has room"
        ) from error
    finally:
        draft.unlink(missing_ok=True)


def _build(config: RunConfig, order: Order, *, step: int, place: Place, records: _Records) -> Batch:
    """Plan, decode and assemble the step at which ``order`` stands."""
    model = model_inputs(config, build_tokenizer(config))
    planner = build_planner(config, place.topology)
    settings = decode_settings(config.loader, model=model, tokenizer_path=config.tokenizer.path)
    planned = StepPlanner(
        order,
        planner=planner,
        place=place,
        model=model,
        decoder=InlineDecoder(settings),
        budget=ByteBudget(sys.maxsize),
        quarantine=records,
        step=step,
        state_of=lambda _step, _lanes: {},
    ).next_step()
    assert planned is not None, "the budget is never closed here"
    # One step of one rank says nothing about a source, so its error budget is not judged.
    assembler = StepAssembler(planner, place=place, model=model, quarantine=records, max_bad_fraction=1.0)
    return assembler.build(planned)


def _failed_before(config: RunConfig, step: int, *, rank: int) -> frozenset[SampleId]:
    """Return what failed at ``step`` when the run trained it, by the rule that its own starts follow."""
    folder = RunDir(config.run.dir)
    with Quarantine(folder.quarantine_path, rank=rank) as quarantine:
        quarantine.honour(step, until=num_steps_trained(folder.metrics_path))
        return quarantine.known(step)


def _arrays_of(microbatch: MicroBatch) -> dict[str, Array]:
    """Return all that one forward and backward reads; texts as unicode arrays."""
    spans, reshard = microbatch.spans, microbatch.reshard
    arrays: dict[str, Array] = {
        "tokens": microbatch.tokens,
        "labels": microbatch.labels,
        "positions": microbatch.positions,
        "cu_seqlens": microbatch.cu_seqlens,
        "samples": np.array([f"{span.id.source}/{span.key}" for span in spans], dtype=np.str_),
        "spans": np.array([[span.start, span.end] for span in spans], dtype=np.int64).reshape(-1, 2),
    }
    for encoder, item in microbatch.inputs.items():
        arrays[f"{encoder}/values"] = item.values
        arrays[f"{encoder}/grids"] = item.grids
        if item.joined:
            arrays |= _joined_arrays(encoder, item.joined)
    for number, hop in enumerate(reshard.hops):
        for field in fields(hop):
            if field.name != "scope":
                values = np.asarray(getattr(hop, field.name), dtype=np.int64)
                arrays[f"reshard/hop{number}/{field.name}"] = values
    arrays["reshard/take_rows"] = reshard.take_rows
    arrays["reshard/positions"] = reshard.positions
    return arrays


def _joined_arrays(encoder: str, joined: Sequence[JoinedSegment]) -> dict[str, Array]:
    """Return the grids of joined segments, and (segment, member of the group, rows) of each share."""
    shares = [
        (index, *share)
        for index, item in enumerate(joined)
        for share in zip(item.members, item.shares, strict=True)
    ]
    return {
        f"{encoder}/joined_grids": np.array([item.grid for item in joined], dtype=np.int64),
        f"{encoder}/joined_shares": np.array(shares, dtype=np.int64),
    }
