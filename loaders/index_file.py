"""The index file of a shard, and how to read some of its rows without the others.

``<shard>.index.arrow`` is an Arrow IPC file, one row per sample, in record batches of ``BATCH_ROWS`` rows: a
reader takes only the batches it needs, each with one positioned read, so the file may be open across a fork.
What is said of the shard as a whole stands in the schema's metadata at the end of the file: no row is read
for it. LZ4, because batches are read while steps are planned: a fifth of the time of zstd for twice the
bytes, still far below 1 % of the shards.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from loaders.index_rows import IndexSummary, ShardIndex, rows_of, summarize
from loaders.storage import (
    ShardStat,
    is_remote,
    local_path,
    open_range,
    read_file,
    stat_shard,
    write_file,
)
from omni_pipeline.core.errors import ShardError

INDEX_SUFFIX = ".index.arrow"
INDEX_VERSION = 3
BATCH_ROWS = 1024

_READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)
_WRITE_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_BAD_CONTENT = (pa.ArrowException, OSError, ValueError, KeyError, TypeError)


class IndexFile:
    """An index opened for reading some of its rows.

    Args:
        shard: Path or URL of the shard.
        file: The Arrow file.

    Raises:
        ShardError: The content is no index of this version.
    """

    def __init__(self, shard: str, file: Any) -> None:
        self.shard = shard
        self._file = file
        try:
            self._reader = pa.ipc.open_file(file, options=_READ_OPTIONS)
            metadata = self._reader.schema.metadata or {}
            version = metadata.get(b"version", b"None").decode()
            if version == str(INDEX_VERSION):
                self.summary = IndexSummary(**json.loads(metadata[b"summary"]))
        except _BAD_CONTENT as error:
            raise unfit(shard, f"index is damaged: {error}") from error
        if version != str(INDEX_VERSION):
            raise unfit(shard, f"index has version {version}, this program reads {INDEX_VERSION}")

    def batch(self, number: int) -> ShardIndex:
        """Return the rows from ``number * BATCH_ROWS`` on, ``BATCH_ROWS`` at most.

        Raises:
            ShardError: The file is damaged.
        """
        try:
            batch = self._reader.get_batch(number)
            batch.validate()
            index = rows_of(batch, self.shard, damage=self.summary.damage)
        except _BAD_CONTENT as error:
            raise unfit(self.shard, f"index is damaged: {error}") from error
        self._check_count(batch, min(BATCH_ROWS, self.summary.num_samples - number * BATCH_ROWS))
        return index

    def keys(self) -> pa.StringArray:
        """Return the keys of all rows; nothing else is read.

        Raises:
            ShardError: The file is damaged.
        """
        place = self._reader.schema.get_field_index("key")
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=[place])
        try:
            rows = one_batch(pa.ipc.open_file(self._file, options=options).read_all())
        except _BAD_CONTENT as error:
            raise unfit(self.shard, f"index is damaged: {error}") from error
        self._check_count(rows, self.summary.num_samples)
        return rows.column("key")

    def all_rows(self) -> pa.RecordBatch:
        """Return all rows as they are stored.

        Raises:
            ShardError: The file is damaged.
        """
        try:
            rows = one_batch(self._reader.read_all())
        except _BAD_CONTENT as error:
            raise unfit(self.shard, f"index is damaged: {error}") from error
        self._check_count(rows, self.summary.num_samples)
        return rows

    def _check_count(self, rows: pa.RecordBatch, expected: int) -> None:
        if rows.num_rows != expected:
            raise unfit(self.shard, f"index is damaged: {rows.num_rows} rows in place of {expected}")


def index_path(shard: str) -> str:
    """Return where the index of ``shard`` lies: beside it."""
    return shard + INDEX_SUFFIX


def open_index(shard: str) -> IndexFile:
    """Return the opened index of ``shard``; a remote one is fetched whole.

    Raises:
        ShardError: There is none, it is damaged or of another version, or the shard has changed since.
    """
    return _open(shard, whole=True)


def read_summary(shard: str) -> IndexSummary:
    """Return what the index of ``shard`` says of it as a whole; reads only the end of the file.

    Raises:
        ShardError: As ``open_index``.
    """
    return _open(shard, whole=False).summary


def read_index(shard: str) -> ShardIndex:
    """Return all rows of the index of ``shard``.

    Raises:
        ShardError: As ``open_index``.
    """
    file = open_index(shard)
    return rows_of(file.all_rows(), shard, damage=file.summary.damage)


def write_index(shard: str, rows: pa.RecordBatch, *, stat: ShardStat, damage: str) -> ShardIndex:
    """Write ``rows`` as the index of ``shard``, atomically; return them as columns.

    Args:
        rows: Columns "key", "members" (lists of structs of ``MEMBER_TYPES``) and "tokens:FINGERPRINT".
        stat: Of the shard that was measured.
        damage: Empty, or what ends the shard early.

    Raises:
        ShardError: It cannot be written.
    """
    index = rows_of(rows, shard, damage=damage)
    summary = summarize(index, shard_bytes=stat.size, shard_version=stat.version)
    schema = rows.schema.with_metadata(
        {"version": str(INDEX_VERSION), "summary": json.dumps(asdict(summary))}
    )
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema, options=_WRITE_OPTIONS) as writer:
        writer.write_table(pa.Table.from_batches([rows]), max_chunksize=BATCH_ROWS)
    write_file(index_path(shard), sink.getvalue())
    return index


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """Return the rows of ``table``, which may be none, in one piece."""
    batches = table.combine_chunks().to_batches()
    if batches:
        return batches[0]
    return pa.RecordBatch.from_arrays(
        [pa.array([], kind) for kind in table.schema.types], names=table.schema.names
    )


def unfit(shard: str, reason: str, *, hint: str = "") -> ShardError:
    """Return the error that the index of ``shard`` cannot be used, and must be made."""
    fix = f"run `omni data index {shard}`"
    return ShardError(reason, where=shard, fix=f"{fix}; {hint}" if hint else fix)


def _open(shard: str, *, whole: bool) -> IndexFile:
    stat = stat_shard(shard)
    file = IndexFile(shard, _content(shard, whole=whole))
    if file.summary.shard_bytes != stat.size:
        raise unfit(
            shard,
            f"index is stale: it is of a shard of {file.summary.shard_bytes} bytes, not {stat.size}",
        )
    if file.summary.shard_version != stat.version:
        hint = "if it was only copied, copy with `cp -p` or `rsync -t`, which keep times"
        reason = "index is stale: the shard was written after it"
        raise unfit(shard, reason, hint="" if is_remote(shard) else hint)
    return file


def _content(shard: str, *, whole: bool) -> Any:
    path = index_path(shard)
    if not is_remote(path):
        try:
            return pa.OSFile(local_path(path))
        except FileNotFoundError as error:
            raise unfit(shard, "shard has no index") from error
        except OSError as error:
            raise unfit(shard, f"index cannot be read: {error.strerror}") from error
    if whole:
        data = read_file(path)
        if data is None:
            raise unfit(shard, "shard has no index")
        return pa.BufferReader(data)
    try:
        size = stat_shard(path).size
    except ShardError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise unfit(shard, "shard has no index") from error
        raise
    return pa.PythonFile(open_range(path, 0, size), mode="r")
