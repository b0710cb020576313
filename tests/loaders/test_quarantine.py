"""Records survive crashes and several writers; budgets stop a run; failures are repeated on resume."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loaders.quarantine import ErrorBudget, Quarantine, QuarantineRecord, read_quarantine
from omni_pipeline.core.errors import DataError
from omni_pipeline.core.sample import SampleId


def record(
    *, step: int = 0, row: int = 0, rank: int = 0, reason: str = "broken", stage: str = "decode"
) -> QuarantineRecord:
    return QuarantineRecord(
        step=step,
        source="captions",
        shard="data/captions-00000.tar",
        shard_index=0,
        row=row,
        key=f"{row:06d}",
        member=f"{row:06d}.jpg",
        offset=512,
        length=1000,
        stage=stage,
        reason=reason,
        rank=rank,
    )


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "run" / "quarantine.jsonl"
    assert read_quarantine(path) == []
    records = [record(row=row, reason='a "quoted" line\nbreak, \u00fc and \ud800') for row in range(3)]
    with Quarantine(path, rank=0) as quarantine:
        for item in records:
            quarantine.add(item)
    read = read_quarantine(path)
    assert read == records
    assert all(item.time > 1.6e9 for item in read)
    assert {"source", "shard", "key", "member", "offset", "length", "stage", "reason"} <= json.loads(
        path.read_text(encoding="ascii").splitlines()[0]
    ).keys()


def test_a_line_cut_by_a_crash_is_skipped_and_does_not_spoil_the_next_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "quarantine.jsonl"
    with Quarantine(path, rank=0) as quarantine:
        quarantine.add(record(row=0))
        quarantine.add(record(row=1))
    path.write_bytes(path.read_bytes()[:-20])
    with Quarantine(path, rank=0) as quarantine:
        quarantine.add(record(row=2))
    with caplog.at_level(logging.WARNING):
        assert [item.row for item in read_quarantine(path)] == [0, 2]
    assert "skipped 1 lines that are no record, first at line 2" in caplog.text


@pytest.mark.parametrize("line", [b"7", b"{}", b'{"step": "x"}', b"\xff\xfe", b"[1]"])
def test_lines_of_other_content_are_no_records(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "quarantine.jsonl"
    with Quarantine(path, rank=0) as quarantine:
        quarantine.add(record())
    path.write_bytes(line + b"\n" + path.read_bytes())
    assert read_quarantine(path) == [record()]


def test_several_processes_append_to_one_file_without_mixing_lines(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    code = """
import sys
from pathlib import Path
from tests.loaders.test_quarantine import record
from loaders.quarantine import Quarantine
rank = int(sys.argv[2])
with Quarantine(Path(sys.argv[1]), rank=rank) as quarantine:
    for step in range(100):
        quarantine.add(record(step=step, row=rank, rank=rank, reason="x" * (rank + 1) * 500))
"""
    root = Path(__file__).parents[2]
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(path), str(rank)], cwd=root) for rank in range(3)
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    read = read_quarantine(path)
    assert len(read) == 300
    for rank in range(3):
        assert [item.step for item in read if item.rank == rank] == list(range(100))


def written(path: Path, steps: list[int]) -> Path:
    """Write one record per step, its row the step; return ``path``."""
    with Quarantine(path, rank=0) as quarantine:
        for step in steps:
            quarantine.add(record(step=step, row=step))
    return path


def test_failures_of_trained_steps_are_known_and_none_is_written_twice(tmp_path: Path) -> None:
    path = written(tmp_path / "quarantine.jsonl", [3, 5, 7, 8])
    with Quarantine(path, rank=0) as again:
        assert again.honour(5, until=8) == 2
        assert again.known(3) == frozenset()
        assert again.known(5) == {SampleId("captions", 0, 5)}
        assert again.known(7)
        assert again.known(8) == frozenset()
        for row in (5, 6):
            again.add(record(step=5, row=row))
        again.add(record(step=8, row=8))
    found = [(item.step, item.row) for item in read_quarantine(path)]
    assert found == [(3, 3), (5, 5), (7, 7), (8, 8), (5, 6)]


@pytest.mark.parametrize("until", [None, 0, 5])
def test_nothing_is_honoured_where_no_step_was_trained_after_the_state(
    tmp_path: Path, until: int | None
) -> None:
    path = written(tmp_path / "quarantine.jsonl", [3, 5, 7])
    with Quarantine(path, rank=0) as again:
        assert again.honour(5, until=until) == 0
        assert again.known(5) == again.known(7) == frozenset()


def test_samples_that_fit_no_pack_are_no_failures_to_repeat_but_are_recorded_once(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    dropped, failed = record(step=5, row=1, stage="plan"), record(step=5, row=2)
    with Quarantine(path, rank=0) as quarantine:
        quarantine.add(dropped)
        quarantine.add(failed)
    with Quarantine(path, rank=0) as again:
        assert again.honour(5, until=6) == 1
        assert again.known(5) == {failed.sample_id}
        again.add(dropped)
    assert read_quarantine(path) == [dropped, failed]


def refused(path: Path) -> DataError:
    """Return the error of adding a record to ``path``."""
    with Quarantine(path, rank=0) as quarantine, pytest.raises(DataError) as caught:
        quarantine.add(record())
    return caught.value


def test_a_folder_that_cannot_be_written_is_told_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    error = refused(tmp_path / "run" / "quarantine.jsonl")
    assert error.what == "a record of a bad sample cannot be written: File exists"
    assert error.where == str(tmp_path / "run" / "quarantine.jsonl")
    assert error.fix == "make room on that disk, or make the run's folder writable"


@pytest.mark.parametrize("content", [b"", b"{cut"])
def test_a_full_disk_is_told_with_its_path_and_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "quarantine.jsonl"
    path.write_bytes(content)
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "write", full)
    error = refused(path)
    assert "No space left on device" in error.what
    assert error.where == str(path)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_fresh_start_moves_the_records_of_earlier_runs_aside_and_loses_none(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    assert Quarantine.start_fresh(path) is None
    for number in (1, 2):
        written(path, [number])
        assert Quarantine.start_fresh(path) == tmp_path / f"quarantine-{number}.jsonl"
        assert not path.exists()
    for number in (1, 2):
        assert [item.step for item in read_quarantine(tmp_path / f"quarantine-{number}.jsonl")] == [number]


def test_records_of_steps_that_were_only_prefetched_leave_the_file_and_are_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    assert Quarantine.forget_from(path, 0) is None
    written(path, [3, 9, 5, 8])
    path.write_bytes(path.read_bytes() + b'{"cut')
    before = [item for item in read_quarantine(path) if item.step < 8]
    aside = Quarantine.forget_from(path, 8)
    assert aside == tmp_path / "quarantine-1.jsonl"
    assert [item.step for item in read_quarantine(aside)] == [9, 8]
    assert read_quarantine(path) == before
    assert [item.time for item in read_quarantine(path)] == [item.time for item in before]
    assert Quarantine.forget_from(path, 8) is None
    assert sorted(item.name for item in tmp_path.iterdir()) == ["quarantine-1.jsonl", "quarantine.jsonl"]


def test_a_source_past_its_budget_stops_the_run_once_enough_samples_were_seen() -> None:
    budget = ErrorBudget(0.1, rank=3)
    ids = [SampleId("captions", 0, row) for row in range(99)]
    budget.count(ids, failed=frozenset(ids))
    with pytest.raises(DataError) as caught:
        budget.count([SampleId("captions", 1, 0)], failed=frozenset())
    assert str(caught.value) == (
        "99 of 100 samples failed (99.0%), limit 10.0%\n"
        "  where: source 'captions' (rank 3)\n"
        "  fix:   mend the shards named in the run's quarantine.jsonl and run `omni data index` on them, "
        "or raise loader.max_bad_fraction"
    )


def test_each_source_has_its_own_budget_and_the_limit_itself_is_allowed() -> None:
    budget = ErrorBudget(0.1, rank=0)
    good = [SampleId("good", 0, row) for row in range(1000)]
    bad = [SampleId("bad", 0, row) for row in range(100)]
    budget.count([*good, *bad], failed=frozenset(bad[:10]))
    with pytest.raises(DataError, match="source 'bad'"):
        budget.count(bad[:1], failed=frozenset(bad[:1]))
