"""What is known of many shards before any of them is opened: from a manifest, or from their indexes.

A manifest, ``NAME.manifest.arrow``, is one Arrow file with a row per shard that says what the shard's index
says of it as a whole. A source of very many shards opens by reading that one file; without it the summary of
every index is read. Paths of shards in or below the manifest's folder are relative to it, so that folder may
be moved. In a copy the indexes are stale, unless it keeps the times of the shards (``cp -p``, ``rsync -t``).
A manifest that no longer fits is noticed when a shard is opened: digests are compared.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from loaders.index_file import read_summary
from loaders.index_rows import DIGEST_BYTES, IndexSummary
from loaders.storage import expand_shards, first_places, is_remote, local_path, read_file, write_file
from omni_pipeline.core.errors import ConfigError, ShardError

MANIFEST_SUFFIX = ".manifest.arrow"
MANIFEST_VERSION = 1
READ_THREADS = 8
FEW_SHARDS = 32

_DIGEST = pa.binary(DIGEST_BYTES)
_SCHEMA = pa.schema(
    [
        ("shard", pa.string()),
        ("num_samples", pa.int64()),
        ("num_bytes", pa.int64()),
        ("num_bad", pa.int64()),
        ("damage", pa.string()),
        ("digest", _DIGEST),
        (
            "suffixes",
            pa.list_(pa.struct([("suffix", pa.string()), ("modality", pa.string()), ("count", pa.int64())])),
        ),
        ("tokens", pa.list_(pa.struct([("tokenizer", pa.string()), ("digest", _DIGEST)]))),
    ]
)


@dataclass(frozen=True)
class ShardTable:
    """Many shards, by number.

    Args:
        shards: Paths or URLs.
        table: Columns as in a manifest, but for the paths.
        manifests: Of each shard the manifest that names it; empty where its index was read.
    """

    shards: tuple[str, ...]
    table: pa.Table
    manifests: tuple[str, ...]

    @property
    def num_samples(self) -> npt.NDArray[np.int64]:
        """Index rows of each shard: int64 [shards]."""
        return np.asarray(self.table.column("num_samples"), dtype=np.int64)

    @property
    def num_bad(self) -> int:
        """Members that cannot be used, of all shards."""
        return int(self.table.column("num_bad").to_numpy().sum())

    @property
    def digests(self) -> bytes:
        """Digests of the samples of each shard, ``DIGEST_BYTES`` each, one after the other."""
        return _joined(self.table.column("digest").combine_chunks())

    @property
    def damaged(self) -> tuple[tuple[str, str], ...]:
        """(shard, what) of the shards that end early."""
        damage = self.table.column("damage")
        places = np.flatnonzero(pc.not_equal(damage, "").to_numpy())
        return tuple((self.shards[place], damage[place].as_py()) for place in places.tolist())

    @property
    def suffixes(self) -> dict[str, tuple[str, int]]:
        """By suffix in lower case: (modality, members) over all shards."""
        members = self.table.column("suffixes").combine_chunks().flatten()
        names = members.field("suffix").dictionary_encode()
        codes = np.asarray(names.indices)
        counts = np.zeros(len(names.dictionary), dtype=np.int64)
        np.add.at(counts, codes, np.asarray(members.field("count")))
        _, firsts = np.unique(codes, return_index=True)
        modalities = members.field("modality").take(pa.array(firsts)).to_pylist()
        words = names.dictionary.to_pylist()
        return dict(zip(words, zip(modalities, counts.tolist(), strict=True), strict=True))

    def token_digests(self, tokenizer: str) -> bytes:
        """Return the digests of each shard's token counts, likewise.

        Args:
            tokenizer: Fingerprint of the one that counted.

        Raises:
            ConfigError: A shard has no counts of it.
        """
        column = self.table.column("tokens").combine_chunks()
        entries = column.flatten()
        places = np.flatnonzero(
            pc.equal(entries.field("tokenizer"), tokenizer).to_numpy(zero_copy_only=False)
        )
        rows = (
            np.searchsorted(np.asarray(column.offsets) - column.offsets[0].as_py(), places, side="right") - 1
        )
        if len(rows) != len(self.shards):
            missing = int(np.setdiff1d(np.arange(len(self.shards)), rows)[0])
            shard, manifest = self.shards[missing], self.manifests[missing]
            command = f"omni data index {shard} --tokenizer FILE"
            if manifest:
                command = f"omni data index {manifest} --tokenizer FILE --manifest {manifest}"
            raise ConfigError(
                f"index has no token counts of this run's tokenizer ({tokenizer})",
                where=shard,
                fix=f"run `{command}` with the tokenizer of the run",
            )
        return _joined(entries.field("digest").take(pa.array(places)))


def is_manifest(path: str) -> bool:
    """Return whether ``path`` names a manifest."""
    return path.endswith(MANIFEST_SUFFIX)


def find_shards(patterns: str | Iterable[str]) -> ShardTable:
    """Return what is known of the shards that ``patterns`` stand for, each shard once, as first spelled.

    Args:
        patterns: As for ``expand_shards``; a path of a manifest stands for the shards it names.

    Raises:
        ConfigError: As ``expand_shards``; or a manifest cannot be read.
        ShardError: An index is missing, damaged or stale.
    """
    names: list[str] = []
    manifests: list[str] = []
    parts: list[pa.Table] = [_SCHEMA.empty_table()]
    for manifest, shards in _runs(expand_shards(patterns)):
        part = _read(manifest) if manifest else to_table(shards, summarize_shards(shards))
        found = _resolved(manifest, part) if manifest else shards
        names += found
        manifests += [manifest] * len(found)
        parts.append(part)
    table = pa.concat_tables(parts).combine_chunks()
    first = first_places(names)
    if len(first) < len(names):
        table = table.take(pa.array(first))
    return ShardTable(
        tuple(names[place] for place in first), table, tuple(manifests[place] for place in first)
    )


def list_shards(patterns: str | Iterable[str]) -> list[str]:
    """Return the shards that ``patterns`` stand for, without looking at their indexes.

    Raises:
        ConfigError: As ``find_shards``.
    """
    found: list[str] = []
    for manifest, shards in _runs(expand_shards(patterns)):
        found += _resolved(manifest, _read(manifest)) if manifest else shards
    return [found[place] for place in first_places(found)]


def write_manifest(path: str, shards: Sequence[str]) -> None:
    """Write the manifest of ``shards``, whose indexes are up to date, atomically.

    Raises:
        ConfigError: The path does not end as a manifest's.
        ShardError: An index is missing, damaged or stale, or the file cannot be written.
    """
    check_manifest_path(path)
    save_manifest(path, to_table([_relative(path, shard) for shard in shards], summarize_shards(shards)))


def save_manifest(path: str, table: pa.Table) -> None:
    """Write rows that ``to_table`` made as a manifest, atomically.

    Raises:
        ShardError: It cannot be written.
    """
    sink = io.BytesIO()
    schema = table.schema.with_metadata({"version": str(MANIFEST_VERSION)})
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    write_file(path, sink.getvalue())


def check_manifest_path(path: str) -> None:
    """Raise ``ConfigError`` unless ``path`` ends as a manifest's."""
    if not is_manifest(path):
        raise ConfigError(
            f"{path} does not end in {MANIFEST_SUFFIX}", fix=f"name the manifest NAME{MANIFEST_SUFFIX}"
        )


def summarize_shards(shards: Sequence[str]) -> list[IndexSummary]:
    """Return what each shard's index says of it, read by some threads where that is worth it.

    Raises:
        ShardError: Of the first shard whose index is missing, damaged or stale.
    """
    if len(shards) <= FEW_SHARDS and not any(map(is_remote, shards)):
        return [read_summary(shard) for shard in shards]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        return list(pool.map(read_summary, shards))


def to_table(shards: Sequence[str], summaries: Sequence[IndexSummary]) -> pa.Table:
    """Return the rows of a manifest."""
    rows = [
        {
            "shard": shard,
            "num_samples": summary.num_samples,
            "num_bytes": summary.shard_bytes,
            "num_bad": summary.num_bad,
            "damage": summary.damage,
            "digest": bytes.fromhex(summary.digest),
            "suffixes": [
                {"suffix": suffix, "modality": modality, "count": count}
                for suffix, (modality, count) in summary.suffixes.items()
            ],
            "tokens": [
                {"tokenizer": name, "digest": bytes.fromhex(digest)}
                for name, digest in summary.token_digests.items()
            ],
        }
        for shard, summary in zip(shards, summaries, strict=True)
    ]
    return pa.Table.from_pylist(rows, _SCHEMA)


def _runs(paths: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return (manifest, []) and ("", shards) in order, neighbouring shards together."""
    runs: list[tuple[str, list[str]]] = []
    for path in paths:
        if is_manifest(path):
            runs.append((path, []))
        elif runs and not runs[-1][0]:
            runs[-1][1].append(path)
        else:
            runs.append(("", [path]))
    return runs


def _read(manifest: str) -> pa.Table:
    def unfit(reason: str) -> ConfigError:
        return ConfigError(
            reason,
            where=manifest,
            fix=f"run `omni data index SHARDS --manifest {manifest}` to write it again",
        )

    try:
        data = read_file(manifest)
    except ShardError as error:
        raise ConfigError(error.what, where=manifest, fix=error.fix) from error
    if data is None:
        raise ConfigError("there is no such manifest", where=manifest, fix="check sources.shards")
    try:
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        version = (table.schema.metadata or {}).get(b"version", b"None").decode()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise unfit(f"manifest is damaged: {error}") from error
    if version != str(MANIFEST_VERSION):
        raise unfit(f"manifest has version {version}, this program reads {MANIFEST_VERSION}")
    if not table.schema.equals(_SCHEMA):
        raise unfit("manifest is damaged: its columns are others")
    return table.replace_schema_metadata(None)


def _joined(digests: pa.FixedSizeBinaryArray) -> bytes:
    start, end = DIGEST_BYTES * digests.offset, DIGEST_BYTES * (digests.offset + len(digests))
    return bytes(digests.buffers()[1] or b"")[start:end]


def _folder(manifest: str) -> str:
    return manifest[: manifest.rfind("/") + 1]


def _resolved(manifest: str, table: pa.Table) -> list[str]:
    folder = _folder(manifest)
    return [
        shard if shard.startswith("/") or "://" in shard else folder + shard
        for shard in table.column("shard").to_pylist()
    ]


def _relative(manifest: str, shard: str) -> str:
    """Return how the manifest names ``shard``."""
    if is_remote(shard):
        folder = _folder(manifest)
        return shard.removeprefix(folder) if is_remote(manifest) else shard
    path = os.path.abspath(local_path(shard))
    if is_remote(manifest):
        return path
    folder = os.path.dirname(os.path.abspath(local_path(manifest)))
    return os.path.relpath(path, folder) if path.startswith(os.path.join(folder, "")) else path
