"""Run a function as several ranks: processes forked from a clean parent, joined by gloo over a file.

The parent of the ranks is a fork server: it has imported torch, and has neither process group nor threads
nor an autograd engine, whatever the test process did before. So a rank starts in a tenth of a second and
no test depends on what ran before it. A file rendezvous has no port to race for.
"""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Heavy modules only; those of this repository are found when tests start at its root.
_PRELOAD = [
    "hypothesis.strategies",
    "numpy",
    "pydantic",
    "pytest",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "tests.support.parity",
    "trainer.loop",
]
_GRACE_S = 2.0


class RanksFailedError(AssertionError):
    """A rank raised, died, or did not end in time."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *, args: Sequence[Any] = (), timeout_s: float = 60.0
) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank and return the results by rank.

    ``function`` and ``args`` must pickle (a function of a test module does). Inside, the default process
    group is gloo over all ranks, and torch uses one thread. After ``timeout_s`` all ranks are killed.

    Raises:
        RanksFailedError: Shows the rank that failed first with its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        rendezvous = Path(folder) / "store"
        processes, pipes = [], []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run_rank,
                    args=(theirs, rank, world_size, rendezvous, timeout_s, function, tuple(args)),
                    daemon=True,
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _collect(pipes, deadline=deadline, timeout_s=timeout_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()


def _run_rank(
    pipe: Connection,
    rank: int,
    world_size: int,
    rendezvous: Path,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        result = function(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 (the process boundary: the parent shows it)
        pipe.send((False, time.time(), traceback.format_exc()))
    else:
        # Plain pickle: that of pipes passes tensors as handles of a process that is gone when they are read.
        pipe.send((True, time.time(), pickle.dumps(result)))


def _collect(pipes: list[Connection], *, deadline: float, timeout_s: float) -> list[Any]:
    """Wait for all ranks; after a failure, only a moment longer, to learn which rank failed first."""
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in (item for item in ready if isinstance(item, Connection)):
            rank = waiting.pop(pipe)
            try:
                succeeded, when, content = pipe.recv()
            except EOFError:
                succeeded, when, content = False, 0.0, "the process ended without a word (killed?)"
            if succeeded:
                results[rank] = pickle.loads(content)
            else:
                failures.append((when, rank, content))
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    if failures:
        _, rank, text = min(failures)
        raise RanksFailedError(f"rank {rank} of {len(pipes)} failed first:\n{text}")
    if waiting:
        ranks = sorted(waiting.values())
        raise RanksFailedError(f"ranks {ranks} of {len(pipes)} did not end within {timeout_s} s")
    return [results[rank] for rank in range(len(pipes))]
