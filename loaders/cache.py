"""Remote shards kept whole on a disk of the node, for all ranks and decode workers there.

The folder is all that processes share; there is no server, no barrier and no shared memory, so nothing of a
killed process is in the way of the next. ``NAME.shard`` is a whole shard (see ``cached_file``). ``NAME.part``
is one on its way: whoever holds its lock fetches it, and renames it when it is whole. Locks are ``flock``:
the kernel takes them back when their process ends, however it ends, and a ``.part`` without one is rubbish.

A read takes the shard from the cache, or waits a bounded time for it to be fetched (in a thread, which goes
on when the read does not wait any longer), or reads the store directly. All that can go wrong with the cache
(a full disk, damage, a stuck process) ends in direct reads, never in a failed or endless one.

The shards used least recently make room, but none that was used within ``keep_s``: where the shards that are
read by turns do not fit, they would chase each other out, each fetched whole for one sample. One that is
being read is locked (shared) for that moment, and passed by.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loaders.cached_file import BLOCK_BYTES, CachedFileWriter, DamagedFileError, RemoteShard, read_cached
from loaders.remote import set_limits
from loaders.storage import is_remote, read_range, stat_shard
from loaders.storage_config import StorageConfig
from omni_pipeline.core.errors import ShardError

logger = logging.getLogger(__name__)

KEEP_S = 60.0
MAX_DOWNLOADS = 2
PIECE_BYTES = 128 * BLOCK_BYTES
REST_S = 600.0
"""How long a process does not fill a cache whose disk failed, nor fetch a shard that could not be fetched."""

_POLL_S = 0.05
_FOLDER_WAIT_S = 5.0
_TOUCH_S = 5.0


class ShardCache:
    """One process's hand on the cache of its node; may be used by several threads.

    Args:
        folder: On a disk of this node; made if missing.
        limit_bytes: Most bytes of shards, whole and on their way.
        wait_s: Longest wait of a read for a shard to be fetched, seconds.
        keep_s: A shard used so recently makes no room, seconds.
    """

    def __init__(self, folder: Path, *, limit_bytes: int, wait_s: float, keep_s: float = KEEP_S) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._wait_s = wait_s
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._shards: dict[str, RemoteShard] = {}
        self._downloads: dict[str, threading.Thread] = {}
        self._no_waiting: set[str] = set()
        self._resting: dict[str, float] = {}
        self._told: set[str] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._folder_lock():
                self._sweep()
        except OSError as error:
            self._rest_all(error)

    def read(self, url: str, offset: int, length: int) -> bytes | None:
        """Return these bytes of ``url`` if they are, or come in time, in the cache; else None.

        Raises:
            ShardError: The store does not answer for the shard.
        """
        shard = self._identify(url)
        if not shard.version:
            self._tell(
                url, "%s is not kept: its store gives neither a tag nor a time to tell a change by", url
            )
            return None
        if offset + length > shard.size:
            return None
        deadline = time.monotonic() + (0.0 if shard.name in self._no_waiting else self._wait_s)
        while True:
            data = self._read_kept(shard, offset, length)
            if data is not None or not self._is_coming(shard):
                return data
            if time.monotonic() >= deadline:
                self._no_waiting.add(shard.name)
                return None
            time.sleep(_POLL_S)

    def close(self, timeout_s: float = 60.0) -> None:
        """Wait for the fetches of this process; without it they end with the process, unfinished."""
        for thread in list(self._downloads.values()):
            thread.join(timeout_s)

    def _identify(self, url: str) -> RemoteShard:
        """Ask the store once per process: a run does not follow shards that change under it."""
        found = self._shards.get(url)
        if found is None:
            stat = stat_shard(url)
            found = self._shards[url] = RemoteShard(url, stat.size, stat.version)
        return found

    def _read_kept(self, shard: RemoteShard, offset: int, length: int) -> bytes | None:
        path = self._path(shard, "shard")
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            # Not given only in the moment when it is thrown out; then the open file is read all the same.
            _try_lock(descriptor, shared=True)
            data = read_cached(descriptor, shard, offset, length)
            if time.time() - os.fstat(descriptor).st_mtime > _TOUCH_S:
                with suppress(PermissionError):  # another user's file
                    os.utime(descriptor)
        except DamagedFileError as error:
            logger.warning("the kept copy of %s (%s) %s; it is fetched again", shard.url, path, error)
            _remove_same(path, descriptor)
            return None
        except OSError as error:
            self._rest_all(error)
            return None
        finally:
            os.close(descriptor)
        self._no_waiting.discard(shard.name)
        return data

    def _is_coming(self, shard: RemoteShard) -> bool:
        """Return whether the shard is being fetched, by this process or another; begins it if none does."""
        now = time.monotonic()
        with self._lock:
            running = self._downloads.get(shard.name)
            if running is not None and running.is_alive():
                return True
            if max(self._resting.get(shard.name, 0.0), self._resting.get("", 0.0)) > now:
                return False
            if sum(thread.is_alive() for thread in self._downloads.values()) >= MAX_DOWNLOADS:
                return False
            try:
                descriptor = self._take(shard)
            except OSError as error:
                self._rest_all(error)
                return False
            if descriptor is None:
                return True
            thread = threading.Thread(
                target=self._download, args=(shard, descriptor), name="shard-cache", daemon=True
            )
            self._downloads = {name: item for name, item in self._downloads.items() if item.is_alive()}
            self._downloads[shard.name] = thread
            thread.start()
        return True

    def _take(self, shard: RemoteShard) -> int | None:
        """Return the part file, locked, or None where another has it."""
        path = self._path(shard, "part")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # Another may have renamed or swept the file between opening and locking it, or have made it whole.
        if _try_lock(descriptor) and _is_same(path, descriptor):
            if not self._path(shard, "shard").exists():
                return descriptor
            path.unlink()
        os.close(descriptor)
        return None

    def _download(self, shard: RemoteShard, descriptor: int) -> None:
        """Fetch the shard into the locked part file ``descriptor`` and close that."""
        path = self._path(shard, "part")
        is_whole = False
        try:
            if not self._reserve(shard, descriptor):
                return
            writer = CachedFileWriter(descriptor, shard)
            for offset in range(0, shard.size, PIECE_BYTES):
                writer.add(read_range(shard.url, offset, min(PIECE_BYTES, shard.size - offset)))
            writer.finish()
            stat = stat_shard(shard.url)
            if (stat.size, stat.version) != (shard.size, shard.version):
                raise ShardError("the shard was replaced while it was read", where=shard.url)
            with self._folder_lock():
                os.replace(path, self._path(shard, "shard"))
            is_whole = True
        except ShardError as error:
            self._resting[shard.name] = time.monotonic() + REST_S
            logger.warning("%s is not kept, but read directly: %s", shard.url, error.what)
        except OSError as error:
            self._rest_all(error)
        finally:
            if not is_whole:
                _remove_same(path, descriptor)
            os.close(descriptor)

    def _reserve(self, shard: RemoteShard, descriptor: int) -> bool:
        """Make room for the shard, and make its part file as large as it will be, so that others count it."""
        if shard.file_bytes > self._limit_bytes:
            self._resting[shard.name] = float("inf")
            self._tell(
                shard.url,
                "%s is not kept: it has %d bytes, loader.storage.cache_bytes is %d",
                shard.url,
                shard.size,
                self._limit_bytes,
            )
            return False
        os.ftruncate(descriptor, 0)  # a part of a process that was killed
        with self._folder_lock():
            if not self._make_room(shard.file_bytes):
                self._resting[shard.name] = time.monotonic() + self._keep_s
                self._tell(
                    "room",
                    "the cache %s is full of shards that are in use, so others are read directly; "
                    "raise loader.storage.cache_bytes to keep more",
                    self._folder,
                )
                return False
            space = os.statvfs(self._folder)
            if space.f_bavail * space.f_frsize < shard.file_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(descriptor, shard.file_bytes)
        return True

    def _make_room(self, num_bytes: int) -> bool:
        """Remove shards until ``num_bytes`` more fit; return whether they do."""
        self._sweep()
        files = _files(self._folder)
        used = sum(stat.st_size for stat, _ in files)
        oldest = time.time() - self._keep_s
        for stat, path in sorted(files, key=lambda item: item[0].st_mtime):
            if used + num_bytes <= self._limit_bytes:
                break
            if path.suffix == ".shard" and stat.st_mtime <= oldest and _remove_unused(path):
                used -= stat.st_size
        return used + num_bytes <= self._limit_bytes

    def _sweep(self) -> None:
        """Remove what processes that were killed have left: parts that nobody holds."""
        for _, path in _files(self._folder):
            if path.suffix == ".part":
                _remove_unused(path)

    @contextmanager
    def _folder_lock(self) -> Iterator[None]:
        """One process at a time counts bytes and removes files; a moment, so the wait for it is short."""
        descriptor = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            deadline = time.monotonic() + _FOLDER_WAIT_S
            while not _try_lock(descriptor):
                if time.monotonic() >= deadline:
                    raise OSError(errno.EAGAIN, f"its lock was not free for {_FOLDER_WAIT_S:g} s")
                time.sleep(_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def _path(self, shard: RemoteShard, ending: str) -> Path:
        return self._folder / f"{shard.name}.{ending}"

    def _rest_all(self, error: OSError) -> None:
        self._resting[""] = time.monotonic() + REST_S
        self._tell(
            "disk",
            "the cache %s cannot take shards (%s), so they are read directly; free some space there, "
            "or lower loader.storage.cache_bytes",
            self._folder,
            error.strerror or error,
        )

    def _tell(self, what: str, message: str, *arguments: object) -> None:
        """Warn once per process of each ``what``."""
        if what not in self._told:
            self._told.add(what)
            logger.warning(message, *arguments)


_settings = StorageConfig()
_cache: ShardCache | None = None
_cache_pid = 0


def set_up_storage(config: StorageConfig) -> None:
    """Read remote shards of this process as ``config`` says, from here on; the same again changes nothing."""
    global _settings, _cache, _cache_pid
    if config == _settings and _cache_pid == os.getpid():
        return
    set_limits(config)
    _settings, _cache_pid = config, os.getpid()
    _cache = None
    if config.cache_dir is not None:
        _cache = ShardCache(config.cache_dir, limit_bytes=config.cache_bytes, wait_s=config.cache_wait_s)


def read_payload(url: str, offset: int, length: int) -> bytes:
    """Return what ``storage.read_range`` does; of a remote shard from the node's cache, if that is set up.

    Raises:
        ShardError: As ``read_range``.
    """
    if length and _cache is not None and is_remote(url):
        if _cache_pid != os.getpid():
            set_up_storage(_settings)  # threads of the parent are not in its fork
        data = _cache.read(url, offset, length)
        if data is not None:
            return data
    return read_range(url, offset, length)


def _files(folder: Path) -> list[tuple[os.stat_result, Path]]:
    files: list[tuple[os.stat_result, Path]] = []
    for path in folder.iterdir():
        if path.suffix in (".shard", ".part"):
            with suppress(FileNotFoundError):  # a part that just ended
                files.append((path.stat(), path))
    return files


def _try_lock(descriptor: int, *, shared: bool = False) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same(path: Path, descriptor: int) -> bool:
    """Return whether ``path`` still names the open file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


def _remove_same(path: Path, descriptor: int) -> None:
    if _is_same(path, descriptor):
        path.unlink(missing_ok=True)


def _remove_unused(path: Path) -> bool:
    """Remove a file that no process holds; return whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if not _try_lock(descriptor):
            return False
        _remove_same(path, descriptor)
        return True
    finally:
        os.close(descriptor)
