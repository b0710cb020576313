"""A pool of decode processes: start, watch, stop, replace.

Decoders crash, hang and leak on damaged media, so they run in processes that may be killed at any moment.
Each worker has one thread here that hands it a job, waits for the answer until the job's deadline, and
replaces the worker when it is stuck or dead. A job that was on a dead worker runs once more on a fresh one.

Workers are started with ``subprocess``, not with ``multiprocessing``: its spawn method imports the parent's
main module again, which in a training program imports torch (1.6 s and hundreds of MB per worker), and fork
is unsafe beside torch's threads. The channel is a socket pair without a name, so nothing outlives a
kill -9: no shared memory, no semaphore, no file.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy.typing as npt

import loaders.channel
from loaders.channel import Channel
from loaders.worker_main import DECODE_JOB, Reply, load_job, run_job
from omni_pipeline.core.errors import WorkerError

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
START_TIMEOUT_S = 60.0
_MAX_ATTEMPTS = 2
_IDLE_CHECK_S = 0.5
_STOP_TIMEOUT_S = 1.0
_KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job gave no array: the stage ("fetch", "decode" or "worker") and the error's message."""

    stage: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decoded:
    """What became of one job: an array or a failure, and the seconds spent in the worker."""

    array: npt.NDArray[Any] | None
    failure: Failure | None
    fetch_s: float = 0.0
    decode_s: float = 0.0


class Decoder(Protocol):
    """Takes decode requests, answers later."""

    def submit(self, request: Any) -> Future[Decoded]:
        """Return a future of the decoded ``request``; it fails only when no worker can be kept alive."""
        ...

    def close(self) -> None:
        """Stop; may be called again."""
        ...


@dataclass(slots=True)
class _Task:
    request: Any
    future: Future[Decoded]


class _StartError(Exception):
    """A worker did not get ready; holds what is known about it."""


class WorkerPool:
    """Decode processes behind a queue. Jobs start in the order of ``submit``.

    Args:
        num_workers: Processes, at least 1.
        settings: Sent once to each worker, with its start.
        deadline_s: Longest time of one job, from its start on a worker to the end of its answer, seconds.
        job: ``module:function`` that a worker runs; see ``worker_main.Job``.
        start_timeout_s: Longest time for a worker to get ready, seconds.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        settings: Any,
        deadline_s: float,
        job: str = DECODE_JOB,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"a pool needs at least one worker, got {num_workers}")
        self._settings = settings
        self._deadline_s = deadline_s
        self._job = job
        self._start_timeout_s = start_timeout_s
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._failed_starts = 0
        self._error: WorkerError | None = None
        self._workers: dict[int, _Worker] = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), name=f"decode-{index}", daemon=True)
            for index in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Any) -> Future[Decoded]:
        """Queue a job.

        Raises:
            WorkerError: The pool is closed, or could not keep workers alive; its futures fail alike.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._closing.is_set():
                raise _closed()
            task = _Task(request, Future())
            self._tasks.put(task)
        return task.future

    def close(self) -> None:
        """Stop all workers and fail what was not done; no process or thread is left. May be called again."""
        with self._lock:
            self._closing.set()
            workers = list(self._workers.values())
        for worker in workers:
            worker.interrupt()
        for thread in self._threads:
            thread.join(timeout=_STOP_TIMEOUT_S + 2 * _KILL_TIMEOUT_S)
        self._fail_waiting(_closed())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, index: int) -> None:
        try:
            while (worker := self._ready_worker(index)) is not None:
                try:
                    task = self._tasks.get(timeout=_IDLE_CHECK_S)
                except queue.Empty:
                    continue
                if task.future.set_running_or_notify_cancel():
                    self._work(index, worker, task)
        finally:
            self._drop(index)

    def _work(self, index: int, first: _Worker, task: _Task) -> None:
        """Run one job to its end: an answer, a failure, or the end of the pool."""
        worker: _Worker | None = first
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            if worker is None:
                task.future.set_exception(self._error or _closed())
                return
            begin = time.monotonic()
            try:
                array, failure, fetch_s, decode_s = worker.call(task.request, deadline_s=self._deadline_s)
            except TimeoutError:
                self._drop(index)
                reason = f"deadline of {self._deadline_s:g} s passed"
                logger.warning("decode worker %s killed: %s", worker.pid, reason)
                spent = time.monotonic() - begin
                task.future.set_result(Decoded(None, Failure("worker", reason), decode_s=spent))
                return
            except (EOFError, OSError):
                exit_code = self._drop(index)
                if not self._closing.is_set():
                    logger.warning("decode worker %s died (exit code %s)", worker.pid, exit_code)
                if attempt < _MAX_ATTEMPTS:
                    worker = self._ready_worker(index)
                continue
            known = None if failure is None else Failure(*failure)
            task.future.set_result(Decoded(array, known, fetch_s, decode_s))
            return
        if self._closing.is_set():
            task.future.set_exception(_closed())
            return
        reason = f"decode worker died {_MAX_ATTEMPTS} times on it (exit code {exit_code})"
        task.future.set_result(Decoded(None, Failure("worker", reason)))

    def _ready_worker(self, index: int) -> _Worker | None:
        """Return a live worker, started if needed; None when the pool has ended."""
        while not self._closing.is_set() and self._error is None:
            worker = self._workers.get(index)
            if worker is not None and worker.alive():
                return worker
            self._drop(index)
            try:
                self._start(index)
            except _StartError as error:
                self._drop(index)
                self._count_failed_start(str(error))
        return None

    def _start(self, index: int) -> None:
        worker = _Worker()
        with self._lock:
            self._workers[index] = worker
            closing = self._closing.is_set()
        if closing:
            raise _StartError("the pool was closed")
        worker.handshake(self._job, self._settings, timeout_s=self._start_timeout_s)
        with self._lock:
            self._failed_starts = 0

    def _count_failed_start(self, what: str) -> None:
        if self._closing.is_set():
            return
        logger.warning("a decode worker did not start: %s", what.strip().splitlines()[-1])
        with self._lock:
            self._failed_starts += 1
            if self._failed_starts < MAX_FAILED_STARTS or self._error is not None:
                return
            self._error = WorkerError(
                f"decode workers died {self._failed_starts} times in a row at their start:\n{what.rstrip()}",
                where=f"job {self._job}",
                fix="mend what the traceback names; a library may be missing or memory too small",
            )
        self._fail_waiting(self._error)

    def _fail_waiting(self, error: WorkerError) -> None:
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                return
            if task.future.set_running_or_notify_cancel():
                task.future.set_exception(error)

    def _drop(self, index: int) -> int | None:
        with self._lock:
            worker = self._workers.pop(index, None)
        return None if worker is None else worker.stop(graceful=self._closing.is_set())


class InlineDecoder:
    """Decodes in the calling thread: no process, so no deadline and no shield against crashes.

    For tests and for looking into a failure with a debugger.
    """

    def __init__(self, settings: Any, *, job: str = DECODE_JOB) -> None:
        self._settings = settings
        self._job = load_job(job)

    def submit(self, request: Any) -> Future[Decoded]:
        """Decode ``request`` now; return a finished future."""
        array, failure, fetch_s, decode_s = run_job(self._job, request, self._settings)
        future: Future[Decoded] = Future()
        known = None if failure is None else Failure(*failure)
        future.set_result(Decoded(array, known, fetch_s, decode_s))
        return future

    def close(self) -> None:
        """Nothing to stop."""


class _Worker:
    """One process and the channel to it. Made, used and stopped by one thread (``interrupt`` by any).

    On Linux the worker dies with the thread that made it (see ``worker_main``), so that thread must be the
    one that uses it.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            command = [
                sys.executable,
                "-P",
                "-m",
                "loaders.worker_main",
                str(theirs.fileno()),
                str(os.getpid()),
            ]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=_worker_environment(),
                process_group=0,  # Ctrl-C reaches the parent only, which then stops its workers
            )
        except OSError as error:
            ours.close()
            raise _StartError(f"cannot start a process: {error}") from error
        finally:
            theirs.close()
        self._channel = Channel(ours)
        self._ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def handshake(self, job: str, settings: Any, *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            self._channel.send((job, settings), deadline=deadline)
            word, detail = self._channel.receive(deadline=deadline)
        except TimeoutError as error:
            raise _StartError(f"not ready after {timeout_s:g} s") from error
        except (EOFError, OSError) as error:
            raise _StartError(f"exit code {self._end_code()} before it was ready") from error
        if word != "ready":
            raise _StartError(detail)
        self._ready = True

    def _end_code(self) -> int | None:
        try:
            return self._process.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None

    def call(self, request: Any, *, deadline_s: float) -> Reply:
        deadline = time.monotonic() + deadline_s
        self._channel.send(request, deadline=deadline)
        reply: Reply = self._channel.receive(deadline=deadline)
        return reply

    def interrupt(self) -> None:
        self._channel.shutdown()

    def stop(self, *, graceful: bool) -> int | None:
        """End the process and reap it; return its exit code. Idle workers leave at the end of the channel."""
        self._channel.close()
        try:
            if graceful and self._ready:
                return self._process.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.debug("decode worker %s is busy, killing it", self.pid)
        self._process.kill()
        try:
            return self._process.wait(timeout=_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("decode worker %s does not die (blocked in the kernel)", self.pid)
            return None


def _worker_environment() -> dict[str, str]:
    """The parent's environment; the packages found where the parent found them; one thread per library."""
    root = str(Path(loaders.channel.__file__).resolve().parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **threads}


def _closed() -> WorkerError:
    return WorkerError("the decode pool was closed before this job ran", fix="submit before close()")
