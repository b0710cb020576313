"""What a ``where`` condition can ask of samples: names, columns, and how a comparison over them is decided.

Everything is done with whole columns. A cell may be unknown (a caption has no height, nothing can be divided
by zero), and a comparison with an unknown side is false. Numbers are float64: exact for integers up to 2**53.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from omni_pipeline.core import media
from omni_pipeline.core.sample import Modality

BoolArray = npt.NDArray[np.bool_]
Kind = Literal["number", "text"]
Test = Callable[[Any, Any], Any]

_PICTURES = (Modality.IMAGE, Modality.VIDEO)
_EVERY = media.KINDS.modalities

HAD_BY: dict[str, Sequence[Modality]] = {
    "height": _PICTURES,
    "width": _PICTURES,
    "aspect_ratio": _PICTURES,
    "num_frames": (Modality.VIDEO,),
    "duration": (Modality.VIDEO, Modality.AUDIO),
    "duration_s": (Modality.VIDEO, Modality.AUDIO),
    "sample_rate": (Modality.AUDIO,),
    "num_samples": (Modality.AUDIO,),
    "num_chars": (Modality.TEXT,),
    "num_bytes": _EVERY,
    "num_tokens": _EVERY,
    "patches": _PICTURES,
    "mel_frames": (Modality.AUDIO,),
    "modality": _EVERY,
}
"""Names of a member, and which modalities have it. ``aspect_ratio`` is long side / short side."""

OF_SAMPLE = ("key", "num_tokens", "patches", "mel_frames")
"""Bare names that are of the whole sample."""

KINDS: dict[str, Kind] = {"key": "text", "modality": "text"}
"""Names whose columns hold text; all others hold numbers."""

COMPARISONS: dict[type[ast.cmpop], Test] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.GtE: operator.ge,
    ast.Gt: operator.gt,
}
ARITHMETIC: dict[type[ast.operator], Test] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.true_divide,
    ast.FloorDiv: np.floor_divide,
    ast.Mod: np.mod,
}


class Values(NamedTuple):
    """A column: float64 (or object, all of them str) [rows], and where it is known."""

    values: npt.NDArray[Any]
    known: BoolArray


class Rows(Protocol):
    """Samples as a condition sees them."""

    @property
    def num_rows(self) -> int:
        """How many."""
        ...

    @property
    def num_fields(self) -> int:
        """Fields of the layout."""
        ...

    def member(self, field: int, name: str) -> Values:
        """Return the column ``name`` (of ``HAD_BY``) of the layout's field ``field``."""
        ...

    def sample(self, name: str) -> Values:
        """Return the column ``name`` (of ``OF_SAMPLE``) of the samples."""
        ...


class Name(NamedTuple):
    """A column: of one field, of the whole sample, or (bare) of every field that has it."""

    name: str
    of: int | Literal["sample", "every"]


Read = Callable[[Name], Values]
Mask = Callable[[Rows], BoolArray]


@dataclass(frozen=True)
class Operand:
    """One side of a comparison: what it is made of, and how to get its column."""

    kind: Kind
    names: frozenset[Name]
    values: Callable[[Read], Values]


def constant(value: str | float) -> Operand:
    """Return an operand that is the same for every sample."""
    is_text = isinstance(value, str)
    column = Values(np.array(value, dtype=object if is_text else np.float64), np.array(True))
    return Operand("text" if is_text else "number", frozenset(), lambda read: column)


def column(name: Name) -> Operand:
    """Return the operand that is one column."""
    return Operand(KINDS.get(name.name, "number"), frozenset([name]), lambda read: read(name))


def calculated(function: Test, left: Operand, right: Operand) -> Operand:
    """Return ``function`` (of ``ARITHMETIC``) of two operands; unknown where it is no finite number."""

    def values(read: Read) -> Values:
        (first, first_known), (second, second_known) = left.values(read), right.values(read)
        with np.errstate(all="ignore"):
            result = function(first, second)
        return Values(result, first_known & second_known & np.isfinite(result))

    return Operand("number", left.names | right.names, values)


def is_in(wanted: frozenset[Any], *, negated: bool) -> Test:
    """Return the test of ``in`` or ``not in``; it looks at its left side only."""

    def test(left: npt.NDArray[Any], _: Any) -> BoolArray:
        found = np.fromiter((value in wanted for value in left.ravel().tolist()), np.bool_, left.size)
        return found.reshape(left.shape) ^ negated

    return test


def comparison(operands: Sequence[Operand], tests: Sequence[Test]) -> Mask:
    """Return what decides ``a < b < c`` for the whole sample.

    Names of one field or of the sample are what they are. Bare names are asked of every member that has all
    of them, and it must hold for each; where no member has them all, each name is of the only member that
    has it, and it does not hold where several or none have it.
    """
    bare = sorted(
        {name.name for operand in operands for name in operand.names if name.of == "every"},
    )

    def mask(rows: Rows) -> BoolArray:
        apart = _holds(operands, tests, _reader(rows, lambda name: _of_only_member(rows, name)))
        apart = np.broadcast_to(apart, rows.num_rows)
        if not bare:
            return apart
        all_hold = np.ones(rows.num_rows, dtype=np.bool_)
        is_asked = np.zeros(rows.num_rows, dtype=np.bool_)
        for field in range(rows.num_fields):
            has_all = reduce(np.logical_and, [rows.member(field, name).known for name in bare])
            read = _reader(rows, lambda name, field=field: rows.member(field, name))  # type: ignore[misc]
            all_hold &= ~has_all | _holds(operands, tests, read)
            is_asked |= has_all
        return np.where(is_asked, all_hold, apart)

    return mask


def _holds(operands: Sequence[Operand], tests: Sequence[Test], read: Read) -> BoolArray:
    """Return where the chain holds, with bare names as ``read`` has them; false where a side is unknown."""
    columns = [operand.values(read) for operand in operands]
    result = reduce(np.logical_and, [column.known for column in columns])
    for test, left, right in zip(tests, columns[:-1], columns[1:], strict=True):
        result = result & np.asarray(test(left.values, right.values), dtype=np.bool_)
    return result


def _reader(rows: Rows, of_bare: Callable[[str], Values]) -> Read:
    def read(name: Name) -> Values:
        if isinstance(name.of, int):
            return rows.member(name.of, name.name)
        return rows.sample(name.name) if name.of == "sample" else of_bare(name.name)

    return read


def _of_only_member(rows: Rows, name: str) -> Values:
    """Return the column of the only member that has ``name``; unknown where several or none have it."""
    values = np.zeros(rows.num_rows)
    count = np.zeros(rows.num_rows, dtype=np.int64)
    for field in range(rows.num_fields):
        found = rows.member(field, name)
        values = np.where(found.known, found.values, values)
        count += found.known
    return Values(values, count == 1)
