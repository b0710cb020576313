"""A source: a named set of indexed shards whose samples are known by their sizes, without reading any.

A sample's ordinal counts index rows, usable or not, so what one row is good for never moves another. Sources
are opened without their rows: start-up and memory do not grow with the number of samples.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loaders.batches import Batches
from loaders.columns import MODALITIES, TEXT, VIDEO, SizedBatch, Sizing
from loaders.decode.text import Tokenizer
from loaders.filters import Filter, count_left_out, describe_counts, open_filter
from loaders.fitting import PackSizes
from loaders.index import member_name, modality_of
from loaders.index_file import BATCH_ROWS, IndexFile
from loaders.index_rows import DIGEST_BYTES
from loaders.manifest import ShardTable, find_shards
from loaders.source_config import FieldConfig, FieldsLayout, SourceConfig
from omni_pipeline.core.errors import ConfigError, ShardError
from omni_pipeline.core.media import KINDS
from omni_pipeline.core.sample import Modality, Sample, SampleId, Segment, quick_constructor
from omni_pipeline.core.sizes import IntArray, ModelSizes

logger = logging.getLogger(__name__)

_make_id, _make_segment, _make_sample = (
    quick_constructor(SampleId),
    quick_constructor(Segment),
    quick_constructor(Sample),
)
SHOWN_NAMES = 8
COUNTED_ROWS = 1 << 16
"""Rows of a source up to which opening it looks at all of them, to tell how many are unusable."""


class Source:
    """The samples of a source by ordinal: the place of their row in the concatenation of its shards.

    Nothing but the sums in ``table`` is held of a shard before a row of it is asked for; see ``Batches`` for
    what is held after. All methods may be used by several threads, and by processes forked from this one.

    Args:
        config: Settings of the source.
        table: Its shards.
        sizes: Of the model.
        tokenizer: Fingerprint of the one whose counts are used.
        left_out: Rows that are left out though they could be used; none by default.

    Raises:
        ConfigError: A shard has no counts of the tokenizer.
    """

    def __init__(
        self,
        config: SourceConfig,
        table: ShardTable,
        *,
        sizes: ModelSizes,
        tokenizer: str,
        left_out: Filter | None = None,
    ) -> None:
        self.name = config.name
        self.filter = Filter() if left_out is None else left_out
        self.shards = table.shards
        self.shard_sizes = tuple(table.num_samples.tolist())
        self.damaged = table.damaged
        self._fields = config.layout.fields
        self._losses = tuple(item.loss for item in self._fields)
        self._patch_s = sizes.vision.patch_s
        self._suffixes = table.suffixes
        self._manifests = table.manifests
        self._digests = table.digests
        self._tokenizer = tokenizer
        self._token_digests = table.token_digests(tokenizer)
        self._ends = np.cumsum(table.num_samples)
        self._firsts = self._ends - table.num_samples
        # The same ends, quick to search for one row; no list, which takes five times the memory.
        self._ends_plain = array("q", self._ends.tobytes())
        self._num_rows = self._ends_plain[-1] if self._ends_plain else 0
        self._num_batches = -(-table.num_samples // BATCH_ROWS)
        self._batch_firsts = np.cumsum(self._num_batches) - self._num_batches
        self.fingerprint = self._fingerprint(config, sizes)
        sounds = frozenset(place for place, item in enumerate(self._fields) if item.sound)
        suffixes = tuple(item.suffixes for item in self._fields)
        sizing = Sizing(suffixes, sizes, tokenizer, self.filter, sounds)
        self._batches = Batches(self.shards, sizing, check=self._check_same)

    def __len__(self) -> int:
        """Return the number of index rows."""
        return self._num_rows

    @property
    def has_labels(self) -> bool:
        """Whether a sample can have text with loss, so that something of this source is trained on."""
        return any(config.loss and self._may_be_text(config) for config in self._fields)

    def sizes(self, ordinals: IntArray) -> PackSizes:
        """Return what these rows take of a pack; opens the shards they are in.

        Raises:
            IndexError: There is no such row.
            ShardError: An index is missing, damaged or stale.
        """
        if len(ordinals) and not (ordinals.min() >= 0 and ordinals.max() < len(self)):
            raise IndexError(
                f"rows {ordinals.min()} to {ordinals.max()} of {len(self)} in source {self.name!r}"
            )
        shards = np.searchsorted(self._ends, ordinals, side="right")
        batches, places = np.divmod(ordinals - self._firsts[shards], BATCH_ROWS)
        numbers = self._batch_firsts[shards] + batches
        out = np.zeros((4, len(ordinals)), dtype=np.int64)
        status = np.zeros(len(ordinals), dtype=np.int8)
        for first in np.unique(numbers, return_index=True)[1].tolist():
            found = self._batches.get(int(shards[first]), int(batches[first])).sizes
            wanted = np.flatnonzero(numbers == numbers[first])
            rows = places[wanted]
            for line, column in zip(
                out, (found.tokens, found.cut_tokens, found.patches, found.mel_frames), strict=True
            ):
                line[wanted] = column[rows]
            status[wanted] = found.status[rows]
        return PackSizes(out[0], out[1], out[2], out[3], status)

    def identify(self, ordinal: int) -> tuple[SampleId, str, str]:
        """Return (id, key, shard) of any row; raises as ``sizes``."""
        shard, row, batch, place = self._find(ordinal)
        return SampleId(self.name, shard, row), batch.keys[place].as_py(), batch.shard

    def problem(self, ordinal: int) -> str:
        """Return why an UNUSABLE row cannot be used, "" for others; raises as ``sizes``."""
        _, _, batch, place = self._find(ordinal)
        return batch.problems.get(place, "")

    def sample(self, ordinal: int) -> Sample:
        """Return the sample of a row that is not UNUSABLE; some microseconds, where its batch is at hand.

        Raises:
            IndexError: There is no such row.
            ValueError: The row is UNUSABLE.
            ShardError: Its index is missing, damaged or stale.
        """
        shard, row, batch, place = self._find(ordinal)
        if place in batch.problems:
            raise ValueError(f"row {ordinal} of source {self.name!r} is unusable: {batch.problems[place]}")
        key = batch.keys[place].as_py()
        segments = [
            self._segment(column.item(place), batch.suffixes, key, loss=loss)
            for column, loss in zip(batch.segments, self._losses, strict=True)
        ]
        # From the last on, so that the places of those before it stay.
        for field, column in reversed(batch.tracks.items()):
            track = column.item(place)
            if track[0] >= 0:
                segments.insert(field + 1, self._segment(track, batch.suffixes, key, is_track=True))
        return _make_sample(
            _make_id(self.name, shard, row),
            key,
            batch.shard,
            tuple(segments),
            batch.sizes.tokens.item(place),
            count_labels(segments),
        )

    def count_unusable(self) -> Counter[str]:
        """Return the reasons of all UNUSABLE rows; opens every shard."""
        reasons: Counter[str] = Counter()
        for shard, num_batches in enumerate(self._num_batches.tolist()):
            for number in range(num_batches):
                reasons.update(self._batches.get(shard, number).problems.values())
        return reasons

    def _find(self, ordinal: int) -> tuple[int, int, SizedBatch, int]:
        """Return (shard, row in it, batch, place in that) of a row."""
        if not 0 <= ordinal < self._num_rows:
            raise IndexError(f"row {ordinal} of {len(self)} in source {self.name!r}")
        shard = bisect_right(self._ends_plain, ordinal)
        row = ordinal - (self._ends_plain[shard - 1] if shard else 0)
        number, place = divmod(row, BATCH_ROWS)
        return shard, row, self._batches.get(shard, number), place

    def _segment(
        self, values: Any, suffixes: Sequence[str], key: str, *, loss: bool = False, is_track: bool = False
    ) -> Segment:
        kind, suffix, offset, length, time, rows, columns, num_rows, num_tokens = values
        return _make_segment(
            MODALITIES[kind],
            member_name(key, suffixes[suffix]),
            offset,
            length,
            (time, rows, columns),
            num_rows,
            num_tokens,
            loss and kind == TEXT,
            self._patch_s if kind == VIDEO else 0.0,
            is_track,
        )

    def _may_be_text(self, config: FieldConfig) -> bool:
        """Whether text is left for the field when every sample has at most one member of each alternative."""
        num_left = len(self)
        for suffix in config.suffixes:
            modality, count = self._suffixes.get(suffix, ("", 0))
            if num_left > 0 and count and modality == str(Modality.TEXT):
                return True
            num_left -= count
        return False

    def _check_same(self, shard: int, file: IndexFile) -> None:
        """Raise unless the index that was opened describes the samples that this source was made of."""
        name, manifest, summary = self.shards[shard], self._manifests[shard], file.summary
        of_shard = slice(DIGEST_BYTES * shard, DIGEST_BYTES * (shard + 1))
        expected = (
            self.shard_sizes[shard],
            self._digests[of_shard].hex(),
            self._token_digests[of_shard].hex(),
        )
        found = (summary.num_samples, summary.digest, summary.token_digests.get(self._tokenizer, ""))
        if found == expected:
            return
        if manifest:
            raise ShardError(
                f"manifest {manifest} is stale: this shard was indexed again, with other samples",
                where=f"source {self.name!r}, {name}",
                fix=f"run `omni data index {manifest} --manifest {manifest}`",
            )
        raise ShardError(
            "this shard was indexed again, with other samples, while it was in use",
            where=f"source {self.name!r}, {name}",
            fix="put the shard back, or start a new run: the order of samples is another one",
        )

    def _fingerprint(self, config: SourceConfig, sizes: ModelSizes) -> str:
        # Names without their folders: the same data may lie elsewhere.
        content = {
            "layout": config.layout.model_dump(),
            "model": sizes.model_dump(),
            "tokenizer": self._tokenizer,
            "shards": len(self.shards),
        }
        digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16)
        names = "\0".join([shard.rpartition("/")[2] for shard in self.shards])
        digest.update(names.encode("utf-8", "surrogateescape"))
        digest.update(np.ascontiguousarray(self._ends, dtype="<i8").data)
        digest.update(self._digests + self._token_digests)
        return digest.hexdigest()


def count_labels(segments: Sequence[Segment]) -> int:
    """Return the positions with a label of a sample made of ``segments`` and one end-of-sample token.

    Each token of a text with loss is predicted from the position before it, and so is the end-of-sample token
    if any text has loss; what stands at position 0 has no position before it.
    """
    trained, has_loss, first = 0, False, None
    for segment in segments:
        if first is None and segment.num_tokens:
            first = segment
        if segment.loss:
            has_loss = True
            trained += segment.num_tokens
    if not has_loss:
        return 0
    return trained + 1 - (1 if first is None or first.loss else 0)


def open_source(config: SourceConfig, sizes: ModelSizes, tokenizer: Tokenizer) -> Source:
    """Return the source of ``config``, sized by ``sizes``, with text counted by ``tokenizer``.

    Reads a manifest, or the summaries of all indexes; rows only of a source of up to ``COUNTED_ROWS``, to
    tell how many of them are unusable.

    Raises:
        ConfigError: A shard or its index is missing or stale, the index lacks counts of this tokenizer, a
            field has no member anywhere, or there are no samples.
    """
    where = f"source {config.name!r}"
    try:
        table = find_shards(config.shards)
        if not table.shards:
            raise ConfigError("the source has no shards", fix="set sources.shards")
        left_out = open_filter(config, table.shards)
        source = Source(config, table, sizes=sizes, tokenizer=tokenizer.fingerprint, left_out=left_out)
        check_members(config.layout, table.suffixes, table.num_samples.tolist(), table.shards)
        if 0 < len(source) <= COUNTED_ROWS:
            _tell_left_out(source)
    except (ConfigError, ShardError) as error:
        place = f"{where}, {error.where}" if error.where else where
        raise ConfigError(error.what, where=place, fix=error.fix) from error
    for shard, damage in source.damaged[:SHOWN_NAMES]:
        logger.warning("shard %s is damaged (%s); using what is before", shard, damage)
    if len(source.damaged) > SHOWN_NAMES:
        logger.warning("source %s has %d damaged shards", source.name, len(source.damaged))
    if len(source) > COUNTED_ROWS and table.num_bad:
        logger.warning("source %s: %d members of its shards are bad", source.name, table.num_bad)
    return source


def check_members(
    layout: FieldsLayout,
    suffixes: Mapping[str, tuple[str, int]],
    num_samples: Sequence[int],
    shards: Sequence[str],
) -> None:
    """Raise ConfigError unless every field of ``layout`` has a member in some sample.

    Args:
        suffixes: Of the source, by suffix in lower case: (modality, members).
        num_samples: Of each shard.
        shards: Paths or URLs.
    """
    if not any(num_samples):
        raise ConfigError(
            f"the source is empty: 0 samples in {len(shards)} shards",
            fix=f"`omni data check {shards[0]}` lists what is in it; or take the source out",
        )
    counts = Counter({suffix: count for suffix, (_, count) in suffixes.items()})
    for field in layout.fields:
        for suffix in field.suffixes:
            _check_modality(suffix, suffixes.get(suffix, ("", 0))[0])
        if not any(suffix in suffixes for suffix in field.suffixes):
            shown = ", ".join(f"{name or '(none)'} ({n})" for name, n in counts.most_common(SHOWN_NAMES))
            raise ConfigError(
                f"no member {field.member!r} in any sample; the shards hold: {shown or 'nothing'}",
                fix="name one of these in sources.layout.fields",
            )


def _check_modality(suffix: str, indexed: str) -> None:
    """Raise if members were indexed without the encoder that reads them here, or with another."""
    modality = modality_of(suffix)
    if not indexed or modality is None or indexed == modality:
        return
    fix = f"name its file in encoders.{indexed}.file"
    if modality in KINDS.encoders:
        fix = f"run `omni data index --encoder {KINDS.encoders[modality].file.path} SHARDS`"
    raise ConfigError(
        f"members {suffix!r} are indexed as {indexed}, and this run reads them as {modality}", fix=fix
    )


def _tell_left_out(source: Source) -> None:
    """Log how many rows are left out, and why; raise if the filter leaves none."""
    counts = count_left_out(source, max_rows=len(source))
    if source.filter.identity and counts.total() == len(source):
        raise ConfigError(
            f"no sample is left: of {len(source)}, {describe_counts(counts, source.filter)}",
            fix="widen its `where` and deny-lists, or take the source out",
        )
    if counts["unusable"]:
        shown = "; ".join(f"{count} x {reason}" for reason, count in source.count_unusable().most_common(3))
        logger.warning(
            "source %s: %d of %d samples are unusable: %s",
            source.name,
            counts["unusable"],
            len(source),
            shown,
        )
    if counts["where"] or counts["deny"]:
        logger.info(
            "source %s: of %d samples, %s", source.name, len(source), describe_counts(counts, source.filter)
        )
