"""Checking many shards: each by itself in worker processes, then what only all of them together show.

Counts are exact, places are the first ones, in the order of the shards, whatever the number of workers.
Memory does not grow with the number of shards or samples: shards are looked at one by one, keys go to disk.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from loaders.check_deny import DenyListWriter
from loaders.check_findings import Findings, MemberTable, Place
from loaders.check_keys import KeySpill, SharedKeys
from loaders.check_members import CheckSettings, ShardJob
from loaders.check_samples import find_partnerless, find_rare_suffixes
from loaders.check_shard import CHECK_JOB, ShardCheck
from loaders.decode.text import load_tokenizer
from loaders.deny import hash_keys
from loaders.source import check_members
from loaders.source_config import FieldsLayout
from loaders.sources.tar import scan_tar, split_name
from loaders.worker_main import DECODE_JOB
from loaders.workers import Decoded, Decoder, InlineDecoder, WorkerPool
from omni_pipeline.core.errors import ConfigError, ShardError
from omni_pipeline.core.media import KINDS

HEADERS_DEADLINE_S = 3600.0
"""Longest time for the headers of one shard; a hang in one is a finding, not a hang."""
DECODE_DEADLINE_S = 60.0
JOBS_PER_WORKER = 4
_DECODE_KINDS = {"fetch": "not_fetched", "decode": "not_decoded", "worker": "decode_stuck"}


@dataclass
class CheckReport:
    """What a check found.

    Args:
        num_shards: Shards looked at.
        num_samples: Samples in them.
        num_members: Regular files in them.
        num_bytes: Of the shards.
        num_decoded: Members that were decoded, well or not; None if only headers were read.
        found: All problems and notes.
        deny_list: The file that was written; None if none was.
        num_denied: Samples in it.
        num_unlisted: Samples that cannot be used and that a list cannot name.
    """

    num_shards: int = 0
    num_samples: int = 0
    num_members: int = 0
    num_bytes: int = 0
    num_decoded: int | None = None
    found: Findings = field(default_factory=Findings)
    deny_list: Path | None = None
    num_denied: int = 0
    num_unlisted: int = 0


def check_shards(
    jobs: Sequence[ShardJob],
    settings: CheckSettings,
    *,
    num_workers: int,
    decode: bool = False,
    decode_deadline_s: float = DECODE_DEADLINE_S,
    deny_list: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CheckReport:
    """Check the shards of ``jobs``, in one pass.

    Args:
        settings: What they are held against.
        num_workers: Processes; 0 works in this one, without deadline or shield.
        decode: Decode every member that is wanted and not bad by its header.
        decode_deadline_s: Longest fetch and decode of one member, seconds.
        deny_list: File to write, naming the samples that cannot be used.
        progress: Called with (done, of all): shards, or members of which the number is estimated.

    Raises:
        ConfigError: The tokenizer cannot be used, or ``deny_list`` cannot be written.
        WorkerError: No worker process can be kept alive.
    """
    load_tokenizer(settings.decode.tokenizer_path)
    settings = replace(
        settings,
        decode=settings.decode.model_copy(update={"encoder_files": KINDS.files}),
        wants_unusable=deny_list is not None,
        wants_hashes=len(jobs) > 1,
        wants_requests=decode,
    )
    report = CheckReport(num_shards=len(jobs), num_decoded=0 if decode else None)
    tables: dict[tuple[FieldsLayout, ...], MemberTable] = {}
    with ExitStack() as stack:
        spill = stack.enter_context(KeySpill())
        writer = None if deny_list is None else stack.enter_context(DenyListWriter(deny_list))
        num_readers = min(num_workers, 1 if decode else len(jobs))
        headers = _pool(settings, CHECK_JOB, HEADERS_DEADLINE_S, num_readers)
        stack.callback(headers.close)
        decoder = None
        if decode:
            decoder = _pool(settings.decode, DECODE_JOB, decode_deadline_s, num_workers)
            stack.callback(decoder.close)
        window = 2 * max(1, num_readers)
        for number, (job, done) in enumerate(_windowed(headers, jobs, window)):
            check = _shard_check(job, done)
            if decoder is not None:
                step = _decode_progress(progress, report, len(check.requests), number, len(jobs))
                _decode(check, decoder, max(1, num_workers) * JOBS_PER_WORKER, report, step)
            elif progress is not None:
                progress(number + 1, len(jobs))
            _add(report, check)
            tables.setdefault(job.layouts, MemberTable()).merge(check.members)
            if len(check.hashes):
                spill.add(number, check.hashes)
            if writer is not None:
                writer.add(check.shard, check.unusable)
        _add_shared(report.found, spill.shared(), [job.shard for job in jobs])
        for layouts, table in tables.items():
            _add_samples(report.found, layouts, table, [job.shard for job in jobs if job.layouts == layouts])
        if writer is not None:
            writer.finish()
            report.deny_list = deny_list
            report.num_denied, report.num_unlisted = writer.num_listed, writer.num_unlisted
    return report


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pool(settings: Any, job: str, deadline_s: float, num_workers: int) -> Decoder:
    if num_workers == 0:
        return InlineDecoder(settings, job=job)
    return WorkerPool(num_workers, settings=settings, deadline_s=deadline_s, job=job)


def _windowed(pool: Decoder, requests: Iterable[Any], window: int) -> Iterator[tuple[Any, Decoded]]:
    """Yield (request, what became of it) in order, with ``window`` of them at work at most."""
    waiting: deque[tuple[Any, Future[Decoded]]] = deque()
    for request in requests:
        waiting.append((request, pool.submit(request)))
        if len(waiting) >= window:
            first, future = waiting.popleft()
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()


def _shard_check(job: ShardJob, done: Decoded) -> ShardCheck:
    if done.failure is None:
        return cast(ShardCheck, done.array)
    check = ShardCheck(job.shard)
    kind = "stuck" if done.failure.stage == "worker" else "unreadable"
    check.found.add(kind, Place(job.shard, what=done.failure.reason))
    return check


def _decode(
    check: ShardCheck,
    decoder: Decoder,
    window: int,
    report: CheckReport,
    step: Callable[[], None],
) -> None:
    """Decode what the check of a shard asks for; add what fails to it."""
    keys = deque(key for key, _ in check.requests)
    requests = [request for _, request in check.requests]
    check.requests = []
    assert report.num_decoded is not None, "decoding was not asked for"
    for request, done in _windowed(decoder, requests, window):
        key = keys.popleft()
        report.num_decoded += 1
        step()
        if done.failure is not None:
            place = Place(request.url, request.member, request.offset, done.failure.reason)
            check.found.add(_DECODE_KINDS[done.failure.stage], place)
            # What the store does not give today it may give tomorrow.
            if key is not None and done.failure.stage != "fetch":
                check.unusable.setdefault(key, f"member {request.member!r}: {done.failure.reason}")


def _decode_progress(
    progress: Callable[[int, int], None] | None, report: CheckReport, num_here: int, number: int, of_all: int
) -> Callable[[], None]:
    """Return what to call after each member; shards to come are taken to be like those so far."""
    so_far = (report.num_decoded or 0) + num_here
    total = so_far * of_all // (number + 1)

    def step() -> None:
        if progress is not None:
            progress(report.num_decoded or 0, max(total, so_far))

    return step


def _add(report: CheckReport, check: ShardCheck) -> None:
    report.num_bytes += check.num_bytes
    report.num_members += check.num_members
    report.num_samples += check.members.num_samples
    report.found.merge(check.found)


def _add_shared(found: Findings, shared: SharedKeys, shards: Sequence[str]) -> None:
    if not shared.count:
        return
    places = []
    for wanted, numbers in shared.firsts:
        others = ", ".join(shards[number].rpartition("/")[2] for number in numbers[1:])
        places.append(
            Place(shards[numbers[0]], _key_of(shards[numbers[0]], wanted), what=f"also in {others}")
        )
    found.add("key_in_shards", *places, count=shared.count)


def _key_of(shard: str, wanted: int) -> str:
    """Return the key with a hash: names were not kept."""
    try:
        keys = list(dict.fromkeys(split_name(member.name)[0] for member in scan_tar(shard).members))
    except ShardError:
        return ""
    hashes = hash_keys(pa.array(keys, pa.string())).tolist()
    return keys[hashes.index(wanted)] if wanted in hashes else ""


def _add_samples(
    found: Findings, layouts: tuple[FieldsLayout, ...], table: MemberTable, shards: Sequence[str]
) -> None:
    """Add what is seen in the samples of shards that have the same layouts."""
    if not layouts:
        for count, places in find_partnerless(table):
            found.add("no_partner", *places, count=count)
        for count, places in find_rare_suffixes(table):
            found.add("rare_suffix", *places, count=count)
    suffixes = {word: (tally.modality, tally.count) for word, tally in table.suffixes.items()}
    for layout in layouts if table.num_samples else ():
        try:
            check_members(layout, suffixes, [table.num_samples], shards)
        except ConfigError as error:
            found.add("no_such_member", Place(shards[0], what=error.what))
