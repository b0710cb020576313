"""A source: a named set of indexed shards whose samples are sized for the model, without any I/O.

``open_source`` reads the indexes once into flat arrays (no Python object per sample, so millions fit and
forked processes share them) and leaves out, with its reason, every row that can never be trained on.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from loaders.columns import MODALITIES, SegmentColumns, concatenate, find_members, size_members
from loaders.decode.text import Tokenizer
from loaders.fitting import PackSizes
from loaders.index import MODALITY_OF_SUFFIX, ShardIndex, member_name, modality_of, read_index
from loaders.storage import expand_shards
from loaders.weight import Weight
from omni_pipeline.core.errors import ConfigError, ShardError
from omni_pipeline.core.sample import Modality, Sample, SampleId, Segment
from omni_pipeline.core.sizes import ModelSizes

logger = logging.getLogger(__name__)

SHOWN_NAMES = 8
_TEXT, _AUDIO = MODALITIES.index(Modality.TEXT), MODALITIES.index(Modality.AUDIO)


class FieldConfig(BaseModel):
    """One segment of a sample: which member holds it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    member: str = Field(
        min_length=1, description="Suffix of the member, e.g. 'jpg'; alternatives as 'jpg|png', first found."
    )
    loss: bool = Field(True, description="Whether text of this member is trained on; no meaning for media.")

    @field_validator("member")
    @classmethod
    def _check_known(cls, member: str) -> str:
        for suffix in member.split("|"):
            if modality_of(suffix) is None:
                known = ", ".join(MODALITY_OF_SUFFIX)
                raise ValueError(f"{suffix!r} is no known kind of member; known endings: {known}")
        return member

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The alternatives, lower case, in order of preference."""
        return tuple(self.member.lower().split("|"))


def _field_of_name(value: Any) -> Any:
    return {"member": value} if isinstance(value, str) else value


class FieldsLayout(BaseModel):
    """A sample is the listed members, in this order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["fields"] = Field("fields", description="Members of one key, in a fixed order.")
    fields: tuple[Annotated[FieldConfig, BeforeValidator(_field_of_name)], ...] = Field(
        min_length=1, description="Suffixes, or tables {member, loss}, in sequence order."
    )


class SourceConfig(BaseModel):
    """One data set of the mixture."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, description="Name of the source; unique in the run.")
    shards: str | tuple[str, ...] = Field(
        description="Tar shards: a path, URL, {0000..0099} pattern or glob, or a list of these."
    )
    layout: FieldsLayout = Field(description="How members make a sample.")
    weight: Weight = Field(
        1.0,
        description="Its part in the mixture, from 0; or [step, weight] points, linear between; or a table.",
    )
    group: str | None = Field(
        None, min_length=1, description="Its group, a path as 'web/clean'; unset: beside the top groups."
    )
    epochs: int | None = Field(
        None, ge=1, description="Times that it is seen, then it leaves the mixture; unset: as order.epochs."
    )


@dataclass(frozen=True)
class Source:
    """The usable samples of a source, by ordinal: their place in the unshuffled concatenation of shards.

    Args:
        name: Unique in the run.
        shards: Paths or URLs, in order.
        shard_sizes: Usable samples of each shard.
        unusable: (shard, key, reason) of samples left out.
        damaged: (shard, what) of shards that end early.
        fingerprint: Digest of all that decides which sample an ordinal is, and its sizes.
    """

    name: str
    shards: tuple[str, ...]
    shard_sizes: tuple[int, ...]
    unusable: tuple[tuple[str, str, str], ...] = field(repr=False)
    damaged: tuple[tuple[str, str], ...] = field(repr=False)
    fingerprint: str
    _fields: tuple[FieldConfig, ...] = field(repr=False)
    _columns: tuple[SegmentColumns, ...] = field(repr=False)
    _suffixes: tuple[str, ...] = field(repr=False)
    _keys: pa.LargeStringArray = field(repr=False)
    _shard: npt.NDArray[np.int32] = field(repr=False)
    _row: npt.NDArray[np.int64] = field(repr=False)

    def __len__(self) -> int:
        """Return the number of usable samples."""
        return len(self._row)

    @property
    def has_labels(self) -> bool:
        """Whether any sample has text with loss, so that something of this source is trained on."""
        return any(
            config.loss and bool((columns.modality == _TEXT).any())
            for config, columns in zip(self._fields, self._columns, strict=True)
        )

    def sizes(self, ordinals: npt.NDArray[np.int64]) -> PackSizes:
        """Return what these samples take of a pack."""
        tokens = np.ones(len(ordinals), dtype=np.int64)
        patches, mel_frames = np.zeros_like(tokens), np.zeros_like(tokens)
        for columns in self._columns:
            tokens += columns.num_tokens[ordinals]
            modality = columns.modality[ordinals]
            is_text, is_audio = modality == _TEXT, modality == _AUDIO
            units = columns.grid[ordinals].astype(np.int64).prod(axis=1)
            mel_frames += units * is_audio
            patches += units * ~(is_text | is_audio)
        last = self._columns[-1]
        words = last.num_tokens[ordinals]
        cut = np.where(last.modality[ordinals] == _TEXT, np.maximum(words - 1, 0), 0)
        status = np.zeros(len(ordinals), dtype=np.int8)
        return PackSizes(tokens, tokens - cut, patches, mel_frames, status)

    def identify(self, ordinal: int) -> tuple[SampleId, str, str]:
        """Return (id, key, shard) of a row."""
        sample = self.sample(ordinal)
        return sample.id, sample.key, sample.shard

    def problem(self, ordinal: int) -> str:
        """Return why a row cannot be used; such rows are left out when the source is opened."""
        raise IndexError(f"row {ordinal} of source {self.name!r} is usable")

    def sample(self, ordinal: int) -> Sample:
        """Return the sample at ``ordinal``, 0 to len - 1; no I/O, some microseconds.

        Raises:
            IndexError: There is no such sample.
        """
        if not 0 <= ordinal < len(self):
            raise IndexError(f"sample {ordinal} of {len(self)} in source {self.name!r}")
        key = self._keys[ordinal].as_py()
        segments = tuple(
            self._segment(ordinal, columns, key, loss=config.loss)
            for config, columns in zip(self._fields, self._columns, strict=True)
        )
        shard = int(self._shard[ordinal])
        return Sample(
            id=SampleId(self.name, shard, int(self._row[ordinal])),
            key=key,
            shard=self.shards[shard],
            segments=segments,
            num_tokens=sum(segment.num_tokens for segment in segments) + 1,
            num_labels=count_labels(segments),
        )

    def _segment(self, ordinal: int, columns: SegmentColumns, key: str, *, loss: bool) -> Segment:
        modality = MODALITIES[columns.modality[ordinal]]
        time, rows, across = columns.grid[ordinal].tolist()
        return Segment(
            modality=modality,
            member=member_name(key, self._suffixes[columns.suffix[ordinal]]),
            offset=int(columns.offset[ordinal]),
            length=int(columns.length[ordinal]),
            grid=(time, rows, across),
            num_rows=int(columns.num_rows[ordinal]),
            num_tokens=int(columns.num_tokens[ordinal]),
            loss=loss and modality is Modality.TEXT,
        )


def count_labels(segments: Sequence[Segment]) -> int:
    """Return the positions with a label of a sample made of ``segments`` and one end-of-sample token.

    Each token of a text with loss is predicted from the position before it, and so is the end-of-sample token
    if any text has loss; what stands at position 0 has no position before it.
    """
    if not any(segment.loss for segment in segments):
        return 0
    trained = sum(segment.num_tokens for segment in segments if segment.loss) + 1
    first = next((segment for segment in segments if segment.num_tokens), None)
    return trained - (1 if first is None or first.loss else 0)


def open_source(config: SourceConfig, sizes: ModelSizes, tokenizer: Tokenizer) -> Source:
    """Return the source of ``config``, sized by ``sizes``, with text counted by ``tokenizer``.

    Reads every index of the source, nothing else.

    Raises:
        ConfigError: A shard or its index is missing or stale, the index lacks counts of this tokenizer, a
            field has no member anywhere, or no sample is usable.
    """
    where = f"source {config.name!r}"
    try:
        shards = expand_shards(config.shards)
    except ConfigError as error:
        raise ConfigError(error.what, where=where, fix=error.fix) from error
    if not shards:
        raise ConfigError("the source has no shards", where=where, fix="set sources.shards")
    loader = _SourceReader(config, sizes, tokenizer)
    for number, shard in enumerate(shards):
        try:
            loader.add(number, read_index(shard))
        except ShardError as error:
            raise ConfigError(error.what, where=f"{where}, {error.where}", fix=error.fix) from error
    return loader.finish(tuple(shards))


class _SourceReader:
    """Collects the arrays of a source, shard by shard."""

    def __init__(self, config: SourceConfig, sizes: ModelSizes, tokenizer: Tokenizer) -> None:
        self.config = config
        self.sizes = sizes
        self.tokenizer = tokenizer
        self.where = f"source {config.name!r}"
        self.suffix_codes: dict[str, int] = {}
        self.suffix_counts: Counter[str] = Counter()
        self.num_found = [0] * len(config.layout.fields)
        self.num_rows = 0
        self.parts: list[list[SegmentColumns]] = [[] for _ in config.layout.fields]
        self.keys: list[pa.Array] = []
        self.rows: list[npt.NDArray[np.int64]] = []
        self.unusable: list[tuple[str, str, str]] = []
        self.damaged: list[tuple[str, str]] = []

    def add(self, number: int, index: ShardIndex) -> None:
        """Take the usable rows of shard ``number``."""
        if index.damage:
            logger.warning("shard %s is damaged (%s); using what is before", index.shard, index.damage)
            self.damaged.append((index.shard, index.damage))
        self._check_tokenizer(index)
        counts = pc.value_counts(pc.utf8_lower(index.suffixes)).to_pylist()
        self.suffix_counts.update({item["values"]: item["counts"] for item in counts})
        self.num_rows += index.num_samples
        reasons = np.full(index.num_samples, "", dtype=object)
        sized = []
        for place, config in enumerate(self.config.layout.fields):
            members = find_members(index, config.suffixes, reasons)
            self.num_found[place] += int((members >= 0).sum())
            sized.append(
                size_members(
                    index,
                    members,
                    reasons,
                    sizes=self.sizes,
                    tokenizer_fingerprint=self.tokenizer.fingerprint,
                    suffix_codes=self.suffix_codes,
                )
            )
        kept = np.flatnonzero(reasons == "")
        for row in np.flatnonzero(reasons != ""):
            self.unusable.append((index.shard, index.keys[int(row)].as_py(), str(reasons[row])))
        for parts, columns in zip(self.parts, sized, strict=True):
            parts.append(columns.take(kept))
        self.keys.append(index.keys.take(pa.array(kept)).cast(pa.large_string()))
        self.rows.append(kept)

    def finish(self, shards: tuple[str, ...]) -> Source:
        """Return the source, or say why there is none."""
        for config, num_found in zip(self.config.layout.fields, self.num_found, strict=True):
            if not num_found and self.num_rows:
                raise self._no_member(config)
        shard_sizes = tuple(len(rows) for rows in self.rows)
        if not sum(shard_sizes):
            raise self._no_sample(shards)
        if self.unusable:
            logger.warning(
                "source %s leaves out %d of %d samples: %s",
                self.config.name,
                len(self.unusable),
                self.num_rows,
                self._reasons(),
            )
        columns = tuple(concatenate(parts) for parts in self.parts)
        keys, rows = pa.concat_arrays(self.keys), np.concatenate(self.rows)
        return Source(
            name=self.config.name,
            shards=shards,
            shard_sizes=shard_sizes,
            unusable=tuple(self.unusable),
            damaged=tuple(self.damaged),
            fingerprint=self._fingerprint(shards, shard_sizes, columns=columns, keys=keys, rows=rows),
            _fields=self.config.layout.fields,
            _columns=columns,
            _suffixes=tuple(self.suffix_codes),
            _keys=keys,
            _shard=np.repeat(np.arange(len(shards), dtype=np.int32), shard_sizes),
            _row=rows,
        )

    def _check_tokenizer(self, index: ShardIndex) -> None:
        if self.tokenizer.fingerprint not in index.tokens:
            raise ConfigError(
                f"index has no token counts of this run's tokenizer ({self.tokenizer.fingerprint})",
                where=f"{self.where}, {index.shard}",
                fix=f"run `omni data index {index.shard} --tokenizer FILE` with the tokenizer of the run",
            )

    def _reasons(self) -> str:
        counts = Counter(reason for _, _, reason in self.unusable)
        return "; ".join(f"{count} x {reason}" for reason, count in counts.most_common(3))

    def _no_member(self, config: FieldConfig) -> ConfigError:
        counts = ", ".join(
            f"{name or '(none)'} ({n})" for name, n in self.suffix_counts.most_common(SHOWN_NAMES)
        )
        return ConfigError(
            f"no member {config.member!r} in any sample; the shards hold: {counts or 'nothing'}",
            where=self.where,
            fix="name one of these in sources.layout.fields",
        )

    def _no_sample(self, shards: tuple[str, ...]) -> ConfigError:
        found = f"{self.num_rows} samples in {len(shards)} shards, none of them usable"
        return ConfigError(
            f"the source is empty: {found}" + (f" ({self._reasons()})" if self.unusable else ""),
            where=self.where,
            fix=f"`omni data index --force {shards[0]}` lists bad members; mend them, or take the source out",
        )

    def _fingerprint(
        self,
        shards: tuple[str, ...],
        shard_sizes: tuple[int, ...],
        *,
        columns: tuple[SegmentColumns, ...],
        keys: pa.LargeStringArray,
        rows: npt.NDArray[np.int64],
    ) -> str:
        # Not where in the shard a member lies: a shard may be written again, with the same samples.
        content = {
            "shards": [shard.rpartition("/")[2] for shard in shards],
            "sizes": shard_sizes,
            "layout": self.config.layout.model_dump(),
            "model": self.sizes.model_dump(),
            "tokenizer": self.tokenizer.fingerprint,
        }
        digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16)
        for part in columns:
            for array in (part.modality, part.grid, part.num_rows, part.num_tokens):
                digest.update(np.ascontiguousarray(array).data)
        digest.update(np.ascontiguousarray(rows).data)
        ends, text = _key_arrays(keys)
        digest.update(ends.data)
        digest.update(text.data)
        return digest.hexdigest()


def _key_arrays(keys: pa.LargeStringArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return the ends of all keys in bytes, and the bytes."""
    _, offsets, data = keys.buffers()
    ends = np.frombuffer(offsets, np.int64)[keys.offset : keys.offset + len(keys) + 1]
    content = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return ends - ends[0], content[ends[0] : ends[-1]]
