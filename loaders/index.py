"""Making the sidecar index of a shard: where each member lies and how large it is, before decoding anything.

One row per sample, in a file beside the shard. Media are measured from their headers;
text is read, since it is counted in tokens, per tokenizer fingerprint. An index knows the size and version of
the shard it describes, so a changed shard is noticed. There is no global database: shards are indexed in
parallel, each by itself, and those that have not changed are passed by.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from loaders.decode.audio import audio_size
from loaders.decode.image import image_size
from loaders.decode.text import Tokenizer, decode_text, load_tokenizer
from loaders.decode.track import track_size
from loaders.decode.video import video_size
from loaders.index_file import IndexFile, open_index, write_index
from loaders.index_rows import (
    LARGEST_INT32,
    MEMBER_TYPES,
    OTHER,
    RAW_TYPES,
    TOKENS,
    WORD,
    ShardIndex,
    rows_of,
)
from loaders.sources.tar import TarMember, scan_tar, split_name
from loaders.storage import ShardStat, open_range, read_range, stat_shard
from omni_pipeline.core.encoder_file import run_encoder_files
from omni_pipeline.core.errors import ConfigError, OmniError, SampleError, ShardError
from omni_pipeline.core.media import KINDS
from omni_pipeline.core.sample import Modality, RawSize

logger = logging.getLogger(__name__)

REPEATED = "another member of the shard has the same key and suffix"


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
    file = None if force else _current_index(shard)
    if file is None:
        # The size is that of before the scan: a shard that grows meanwhile is stale.
        stat, scan = stat_shard(shard), scan_tar(shard)
        rows = measure_members(shard, scan.members, tokenizer)
        index = write_index(shard, rows, stat=stat, damage=scan.damage)
    elif tokenizer.fingerprint not in file.summary.token_digests:
        index = _add_tokens(file, tokenizer)
    else:
        index = rows_of(file.all_rows(), shard, damage=file.summary.damage)
        return _report(index, is_unchanged=True)
    return _report(index, is_unchanged=False)


def modality_of(suffix: str) -> Modality | None:
    """Return what members of ``suffix`` hold, by its longest ending that is known; None if none is."""
    return KINDS.modality_of(suffix)


def _run_jobs(jobs: list[tuple[str, Path | None, bool]], *, num_workers: int) -> Iterator[IndexReport]:
    if num_workers < 2:
        yield from map(_index_one, jobs)
        return
    # Spawned, because the caller may have threads (a progress bar) that a fork would cut off.
    with ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=run_encoder_files,
        initargs=(KINDS.files,),
    ) as pool:
        yield from pool.map(_index_one, jobs)


def _index_one(job: tuple[str, Path | None, bool]) -> IndexReport:
    shard, tokenizer_path, force = job
    try:
        return build_index(shard, tokenizer=load_tokenizer(tokenizer_path), force=force)
    except ConfigError:
        raise
    except OmniError as error:
        return IndexReport(shard, error=str(error))


def measure_members(
    shard: str,
    members: Iterable[TarMember],
    tokenizer: Tokenizer,
    *,
    on_text: Callable[[TarMember, bytes], None] | None = None,
) -> pa.RecordBatch:
    """Return the rows of an index of ``members``, as ``write_index`` takes them.

    Args:
        on_text: Called with each good text and its bytes.

    Raises:
        ShardError: The shard cannot be read.
    """
    samples: dict[str, list[tuple[dict[str, Any], int]]] = {}
    for member in members:
        key, suffix = split_name(member.name)
        samples.setdefault(key, []).append(_measure(shard, member, suffix, tokenizer, on_text))
    for measured in samples.values():
        _mark_repeated([entry for entry, _ in measured])
    entries = [entry for measured in samples.values() for entry, _ in measured]
    counts = [num_tokens for measured in samples.values() for _, num_tokens in measured]
    starts = np.cumsum([0, *map(len, samples.values())])
    columns = [
        pa.array([entry[name] for entry in entries], pa.string() if kind == WORD else kind)
        for name, kind in MEMBER_TYPES.items()
    ]
    columns = [column.dictionary_encode() if column.type == pa.string() else column for column in columns]
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array(list(samples), pa.string()),
            "members": _lists(starts, pa.StructArray.from_arrays(columns, names=list(MEMBER_TYPES))),
            TOKENS + tokenizer.fingerprint: _lists(starts, pa.array(counts, pa.int32())),
        }
    )


def _lists(starts: npt.NDArray[np.int64], values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), values)


def _mark_repeated(entries: list[dict[str, Any]]) -> None:
    """Mark *every* member of a repeated suffix: which of them belongs to the sample is not known."""
    suffixes = [entry["suffix"].lower() for entry in entries]
    for entry, suffix in zip(entries, suffixes, strict=True):
        if suffixes.count(suffix) > 1:
            entry["error"] = REPEATED


def _measure(
    shard: str,
    member: TarMember,
    suffix: str,
    tokenizer: Tokenizer,
    on_text: Callable[[TarMember, bytes], None] | None,
) -> tuple[dict[str, Any], int]:
    """Return the index entry of one member, and its tokens (-1 for anything but good text)."""
    modality = modality_of(suffix)
    raw, error, num_tokens = RawSize(), member.error, -1
    if modality is not None and not error:
        try:
            if modality is Modality.TEXT:
                data = read_range(shard, member.offset, member.length)
                raw, num_tokens = _measure_text(data, tokenizer)
                if on_text is not None:
                    on_text(member, data)
            else:
                raw = _in_range(_measure_media(shard, member, suffix, modality))
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
            raw = video_size(file)
            file.seek(0)
            sample_rate, num_samples = track_size(file)
            return replace(raw, sample_rate=sample_rate, num_samples=num_samples)
        if modality is Modality.AUDIO:
            return audio_size(file, suffix=suffix.rpartition(".")[2])
        return KINDS[modality].measure(file)


def _in_range(raw: RawSize) -> RawSize:
    """Return ``raw`` if the index can hold it: a header may say anything."""
    for name, kind in RAW_TYPES.items():
        value = getattr(raw, name)
        if kind == pa.int32() and not 0 <= value <= LARGEST_INT32:
            raise SampleError(f"header says {name} {value}, limit {LARGEST_INT32}", fix="remove the file")
    return raw


def _measure_text(data: bytes, tokenizer: Tokenizer) -> tuple[RawSize, int]:
    text = decode_text(data)
    num_tokens = len(tokenizer.encode(text))
    if num_tokens > LARGEST_INT32:
        raise SampleError(f"text has {num_tokens} tokens, limit {LARGEST_INT32}", fix="cut the text")
    return RawSize(num_chars=len(text), num_bytes=len(data)), num_tokens


def _add_tokens(file: IndexFile, tokenizer: Tokenizer) -> ShardIndex:
    shard, rows, summary = file.shard, file.all_rows(), file.summary
    index = rows_of(rows, shard, damage=summary.damage)
    counts = np.full(int(index.starts[-1]), -1, dtype=np.int32)
    is_text = np.array(index.modalities.to_pylist(), dtype=object) == str(Modality.TEXT)
    is_good = np.array(index.errors.to_pylist(), dtype=object) == ""
    for place in np.flatnonzero(is_text & is_good):
        offset, length = int(index.numbers["offset"][place]), int(index.numbers["length"][place])
        counts[place] = _measure_text(read_range(shard, offset, length), tokenizer)[1]
    rows = pa.RecordBatch.from_arrays(
        [*rows.columns, _lists(index.starts, pa.array(counts))],
        names=[*rows.schema.names, TOKENS + tokenizer.fingerprint],
    )
    stat = ShardStat(summary.shard_bytes, summary.shard_version)
    return write_index(shard, rows, stat=stat, damage=summary.damage)


def _current_index(shard: str) -> IndexFile | None:
    """The index that fits the shard; None where it must be made, damaged content included."""
    stat_shard(shard)
    try:
        file = open_index(shard)
        file.all_rows()
    except ShardError as error:
        logger.debug("indexing %s: %s", shard, error.what)
        return None
    for suffix, (modality, _) in file.summary.suffixes.items():
        known = modality_of(suffix)
        if known in KINDS.encoders and known != modality:
            return None  # made without the encoder that reads these members
    return file


def _report(index: ShardIndex, *, is_unchanged: bool) -> IndexReport:
    errors = np.array(index.errors.to_pylist(), dtype=object)
    rows = index.rows
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
