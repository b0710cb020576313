"""A key -> the rows of the index that have it, and what becomes of each: shard by shard, keys only."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from loaders.fitting import DENIED, FILTERED, UNUSABLE, misfit
from loaders.index_file import open_index
from loaders.order import OrderConfig
from loaders.source import Source
from omni_pipeline.app.follow import Progress, no_progress
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.sample import SampleId

MAX_MATCHES = 20
_COMPARED_KEYS = 20_000
_NEAREST = 3


@dataclass(frozen=True)
class FoundRow:
    """A row of an index.

    Args:
        id: Source, shard number, row.
        ordinal: Its place in the concatenated shards of its source.
        key: Its key.
        shard: Path or URL.
        left_out: Why it is never drawn; "" if it is.
    """

    id: SampleId
    ordinal: int
    key: str
    shard: str
    left_out: str


@dataclass(frozen=True)
class FoundRows:
    """All rows with a key, the first ``MAX_MATCHES`` of them in full."""

    rows: list[FoundRow]
    num_matches: int


def find_rows(
    wanted: str, sources: Sequence[Source], order: OrderConfig, *, progress: Progress = no_progress
) -> FoundRows:
    """Return the rows that ``wanted`` names.

    Args:
        wanted: A key; or ``source/key``, ``shard/key`` or ``source/shard/key``, a shard by its file name. A
            key may have slashes itself.
        sources: Where to look.
        order: What a pack can hold.
        progress: Told how many shards were looked through.

    Raises:
        ConfigError: There is none; names the nearest keys.
    """
    places = list(_places(wanted, sources))
    rows: list[FoundRow] = []
    compared: list[str] = []
    num_matches = 0
    for done, (source, shard, keys) in enumerate(places, start=1):
        in_shard = open_index(source.shards[shard]).keys()
        matching = np.flatnonzero(pc.is_in(in_shard, value_set=pa.array(keys)).to_numpy(zero_copy_only=False))
        num_matches += len(matching)
        for row in matching[: MAX_MATCHES - len(rows)].tolist():
            rows.append(_found(source, shard, row, order))
        if not num_matches and len(compared) < _COMPARED_KEYS:
            compared += in_shard.slice(0, _COMPARED_KEYS - len(compared)).to_pylist()
        progress(done, len(places))
    if not rows:
        raise _unknown(wanted, places, compared)
    return FoundRows(rows, num_matches)


def _places(wanted: str, sources: Sequence[Source]) -> Iterator[tuple[Source, int, list[str]]]:
    """Yield (source, shard, keys that ``wanted`` can mean there); a name in front narrows the search."""
    by_source = [source for source in sources if wanted.startswith(f"{source.name}/")]
    for source in by_source or sources:
        rest = wanted.removeprefix(f"{source.name}/")
        keys = {wanted, rest}
        heads = [f"{_file_name(shard)}/" for shard in source.shards]
        narrowed = [shard for shard, head in enumerate(heads) if rest.startswith(head)]
        for shard in narrowed or range(len(source.shards)):
            yield source, shard, sorted(keys | {rest.removeprefix(heads[shard])})


def _file_name(shard: str) -> str:
    return shard.rpartition("/")[2]


def _found(source: Source, shard: int, row: int, order: OrderConfig) -> FoundRow:
    ordinal = sum(source.shard_sizes[:shard]) + row
    sample_id, key, path = source.identify(ordinal)
    return FoundRow(sample_id, ordinal, key, path, _left_out(source, ordinal, order))


def _left_out(source: Source, ordinal: int, order: OrderConfig) -> str:
    sizes = source.sizes(np.array([ordinal], dtype=np.int64))
    status = int(sizes.status[0])
    if status == FILTERED:
        condition = source.filter.where
        return f"left out by `where`: {condition.text if condition else ''}"
    if status == DENIED:
        return f"named by a deny-list of source {source.name}"
    if status == UNUSABLE:
        return source.problem(ordinal)
    return misfit(sizes, 0, budgets=order.budgets, oversize=order.oversize)


def _unknown(
    wanted: str, places: Sequence[tuple[Source, int, list[str]]], compared: Sequence[str]
) -> ConfigError:
    key = min(places[0][2], key=len) if places else wanted
    nearest = difflib.get_close_matches(key, dict.fromkeys(compared), n=_NEAREST)
    names = ", ".join(sorted({source.name for source, _, _ in places}))
    return ConfigError(
        f"no sample has the key {key!r}",
        where=f"{len(places)} shards of {names}",
        fix=f"the nearest keys are {', '.join(nearest)}" if nearest else "give a key of a training source",
    )
