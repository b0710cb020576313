"""``where``: a condition over index columns, such as ``height >= 64 and duration < 30``.

The text is read once, with the standard library's ``ast``, into functions over whole columns. A syntax tree
with anything but comparisons, arithmetic, ``and``, ``or``, ``not``, constants and known names is refused;
nothing is ever evaluated as Python.

What a name means: ``key``, ``num_tokens``, ``patches`` and ``mel_frames`` are of the whole sample. Any other
bare name, such as ``height``, is asked of every member that has it: ``height >= 64`` holds where all pictures
and clips of the sample are that high, and not where there is none. Names within one comparison are of the
same member (``width / height < 3``), or, where no member has them all (``num_chars / duration``), of the only
member that has each. ``jpg.height`` and ``member["jpg"].height`` name one field of the layout.

A comparison about what a sample does not have, and one that divides by zero, is false; so
``not duration >= 30`` keeps samples without a duration, ``duration < 30`` does not.
"""

from __future__ import annotations

import ast
import difflib
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple, NoReturn

import numpy as np

from loaders.where_columns import (
    ARITHMETIC,
    COMPARISONS,
    HAD_BY,
    OF_SAMPLE,
    BoolArray,
    Kind,
    Mask,
    Name,
    Operand,
    Rows,
    calculated,
    column,
    comparison,
    constant,
    is_in,
)
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.sample import Modality

MAX_CHARS = 4000
MAX_DEPTH = 50
_INSTEAD: dict[type[ast.operator], str] = {
    ast.BitAnd: "write `and`",
    ast.BitOr: "write `or`",
    ast.Pow: "write a product",
}


class FieldKind(NamedTuple):
    """What a condition has to know of one field of the layout: its endings, and what they may hold."""

    suffixes: tuple[str, ...]
    modalities: frozenset[Modality]


@dataclass(frozen=True)
class Where:
    """A condition that was read; made by ``parse_where``.

    Args:
        text: In one spelling: spaces and needless parentheses do not show.
    """

    text: str
    _mask: Mask = field(repr=False, compare=False)

    def mask(self, rows: Rows) -> BoolArray:
        """Return bool [rows]: where the condition holds."""
        return self._mask(rows)


def parse_where(text: str, fields: Sequence[FieldKind]) -> Where:
    """Return the condition that ``text`` is, for samples of these fields.

    Raises:
        ConfigError: It is no condition, or asks for what no member has; says at which column.
    """
    reader = _Reader(" ".join(text.splitlines()).strip(), fields)
    tree = reader.parse()
    mask = reader.condition(tree, depth=0)
    return Where(ast.unparse(tree), mask)


class _Reader:
    """Turns the syntax tree of one condition into functions, or says what is wrong with it, and where."""

    def __init__(self, text: str, fields: Sequence[FieldKind]) -> None:
        self._text = text
        self._fields = fields

    def parse(self) -> ast.expr:
        """Return the tree."""
        if not self._text:
            self._refuse("it is empty")
        if len(self._text) > MAX_CHARS:
            self._refuse(f"it has {len(self._text)} characters, limit {MAX_CHARS}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of odd escapes in texts; they mean what Python says
                return ast.parse(self._text, mode="eval").body
        except SyntaxError as error:
            self._refuse(f"column {error.offset or 1}: it cannot be read from here on")
        except (ValueError, RecursionError, MemoryError) as error:
            self._refuse(f"it cannot be read: {error}")

    def condition(self, node: ast.expr, *, depth: int) -> Mask:
        """Return what decides ``node``, which must be true or false."""
        self._check_depth(node, depth)
        match node:
            case ast.BoolOp():
                masks = [self.condition(value, depth=depth + 1) for value in node.values]
                join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
                return lambda rows: reduce(join, [mask(rows) for mask in masks])
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                mask = self.condition(inner, depth=depth + 1)
                return lambda rows: ~mask(rows)
            case ast.Compare():
                return self._comparison(node, depth + 1)
        operand = self._operand(node, depth)
        self._refuse(f"{self._source(node)} is a {operand.kind}, not true or false: compare it", node)

    def _comparison(self, node: ast.Compare, depth: int) -> Mask:
        operands = [self._operand(node.left, depth)]
        if isinstance(node.ops[0], ast.In | ast.NotIn) and len(node.ops) == 1:
            wanted = self._constants(node.comparators[0], operands[0].kind)
            return comparison(operands * 2, [is_in(wanted, negated=isinstance(node.ops[0], ast.NotIn))])
        tests = []
        for test, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(test, ast.In | ast.NotIn):
                self._refuse("`in` is part of a chain: write two comparisons joined by `and`", node)
            if type(test) not in COMPARISONS:
                self._refuse("`is` is not allowed: write == or !=", node)
            operand = self._operand(right, depth)
            if operand.kind != operands[-1].kind:
                kinds = f"a {operands[-1].kind} is compared with the {operand.kind}"
                self._refuse(f"{kinds} {self._source(right)}", right)
            tests.append(COMPARISONS[type(test)])
            operands.append(operand)
        return comparison(operands, tests)

    def _operand(self, node: ast.expr, depth: int) -> Operand:
        self._check_depth(node, depth)
        match node:
            case ast.Constant():
                return constant(node.value if isinstance(node.value, str) else self._as_float(node))
            case ast.Name():
                return column(self._bare(node))
            case ast.Attribute():
                return column(self._of_member(node))
            case ast.BinOp():
                function = ARITHMETIC.get(type(node.op))
                if function is None:
                    hint = _INSTEAD.get(type(node.op), "write + - * / // or %")
                    self._refuse(f"the operator of {self._source(node)} is not allowed: {hint}", node)
                left, right = self._number(node.left, depth + 1), self._number(node.right, depth + 1)
                return calculated(function, left, right)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=inner):
                sign = constant(-1.0 if isinstance(node.op, ast.USub) else 1.0)
                return calculated(np.multiply, sign, self._number(inner, depth + 1))
            case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                self._refuse(f"{self._source(node)} is true or false, not a number or text", node)
        hint = ": write `not`" if isinstance(node, ast.UnaryOp) else ""
        self._refuse(f"{self._source(node)} is not allowed{hint}", node)

    def _number(self, node: ast.expr, depth: int) -> Operand:
        operand = self._operand(node, depth)
        if operand.kind != "number":
            self._refuse(f"{self._source(node)} is a text, not a number to calculate with", node)
        return operand

    def _as_float(self, node: ast.Constant) -> float:
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            self._refuse(f"{self._source(node)} is neither number nor text", node)
        try:
            value = float(node.value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            self._refuse(f"{self._source(node)} is too large a number", node)
        return value

    def _constants(self, node: ast.expr, kind: Kind) -> frozenset[Any]:
        """Return the members of the list on the right of ``in``."""
        if not isinstance(node, ast.Tuple | ast.List) or not node.elts:
            self._refuse("`in` needs a list of numbers or texts, such as [1, 2]", node)
        found: list[Any] = []
        for item in node.elts:
            is_negative = isinstance(item, ast.UnaryOp) and isinstance(item.op, ast.USub)
            value = item.operand if is_negative else item  # type: ignore[attr-defined]
            if not isinstance(value, ast.Constant):
                self._refuse(f"{self._source(item)} is no constant, as a list after `in` needs", item)
            is_text = isinstance(value.value, str) and not is_negative
            if is_text != (kind == "text"):
                self._refuse(f"a {kind} is looked for in a list that holds {self._source(item)}", item)
            found.append(value.value if is_text else (-1 if is_negative else 1) * self._as_float(value))
        return frozenset(found)

    def _bare(self, node: ast.Name) -> Name:
        if node.id in OF_SAMPLE:
            return Name(node.id, "sample")
        if node.id not in HAD_BY:
            self._unknown(node, node.id, [*OF_SAMPLE, *HAD_BY])
        if node.id == "modality":
            instead = " or ".join(f"`{_spelled(item)}.modality`" for item in self._fields[:3])
            self._refuse(f"`modality` is of one member: write {instead}", node)
        if not any(item.modalities & {*HAD_BY[node.id]} for item in self._fields):
            self._refuse(f"no member of this source has `{node.id}`", node)
        return Name(node.id, "every")

    def _of_member(self, node: ast.Attribute) -> Name:
        place = self._place(node.value)
        if node.attr not in HAD_BY:
            self._unknown(node, node.attr, HAD_BY)
        if not self._fields[place].modalities & {*HAD_BY[node.attr]}:
            self._refuse(f"{self._source(node.value)} has no `{node.attr}`", node)
        return Name(node.attr, place)

    def _place(self, node: ast.expr) -> int:
        """Return the place in the layout of the member that ``node`` names."""
        match node:
            case ast.Subscript(value=ast.Name(id="member"), slice=ast.Constant(value=str() as ending)):
                pass
            case ast.Name() | ast.Attribute():
                ending = ast.unparse(node)
            case _:
                self._refuse(f"{self._source(node)} names no member of the layout", node)
        wanted = {*ending.lower().split("|")}
        exact = [place for place, item in enumerate(self._fields) if {*item.suffixes} == wanted]
        found = exact or [place for place, item in enumerate(self._fields) if wanted <= {*item.suffixes}]
        if len(found) > 1:
            shown = " or ".join(_spelled(self._fields[place]) for place in found)
            self._refuse(f"several fields of the layout have the member {ending!r}: {shown}", node)
        if not found:
            members = ", ".join("|".join(item.suffixes) for item in self._fields)
            self._refuse(f"the layout has no member {ending!r}; it has {members}", node)
        return found[0]

    def _unknown(self, node: ast.expr, name: str, known: Iterable[str]) -> NoReturn:
        names = sorted({*known})
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(names)}"
        self._refuse(f"unknown name `{name}`; {hint}", node)

    def _check_depth(self, node: ast.expr, depth: int) -> None:
        if depth > MAX_DEPTH:
            self._refuse(f"it is nested more than {MAX_DEPTH} deep", node)

    def _source(self, node: ast.expr) -> str:
        text = ast.get_source_segment(self._text, node) or ""
        return f"`{text if len(text) <= 40 else text[:37] + '...'}`"

    def _refuse(self, what: str, node: ast.expr | None = None) -> NoReturn:
        if node is not None:
            before = self._text.encode()[: node.col_offset].decode()
            what = f"column {len(before) + 1}: {what}"
        raise ConfigError(
            what,
            where=f"condition `{self._text[:200]}`",
            fix="conditions are made of names, numbers, 'texts', + - * / // %, < <= == != >= >, in [...], "
            "and, or, not, parentheses; for example `height >= 64 and duration < 30`",
        )


def _spelled(item: FieldKind) -> str:
    """Return how a condition names this field."""
    ending = "|".join(item.suffixes)
    is_plain = all(part.isidentifier() for part in ending.split("."))
    return ending if is_plain else f'member["{ending}"]'
