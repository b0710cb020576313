"""The sidecar index of a shard: where each member lies and how large it is, before anything is decoded.

One Arrow file per shard, ``<shard>.index.arrow``, one row per sample. Media are measured from their headers;
text is read, since it is counted in tokens, per tokenizer fingerprint. An index knows the size and version of
the shard it describes, so a changed shard is noticed. There is no global database: shards are indexed in
parallel, each by itself, and those that have not changed are passed by.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from loaders.decode.audio import audio_size
from loaders.decode.image import image_size
from loaders.decode.text import Tokenizer, decode_text, load_tokenizer
from loaders.decode.video import video_size
from loaders.sources.tar import TarMember, scan_tar, split_name
from loaders.storage import open_range, read_file, read_range, stat_shard, write_file
from omni_pipeline.core.errors import ConfigError, OmniError, SampleError, ShardError
from omni_pipeline.core.sample import Modality, RawSize

logger = logging.getLogger(__name__)

INDEX_SUFFIX = ".index.arrow"
INDEX_VERSION = 1
OTHER = "other"
REPEATED = "another member of the shard has the same key and suffix"

MODALITY_OF_SUFFIX: dict[str, Modality] = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp"), Modality.IMAGE),
    **dict.fromkeys(("mp4", "webm", "mkv", "mov"), Modality.VIDEO),
    **dict.fromkeys(("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac"), Modality.AUDIO),
    "txt": Modality.TEXT,
}

_RAW_TYPES = {
    field.name: pa.float64() if field.name == "duration_s" else pa.int64() for field in fields(RawSize)
}
_MEMBER_TYPE = pa.struct(
    [
        ("suffix", pa.string()),
        ("modality", pa.string()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        *_RAW_TYPES.items(),
        ("error", pa.string()),
    ]
)
_TOKENS = "tokens:"


@dataclass(frozen=True)
class ShardIndex:
    """The index of one shard as flat columns.

    Args:
        shard: Path or URL of the shard.
        keys: Arrow string [rows]; one row per sample, by first appearance in the shard.
        starts: int64 [rows + 1]; members of row r are ``starts[r]`` to ``starts[r + 1]``.
        suffixes: Arrow string [members], as spelled in the shard.
        modalities: Arrow string [members]; a ``Modality`` or "other".
        errors: Arrow string [members]; empty for a good member.
        numbers: By name (offset, length, and the fields of ``RawSize``): [members].
        tokens: By tokenizer fingerprint: int64 [members], -1 where there is no text.
        damage: Empty, or what ends the shard early.
    """

    shard: str
    keys: pa.StringArray
    starts: npt.NDArray[np.int64]
    suffixes: pa.StringArray
    modalities: pa.StringArray
    errors: pa.StringArray
    numbers: dict[str, npt.NDArray[Any]]
    tokens: dict[str, npt.NDArray[np.int64]]
    damage: str

    @property
    def num_samples(self) -> int:
        """Rows."""
        return len(self.keys)


@dataclass(frozen=True)
class IndexReport:
    """What indexing one shard found.

    Args:
        shard: Path or URL.
        num_samples: Rows of the index.
        num_members: Members in them.
        bad: (member, reason) of members that cannot be used.
        damage: Empty, or what ends the shard early.
        error: Empty, or why the shard has no index.
        is_unchanged: Whether the index was there already.
    """

    shard: str
    num_samples: int = 0
    num_members: int = 0
    bad: tuple[tuple[str, str], ...] = ()
    damage: str = ""
    error: str = ""
    is_unchanged: bool = False


def index_path(shard: str) -> str:
    """Return where the index of ``shard`` lies: beside it."""
    return shard + INDEX_SUFFIX


def index_shards(
    shards: Sequence[str],
    *,
    tokenizer_path: Path | None = None,
    num_workers: int = 0,
    progress: Callable[[IndexReport], None] | None = None,
    force: bool = False,
) -> list[IndexReport]:
    """Index ``shards``, except those whose index is up to date; return one report each, in order.

    A shard that cannot be indexed has its ``error`` in the report; the others are indexed all the same.

    Args:
        tokenizer_path: Count tokens with this ``tokenizer.json``; None counts bytes.
        num_workers: Processes; 0 works in this one.
        progress: Called in this process with each report as it comes.
        force: Index unchanged shards too.

    Raises:
        ConfigError: The tokenizer cannot be used.
    """
    load_tokenizer(tokenizer_path)
    jobs = [(shard, tokenizer_path, force) for shard in shards]
    reports: list[IndexReport] = []
    for report in _run_jobs(jobs, num_workers=min(num_workers, len(jobs))):
        reports.append(report)
        if progress is not None:
            progress(report)
    return reports


def build_index(shard: str, *, tokenizer: Tokenizer, force: bool = False) -> IndexReport:
    """Write the index of ``shard`` beside it, atomically; cheap when it is there and up to date.

    An up-to-date index that lacks counts of this tokenizer gets them added; the media are not measured again.

    Raises:
        ShardError: The shard cannot be read, or the index cannot be written.
    """
    table = None if force else _current_table(shard)
    fingerprint = tokenizer.fingerprint
    is_unchanged = table is not None and _TOKENS + fingerprint in table.column_names
    if table is None:
        table = _measure_shard(shard, tokenizer)
    elif not is_unchanged:
        table = _add_tokens(table, shard, tokenizer)
    if not is_unchanged:
        _write_table(table, shard)
    return _report(_to_index(table, shard), is_unchanged=is_unchanged)


def read_index(shard: str) -> ShardIndex:
    """Return the index of ``shard``.

    Raises:
        ShardError: There is none, it is damaged or of another version, or the shard has changed since.
    """
    table, reason = _load_table(shard)
    if table is None:
        raise ShardError(reason, where=shard, fix=f"run `omni data index {shard}`")
    return _to_index(table, shard)


def modality_of(suffix: str) -> Modality | None:
    """Return what members of ``suffix`` hold, by its last part; None when it is not known here."""
    return MODALITY_OF_SUFFIX.get(suffix.rpartition(".")[2].lower())


def _run_jobs(jobs: list[tuple[str, Path | None, bool]], *, num_workers: int) -> Iterator[IndexReport]:
    if num_workers < 2:
        yield from map(_index_one, jobs)
        return
    # Spawned, because the caller may have threads (a progress bar) that a fork would cut off.
    with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_index_one, jobs)


def _index_one(job: tuple[str, Path | None, bool]) -> IndexReport:
    shard, tokenizer_path, force = job
    try:
        return build_index(shard, tokenizer=load_tokenizer(tokenizer_path), force=force)
    except ConfigError:
        raise
    except OmniError as error:
        return IndexReport(shard, error=str(error))


def _measure_shard(shard: str, tokenizer: Tokenizer) -> pa.Table:
    stat = stat_shard(shard)
    scan = scan_tar(shard)
    samples: dict[str, list[dict[str, Any]]] = {}
    counts: dict[str, list[int]] = {}
    for member in scan.members:
        key, suffix = split_name(member.name)
        entry, num_tokens = _measure(shard, member, suffix, tokenizer)
        samples.setdefault(key, []).append(entry)
        counts.setdefault(key, []).append(num_tokens)
    for entries in samples.values():
        _mark_repeated(entries)
    metadata = {
        "version": str(INDEX_VERSION),
        "shard_size": str(stat.size),
        "shard_version": stat.version,
        "damage": scan.damage,
    }
    columns = {
        "key": pa.array(list(samples), pa.string()),
        "members": pa.array(list(samples.values()), pa.list_(_MEMBER_TYPE)),
        _TOKENS + tokenizer.fingerprint: pa.array(list(counts.values()), pa.list_(pa.int64())),
    }
    return pa.table(columns).replace_schema_metadata(metadata)


def _mark_repeated(entries: list[dict[str, Any]]) -> None:
    """Mark *every* member of a repeated suffix: which of them belongs to the sample is not known."""
    suffixes = [entry["suffix"].lower() for entry in entries]
    for entry, suffix in zip(entries, suffixes, strict=True):
        if suffixes.count(suffix) > 1:
            entry["error"] = REPEATED


def _measure(shard: str, member: TarMember, suffix: str, tokenizer: Tokenizer) -> tuple[dict[str, Any], int]:
    """Return the index entry of one member, and its tokens (-1 for anything but good text)."""
    modality = modality_of(suffix)
    raw, error, num_tokens = RawSize(), member.error, -1
    if modality is not None and not error:
        try:
            if modality is Modality.TEXT:
                raw, num_tokens = _measure_text(shard, member.offset, member.length, tokenizer)
            else:
                raw = _measure_media(shard, member, suffix, modality)
        except SampleError as problem:
            error = problem.what
        except ShardError:
            raise
        except Exception as problem:  # noqa: BLE001 - decode boundary: hostile headers raise anything
            error = f"header cannot be read: {type(problem).__name__}: {problem}"
    entry = {
        "suffix": suffix,
        "modality": str(modality or OTHER),
        "offset": member.offset,
        "length": member.length,
        **asdict(raw),
        "error": error,
    }
    return entry, num_tokens


def _measure_media(shard: str, member: TarMember, suffix: str, modality: Modality) -> RawSize:
    if member.length == 0:
        raise SampleError("member is empty", fix="remove it")
    with open_range(shard, member.offset, member.length) as file:
        if modality is Modality.IMAGE:
            return image_size(file)
        if modality is Modality.VIDEO:
            return video_size(file)
        return audio_size(file, suffix=suffix.rpartition(".")[2])


def _measure_text(shard: str, offset: int, length: int, tokenizer: Tokenizer) -> tuple[RawSize, int]:
    text = decode_text(read_range(shard, offset, length))
    return RawSize(num_chars=len(text), num_bytes=length), len(tokenizer.encode(text))


def _add_tokens(table: pa.Table, shard: str, tokenizer: Tokenizer) -> pa.Table:
    index = _to_index(table, shard)
    counts = np.full(int(index.starts[-1]), -1, dtype=np.int64)
    is_text = np.array(index.modalities.to_pylist(), dtype=object) == str(Modality.TEXT)
    is_good = np.array(index.errors.to_pylist(), dtype=object) == ""
    for place in np.flatnonzero(is_text & is_good):
        offset, length = int(index.numbers["offset"][place]), int(index.numbers["length"][place])
        counts[place] = _measure_text(shard, offset, length, tokenizer)[1]
    column = pa.ListArray.from_arrays(pa.array(index.starts, pa.int32()), pa.array(counts))
    return table.append_column(_TOKENS + tokenizer.fingerprint, column)


def _write_table(table: pa.Table, shard: str) -> None:
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks())
    write_file(index_path(shard), sink.getvalue())


def _current_table(shard: str) -> pa.Table | None:
    table, reason = _load_table(shard)
    if table is None:
        logger.debug("indexing %s: %s", shard, reason)
    return table


def _load_table(shard: str) -> tuple[pa.Table | None, str]:
    """Return (table, "") of an index that fits its shard, else (None, why not)."""
    stat = stat_shard(shard)
    data = read_file(index_path(shard))
    if data is None:
        return None, "shard has no index"
    try:
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all().combine_chunks()
        metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        return None, f"index is damaged: {error}"
    if metadata.get("version") != str(INDEX_VERSION):
        return None, f"index has version {metadata.get('version')}, this program reads {INDEX_VERSION}"
    if metadata.get("shard_size") != str(stat.size):
        return (
            None,
            f"index is stale: it is of a shard of {metadata.get('shard_size')} bytes, not {stat.size}",
        )
    if metadata.get("shard_version") != stat.version:
        return None, "index is stale: the shard was written after it"
    return table, ""


def _to_index(table: pa.Table, shard: str) -> ShardIndex:
    members = _one_array(table, "members", pa.list_(_MEMBER_TYPE))
    starts = np.asarray(members.offsets, dtype=np.int64) if len(members) else np.zeros(1, dtype=np.int64)
    values = members.flatten()
    numbers = {name: np.asarray(values.field(name)) for name in ("offset", "length", *_RAW_TYPES)}
    tokens = {
        name.removeprefix(_TOKENS): np.asarray(_one_array(table, name, pa.list_(pa.int64())).flatten())
        for name in table.column_names
        if name.startswith(_TOKENS)
    }
    return ShardIndex(
        shard=shard,
        keys=_one_array(table, "key", pa.string()),
        starts=starts - starts[0],
        suffixes=values.field("suffix"),
        modalities=values.field("modality"),
        errors=values.field("error"),
        numbers=numbers,
        tokens=tokens,
        damage=(table.schema.metadata or {}).get(b"damage", b"").decode(),
    )


def _one_array(table: pa.Table, name: str, kind: Any) -> Any:
    chunks = table.column(name).chunks
    return pa.concat_arrays(chunks) if chunks else pa.array([], kind)


def _report(index: ShardIndex, *, is_unchanged: bool) -> IndexReport:
    errors = np.array(index.errors.to_pylist(), dtype=object)
    rows = np.repeat(np.arange(index.num_samples), np.diff(index.starts))
    bad = [
        (member_name(index.keys[int(rows[place])].as_py(), index.suffixes[int(place)].as_py()), errors[place])
        for place in np.flatnonzero(errors != "")
    ]
    return IndexReport(
        shard=index.shard,
        num_samples=index.num_samples,
        num_members=len(errors),
        bad=tuple(bad),
        damage=index.damage,
        is_unchanged=is_unchanged,
    )


def member_name(key: str, suffix: str) -> str:
    """Return the name in the tar of a member, from the two parts that ``split_name`` makes of it."""
    return f"{key}.{suffix}" if suffix else key
