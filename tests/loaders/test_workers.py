"""The decode pool: answers, deadlines, deaths, ends. Real processes throughout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from loaders.workers import Failure, InlineDecoder, WorkerPool
from omni_pipeline.core.errors import WorkerError

JOB = "tests.support.jobs:run"
ANSWER_S = 30


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1, settings={"a": 1}, deadline_s=20, job=JOB) as made:
        yield made


def worker_pids() -> list[int]:
    """Return the ids of this process's decode workers."""
    children = psutil.Process().children()
    return sorted(child.pid for child in children if "loaders.worker_main" in child.cmdline())


def until(condition: Callable[[], bool], *, timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_arrays_come_back_whole_writable_and_with_the_times_of_the_worker(pool: WorkerPool) -> None:
    futures = [pool.submit(("fill", size, size)) for size in (0, 3, 2_000_000)]
    for size, future in zip((0, 3, 2_000_000), futures, strict=True):
        decoded = future.result(ANSWER_S)
        assert decoded.failure is None
        assert decoded.array is not None
        np.testing.assert_array_equal(decoded.array, np.full(size, size))
        decoded.array[:] = 0
        assert (decoded.fetch_s, decoded.decode_s) == (0.25, 0.5)
    assert pool.submit(("settings",)).result(ANSWER_S).array == {"a": 1}


def test_an_exception_in_a_job_is_a_failure_and_the_worker_lives_on(pool: WorkerPool) -> None:
    decoded = pool.submit(("raise", "no such thing")).result(ANSWER_S)
    assert decoded.array is None
    assert decoded.failure == Failure("decode", "ValueError: no such thing")
    before = worker_pids()
    assert pool.submit(("fill", 1, 1)).result(ANSWER_S).failure is None
    assert worker_pids() == before


def test_a_stuck_worker_is_killed_at_the_deadline_and_replaced() -> None:
    with WorkerPool(1, settings=None, deadline_s=0.3, job=JOB) as pool:
        assert pool.submit(("fill", 1, 1)).result(ANSWER_S).failure is None
        (stuck,) = worker_pids()
        decoded = pool.submit(("stick",)).result(ANSWER_S)
        assert decoded.failure == Failure("worker", "deadline of 0.3 s passed")
        assert not psutil.pid_exists(stuck)
        assert pool.submit(("fill", 1, 1)).result(ANSWER_S).failure is None


def test_a_job_whose_worker_died_runs_once_more(pool: WorkerPool, tmp_path: Path) -> None:
    decoded = pool.submit(("die-once", str(tmp_path / "marker"))).result(ANSWER_S)
    assert decoded.failure is None
    assert decoded.array is not None
    assert decoded.array.tolist() == [0, 1, 2]


def test_a_job_that_kills_every_worker_fails_and_the_pool_lives_on(pool: WorkerPool) -> None:
    decoded = pool.submit(("die",)).result(ANSWER_S)
    assert decoded.failure == Failure("worker", "decode worker died 2 times on it (exit code -9)")
    assert pool.submit(("fill", 1, 1)).result(ANSWER_S).failure is None


def test_an_idle_worker_that_was_killed_costs_no_job(pool: WorkerPool) -> None:
    pool.submit(("fill", 1, 1)).result(ANSWER_S)
    (pid,) = worker_pids()
    os.kill(pid, signal.SIGKILL)
    assert pool.submit(("fill", 1, 1)).result(ANSWER_S).failure is None


def test_workers_hold_no_torch_though_the_parent_does(pool: WorkerPool) -> None:
    pytest.importorskip("torch")
    decoded = pool.submit(("maps",)).result(ANSWER_S)
    assert decoded.array is not None
    assert decoded.array.tolist() == [0]
    code = "import sys, loaders.worker_main, loaders.decode.segment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_pool_whose_workers_cannot_start_says_why() -> None:
    with WorkerPool(2, settings=None, deadline_s=5, job="tests.support.no_such_module:run") as pool:
        with pytest.raises(WorkerError, match="ModuleNotFoundError") as caught:
            pool.submit(None).result(ANSWER_S)
        assert "died 3 times in a row at their start" in caught.value.what
        with pytest.raises(WorkerError, match="ModuleNotFoundError"):
            pool.submit(None)


def test_close_ends_busy_workers_and_waiting_jobs_at_once_and_twice_is_once() -> None:
    threads = threading.active_count()
    pool = WorkerPool(2, settings=None, deadline_s=600, job=JOB)
    for _ in range(2):
        pool.submit(("fill", 1, 1)).result(ANSWER_S)
    stuck = [pool.submit(("stick",)) for _ in range(4)]
    assert until(lambda: sum(future.running() for future in stuck) == 2, timeout_s=ANSWER_S)
    pids = worker_pids()
    begin = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - begin < 5
    for future in stuck:
        with pytest.raises(WorkerError, match="pool was closed"):
            future.result(0)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert threading.active_count() == threads
    with pytest.raises(WorkerError, match="pool was closed"):
        pool.submit(("fill", 1, 1))


def test_workers_are_gone_soon_after_their_parent_was_killed(tmp_path: Path) -> None:
    marker = tmp_path / "spinning"
    code = f"""
import time
from loaders.workers import WorkerPool
from tests.loaders.test_workers import worker_pids
pool = WorkerPool(2, settings=None, deadline_s=600, job={JOB!r})
pool.submit(("spin", {str(marker)!r}))
pool.submit(("fill", 1, 1)).result(60)
print(*worker_pids(), flush=True)
time.sleep(600)
"""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment, cwd=root
    )
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert until(marker.exists, timeout_s=ANSWER_S)
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close() if parent.stdout else None
    assert until(lambda: not any(_runs(pid) for pid in pids), timeout_s=5)


def test_ctrl_c_ends_parent_and_workers_without_a_word_of_the_workers() -> None:
    # Whoever started the tests in the background made SIGINT one that is ignored, here and in children.
    code = f"""
import signal
import time
signal.signal(signal.SIGINT, signal.default_int_handler)
from loaders.workers import WorkerPool
from tests.loaders.test_workers import worker_pids
try:
    with WorkerPool(1, settings=None, deadline_s=600, job={JOB!r}) as pool:
        pool.submit(("fill", 1, 1)).result(60)
        pool.submit(("stick",))
        print(*worker_pids(), flush=True)
        time.sleep(600)
except KeyboardInterrupt:
    print("stopped", flush=True)
"""
    root = Path(__file__).parents[2]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, cwd=root, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        (pid,) = [int(word) for word in parent.stdout.readline().split()]
        os.killpg(parent.pid, signal.SIGINT)
        output, errors = parent.communicate(timeout=ANSWER_S)
    assert (output, errors, parent.returncode) == ("stopped\n", "", 0)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_decoder_without_processes_gives_the_same_answers() -> None:
    decoder = InlineDecoder({"a": 1}, job=JOB)
    decoded = decoder.submit(("fill", 2, 7)).result(0)
    assert decoded.array is not None
    assert decoded.array.tolist() == [7, 7]
    assert decoder.submit(("raise", "x")).result(0).failure == Failure("decode", "ValueError: x")
    decoder.close()
