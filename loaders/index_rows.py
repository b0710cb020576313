"""What an index says of samples, as flat columns, and of a shard as a whole.

Two digests tell whether two indexes describe the same samples: one of keys, suffixes, raw sizes and which
members are bad, and one for the counts of each tokenizer. Neither sees where in the shard a member lies, in
which order the members of a sample come, or members that can be part of no sample: a shard may be written
again with the same samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from omni_pipeline.core.sample import RawSize

OTHER = "other"
TOKENS = "tokens:"
WORD = pa.dictionary(pa.int32(), pa.string())
_WIDE = ("num_samples", "num_chars", "num_bytes")
_REAL = ("duration_s",)
RAW_TYPES = {
    name: pa.float64() if name in _REAL else pa.int64() if name in _WIDE else pa.int32()
    for name in (item.name for item in fields(RawSize))
}
MEMBER_TYPES = {
    "suffix": WORD,
    "modality": WORD,
    "offset": pa.int64(),
    "length": pa.int64(),
    **RAW_TYPES,
    "error": WORD,
}
DIGEST_BYTES = 16
LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True)
class ShardIndex:
    """Rows of the index of one shard, all or some, as flat columns.

    Args:
        shard: Path or URL of the shard.
        keys: Arrow string [rows]; one row per sample, by first appearance in the shard.
        starts: int64 [rows + 1]; members of row r are ``starts[r]`` to ``starts[r + 1]``.
        suffixes: Arrow dictionary of strings [members], as spelled in the shard.
        modalities: Arrow dictionary of strings [members]; a ``Modality`` or "other".
        errors: Arrow dictionary of strings [members]; empty for a good member.
        numbers: By name (offset, length, and the fields of ``RawSize``): [members].
        tokens: By tokenizer fingerprint: int32 [members], -1 where there is no text.
        damage: Empty, or what ends the shard early.
    """

    shard: str
    keys: pa.StringArray
    starts: npt.NDArray[np.int64]
    suffixes: pa.DictionaryArray
    modalities: pa.DictionaryArray
    errors: pa.DictionaryArray
    numbers: dict[str, npt.NDArray[Any]]
    tokens: dict[str, npt.NDArray[np.int32]]
    damage: str

    @property
    def num_samples(self) -> int:
        """Rows."""
        return len(self.keys)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Row of each member: int64 [members]."""
        return np.repeat(np.arange(self.num_samples), np.diff(self.starts))


@dataclass(frozen=True)
class IndexSummary:
    """What the index says of its shard as a whole.

    Args:
        num_samples: Rows.
        shard_bytes: Size of the shard that was indexed.
        shard_version: Its version, as ``storage.ShardStat`` has it.
        damage: Empty, or what ends the shard early.
        num_bad: Members that cannot be used.
        suffixes: By suffix in lower case: (modality, members).
        digest: Of the samples; see the module's head.
        token_digests: Of their token counts, by tokenizer fingerprint.
    """

    num_samples: int
    shard_bytes: int
    shard_version: str
    damage: str = ""
    num_bad: int = 0
    suffixes: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    digest: str = ""
    token_digests: Mapping[str, str] = field(default_factory=dict)


def rows_of(batch: pa.RecordBatch, shard: str, *, damage: str) -> ShardIndex:
    """Return the rows of ``batch``, whose columns are those of an index file.

    Raises:
        KeyError: A column is missing.
    """
    members = batch.column("members")
    starts = np.asarray(members.offsets, dtype=np.int64) if len(members) else np.zeros(1, dtype=np.int64)
    values = members.flatten()
    return ShardIndex(
        shard=shard,
        keys=batch.column("key"),
        starts=starts - starts[0],
        suffixes=values.field("suffix"),
        modalities=values.field("modality"),
        errors=values.field("error"),
        numbers={name: np.asarray(values.field(name)) for name in ("offset", "length", *RAW_TYPES)},
        tokens={
            name.removeprefix(TOKENS): np.asarray(batch.column(name).flatten())
            for name in batch.schema.names
            if name.startswith(TOKENS)
        },
        damage=damage,
    )


def summarize(index: ShardIndex, *, shard_bytes: int, shard_version: str) -> IndexSummary:
    """Return the summary of a shard from all rows of its index."""
    suffix_codes, suffixes = codes_of(index.suffixes)
    modality_codes, modalities = codes_of(index.modalities)
    error_codes, errors = codes_of(index.errors)
    is_bad = np.array([error != "" for error in errors], dtype=np.bool_)[error_codes]
    counts = np.bincount(suffix_codes, minlength=len(suffixes)).tolist()
    modality_of = dict(zip(suffix_codes.tolist(), modality_codes.tolist(), strict=True))
    found: dict[str, tuple[str, int]] = {}
    for code, (suffix, count) in enumerate(zip(suffixes, counts, strict=True)):
        if count:
            _, before = found.get(suffix.lower(), ("", 0))
            found[suffix.lower()] = (modalities[modality_of[code]], before + count)
    places = _canonical_places(index, suffix_codes, suffixes, is_other=_is_other(modality_codes, modalities))
    return IndexSummary(
        num_samples=index.num_samples,
        shard_bytes=shard_bytes,
        shard_version=shard_version,
        damage=index.damage,
        num_bad=int(is_bad.sum()),
        suffixes=found,
        digest=_samples_digest(index, places, suffix_codes, suffixes, is_bad=is_bad),
        token_digests={name: _digest(counts[places]) for name, counts in index.tokens.items()},
    )


def codes_of(words: pa.DictionaryArray) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Return the code of each place, and the word of each code."""
    return np.asarray(words.indices), words.dictionary.to_pylist()


def _is_other(modality_codes: npt.NDArray[np.int32], modalities: list[str]) -> npt.NDArray[np.bool_]:
    return np.array([word == OTHER for word in modalities], dtype=np.bool_)[modality_codes]


def _canonical_places(
    index: ShardIndex,
    suffix_codes: npt.NDArray[np.int32],
    suffixes: list[str],
    *,
    is_other: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int64]:
    """Members that samples can have, by row and then by suffix, whatever their order in the shard."""
    ranked = {suffix: rank for rank, suffix in enumerate(sorted({suffix.lower() for suffix in suffixes}))}
    rank = np.array([ranked[suffix.lower()] for suffix in suffixes], dtype=np.int64)[suffix_codes]
    places = np.lexsort((rank, index.rows))
    kept: npt.NDArray[np.int64] = places[~is_other[places]]
    return kept


def _samples_digest(
    index: ShardIndex,
    places: npt.NDArray[np.int64],
    suffix_codes: npt.NDArray[np.int32],
    suffixes: list[str],
    *,
    is_bad: npt.NDArray[np.bool_],
) -> str:
    words = [suffix.lower() for suffix in suffixes]
    return _digest(
        "\0".join(index.keys.to_pylist()),
        "\0".join([words[code] for code in suffix_codes[places].tolist()]),
        np.bincount(index.rows[places], minlength=index.num_samples),
        is_bad[places],
        *(index.numbers[name][places] for name in RAW_TYPES),
    )


def _digest(*parts: str | npt.NDArray[Any]) -> str:
    """Digest of texts and arrays; of an array its values, whatever their width."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        if isinstance(part, str):
            data = part.encode("utf-8", "surrogatepass")
        else:
            kind = "<f8" if part.dtype.kind == "f" else "<i8"
            data = np.ascontiguousarray(part, dtype=kind).tobytes()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
