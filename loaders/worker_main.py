"""The program of a decode worker: ``python -m loaders.worker_main FD PARENT_PID``.

It reads jobs from the socket FD, runs them, and writes back arrays or failures. It lives as long as its
parent: the kernel kills it when the parent dies (Linux), a watching thread ends it elsewhere, and the end of
the socket ends it in any case. Ctrl-C is the parent's business, so SIGINT is ignored here. Free of torch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from loaders.channel import Channel
from omni_pipeline.core.errors import OmniError, SampleError

DECODE_JOB = "loaders.worker_main:decode_job"

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 1.0

# (request, settings) -> (array, seconds of fetching, seconds of decoding)
Job = Callable[[Any, Any], tuple[Any, float, float]]
# (array or None, (stage, reason) or None, seconds of fetching, seconds of decoding)
Reply = tuple[Any, tuple[str, str] | None, float, float]


class FetchError(SampleError):
    """The bytes of a segment could not be read, so nothing was decoded."""


def decode_job(request: Any, settings: Any) -> tuple[Any, float, float]:
    """Fetch and decode one ``DecodeRequest`` under ``DecodeSettings``; return (array, fetch_s, decode_s)."""
    from loaders.cache import read_payload, set_up_storage
    from loaders.decode.segment import decode_bytes  # heavy: only processes that decode import it

    begin = time.monotonic()
    set_up_storage(settings.storage)
    try:
        data = read_payload(request.url, request.offset, request.length)
    except (OmniError, OSError) as error:
        raise FetchError(_reason(error), where=f"{request.where}, byte {request.offset}") from error
    fetched = time.monotonic()
    array = decode_bytes(data, request, settings)
    return array, fetched - begin, time.monotonic() - fetched


def run_job(job: Job, request: Any, settings: Any) -> Reply:
    """Run one job. This is the decode boundary: whatever it raises is a failed sample, not a dead run."""
    begin = time.monotonic()
    try:
        array, fetch_s, decode_s = job(request, settings)
    except FetchError as error:
        return None, ("fetch", error.what), time.monotonic() - begin, 0.0
    except Exception as error:  # noqa: BLE001 - decoders raise anything on damaged bytes
        return None, ("decode", _reason(error)), 0.0, time.monotonic() - begin
    return array, None, fetch_s, decode_s


def load_job(name: str) -> Job:
    """Return the function of ``module:function``."""
    module, _, function = name.partition(":")
    job: Job = getattr(importlib.import_module(module), function)
    return job


def main(arguments: list[str]) -> int:
    """Serve jobs until the parent closes the socket or dies; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    descriptor, parent_pid = int(arguments[0]), int(arguments[1])
    _end_with_parent(parent_pid)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        _serve(channel)
    except EOFError:
        return 0
    return 1


def _serve(channel: Channel) -> None:
    name, settings = channel.receive(deadline=None)
    try:
        job = load_job(name)
    except Exception:  # noqa: BLE001 - the process boundary: the parent raises it with this traceback
        channel.send(("broken", traceback.format_exc()), deadline=None)
        return
    channel.send(("ready", ""), deadline=None)
    while True:
        request = channel.receive(deadline=None)
        channel.send(run_job(job, request, settings), deadline=None)


def _end_with_parent(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_CHECK_S)
        os._exit(1)

    # Also ends a worker whose parent died before the prctl above.
    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _reason(error: BaseException) -> str:
    if isinstance(error, OmniError):
        return error.what
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
