"""Weights of the reference -> a checkpoint of torch that any number of ranks loads (DCP), tensor by tensor.

First everything is compared by headers: names, shapes, types. Then the writer of the checkpoint asks for one
block of rows after the other and each is read from its file, so memory stays near one block. Numbers are
copied bit by bit, in the type of the file. Blocks also let a rank of a run read little more than its shard.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from omni_pipeline.core.config import validate
from omni_pipeline.core.errors import DataError, OmniError
from trainer.checkpoint_files import TENSORS_NAME, drafted, seal
from trainer.config import ModelConfig
from trainer.weights.folder import KEPT_NAME, MODEL_NAME, REFERENCE_NAME, Progress, model_file
from trainer.weights.match import FIX, match, parameter_shapes
from trainer.weights.names import Piece, Shape
from trainer.weights.reference_config import describe
from trainer.weights.reference_files import SETTINGS_NAME, check_free, copy_files, read_settings
from trainer.weights.safetensors_file import (
    BLOCK_BYTES,
    DTYPES,
    SafetensorsWriter,
    StoredTensor,
    TensorToWrite,
    list_folder,
)


@dataclass(frozen=True)
class Imported:
    """What an import did.

    Args:
        parts: Encoders by name, and ``llm``.
        num_parameters: Numbers in them.
        num_bytes: Of the tensors.
        dtypes: Types of the tensors, as safetensors names them.
        kept: Tensors that no forward reads, kept for export.
        left_out: Tensors that were not taken.
    """

    parts: tuple[str, ...]
    num_parameters: int
    num_bytes: int
    dtypes: tuple[str, ...]
    kept: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """Consecutive elements of a stored tensor, and the box of a parameter that they fill.

    Args:
        name: Of the parameter.
        shape: Of the parameter.
        offsets: Where the box begins.
        sizes: Of the box.
        stored: The tensor.
        first: Its first element in the box.
    """

    name: str
    shape: Shape
    offsets: Shape
    sizes: Shape
    stored: StoredTensor
    first: int

    @property
    def num_elements(self) -> int:
        """Of the box."""
        return math.prod(self.sizes)

    @property
    def num_bytes(self) -> int:
        """Of the box."""
        return self.num_elements * DTYPES[self.stored.dtype].itemsize


def import_weights(source: Path, out: Path, *, progress: Progress) -> Imported:
    """Make the folder ``out`` of the weights in ``source``: complete, or not at all.

    Args:
        source: Folder with ``config.json`` and safetensors files.
        out: Must not exist, or be empty.
        progress: See ``Progress``.

    Raises:
        ConfigError: ``out`` is taken, or ``config.json`` describes a model that this project does not have.
        DataError: Files are missing or damaged, or tensors are missing, unexpected or of another shape.
    """
    check_free(out)
    settings = source / SETTINGS_NAME
    described = describe(read_settings(source), where=str(settings))
    # What config.json has no word for is as published.
    config = validate(ModelConfig, {"size": "7b", **described.model}, where=str(settings), fix=FIX)
    listed = list_folder(source)
    found = match(listed, config, layout=described.layout, where=str(source))
    blocks = list(_blocks(found.pieces, listed, config))
    with drafted(out) as draft:
        _save(draft / TENSORS_NAME, blocks, progress)
        _keep(source, draft / REFERENCE_NAME, found.kept)
        seal(
            draft,
            {
                MODEL_NAME: model_file(
                    config.model_dump(mode="json", include=set(described.model)), described.parts
                )
            },
        )
    return Imported(
        parts=described.parts,
        num_parameters=sum(block.num_elements for block in blocks),
        num_bytes=sum(block.num_bytes for block in blocks),
        dtypes=tuple(sorted({block.stored.dtype for block in blocks})),
        kept=tuple(found.kept),
        left_out=found.left_out,
    )


def _save(path: Path, blocks: list[Block], progress: Progress) -> None:
    # One thread, nothing read ahead: the planner counts on being asked in order.
    writer = FileSystemWriter(path, thread_count=1, per_thread_copy_ahead=0)
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is one process only
            save_tensors({}, storage_writer=writer, planner=_StreamingPlanner(blocks, progress), no_dist=True)
    except CheckpointException as error:
        cause = error.failures[0][0]
        raise (cause if isinstance(cause, OmniError) else DataError(str(cause), where=str(path))) from error


def _blocks(
    pieces: Mapping[str, tuple[Piece, ...]], listed: Mapping[str, StoredTensor], config: ModelConfig
) -> Iterator[Block]:
    """Yield the blocks of all parameters: each piece, cut along its longest-striding dim that has a size."""
    for name, shape in parameter_shapes(config).items():
        for piece in pieces.get(name, ()):
            stored = listed[piece.name]
            offsets, sizes = _box(piece, shape)
            dim = next((dim for dim, size in enumerate(sizes) if size > 1), 0)
            row = math.prod(sizes[dim + 1 :])
            rows = max(1, BLOCK_BYTES // (row * DTYPES[stored.dtype].itemsize))
            for start in range(0, sizes[dim], rows):
                count = min(rows, sizes[dim] - start)
                yield Block(
                    name,
                    shape,
                    (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]),
                    (*sizes[:dim], count, *sizes[dim + 1 :]),
                    stored,
                    start * row,
                )


def _box(piece: Piece, shape: Shape) -> tuple[Shape, Shape]:
    """Return (offsets, sizes) of the box ``parameter[piece.index]``, in all dims of the parameter."""
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, index in enumerate(piece.index):
        start, stop, _ = (index, index + 1, 1) if isinstance(index, int) else index.indices(shape[dim])
        offsets[dim], sizes[dim] = start, stop - start
    return tuple(offsets), tuple(sizes)


class _StreamingPlanner(DefaultSavePlanner):
    """Plans to save blocks that are read only when they are written."""

    def __init__(self, blocks: list[Block], progress: Progress) -> None:
        super().__init__(flatten_state_dict=False)
        self._blocks = {(f"model.{block.name}", block.offsets): block for block in blocks}
        self._progress = progress
        self._total = sum(block.num_bytes for block in blocks)
        self._done = 0
        self._memory = bytearray(max(block.num_bytes for block in blocks))

    def create_local_plan(self) -> SavePlan:
        """Return one item per block."""
        self.plan = SavePlan([_write_item(name, block) for (name, _), block in self._blocks.items()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Read a block into the memory that all share: the writer keeps tensors until it closes its file."""
        block = self._blocks[write_item.index.fqn, tuple(write_item.index.offset or ())]
        self._done += block.num_bytes
        self._progress(self._done, self._total)
        return block.stored.read(block.first, block.num_elements, into=self._memory).view(block.sizes)


def _write_item(name: str, block: Block) -> WriteItem:
    offsets = torch.Size(block.offsets)
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(block.sizes)),
            properties=TensorProperties(dtype=DTYPES[block.stored.dtype]),
            size=torch.Size(block.shape),
        ),
    )


def _keep(source: Path, reference: Path, kept: Mapping[str, StoredTensor]) -> None:
    """Copy what is no weight and may be needed again: settings, tokenizer, tensors that no forward reads."""
    reference.mkdir()
    copy_files(source, reference)
    if not kept:
        return
    entries = [TensorToWrite(name, DTYPES[item.dtype], item.shape) for name, item in kept.items()]
    with SafetensorsWriter(reference / KEPT_NAME, entries) as writer:
        for item in kept.values():
            writer.write(item.read(0, item.num_elements).view(item.shape))
