"""loaders.where: conditions are read as people mean them, decided as a plain walk decides, or refused."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.where import MAX_CHARS, MAX_DEPTH, FieldKind, Where, parse_where
from loaders.where_columns import HAD_BY, KINDS, Values
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.sample import Modality

FIX = (
    "conditions are made of names, numbers, 'texts', + - * / // %, < <= == != >= >, in [...], "
    "and, or, not, parentheses; for example `height >= 64 and duration < 30`"
)
KIND_OF = {"jpg": Modality.IMAGE, "png": Modality.IMAGE, "mp4": Modality.VIDEO, "wav": Modality.AUDIO}
Member = Mapping[str, Any]


def fields_of(*members: str) -> list[FieldKind]:
    """Return the layout of these members, such as "jpg|png"."""
    endings = [tuple(member.split("|")) for member in members]
    return [
        FieldKind(names, frozenset(KIND_OF.get(name.rpartition(".")[2], Modality.TEXT) for name in names))
        for names in endings
    ]


@dataclass(frozen=True)
class Listed:
    """``Rows`` over samples as dictionaries: by field its columns, and under "sample" those of the whole."""

    samples: Sequence[Mapping[int | str, Member]]
    num_fields: int

    @property
    def num_rows(self) -> int:
        return len(self.samples)

    def member(self, field: int, name: str) -> Values:
        return self._column(field, name)

    def sample(self, name: str) -> Values:
        return self._column("sample", name)

    def _column(self, of: int | str, name: str) -> Values:
        cells = [sample.get(of, {}).get(name) for sample in self.samples]
        is_text = name in KINDS
        known = np.array([cell is not None for cell in cells], dtype=np.bool_)
        filled = [("" if is_text else 0.0) if cell is None else cell for cell in cells]
        return Values(np.array(filled, dtype=object if is_text else np.float64), known)


def kept(text: str, members: Sequence[str], samples: Sequence[Mapping[int | str, Member]]) -> list[bool]:
    """Return which samples the condition keeps."""
    mask = parse_where(text, fields_of(*members)).mask(Listed(samples, len(members)))
    assert mask.dtype == np.bool_
    assert mask.shape == (len(samples),)
    return list(mask.tolist())


def picture(height: float, width: float = 100) -> Member:
    return {"height": height, "width": width, "modality": "image", "num_bytes": 10}


# Expressions of the property test: how to write them, and how a plain walk decides them for one sample.


class UnknownError(Exception):
    """A name that the sample does not have, or a division by zero."""


Find = Callable[[str], float]


@dataclass(frozen=True)
class Number:
    """A number of one sample: its text, its bare names, and its value for what a name is."""

    text: str
    bare: frozenset[str]
    value: Callable[[Mapping[int | str, Member], Find], float]


ARITHMETIC = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
TESTS = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
# Field 0 is a picture or a clip, field 1 a picture, field 2 a text.
LAYOUT = ("jpg|mp4", "png", "txt")
HAS = {0: ["height", "width", "duration"], 1: ["height", "width"], 2: ["num_chars"]}
ENDINGS = {0: "jpg", 1: "png", 2: 'member["txt"]'}


def of_field(field: int, name: str) -> Number:
    def value(sample: Mapping[int | str, Member], find: Find) -> float:
        return cell(sample, field, name)

    return Number(f"{ENDINGS[field]}.{name}", frozenset(), value)


def cell(sample: Mapping[int | str, Member], of: int | str, name: str) -> float:
    found = sample.get(of, {}).get(name)
    if found is None:
        raise UnknownError
    return float(found)


def combined(sign: str, left: Number, right: Number) -> Number:
    def value(sample: Mapping[int | str, Member], find: Find) -> float:
        first, second = left.value(sample, find), right.value(sample, find)
        try:
            return float(ARITHMETIC[sign](first, second))
        except ZeroDivisionError as error:
            raise UnknownError from error

    return Number(f"({left.text} {sign} {right.text})", left.bare | right.bare, value)


constants = st.integers(-3, 300).map(lambda n: Number(str(n), frozenset(), lambda sample, find: float(n)))
bare_names = st.sampled_from(["height", "width", "duration", "num_chars"]).map(
    lambda name: Number(name, frozenset([name]), lambda sample, find: find(name))
)
sample_names = st.just(
    Number("num_tokens", frozenset(), lambda sample, find: cell(sample, "sample", "num_tokens"))
)
field_names = st.sampled_from([(field, name) for field, names in HAS.items() for name in names]).map(
    lambda pair: of_field(*pair)
)
numbers = st.recursive(
    constants | bare_names | field_names | sample_names,
    lambda inner: st.builds(combined, st.sampled_from(sorted(ARITHMETIC)), inner, inner),
    max_leaves=4,
)


@dataclass(frozen=True)
class Condition:
    """A condition: its text, and whether it holds for one sample."""

    text: str
    holds: Callable[[Mapping[int | str, Member]], bool]


def compared(operands: list[Number], signs: list[str]) -> Condition:
    operands = operands[: len(signs) + 1]
    signs = signs[: len(operands) - 1]
    bare = frozenset[str]().union(*(operand.bare for operand in operands))

    def holds_with(sample: Mapping[int | str, Member], find: Find) -> bool:
        try:
            values = [operand.value(sample, find) for operand in operands]
        except UnknownError:
            return False
        return all(
            TESTS[sign](left, right) for sign, left, right in zip(signs, values[:-1], values[1:], strict=True)
        )

    def holds(sample: Mapping[int | str, Member]) -> bool:
        members = [sample.get(field, {}) for field in range(3)]
        having = [member for member in members if all(name in member for name in bare)]
        if bare and having:
            return all(
                holds_with(sample, lambda name, member=member: float(member[name]))  # type: ignore[misc]
                for member in having
            )

        def find_alone(name: str) -> float:
            found = [member[name] for member in members if name in member]
            if len(found) != 1:
                raise UnknownError
            return float(found[0])

        return holds_with(sample, find_alone)

    text = operands[0].text
    for sign, operand in zip(signs, operands[1:], strict=True):
        text += f" {sign} {operand.text}"
    return Condition(f"({text})", holds)


def listed(number: Number, members: list[int], negated: bool) -> Condition:
    base = compared([number, number], ["=="])
    one_of = [
        compared(
            [number, Number(str(n), frozenset(), lambda s, f, n=n: float(n))], ["!=" if negated else "=="]
        )
        for n in members
    ]

    def holds(sample: Mapping[int | str, Member]) -> bool:
        # As a walk over the members would have it: of each it is one of them, or of each it is none.
        if negated:
            return all(condition.holds(sample) for condition in one_of)
        return base.holds(sample) and any(condition.holds(sample) for condition in one_of)

    word = "not in" if negated else "in"
    return Condition(f"({number.text} {word} {members})", holds)


comparisons = st.builds(
    compared,
    st.lists(numbers, min_size=2, max_size=3),
    st.lists(st.sampled_from(sorted(TESTS)), min_size=1, max_size=2),
)
# A list after the number of one field: over several members, "each is in the list" is not "all are equal".
lists = st.builds(listed, field_names, st.lists(st.integers(0, 300), min_size=1, max_size=3), st.booleans())
conditions = st.recursive(
    comparisons | lists,
    lambda inner: (
        st.builds(lambda c: Condition(f"(not {c.text})", lambda s: not c.holds(s)), inner)
        | st.builds(
            lambda a, b: Condition(f"({a.text} and {b.text})", lambda s: a.holds(s) and b.holds(s)),
            inner,
            inner,
        )
        | st.builds(
            lambda a, b: Condition(f"({a.text} or {b.text})", lambda s: a.holds(s) or b.holds(s)),
            inner,
            inner,
        )
    ),
    max_leaves=5,
)


@st.composite
def samples(draw: st.DrawFn) -> Mapping[int | str, Member]:
    """A sample of the layout, of which any member may be missing."""
    small = st.integers(0, 300)
    sample: dict[int | str, Member] = {"sample": {"num_tokens": draw(small)}}
    for field, names in HAS.items():
        if draw(st.booleans()):
            sample[field] = {name: draw(small) for name in names if name != "duration" or draw(st.booleans())}
    return sample


@settings(max_examples=300)
@given(conditions, st.lists(samples(), max_size=12))
def test_a_condition_is_decided_as_a_walk_over_rows_and_members_decides_it(
    condition: Condition, rows: list[Mapping[int | str, Member]]
) -> None:
    assert kept(condition.text, LAYOUT, rows) == [condition.holds(row) for row in rows]


@given(conditions)
def test_the_one_spelling_of_a_condition_is_read_as_the_same_condition(condition: Condition) -> None:
    fields = fields_of(*LAYOUT)
    where = parse_where(condition.text, fields)
    assert parse_where(where.text, fields) == where


def test_spaces_lines_and_parentheses_do_not_make_another_condition() -> None:
    spellings = [
        "height >= 64 and width < 5",
        "  (height>=64) and\n\t(width   <5)\r\n",
        "((height >= 64 and width < 5))",
    ]
    assert {parse_where(text, fields_of("jpg")).text for text in spellings} == {spellings[0]}


def test_a_bare_name_is_asked_of_every_member_that_has_it() -> None:
    both = {0: picture(100), 1: picture(50)}
    one = {0: picture(100), 2: {"num_chars": 5}}
    none = {2: {"num_chars": 5}}
    members = ["jpg", "png", "txt"]
    assert kept("height >= 64", members, [both, one, none]) == [False, True, False]
    assert kept("not height >= 64", members, [both, one, none]) == [True, False, True]
    assert kept("jpg.height >= 64", members, [both, one, none]) == [True, True, False]
    assert kept('member["png"].height < 64', members, [both, one, none]) == [True, False, False]
    assert kept("height in [100, 50]", members, [both, one, none]) == [True, True, False]
    assert kept("height not in (50, -1)", members, [both, one, none]) == [False, True, False]


def test_names_of_one_comparison_are_of_one_member_where_one_has_them_all() -> None:
    wide_and_high = {0: picture(10, 90), 1: picture(90, 10)}
    assert kept("width * height == 900", ["jpg", "png"], [wide_and_high]) == [True]
    assert kept("0.1 < width / height < 10", ["jpg", "png"], [wide_and_high]) == [True]
    assert kept("width == 90 and height == 90", ["jpg", "png"], [wide_and_high]) == [False]


def test_names_that_no_one_member_has_are_of_the_only_members_that_have_them() -> None:
    talk = {0: {"duration": 4.0}, 1: {"num_chars": 20}}
    two_texts = {**talk, 2: {"num_chars": 2}}
    members = ["wav", "txt", "question.txt"]
    assert kept("num_chars / duration <= 5", members, [talk, two_texts]) == [True, False]
    assert kept("txt.num_chars / duration <= 5", members, [talk, two_texts]) == [True, True]
    assert kept("question.txt.num_chars < 5", members, [talk, two_texts]) == [False, True]


def test_texts_are_compared_and_looked_for() -> None:
    rows = [{"sample": {"key": key}, 0: {"modality": kind}} for key, kind in (("a", "image"), ("b", "video"))]
    members = ["jpg|mp4"]
    assert kept("key == 'a'", members, rows) == [True, False]
    assert kept("key != 'a' and key < 'c'", members, rows) == [False, True]
    assert kept("key not in ['a', 'x']", members, rows) == [False, True]
    assert kept("mp4.modality in ('video',)", members, rows) == [False, True]
    assert kept("JPG.modality == 'image'", members, rows) == [True, False]


def test_what_cannot_be_calculated_holds_nowhere() -> None:
    rows = [{0: picture(0, 10)}, {0: picture(5, 10)}]
    for text in ("width / height > 0", "width % height >= 0", "width // height > 0"):
        assert kept(text, ["jpg"], rows) == [False, True], text
    for text in (
        "width / (height / 0) == 0",
        "width * 1e308 * 1e308 > 0",
        "1 / (width * 1e300 * 1e300) == 0",
    ):
        assert kept(text, ["jpg"], rows) == [False, False], text
    for text in ("5 > jpg.height", "jpg.height < 5", "5 < 6 > jpg.height"):
        assert kept(text, ["jpg"], [{}, rows[0]]) == [False, True], text


def test_signs_are_those_of_numbers() -> None:
    rows = [{0: picture(3)}, {0: picture(5)}]
    assert kept("0 - 5 == -height and +height == 5", ["jpg"], rows) == [False, True]
    assert kept("height - 8 in [-5, 1]", ["jpg"], rows) == [True, False]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "it is empty"),
        ("hieght >= 64", "column 1: unknown name `hieght`; did you mean `height`?"),
        (
            "height > 1 and zzz > 2",
            "column 16: unknown name `zzz`; known are aspect_ratio, duration, duration_s, height, key, "
            "mel_frames, modality, num_bytes, num_chars, num_frames, num_samples, num_tokens, patches, "
            "sample_rate, width",
        ),
        ("jpg.heigth > 1", "column 1: unknown name `heigth`; did you mean `height`?"),
        ("gif.height > 1", "column 1: the layout has no member 'gif'; it has jpg|png, question.txt, txt"),
        (
            'member["txt.gz"].height > 1',
            "column 1: the layout has no member 'txt.gz'; it has jpg|png, question.txt, txt",
        ),
        ("[1].height > 1", "column 1: `[1]` names no member of the layout"),
        ("duration < 30", "column 1: no member of this source has `duration`"),
        ("txt.height < 30", "column 1: `txt` has no `height`"),
        (
            "modality == 'image'",
            'column 1: `modality` is of one member: write `member["jpg|png"].modality` or '
            "`question.txt.modality` or `txt.modality`",
        ),
        ("height", "column 1: `height` is a number, not true or false: compare it"),
        ("not key", "column 5: `key` is a text, not true or false: compare it"),
        ("True", "column 1: `True` is neither number nor text"),
        ("height > None", "column 10: `None` is neither number nor text"),
        ("height > 2j", "column 10: `2j` is neither number nor text"),
        ("height > 1e999", "column 10: `1e999` is too large a number"),
        (
            "height > 1" + "0" * 400,
            "column 10: `1000000000000000000000000000000000000...` is too large a number",
        ),
        ("height > 'a'", "column 10: a number is compared with the text `'a'`"),
        ("key == 5", "column 8: a text is compared with the number `5`"),
        ("key + 1 == 5", "column 1: `key` is a text, not a number to calculate with"),
        ("-key == 5", "column 2: `key` is a text, not a number to calculate with"),
        ("(height > 1) + 1 == 2", "column 2: `height > 1` is true or false, not a number or text"),
        ("(height > 1) == (width > 1)", "column 2: `height > 1` is true or false, not a number or text"),
        ("height >= 64 & width > 3", "column 11: the operator of `64 & width` is not allowed: write `and`"),
        ("height ** 2 > 3", "column 1: the operator of `height ** 2` is not allowed: write a product"),
        ("height << 2 > 3", "column 1: the operator of `height << 2` is not allowed: write + - * / // or %"),
        ("~height > 3", "column 1: `~height` is not allowed: write `not`"),
        ("height is 3", "column 1: `is` is not allowed: write == or !="),
        ("height in 3", "column 11: `in` needs a list of numbers or texts, such as [1, 2]"),
        ("height in []", "column 11: `in` needs a list of numbers or texts, such as [1, 2]"),
        ("height in [1, width]", "column 15: `width` is no constant, as a list after `in` needs"),
        ("height in [1, 'a']", "column 15: a number is looked for in a list that holds `'a'`"),
        ("key in ['a', -1]", "column 14: a text is looked for in a list that holds `-1`"),
        ("1 < height in [1]", "column 1: `in` is part of a chain: write two comparisons joined by `and`"),
        ("abs(height) > 1", "column 1: `abs(height)` is not allowed"),
        ("(lambda: 1) > 1", "column 2: `lambda: 1` is not allowed"),
        ("[h for h in [1]] == 1", "column 1: `[h for h in [1]]` is not allowed"),
        ("height > 1 if True else width > 1", "column 1: `height > 1 if True else width > 1` is not allowed"),
        ("f'{height}' == 'a'", "column 1: `f'{height}'` is not allowed"),
        ("key == 'ä' and hieght > 1", "column 16: unknown name `hieght`; did you mean `height`?"),
        ("x" * (MAX_CHARS + 1), f"it has {MAX_CHARS + 1} characters, limit {MAX_CHARS}"),
        ("1" + " + 1" * 60 + " > height", f"column 1: it is nested more than {MAX_DEPTH} deep"),
        ("not " * 60 + "height > 1", f"column 205: it is nested more than {MAX_DEPTH} deep"),
    ],
)
def test_what_is_no_condition_is_refused_with_its_column(text: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_where(text, fields_of("jpg|png", "question.txt", "txt"))
    assert str(caught.value) == f"{what}\n  where: condition `{text[:200]}`\n  fix:   {FIX}"


@pytest.mark.parametrize(
    "text", ["height >= ", "height => 64", "height = 64", "a) or (b", "height > 1; 2", "\0"]
)
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_where(text, fields_of("jpg"))


@pytest.mark.parametrize(
    "text", ["not " * 900 + "height > 1", "(" * 900 + "height" + ")" * 900, "'\\d' == key"]
)
def test_hostile_text_ends_in_a_message_or_is_read(text: str) -> None:
    with suppress(ConfigError):
        assert isinstance(parse_where(text, fields_of("jpg")), Where)


def test_a_member_in_two_fields_must_be_named_in_full() -> None:
    fields = fields_of("jpg|png", "png", "0.jpg|png")
    with pytest.raises(ConfigError) as caught:
        parse_where("member['jpg'].height > 1 and webp.height > 1", fields)
    assert "no member 'webp'" in caught.value.what
    parse_where("png.height > 1", fields)
    with pytest.raises(ConfigError) as caught:
        parse_where("png.height > 1", fields_of("jpg|png", "0.jpg|png"))
    assert caught.value.what == (
        "column 1: several fields of the layout have the member 'png': "
        'member["jpg|png"] or member["0.jpg|png"]'
    )


def test_every_name_is_of_some_modality() -> None:
    assert all(modalities for modalities in HAD_BY.values())
    assert {*KINDS} <= {*HAD_BY, "key"}


def test_a_million_rows_take_a_moment() -> None:
    count = 1_000_000
    values = Values(np.arange(count, dtype=np.float64), np.ones(count, dtype=np.bool_))

    class Many:
        """One picture each."""

        num_rows = count
        num_fields = 1

        def member(self, field: int, name: str) -> Values:
            return values

        def sample(self, name: str) -> Values:
            return values

    where = parse_where("64 <= height < 900000 and width / height < 3", fields_of("jpg"))
    begin = time.perf_counter()
    assert int(where.mask(Many()).sum()) == 900_000 - 64
    # Some 30 ms; the bound only catches a walk over rows.
    assert time.perf_counter() - begin < 1.0
