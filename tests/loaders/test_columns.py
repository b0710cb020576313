"""loaders.columns: whole batches are sized as their rows one by one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders import columns
from loaders.columns import MODALITIES, SizedBatch, Sizing
from loaders.fitting import UNUSABLE, USABLE
from loaders.index_rows import MEMBER_TYPES, RAW_TYPES, TOKENS, WORD, ShardIndex, rows_of
from omni_pipeline.core.errors import SampleError
from omni_pipeline.core.sample import Modality, RawSize
from omni_pipeline.core.sizes import ModelSizes, media_grid, media_rows

SIZES = ModelSizes()
Field = tuple[str, ...]
KINDS = {
    "jpg": "image",
    "png": "image",
    "mp4": "video",
    "wav": "audio",
    "txt": "text",
    "a.txt": "text",
    "json": "other",
}
SIDES = st.sampled_from([640, 333, 56, 28, 4000, 9000, 1])


@dataclass(frozen=True)
class Member:
    """One member of a row, as the index has it."""

    suffix: str
    raw: RawSize
    num_tokens: int
    error: str

    @property
    def kind(self) -> str:
        """A modality, or "other"."""
        return KINDS[self.suffix.lower()]


RAW = st.builds(
    RawSize,
    height=SIDES,
    width=SIDES,
    num_frames=st.integers(0, 900),
    duration_s=st.sampled_from([1.5, 90.0, 1e9]),
    sample_rate=st.sampled_from([8000, 48_000]),
    num_samples=st.sampled_from([48_001, 300_000, 0]),
)
SUFFIXES = st.sampled_from(["jpg", "png", "txt", "wav", "mp4", "JPG", "json"])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[Member]], list[Field]]:
    """Draw rows and fields; half of the time all rows have the same good members, as in most shards."""
    common = draw(st.lists(SUFFIXES, min_size=1, max_size=3))
    suffixes, errors = st.just(common), st.just("")
    if draw(st.booleans()):
        suffixes |= st.permutations(common) | st.lists(SUFFIXES, min_size=1, max_size=3)
        errors |= st.just("cut off")
    rows = [
        [Member(suffix, draw(RAW), draw(st.integers(0, 50)), draw(errors)) for suffix in draw(suffixes)]
        for _ in range(draw(st.integers(1, 6)))
    ]
    wanted = st.sampled_from(common).map(str.lower)
    field = wanted.map(lambda suffix: (suffix,)) | st.tuples(SUFFIXES.map(str.lower), wanted)
    return rows, draw(st.lists(field, min_size=1, max_size=3))


def index_of(rows: list[list[Member]]) -> ShardIndex:
    """Return ``rows`` as an index has them; the n-th member of all begins at byte 1000 n."""
    members = [member for row in rows for member in row]
    values: dict[str, list[Any]] = {
        "suffix": [member.suffix for member in members],
        "modality": [member.kind for member in members],
        "offset": [1000 * number for number in range(len(members))],
        "length": [7 + number for number in range(len(members))],
        "error": [member.error for member in members],
    }
    values |= {name: [asdict(member.raw)[name] for member in members] for name in RAW_TYPES}
    found = [
        pa.array(values[name], pa.string()).dictionary_encode()
        if kind == WORD
        else pa.array(values[name], kind)
        for name, kind in MEMBER_TYPES.items()
    ]
    starts = pa.array(np.cumsum([0, *map(len, rows)]), pa.int32())
    tokens = [member.num_tokens if member.kind == "text" else -1 for member in members]
    columns = {
        "key": pa.array([f"{number}" for number in range(len(rows))], pa.string()),
        "members": pa.ListArray.from_arrays(
            starts, pa.StructArray.from_arrays(found, names=list(MEMBER_TYPES))
        ),
        f"{TOKENS}t": pa.ListArray.from_arrays(starts, pa.array(tokens, pa.int32())),
    }
    return rows_of(pa.RecordBatch.from_pydict(columns), "a.tar", damage="")


def member_of(row: list[Member], wanted: Field) -> int:
    """Return the place in ``row`` of what fills a field, -1 if nothing does."""
    for suffix in wanted:
        places = [place for place, member in enumerate(row) if member.suffix.lower() == suffix]
        if places:
            return places[-1]
    return -1


def plain_row(row: list[Member], fields: list[Field], first: int) -> tuple[list[Any], str]:
    """Return (segments, problem) of one row whose members begin with number ``first``."""
    filled = []
    for wanted in fields:
        place = member_of(row, wanted)
        if place < 0:
            return [], f"no member {'|'.join(wanted)!r}"
        member = row[place]
        if member.error or member.kind == "other":
            error = member.error or "indexed as no kind of media; index it again"
            return [], f"member {member.suffix!r}: {error}"
        filled.append((place, member))
    segments = []
    for place, member in filled:
        kind = Modality(member.kind)
        if kind is Modality.TEXT:
            grid, num_rows, num_tokens = (member.num_tokens, 1, 1), 0, member.num_tokens
        else:
            try:
                grid = media_grid(kind, member.raw, SIZES)
            except SampleError as error:
                return [], error.what
            num_rows = media_rows(kind, grid, SIZES)
            num_tokens = num_rows + 2
        number = first + place
        segments.append((kind, member.suffix, 1000 * number, 7 + number, *grid, num_rows, num_tokens))
    return segments, ""


def assert_sized_as_rows(batch: SizedBatch, rows: list[list[Member]], fields: list[Field]) -> None:
    """Compare with ``plain_row`` of every row."""
    first = 0
    problems = {}
    for number, row in enumerate(rows):
        expected, problem = plain_row(row, fields, first)
        first += len(row)
        sizes = batch.sizes
        assert sizes.status[number] == (UNUSABLE if problem else USABLE)
        if problem:
            problems[number] = problem
            continue
        found = [column[number].item() for column in batch.segments]
        assert [(MODALITIES[kind], batch.suffixes[code], *rest) for kind, code, *rest in found] == expected
        units = dict.fromkeys(MODALITIES, 0)
        for kind, _, _, _, time, height, width, _, _ in expected:
            units[kind] += time * height * width
        tokens = 1 + sum(segment[-1] for segment in expected)
        cut = max(0, expected[-1][-1] - 1) if expected[-1][0] is Modality.TEXT else 0
        assert (sizes.tokens[number], sizes.cut_tokens[number]) == (tokens, tokens - cut)
        assert sizes.patches[number] == units[Modality.IMAGE] + units[Modality.VIDEO]
        assert sizes.mel_frames[number] == units[Modality.AUDIO]
    assert batch.problems == problems


@settings(max_examples=400)
@given(cases())
def test_a_batch_is_sized_as_its_rows_one_by_one(case: tuple[list[list[Member]], list[Field]]) -> None:
    rows, fields = case
    assert_sized_as_rows(Sizing(tuple(fields), SIZES, "t")(index_of(rows)), rows, fields)


@pytest.mark.parametrize(("lengths", "wanted"), [((1, 3, 2), "a.txt"), ((1,) * 6, "txt")])
def test_rows_that_differ_only_in_suffixes_or_number_of_members_are_told_apart(
    lengths: tuple[int, ...], wanted: str
) -> None:
    texts = iter([Member(suffix, RawSize(), n, "") for n, suffix in enumerate(["txt", "a.txt"] * 3)])
    rows = [[next(texts) for _ in range(length)] for length in lengths]
    fields: list[Field] = [(wanted,)]
    assert_sized_as_rows(Sizing(tuple(fields), SIZES, "t")(index_of(rows)), rows, fields)


def test_rows_alike_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Member("jpg", RawSize(height=640, width=333), -1, "")
    rows = [[image, Member("txt", RawSize(), n, ""), Member("json", RawSize(), -1, "")] for n in range(5)]
    monkeypatch.delattr(columns._Rows, "_find_one_by_one")
    assert_sized_as_rows(Sizing((("jpg",), ("txt",)), SIZES, "t")(index_of(rows)), rows, [("jpg",), ("txt",)])
    with pytest.raises(AttributeError):
        Sizing((("jpg",),), SIZES, "t")(index_of([*rows, [image]]))
