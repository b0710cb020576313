"""The safetensors container, tensor by tensor: a JSON header of names and places, then bytes.

The library maps whole files into memory, and writes from tensors that are all in memory at once. Here a
tensor is read by its place, in blocks, and a file is written in the order of its header, so that memory does
not depend on the size of the model. The format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from omni_pipeline.core.errors import DataError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
BLOCK_BYTES = 32 * 2**20
LONGEST_HEADER_BYTES = 100 * 2**20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types that weights may have; files may hold others, which cannot be read here."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FIX = "fetch the file again: it is damaged or incomplete"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies.

    Args:
        file: The file.
        dtype: As the file names it, e.g. ``BF16``.
        shape: Of the tensor.
        start: First byte, counted from the start of the file.
        num_bytes: Of the tensor.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape)

    def read(self, first: int, count: int, *, into: bytearray | None = None) -> Tensor:
        """Return elements ``first`` to ``first + count`` in row-major order, [count], in the file's type.

        Args:
            first: Of the elements.
            count: Of the elements.
            into: Memory to use, at least that large; the tensor is a view of it. Default: its own.

        Raises:
            DataError: The file has become shorter since it was listed.
        """
        dtype = DTYPES[self.dtype]
        memory = bytearray(count * dtype.itemsize) if into is None else into
        rest = memoryview(memory)[: count * dtype.itemsize]
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.start + first * dtype.itemsize)
            while len(rest):
                got = file.readinto(rest)  # Linux gives at most 2 GiB at once
                if not got:
                    raise DataError(f"{self.file} ends {len(rest)} bytes early", fix=FIX)
                rest = rest[got:]
        return tensor_in(memory, (count,), dtype)


def tensor_in(memory: bytearray, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor that views the first bytes of ``memory``."""
    count = math.prod(shape)
    flat = torch.frombuffer(memory, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
    return flat.view(*shape)


def list_folder(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all safetensors files of ``folder``, by name, as its index says.

    Raises:
        DataError: No such files, a file of the index is missing, one is damaged, or the index is wrong.
    """
    index_path = folder / INDEX_NAME
    if not index_path.exists():
        if not (folder / SINGLE_NAME).exists():
            raise DataError(
                f"there is neither {SINGLE_NAME} nor {INDEX_NAME}",
                where=str(folder),
                fix="give a folder as `save_pretrained` writes it; other formats are not read",
            )
        return list_file(folder / SINGLE_NAME)
    file_of = _read_index(index_path)
    missing = sorted({name for name in file_of.values() if not (folder / name).is_file()})
    if missing:
        raise DataError(
            f"{counted(missing, 'file')} of the index {'is' if len(missing) == 1 else 'are'} missing",
            where=str(index_path),
            fix="fetch the folder again, all files of it",
        )
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(file_of.values())):
        found |= list_file(folder / file)
    strays = sorted(
        name for name, file in file_of.items() if name not in found or found[name].file.name != file
    )
    if strays:
        raise DataError(
            f"{counted(strays, 'tensor')} of the index not in the file named there",
            where=str(index_path),
            fix="fetch the folder again, all files of one version",
        )
    return found


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor. Files lie in the folder of the index: other paths are refused."""
    try:
        file_of = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        bad = [file for file in file_of.values() if Path(file).name != file]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError("the index has no weight_map of names and files", where=str(path), fix=FIX) from error
    if bad:
        raise DataError(
            f"the index names {bad[0]!r}, which is no file beside it", where=str(path), fix="mend the index"
        )
    return dict(file_of)


def list_file(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file, by name; reads its header only.

    Raises:
        DataError: No safetensors file, or it is shorter than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(LONGEST_HEADER_BYTES, size - 8):
            raise DataError(
                f"the header claims {header_bytes} bytes, the file has {size}", where=str(path), fix=FIX
            )
        raw = file.read(header_bytes)
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        found = {name: _stored(path, entry, 8 + header_bytes) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError("the header is no list of tensors", where=str(path), fix=FIX) from error
    for name, tensor in found.items():
        if tensor.start + tensor.num_bytes > size:
            raise DataError(
                f"{name} ends at byte {tensor.start + tensor.num_bytes}, the file has {size}",
                where=str(path),
                fix=FIX,
            )
    return found


def _stored(path: Path, entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    start, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(size) for size in entry["shape"])
    dtype = str(entry["dtype"])
    wanted = math.prod(shape) * DTYPES[dtype].itemsize if dtype in DTYPES else end - start
    if start < 0 or end - start != wanted or any(size < 0 for size in shape):
        raise ValueError(f"{entry} does not add up")
    return StoredTensor(path, dtype, shape, data_start + start, wanted)


def counted(names: Sequence[str], what: str, *, plural: str = "", shown: int = 4) -> str:
    """Return the number of ``names``, and the first few of them."""
    more = ", ..." if len(names) > shown else ""
    word = what if len(names) == 1 else plural or f"{what}s"
    return f"{len(names)} {word} ({', '.join(names[:shown])}{more})"


@dataclass(frozen=True)
class TensorToWrite:
    """What the header says of a tensor that is written later."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """Writes one file: the header at once, then the tensors, one at a time in that order.

    Args:
        path: The file; must not exist.
        tensors: All tensors of the file, in order.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorToWrite]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in tensors:
            end = offset + tensor.num_bytes
            header[tensor.name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)  # so that the data are aligned
        self._waiting = list(reversed(tensors))
        self._file: BinaryIO = path.open("xb")
        self._file.write(len(raw).to_bytes(8, "little") + raw)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        assert kind is not None or not self._waiting, f"{len(self._waiting)} tensors were not written"

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor, cast to the type that the header says, block by block."""
        expected = self._waiting.pop()
        assert tuple(tensor.shape) == expected.shape, (tensor.shape, expected)
        flat = tensor.detach().reshape(-1)
        step = BLOCK_BYTES // expected.dtype.itemsize
        for start in range(0, len(flat), step):
            block = flat[start : start + step].to(expected.dtype)
            self._file.write(block.view(torch.uint8).numpy().data)
