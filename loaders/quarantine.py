"""Bad samples kept aside with their reason: the record file, the error budget, and the replay of failures.

One file per run takes the records of all ranks: each record is one line, written by one ``write`` to a
descriptor opened with O_APPEND, so lines of several processes never mix. A crash can cut the last line
only; reading skips it with a warning.

A failure is part of what the run has trained on. Steps that were trained after the checkpoint that a run
resumes from are trained again, and must see the failure again, or their labels would differ (known fault:
another skip on resume). So the records of these steps, and of no others, are honoured: those samples fail
again at that step, without decoding and without a second record. From there on a sample that was mended is
read as it is. Steps that were only prefetched were never trained, so their records bind nobody. Which steps
were trained the loader cannot know; it is told (``until``), and ``Quarantine.forget_from`` takes the other
records out of the file before they could be taken for failures of the steps that run in their place.

Records of stage "plan" are of samples that were never in a step. The order leaves them out again by itself,
so there is nothing to honour.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from omni_pipeline.core.errors import DataError
from omni_pipeline.core.sample import SampleId

logger = logging.getLogger(__name__)

MIN_JUDGED_SAMPLES = 100
# Stage of a sample that fits no pack: it was never in the step that its record names.
PLAN_STAGE = "plan"


@dataclass(frozen=True, slots=True)
class QuarantineRecord:
    """One failed sample, as one line of the file.

    Args:
        step: Step it was planned for.
        source: Name of its source.
        shard: Path or URL of its shard.
        shard_index: Number of the shard in its source.
        row: Row of the sample in the shard's index.
        key: The name people know it by.
        member: Tar member or column of the segment that failed.
        offset: First byte of that segment in the shard.
        length: Its bytes.
        stage: Where it failed: "fetch", "decode", "worker" or "assemble"; "plan" if it fits no pack.
        reason: The error's message.
        rank: Rank that met it.
        time: Seconds since the epoch (UTC).
    """

    step: int
    source: str
    shard: str
    shard_index: int
    row: int
    key: str
    member: str
    offset: int
    length: int
    stage: str
    reason: str
    rank: int
    time: float = dataclasses.field(default_factory=time.time, compare=False)

    @property
    def sample_id(self) -> SampleId:
        """Identity of the sample."""
        return SampleId(source=self.source, shard=self.shard_index, row=self.row)


class Quarantine:
    """Appends records to the run's file, and knows which failures a resumed run must see again.

    Safe for several processes on one file system with atomic appends (every local one; on NFS give each node
    its own file). Thread-safe: a record is one system call.
    """

    def __init__(self, path: Path, *, rank: int) -> None:
        self.path = path
        self._rank = rank
        self._descriptor: int | None = None
        self._known: dict[int, frozenset[SampleId]] = {}
        self._on_file: frozenset[tuple[int, SampleId]] = frozenset()

    @staticmethod
    def start_fresh(path: Path) -> Path | None:
        """Move the file of an earlier run aside, to ``quarantine-<n>.jsonl``; return where it is now.

        To be called by one rank, before the loader of any rank starts. None when there is no file.
        """
        if not path.exists():
            return None
        aside = _free_path(path)
        path.rename(aside)
        logger.info("the quarantine of an earlier run is kept as %s", aside)
        return aside

    @staticmethod
    def forget_from(path: Path, step: int) -> Path | None:
        """Move the records of ``step`` and later, which was never trained, to ``quarantine-<n>.jsonl``.

        Without this the failures of steps that were only prefetched would stand in the file beside those of
        the steps that take their place. To be called by one rank, before the loader of any rank starts.

        Returns:
            Where the records are now; None when there are none.
        """
        records = read_quarantine(path)
        stale = [record for record in records if record.step >= step]
        if not stale:
            return None
        aside = _free_path(path)
        aside.write_bytes(b"".join(map(_line, stale)))
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(b"".join(_line(record) for record in records if record.step < step))
        os.replace(temporary, path)
        logger.info("failures of steps that were not trained: %s, kept as %s", len(stale), aside)
        return aside

    def honour(self, step: int, *, until: int | None) -> int:
        """Read the file and keep the failures of steps that were trained before and run again.

        Args:
            step: The first step of this run.
            until: End of the steps known to be trained; None: none of them.

        Returns:
            How many failures are honoured.
        """
        records = [record for record in read_quarantine(self.path) if record.step >= step]
        self._on_file = frozenset((record.step, record.sample_id) for record in records)
        last = step if until is None else until
        found: dict[int, set[SampleId]] = {}
        for record in records:
            if record.step < last and record.stage != PLAN_STAGE:
                found.setdefault(record.step, set()).add(record.sample_id)
        self._known = {at: frozenset(ids) for at, ids in found.items()}
        return sum(len(ids) for ids in self._known.values())

    def known(self, step: int) -> frozenset[SampleId]:
        """Return the samples that failed at ``step`` when it was trained before."""
        return self._known.get(step, frozenset())

    def add(self, record: QuarantineRecord) -> None:
        """Append ``record``, unless this step's failure of the sample is on file already.

        Raises:
            DataError: The file cannot be written.
        """
        if (record.step, record.sample_id) in self._on_file:
            return
        logger.debug("rank %s quarantines %s of %s: %s", self._rank, record.key, record.shard, record.reason)
        line = _line(record)
        try:
            if self._descriptor is None:
                self._descriptor = self._open()
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise DataError(
                f"a record of a bad sample cannot be written: {error.strerror}",
                where=str(self.path),
                fix="make room on that disk, or make the run's folder writable",
            ) from error
        if written != len(line):
            raise DataError(
                f"only {written} of {len(line)} bytes of a record were written",
                where=str(self.path),
                fix="make room on that disk",
            )

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                # A crash cut the last line. Without this the first record of this run would be glued to it.
                os.write(descriptor, b"\n")
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


def read_quarantine(path: Path) -> list[QuarantineRecord]:
    """Return all records of the file, oldest first; none if there is no file.

    Lines that are no record (cut by a crash) are skipped and counted in one warning.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    records: list[QuarantineRecord] = []
    bad: list[int] = []
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        record = _parse(line)
        if record is None:
            bad.append(number)
        else:
            records.append(record)
    if bad:
        logger.warning("%s: skipped %s lines that are no record, first at line %s", path, len(bad), bad[0])
    return records


class ErrorBudget:
    """Counts samples and failures per source, and ends the run when too many fail.

    A source is judged once ``MIN_JUDGED_SAMPLES`` samples of it were handled on this rank.
    """

    def __init__(self, max_bad_fraction: float, *, rank: int) -> None:
        self._max_bad_fraction = max_bad_fraction
        self._rank = rank
        self._handled: dict[str, int] = {}
        self._bad: dict[str, int] = {}

    def count(self, handled: Iterable[SampleId], *, failed: frozenset[SampleId]) -> None:
        """Count the samples of one step.

        Raises:
            DataError: A source is past its budget.
        """
        for sample_id in sorted(handled):
            self._handled[sample_id.source] = self._handled.get(sample_id.source, 0) + 1
            if sample_id in failed:
                self._bad[sample_id.source] = self._bad.get(sample_id.source, 0) + 1
        for source in sorted(self._bad):
            self._judge(source)

    def _judge(self, source: str) -> None:
        handled, bad = self._handled[source], self._bad[source]
        if handled < MIN_JUDGED_SAMPLES or bad <= self._max_bad_fraction * handled:
            return
        raise DataError(
            f"{bad} of {handled} samples failed ({bad / handled:.1%}), limit {self._max_bad_fraction:.1%}",
            where=f"source {source!r} (rank {self._rank})",
            fix="mend the shards named in the run's quarantine.jsonl and run `omni data index` on them, "
            "or raise loader.max_bad_fraction",
        )


def _line(record: QuarantineRecord) -> bytes:
    return (json.dumps(dataclasses.asdict(record)) + "\n").encode("ascii")


def _free_path(path: Path) -> Path:
    """Return the first of ``<stem>-1<suffix>``, ``<stem>-2<suffix>``... that does not exist."""
    number = 1
    while (aside := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return aside


def _parse(line: bytes) -> QuarantineRecord | None:
    names = {field.name: field.type for field in dataclasses.fields(QuarantineRecord)}
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "str": (str,), "float": (int, float)}
    try:
        content: Any = json.loads(line)
    except ValueError:
        return None
    if not isinstance(content, dict) or not names.keys() <= content.keys():
        return None
    if any(not isinstance(content[name], kinds[str(kind)]) for name, kind in names.items()):
        return None
    return QuarantineRecord(**{name: content[name] for name in names})
