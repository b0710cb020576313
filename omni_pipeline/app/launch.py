"""Start the ranks of a run on this machine, watch them, and end them together.

Each rank is a process of its own with torchrun's environment variables, so a rank cannot tell who started it.
When one fails the others get a few seconds to report (gloo tells them that a peer has gone), then they are
ended: no rank waits for one that will not come back. Ranks die with their launcher (Linux: PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType

from omni_pipeline.core.errors import RankError

logger = logging.getLogger(__name__)

GRACE_S = 10.0
POLL_S = 0.1
PR_SET_PDEATHSIG = 1


class RankProcesses:
    """The ranks of one run on this machine.

    Args:
        arguments: Arguments of ``python -m omni_pipeline`` for every rank.
        num_ranks: World size.
        quiet: Discard the ranks' standard output (their logs go to stderr).
    """

    def __init__(self, arguments: Sequence[str], *, num_ranks: int, quiet: bool = False) -> None:
        threads = max(1, (os.cpu_count() or 1) // num_ranks)
        port = _free_port()
        self._asked: set[int] = set()
        self.processes = [
            subprocess.Popen(
                # -P: a folder `trainer` or a file `random.py` where the user stands must not be imported.
                [sys.executable, "-P", "-m", "omni_pipeline", *arguments],
                env=_rank_environment(rank, num_ranks=num_ranks, port=port, threads=threads),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if quiet else None,
                preexec_fn=_begin_as_child,
            )
            for rank in range(num_ranks)
        ]

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def poll(self) -> bool:
        """Return whether all ranks have ended well.

        Raises:
            RankError: A rank failed. By then all others have been ended; names the first and how it ended.
        """
        codes = [process.poll() for process in self.processes]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            stuck = self._let_others_report()
            raise _rank_error(self.processes, failed[0], stuck)
        return all(code == 0 for code in codes)

    def wait(self) -> None:
        """Block until all ranks have ended well; raises as ``poll`` does.

        The first Ctrl-C asks all ranks to save and end, the second ends them at once.

        Raises:
            RankError: As ``poll``, or a signal ended the ranks while they did not train.
            KeyboardInterrupt: After Ctrl-C, when all have ended.
        """
        interrupted = False
        with self._forwarded_signals():
            while True:
                try:
                    if self.poll():
                        break
                    time.sleep(POLL_S)
                except KeyboardInterrupt:
                    if interrupted:
                        self._signal(signal.SIGKILL)
                        raise
                    interrupted = True
                    logger.warning("Ctrl-C: asking the ranks to save and end; press it again to end at once")
                    self._signal(signal.SIGTERM)
                except RankError:
                    if not self._ended_as_asked():
                        raise
                    break
        if interrupted:
            raise KeyboardInterrupt
        if self._ended_as_asked():
            raise RankError(
                "a signal ended the run while it did not train, so nothing was saved then",
                fix="start the same command again: it continues from the latest complete checkpoint, if any",
            )

    def _ended_as_asked(self) -> bool:
        """Return whether a rank was ended by a signal that this object had passed on."""
        return any(-number in self._asked for number in self._exit_codes() if number < 0)

    def _exit_codes(self) -> list[int]:
        return [process.returncode for process in self.processes if process.returncode is not None]

    def stop(self) -> None:
        """End all ranks that still run; waits for them."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + GRACE_S
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _signal(self, number: int) -> None:
        self._asked.add(number)
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def _let_others_report(self) -> list[int]:
        """Wait a little for the other ranks to end by themselves; return those that had to be killed."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
            time.sleep(POLL_S)
        stuck = [rank for rank, process in enumerate(self.processes) if process.poll() is None]
        for rank in stuck:
            self.processes[rank].kill()
            self.processes[rank].wait()
        return stuck

    @contextlib.contextmanager
    def _forwarded_signals(self) -> Iterator[None]:
        """SIGTERM and SIGUSR1 of the launcher reach every rank: they checkpoint and stop."""

        def forward(number: int, frame: FrameType | None) -> None:
            self._signal(number)

        previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _rank_error(processes: Sequence[subprocess.Popen[bytes]], first: int, stuck: list[int]) -> RankError:
    """The error for a failed run. A rank that was killed is the cause; those that noticed are not.

    Args:
        processes: All ranks, ended.
        first: The lowest rank that was seen to fail first.
        stuck: Ranks that did not end by themselves.
    """
    codes = {rank: process.returncode for rank, process in enumerate(processes) if rank not in stuck}
    killed = [rank for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM]
    rank = first if not killed or first in killed else killed[0]
    code = codes[rank]
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    waited = f"; ranks {stuck} did not notice within {GRACE_S:.0f} s and were killed" if stuck else ""
    error = RankError(
        f"rank {rank} {how}; the run stopped on all {len(processes)} ranks{waited}",
        where="its message is above" if code > 0 else f"process {processes[rank].pid}",
        fix="mend what the message above names"
        if code > 0
        else "start the same command again: it continues from the latest complete checkpoint",
    )
    if code == 2:
        error.exit_code = 2
    return error


def _rank_environment(rank: int, *, num_ranks: int, port: int, threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _begin_as_child() -> None:
    """Runs in the child before exec: SIGTERM when the launcher dies, and no Ctrl-C but through it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
