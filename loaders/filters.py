"""What a source leaves out though it could be used: rows that its ``where`` rejects, and its deny-lists.

Decided at plan time, from index columns and keys alone, by ``Filter``, the ``Screen`` of a source. Positions
count all rows, so a filter moves none; but another filter is another data set, so it is part of the run's
identity. A row that a deny-list names is DENIED whatever else is wrong with it; ``where`` is asked only of
rows that can be used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from loaders.columns import MODALITIES, SizedBatch, StatusArray
from loaders.deny import DenyList, read_deny_lists
from loaders.fitting import DENIED, FILTERED, USABLE
from loaders.index_rows import ShardIndex
from loaders.lane_cursor import REASONS, SampleSource
from loaders.source_config import SourceConfig
from loaders.where import Where, parse_where
from loaders.where_columns import HAD_BY, Values
from omni_pipeline.core.sizes import IntArray

_UNITS = ("time", "rows", "columns")
_OF_SEGMENT = {"num_bytes": "length", "num_tokens": "num_tokens"}
_COUNTED_AT_ONCE = 4096


@dataclass(frozen=True)
class Filter:
    """Which usable rows a source leaves out.

    Args:
        where: What a row must satisfy; None for nothing.
        deny: Rows that are left out by name.
    """

    where: Where | None = None
    deny: DenyList = field(default_factory=DenyList)

    def __call__(self, index: ShardIndex, members: Sequence[IntArray], batch: SizedBatch) -> StatusArray:
        """Return the status of every row; see ``columns.Screen``."""
        status = np.full(index.num_samples, USABLE, dtype=np.int8)
        if self.where is not None:
            status[~self.where.mask(_BatchRows(index, members, batch))] = FILTERED
        status[self.deny.mask(batch.shard, batch.keys)] = DENIED
        return status

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal for a saved state to fit: JSON-plain, empty where nothing is left out."""
        where = {} if self.where is None else {"where": self.where.text}
        deny = {"entries": self.deny.num_entries, "digest": self.deny.digest}
        return {**where, **({"deny": deny} if self.deny.num_entries else {})}


def open_filter(config: SourceConfig, shards: Sequence[str]) -> Filter:
    """Return the filter of a source with these shards.

    Raises:
        ConfigError: A deny-list cannot be used.
    """
    where = None if config.where is None else parse_where(config.where, config.layout.kinds)
    return Filter(where, read_deny_lists(config.deny, source=config.name, shards=shards))


class _BatchRows:
    """``where_columns.Rows`` over one batch of a shard."""

    def __init__(self, index: ShardIndex, members: Sequence[IntArray], batch: SizedBatch) -> None:
        self._index = index
        self._members = members
        self._batch = batch
        self._known: dict[tuple[int, str], Values] = {}

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return self._index.num_samples

    @property
    def num_fields(self) -> int:
        """Fields of the layout."""
        return len(self._members)

    def member(self, field: int, name: str) -> Values:
        """Return a column of the members that fill ``field``."""
        found = self._known.get((field, name))
        if found is None:
            modality = self._batch.segments[field]["modality"]
            codes = [MODALITIES.index(kind) for kind in HAD_BY[name]]
            found = Values(self._column(field, name), np.isin(modality, codes))
            self._known[field, name] = found
        return found

    def sample(self, name: str) -> Values:
        """Return a column of the whole samples."""
        if name == "key":
            values: npt.NDArray[Any] = np.array(self._batch.keys.to_pylist(), dtype=object)
        else:
            of_sizes = {"num_tokens": "tokens"}.get(name, name)
            values = getattr(self._batch.sizes, of_sizes).astype(np.float64)
        return Values(values, np.ones(self.num_rows, dtype=np.bool_))

    def _column(self, field: int, name: str) -> npt.NDArray[Any]:
        segments = self._batch.segments[field]
        values: npt.NDArray[Any]
        if name == "modality":
            values = np.array([*MODALITIES, ""], dtype=object)[segments["modality"]]
        elif name in _OF_SEGMENT:
            values = segments[_OF_SEGMENT[name]].astype(np.float64)
        elif name in ("patches", "mel_frames"):
            values = np.prod([segments[side].astype(np.float64) for side in _UNITS], axis=0)
        elif name == "aspect_ratio":
            height, width = self._raw(field, "height"), self._raw(field, "width")
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.maximum(height, width) / np.minimum(height, width)
        else:
            values = self._raw(field, "duration_s" if name == "duration" else name)
        return values

    def _raw(self, field: int, name: str) -> npt.NDArray[np.float64]:
        """Return a column of the index; what it has where there is no member means nothing."""
        column = self._index.numbers[name].astype(np.float64)
        return np.append(column, 0.0)[self._members[field]]


def count_left_out(source: SampleSource, *, max_rows: int) -> Counter[str]:
    """Return how many of the first ``max_rows`` rows are left out, by reason: "where", "deny", "unusable".

    Opens the shards that these rows are in. Whether a pack can hold the others is not looked at.
    """
    counts: Counter[str] = Counter()
    num_rows = min(sum(source.shard_sizes), max_rows)
    for first in range(0, num_rows, _COUNTED_AT_ONCE):
        rows = np.arange(first, min(first + _COUNTED_AT_ONCE, num_rows), dtype=np.int64)
        statuses, numbers = np.unique(source.sizes(rows).status, return_counts=True)
        for status, number in zip(statuses.tolist(), numbers.tolist(), strict=True):
            if status != USABLE:
                counts[REASONS[status]] += number
    return counts


def describe_counts(counts: Mapping[str, int], left_out: Filter) -> str:
    """Return in words what ``count_left_out`` found, as "3 left out by `height >= 64`, 1 by deny-lists"."""
    condition = "" if left_out.where is None else left_out.where.text
    texts = {"where": f"by `{condition}`", "deny": "by deny-lists", "unusable": "as unusable"}
    found = [f"{counts[reason]} {text}" for reason, text in texts.items() if counts.get(reason)]
    if not found:
        return "none is left out"
    return f"{found[0].replace(' ', ' left out ', 1)}" + "".join(f", {text}" for text in found[1:])
