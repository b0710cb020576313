"""Checking one shard: what its headers, its names and its index say, without decoding anything.

The shard is scanned and measured by the code that indexes it, and sized by the code that a run sizes it with,
so a check cannot disagree with a run. The index is not written; one that is there is compared.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from loaders.cache import set_up_storage
from loaders.check_findings import Findings, MemberTable, Place
from loaders.check_kinds import kind_of
from loaders.check_members import CheckSettings, Members, ShardJob, wanted_suffixes
from loaders.decode.segment import DecodeRequest
from loaders.decode.text import load_tokenizer
from loaders.deny import Hashes, hash_keys
from loaders.index import measure_members
from loaders.index_file import read_index, read_summary
from loaders.index_rows import ShardIndex, rows_of, summarize
from loaders.source_config import FieldsLayout
from loaders.sources.tar import TarMember, TarScan, scan_tar, split_name
from loaders.storage import stat_shard
from omni_pipeline.core.encoder_file import run_encoder_files
from omni_pipeline.core.errors import ShardError

CHECK_JOB = "loaders.check_shard:check_job"
LONG_TEXT_BYTES = 1 << 20
_BYTE = re.compile(r"at byte (\d+)")


@dataclass
class ShardCheck:
    """What one shard holds, and what was found.

    Args:
        shard: Path or URL.
        num_bytes: Of the shard.
        num_members: Regular files in it.
        found: Problems and notes.
        members: Suffixes and patterns of its samples.
        unusable: By key: why no run can use the sample.
        hashes: Of its keys; empty unless asked for.
        requests: What to decode, where that was asked for, and the key of the sample that is lost with it.
    """

    shard: str
    num_bytes: int = 0
    num_members: int = 0
    found: Findings = field(default_factory=Findings)
    members: MemberTable = field(default_factory=MemberTable)
    unusable: dict[str, str] = field(default_factory=dict)
    hashes: Hashes = field(default_factory=lambda: np.zeros(0, np.uint64))
    requests: list[tuple[str | None, DecodeRequest]] = field(default_factory=list)


def check_job(job: ShardJob, settings: CheckSettings) -> tuple[ShardCheck, float, float]:
    """As ``check_shard``, for a process of ``WorkerPool``."""
    run_encoder_files(settings.decode.encoder_files)
    set_up_storage(settings.decode.storage)
    return check_shard(job, settings), 0.0, 0.0


def check_shard(job: ShardJob, settings: CheckSettings) -> ShardCheck:
    """Return what is found in one shard; memory grows with the samples of that shard."""
    check = ShardCheck(job.shard)
    texts = _TextNotes(job.shard, job.layouts)
    tokenizer = load_tokenizer(settings.decode.tokenizer_path)
    try:
        check.num_bytes = stat_shard(job.shard).size
        scan = scan_tar(job.shard)
        rows = measure_members(job.shard, scan.members, tokenizer, on_text=texts)
    except ShardError as error:
        kind = kind_of(error.what)
        fix = f" (fix: {error.fix})" if kind == "unreadable" and error.fix else ""
        check.found.add(kind, Place(error.where or job.shard, what=error.what + fix))
        return check
    index = rows_of(rows, job.shard, damage=scan.damage)
    check.num_members = len(scan.members)
    _check_index(index, check)
    _check_tar(scan, check)
    check.found.merge(texts.found)
    _check_keys(index, scan, check.found)
    members = Members(index, job.layouts, settings)
    members.judge(check.found)
    unusable = members.unusable(check.found)
    check.unusable = unusable if settings.wants_unusable else {}
    check.members = members.table()
    if settings.wants_hashes:
        check.hashes = hash_keys(index.keys)
    if settings.wants_requests:
        check.requests = list(members.requests())
    return check


def _check_index(index: ShardIndex, check: ShardCheck) -> None:
    shard = index.shard
    try:
        summary, held = read_summary(shard), read_index(shard)
    except ShardError as error:
        check.found.add(kind_of(error.what), Place(shard, what=error.what))
        return
    fresh = summarize(index, shard_bytes=0, shard_version="")
    # With an encoder that this check was not given, other members count as media: not comparable.
    if {word: kind for word, (kind, _) in summary.suffixes.items()} != {
        word: kind for word, (kind, _) in fresh.suffixes.items()
    } and summary.num_samples == fresh.num_samples:
        return
    if summary.digest != fresh.digest:
        check.found.add("wrong_index", Place(shard, what="keys, suffixes or sizes of members differ"))
        return
    # Neither order nor place of the members of a sample is in the digest.
    if held.suffixes.to_pylist() != index.suffixes.to_pylist() or not all(
        np.array_equal(held.numbers[name], index.numbers[name]) for name in ("offset", "length")
    ):
        check.found.add("wrong_index", Place(shard, what="members lie elsewhere"))


def _check_tar(scan: TarScan, check: ShardCheck) -> None:
    found, shard = check.found, check.shard
    if scan.damage:
        at = _BYTE.search(scan.damage)
        found.add(kind_of(scan.damage), Place(shard, byte=int(at[1]) if at else -1, what=scan.damage))
    elif not scan.members:
        found.add("empty_shard", Place(shard))
    for note in scan.notes:
        found.add(kind_of(note.what), Place(shard, note.name, note.offset, note.what))
    for member in scan.members:
        if member.name.startswith("/") or ".." in member.name.split("/"):
            found.add("outside_path", Place(shard, member.name, member.offset))


def _check_keys(index: ShardIndex, scan: TarScan, found: Findings) -> None:
    shard = index.shard
    before, left, told = "", set[str](), set[str]()
    for member in scan.members:
        key = split_name(member.name)[0]
        if key != before:
            if key in left and key not in told:
                told.add(key)
                found.add("not_adjacent", Place(shard, member.name, member.offset, f"again key {key!r}"))
            left.add(before)
            before = key
    spellings: dict[str, str] = {}
    firsts = index.numbers["offset"][index.starts[:-1]].tolist()
    for key, byte in zip(index.keys.to_pylist(), firsts, strict=True):
        other = spellings.setdefault(key.casefold(), key)
        if other != key:
            found.add("case_of_key", Place(shard, key, byte, f"beside {other!r}"))


class _TextNotes:
    """Looks at each text that is read to count its tokens."""

    def __init__(self, shard: str, layouts: Sequence[FieldsLayout]) -> None:
        self.found = Findings()
        self._shard = shard
        self._wanted = wanted_suffixes(layouts)

    def __call__(self, member: TarMember, data: bytes) -> None:
        if self._wanted is not None and split_name(member.name)[1].lower() not in self._wanted:
            return
        if data.startswith(codecs.BOM_UTF8):
            self._add("text_bom", member)
        if at := data.find(b"\0") + 1:
            self._add("text_nul", member, f"first at byte {at - 1} of the text")
        if len(data) > LONG_TEXT_BYTES:
            self._add("long_text", member, f"{len(data)} bytes, more than {LONG_TEXT_BYTES}")

    def _add(self, kind: str, member: TarMember, what: str = "") -> None:
        self.found.add(kind, Place(self._shard, member.name, member.offset, what))
