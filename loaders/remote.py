"""Bytes of remote stores, through fsspec: every wait bounded, every failure logged, every read resumed.

A read goes on from its last good byte. A request that brings nothing is repeated ``attempts`` times in a row
with growing pauses; a store that brings little is asked for less at a time; and the read as a whole ends
within ``read_timeout_s``. So a store that stalls, cuts off, resets or lies about lengths is either read
exactly or ends in an error that names it: never in a short read, never in a wait without end.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from loaders.http_range import fetch_http, http_info
from loaders.storage_config import StorageConfig
from omni_pipeline.core.errors import ConfigError, OmniError, ShardError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
PIECE_BYTES = 8 << 20
LEAST_PIECE_BYTES = 1 << 16
_CANCEL_S = 2.0

ResultT = TypeVar("ResultT")

_limits = StorageConfig()


def set_limits(config: StorageConfig) -> None:
    """Make ``config`` the limits of all remote calls of this process."""
    global _limits
    _limits = config


def read_remote(url: str, offset: int, length: int) -> bytes:
    """Return ``length`` bytes of ``url`` from ``offset``, or fewer where the store says that it ends there.

    Raises:
        ShardError: Missing, refused, or not read within the limits.
    """
    return _Read(url, offset, length, _limits).run()


def remote_info(url: str) -> dict[str, Any]:
    """Return what the store tells of ``url``; "size" is always there.

    Raises:
        ShardError: As ``read_remote``.
    """
    return _retried(lambda system: _info(system, url, _limits.timeout_s), url)


def write_remote(url: str, data: bytes) -> None:
    """Put ``data`` at ``url``.

    Raises:
        ShardError: As ``read_remote``.
    """
    timeout_s = max(_limits.timeout_s, _limits.read_timeout_s)
    _retried(lambda system: _call(system, "pipe_file", url, data, timeout_s=timeout_s), url)


def glob_remote(pattern: str) -> list[str]:
    """Return the URLs that ``pattern`` matches, sorted.

    Raises:
        ShardError: As ``read_remote``.
    """
    timeout_s = max(_limits.timeout_s, _limits.read_timeout_s)
    names = _retried(lambda system: _call(system, "glob", pattern, timeout_s=timeout_s), pattern)
    system = _filesystem(pattern)
    return sorted(system.unstrip_protocol(name) for name in names)


class _StoreError(OSError):
    """A request failed in a way that is no OSError, but may pass all the same."""


class _Read:
    """One read: what it has so far, and what it may still try."""

    def __init__(self, url: str, offset: int, length: int, limits: StorageConfig) -> None:
        self._url = url
        self._offset = offset
        self._length = length
        self._limits = limits
        self._deadline = time.monotonic() + limits.read_timeout_s
        self._data = bytearray()
        self._piece_bytes = PIECE_BYTES
        self._tries = 0
        self._empty_tries = 0

    def run(self) -> bytes:
        while len(self._data) < self._length:
            wanted = min(self._piece_bytes, self._length - len(self._data))
            came = bytearray()
            self._tries += 1
            try:
                self._fetch(came, wanted)
                error = None
            except (FileNotFoundError, PermissionError) as denied:
                raise _denied(denied, self._where) from denied
            except OSError as failure:
                error = failure
            if len(came) > wanted:
                raise ShardError(
                    f"the store sent {len(came)} bytes when asked for {wanted}: it ignores ranges",
                    where=self._where,
                    fix="keep the shards in a store that supports ranged reads, or copy them to a disk",
                )
            self._data += came
            if len(came) == wanted:
                self._empty_tries = 0
                continue
            try:
                # EINVAL is how stores (s3 among them) say that a range begins behind the end.
                if (error is None or error.errno == errno.EINVAL) and self._at_end():
                    break
            except OSError as failure:
                error = failure
            self._failed(len(came), error or ConnectionError(f"got {len(came)} of {wanted} bytes"))
        return bytes(self._data)

    @property
    def _where(self) -> str:
        return f"{self._url}, byte {self._offset + len(self._data)}"

    def _remaining_s(self) -> float:
        return max(0.01, self._deadline - time.monotonic())

    def _fetch(self, came: bytearray, wanted: int) -> None:
        system = _filesystem(self._url)
        start = self._offset + len(self._data)
        silence_s = min(self._limits.timeout_s, self._remaining_s())
        if _is_http(self._url):
            fetching = fetch_http(system, self._url, start, wanted, into=came, timeout_s=silence_s)
            _run(system, fetching, timeout_s=self._remaining_s())
        else:
            came += _call(system, "cat_file", self._url, start=start, end=start + wanted, timeout_s=silence_s)

    def _at_end(self) -> bool:
        info = _info(_filesystem(self._url), self._url, min(self._limits.timeout_s, self._remaining_s()))
        return self._offset + len(self._data) >= int(info["size"])

    def _failed(self, num_bytes: int, error: OSError) -> None:
        """Count a failure and pause, or raise.

        A failure that brought many bytes is progress, not one more failure in a row: a store that closes
        every connection early is slow, not broken.
        """
        self._empty_tries = 1 if num_bytes >= LEAST_PIECE_BYTES else self._empty_tries + 1
        self._piece_bytes = max(LEAST_PIECE_BYTES, self._piece_bytes // 2)
        pause_s = _pause_s(self._empty_tries)
        is_late = time.monotonic() + pause_s >= self._deadline
        if is_late or self._empty_tries >= self._limits.attempts:
            raise _given_up(self._tries, error, self._where, is_late=is_late) from error
        _tell(self._tries, error, self._where, pause_s)
        time.sleep(pause_s)


def _retried(action: Callable[[Any], ResultT], where: str) -> ResultT:
    """Return ``action`` of the store of the URL ``where``; it is a single request."""
    deadline = time.monotonic() + _limits.read_timeout_s
    for attempt in range(1, _limits.attempts + 1):
        try:
            return action(_filesystem(where))
        except (FileNotFoundError, PermissionError) as error:
            raise _denied(error, where) from error
        except OSError as error:
            pause_s = _pause_s(attempt)
            is_late = time.monotonic() + pause_s >= deadline
            if is_late or attempt == _limits.attempts:
                raise _given_up(attempt, error, where, is_late=is_late) from error
            _tell(attempt, error, where, pause_s)
            time.sleep(pause_s)
    raise ValueError("attempts must be at least 1")


def _info(system: Any, url: str, timeout_s: float) -> dict[str, Any]:
    if _is_http(url):
        return _run(system, http_info(system, url, timeout_s=timeout_s), timeout_s=timeout_s)
    info: dict[str, Any] = _call(system, "info", url, timeout_s=timeout_s)
    return info


def _call(system: Any, name: str, *arguments: Any, timeout_s: float, **options: Any) -> Any:
    """Call a method of a file system, for ``timeout_s`` at most."""
    if getattr(system, "async_impl", False):
        return _run(system, getattr(system, f"_{name}")(*arguments, **options), timeout_s=timeout_s)
    outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(getattr(system, name)(*arguments, **options))
        except BaseException as error:  # noqa: BLE001 - a thread boundary: the caller raises it
            outcome.set_exception(error)

    # It cannot be stopped, only left: a daemon, so that it never holds up the end of the process.
    threading.Thread(target=run, name="remote-call", daemon=True).start()
    return _result(outcome, timeout_s, wait_s=timeout_s)


def _run(system: Any, coroutine: Coroutine[Any, Any, ResultT], *, timeout_s: float) -> ResultT:
    """Run ``coroutine`` in the loop of ``system``; after ``timeout_s`` it is cancelled."""

    async def bounded() -> ResultT:
        return await asyncio.wait_for(coroutine, timeout_s)

    future = asyncio.run_coroutine_threadsafe(bounded(), system.loop)
    return _result(future, timeout_s, wait_s=timeout_s + _CANCEL_S)


def _result(future: concurrent.futures.Future[ResultT], timeout_s: float, *, wait_s: float) -> ResultT:
    try:
        return future.result(wait_s)
    except TimeoutError as error:
        raise _StoreError(f"no answer within {timeout_s:g} s") from error
    except (OmniError, OSError):
        raise
    except Exception as error:  # the clients of stores raise trees of their own, for the network too
        raise _StoreError(f"{type(error).__name__}: {error}") from error


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _filesystem(url: str) -> Any:
    protocol = url.partition("://")[0]
    try:
        # By process: the loop and the connections of a file system do not survive a fork.
        return _filesystem_of(protocol, os.getpid())
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"cannot open {protocol}:// shards: {error}",
            fix="install the fsspec package of this store; "
            "`pip install 'omni-pipeline[remote]'` has those of http and s3",
        ) from error


@functools.lru_cache(maxsize=16)
def _filesystem_of(protocol: str, pid: int) -> Any:
    import fsspec  # only remote shards need it

    # What a store holds is asked anew each time: listings kept from before hide a shard that was replaced.
    return fsspec.filesystem(protocol, use_listings_cache=False)


def _pause_s(failures: int) -> float:
    return FIRST_PAUSE_S * 2.0 ** (failures - 1)


def _tell(tries: int, error: OSError, where: str, pause_s: float) -> None:
    logger.warning("try %d of %s failed (%s); next in %.1f s", tries, where, _reason(error), pause_s)


def _reason(error: OSError) -> str:
    return str(error) or type(error).__name__


def _denied(error: OSError, where: str) -> ShardError:
    if isinstance(error, FileNotFoundError):
        return ShardError("there is no such shard", where=where, fix="check the URL")
    return ShardError(
        f"the store refuses access: {error}", where=where, fix="check the credentials that this process has"
    )


def _given_up(tries: int, error: OSError, where: str, *, is_late: bool) -> ShardError:
    times = "once" if tries == 1 else f"{tries} times"
    setting = "read_timeout_s" if is_late else "attempts"
    return ShardError(
        f"storage failed {times}, last: {_reason(error)}",
        where=where,
        fix=f"check the network and the store, or raise loader.storage.{setting}",
    )
