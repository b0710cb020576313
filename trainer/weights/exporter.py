"""Weights of ours -> files of the reference, tensor by tensor, with the settings that make them load.

One parameter after the other is read from its checkpoint, in the order of the model, and its pieces are
appended to the present file, so memory stays near the largest parameter (one copy here, and while it is read
one of what the checkpoint stores in one piece).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from omni_pipeline.core.errors import DataError
from trainer.checkpoint_files import drafted
from trainer.config import ModelConfig
from trainer.weights.folder import KEPT_NAME, TOKENIZER_NAME, Progress, WeightsFolder
from trainer.weights.language_config import language_model_settings
from trainer.weights.match import parameter_shapes
from trainer.weights.names import LLM, THINKER, UNUSED, Layout, part_of, pieces_of
from trainer.weights.reference_config import thinker_settings
from trainer.weights.reference_files import SETTINGS_NAME, check_free, copy_files, read_settings
from trainer.weights.safetensors_file import (
    INDEX_NAME,
    SINGLE_NAME,
    SafetensorsWriter,
    TensorToWrite,
    counted,
    list_file,
    tensor_in,
)

DAMAGED = "export an earlier checkpoint, or import the weights again"


@dataclass(frozen=True)
class ExportSettings:
    """What to write.

    Args:
        dtype: Type of all tensors; None: as they are stored.
        max_shard_bytes: Largest file; a larger tensor has a file of its own.
        like: Folder of the reference to take settings and tokenizer from; None: what was imported.
        llm_only: Write the language model alone, as one of the reference's.
        special: Ids of special tokens by role, for settings that nothing else gives.
    """

    dtype: torch.dtype | None
    max_shard_bytes: int
    like: Path | None
    llm_only: bool
    special: Mapping[str, int]


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Args:
        class_name: Of the reference, which loads the folder.
        num_bytes: Of the tensors.
        files: Names of all files.
        made: Tensors that no forward reads and that were not there: they are zeros.
        left_out: Parts of the model that this class does not have.
    """

    class_name: str
    num_bytes: int
    files: tuple[str, ...]
    made: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer was written."""
        return TOKENIZER_NAME in self.files


def export_weights(
    weights: WeightsFolder, out: Path, settings: ExportSettings, *, progress: Progress
) -> Exported:
    """Make the folder ``out`` of ``weights``: complete, or not at all.

    Args:
        weights: What to export.
        out: Must not exist, or be empty.
        settings: See there.
        progress: See ``Progress``.

    Raises:
        ConfigError: ``out`` is taken, or the reference has no class for this model.
        DataError: The checkpoint is damaged.
    """
    check_free(out)
    config = ModelConfig.model_validate(weights.model)
    beside = settings.like or weights.reference
    layout = LLM if settings.llm_only or weights.parts == ("llm",) else THINKER
    source = _Checkpoint(weights.tensors)
    plan, made = _plan(source, config, layout, dtype=settings.dtype, kept=_kept(weights))
    shards = _shards([item.to_write for item in plan], settings.max_shard_bytes)
    dtypes = {str(item.to_write.dtype).removeprefix("torch.") for item in plan}
    like = read_settings(beside) if beside is not None and (beside / SETTINGS_NAME).exists() else {}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    if layout is LLM:
        content = language_model_settings(config.llm, like=like, dtype=dtype)
    else:
        content = thinker_settings(config, like=like, special=settings.special, dtype=dtype)
    total = sum(item.to_write.num_bytes for item in plan)
    with drafted(out) as draft:
        if beside is not None:
            copy_files(beside, draft)
        (draft / SETTINGS_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        _write(draft, shards, _values(plan, source), total=total, progress=progress)
        files = tuple(sorted(path.name for path in draft.iterdir()))
    return Exported(content["architectures"][0], total, files, made, source.parts_beside(layout))


@dataclass(frozen=True)
class _Item:
    """A tensor of the reference, and where its numbers are: a parameter, or what was kept."""

    to_write: TensorToWrite
    parameter: str
    index: tuple[int | slice, ...]
    kept: Tensor | None = None


class _Checkpoint:
    """Reads parameters one by one from a distributed checkpoint, in one process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory = bytearray()
        self._reader = FileSystemReader(path)
        try:
            self._metadata: Metadata = self._reader.read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise DataError(
                f"cannot read the list of tensors: {error}", where=str(path), fix=DAMAGED
            ) from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def entry(self, name: str) -> TensorStorageMetadata:
        """Return size and type of a parameter."""
        found = self._metadata.state_dict_metadata.get(f"model.{name}")
        if not isinstance(found, TensorStorageMetadata):
            raise DataError(f"there is no parameter {name}", where=str(self._path), fix=DAMAGED)
        return found

    def parts_beside(self, layout: Layout) -> tuple[str, ...]:
        """Return the parts that are here and that files of ``layout`` do not hold."""
        names = [name.removeprefix("model.") for name in self._metadata.state_dict_metadata]
        known = [name for name in names if name.startswith(("encoders.", "llm."))]
        return tuple(sorted({part_of(name) for name in known if layout.rename(name) is None}))

    def read(self, name: str) -> Tensor:
        """Return a parameter, whole, in the type that is stored; valid until the next is read."""
        entry = self.entry(name)
        num_bytes = entry.size.numel() * entry.properties.dtype.itemsize
        if num_bytes > len(self._memory):
            self._memory = bytearray()  # before the larger one is there
            self._memory = bytearray(num_bytes)
        tensor = tensor_in(self._memory, entry.size, entry.properties.dtype)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({f"model.{name}": tensor}, self._metadata, is_coordinator=True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except (OSError, RuntimeError, EOFError) as error:
            raise DataError(f"cannot read {name}: {error}", where=str(self._path), fix=DAMAGED) from error
        return tensor


def _plan(
    source: _Checkpoint,
    config: ModelConfig,
    layout: Layout,
    *,
    dtype: torch.dtype | None,
    kept: Mapping[str, Tensor],
) -> tuple[list[_Item], tuple[str, ...]]:
    """Return all tensors to write, in order, and the names of those made of zeros."""
    plan = []
    problems = []
    for name, shape in parameter_shapes(config).items():
        if layout.rename(name) is None:
            continue
        entry = source.entry(name)
        if tuple(entry.size) != shape:
            problems.append(f"{name} {list(entry.size)}, wanted {list(shape)}")
        for piece in pieces_of(name, shape, layout=layout, config=config):
            to_write = TensorToWrite(piece.name, dtype or entry.properties.dtype, piece.shape)
            plan.append(_Item(to_write, name, piece.index))
    if problems:
        raise DataError(
            counted(problems, "parameter of another shape", plural="parameters of another shape"),
            fix=DAMAGED,
        )
    made = []
    for name in UNUSED:
        renamed = layout.rename(name)
        if renamed is not None:
            if name not in kept:
                made.append(renamed)
            tensor = kept.get(name, torch.zeros(2, config.llm.hidden, dtype=plan[0].to_write.dtype))
            to_write = TensorToWrite(renamed, dtype or tensor.dtype, tuple(tensor.shape))
            plan.append(_Item(to_write, "", (), tensor))
    return plan, tuple(made)


def _kept(weights: WeightsFolder) -> dict[str, Tensor]:
    path = None if weights.reference is None else weights.reference / KEPT_NAME
    if path is None or not path.exists():
        return {}
    return {
        name: stored.read(0, stored.num_elements).view(stored.shape)
        for name, stored in list_file(path).items()
    }


def _values(plan: list[_Item], source: _Checkpoint) -> Iterator[Tensor]:
    """Yield the tensors of ``plan``; a parameter of many pieces is read once."""
    name, parameter = "", torch.empty(0)
    for item in plan:
        if item.kept is not None:
            yield item.kept
            continue
        if item.parameter != name:
            del parameter  # so that its memory is free for the next
            name, parameter = item.parameter, source.read(item.parameter)
        yield parameter[item.index].reshape(item.to_write.shape)


def _shards(tensors: list[TensorToWrite], max_bytes: int) -> list[list[TensorToWrite]]:
    shards: list[list[TensorToWrite]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def _write(
    draft: Path,
    shards: list[list[TensorToWrite]],
    values: Iterator[Tensor],
    *,
    total: int,
    progress: Progress,
) -> None:
    """Write all files, and their index if there are several."""
    done = 0
    file_of: dict[str, Any] = {}
    for number, tensors in enumerate(shards, start=1):
        name = SINGLE_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with SafetensorsWriter(draft / name, tensors) as writer:
            for tensor in tensors:
                writer.write(next(values))
                file_of[tensor.name] = name
                done += tensor.num_bytes
                progress(done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (draft / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
