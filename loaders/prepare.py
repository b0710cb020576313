r"""Raw media to indexed tar shards: from a folder, or from a manifest of JSON lines.

A folder: files with the same stem are one sample (``a/cat.jpg`` and ``a/cat.txt``), its key the path up to
the suffix. The suffix starts at the first dot that is followed by nothing but words (``22.05.png`` is
``22.05`` and ``png``; ``x.question.txt`` is ``x`` and ``question.txt``).

A manifest: one object per line, one sample per object. By field:

- ``key`` (or ``__key__``): the sample's key; without it the line number is the key.
- ``text``, ``txt``, or any name ending in ``.txt``: the text itself, member ``txt`` or as named.
- ``image``, ``video``, ``audio``: the path of a file, beside the manifest; its member is the file's suffix.
- a name that is or ends in a media suffix (``jpg``, ``left.png``): a path too; the name is the member.
- any other string: a path; the member is the field's name, a dot, and the file's suffix.
- numbers, lists, objects: kept together as member ``json``.

Shards are WebDataset tars, written beside their final name and moved when complete. A call that fails or is
ended by Ctrl-C or SIGTERM removes what it wrote. One that is killed cannot: its ``.tar.part`` stays, and
while there is one the next call refuses the place. The order is that of the sorted paths, or of the lines;
nothing depends on the clock, so equal input gives equal shards.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from loaders.decode.text import load_tokenizer
from loaders.index import IndexReport, index_shards, modality_of
from loaders.index_file import INDEX_SUFFIX, index_path
from loaders.index_rows import OTHER
from omni_pipeline.core.errors import ConfigError, DataError

MAX_KEY_CHARS = 200
TEXT_NAMES = frozenset({"text", "txt"})
KEY_NAMES = ("key", "__key__")
MEDIA_NAMES = frozenset({"image", "video", "audio"})
_NAME = re.compile(r"(.+?)((?:\.[A-Za-z_][\w-]*)+)", re.DOTALL)
_FIELD = re.compile(r"[\w-]+(\.[\w-]+)*")
_NOT_IN_KEY = re.compile(r"[\x00-\x1f\x7f.\\]")


@dataclass(frozen=True)
class PrepareSummary:
    """What ``prepare`` made.

    Args:
        shards: Paths, in order.
        num_samples: In all shards.
        num_bytes: Size of all payloads.
        num_members: By modality, or "other".
        num_skipped: Files of a folder that belong to no sample.
        reports: Of the index, one per shard.
    """

    shards: tuple[str, ...]
    num_samples: int
    num_bytes: int
    num_members: dict[str, int]
    num_skipped: int
    reports: tuple[IndexReport, ...]


@dataclass(frozen=True)
class _Entry:
    """A sample to be written: its wish for a key, and what fills each member."""

    key: str
    members: Mapping[str, Path | bytes]


class _OpenShard:
    """The one shard that is being written: ``<its name>.part`` until it is complete."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._path = ""

    def open(self, path: str) -> BinaryIO:
        """Begin the shard ``path``; return the file to write to."""
        self._path = path  # first, so that an interruption between the two leaves nothing behind
        self._file = open(_unfinished(path), "wb")  # noqa: SIM115 - closed by `publish` or `discard`
        return self._file

    def publish(self) -> None:
        """Close the file and give it the shard's name."""
        if self._file is not None:
            self._file.close()
            os.replace(_unfinished(self._path), self._path)
            self._file, self._path = None, ""

    def discard(self) -> None:
        """Close and remove the file, if there is one."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk refuses the last buffer again
                self._file.close()
        if self._path:
            Path(_unfinished(self._path)).unlink(missing_ok=True)
        self._file, self._path = None, ""


def _unfinished(shard: str) -> str:
    """Return where ``shard`` (a path, or a pattern of several) lies while it is written."""
    return f"{shard}.part"


@dataclass
class _Tally:
    """What has been written or left out so far."""

    open_shard: _OpenShard = field(default_factory=_OpenShard)
    shards: list[str] = field(default_factory=list)
    num_samples: int = 0
    num_bytes: int = 0
    num_members: Counter[str] = field(default_factory=Counter)
    num_skipped: int = 0


def prepare(
    inputs: Path | Sequence[Path],
    out: Path,
    *,
    max_count: int = 1000,
    max_bytes: int = 1 << 30,
    name: str = "shard",
    tokenizer_path: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PrepareSummary:
    """Write the samples of ``inputs`` as ``out/<name>-000000.tar`` and so on, and index them.

    Everything named is checked before the first byte is written. No shard is ever empty. In the main thread,
    SIGTERM takes effect only after what was written is removed; one that was ignored stays so.

    Args:
        inputs: Folders or ``.jsonl`` manifests.
        max_count: Most samples of a shard.
        max_bytes: A shard that has reached this payload size is closed.
        tokenizer_path: Count tokens with this ``tokenizer.json``; None counts bytes.
        progress: Called with the number of samples written so far, and of all.

    Raises:
        ConfigError: An input is missing or holds no sample, a manifest names a missing file or is no JSON
            (with the line), ``out`` is no folder or already has shards of this name, complete or not, or
            ``name`` cannot begin a file's name.
        DataError: A shard cannot be written.
    """
    if max_count < 1 or max_bytes < 1:
        raise ConfigError("max_count and max_bytes must be at least 1", fix="leave them out for the defaults")
    paths = [inputs] if isinstance(inputs, Path) else list(inputs)
    _check_place(out, name)
    load_tokenizer(tokenizer_path)
    num_samples = sum(1 for _ in _entries(paths, _Tally()))
    if not num_samples:
        raise ConfigError(
            f"no sample in {', '.join(map(str, paths))}",
            fix="name a folder with media or text files, or a .jsonl manifest",
        )
    tally = _Tally()
    on_sample = None if progress is None else lambda: progress(tally.num_samples, num_samples)
    with _unwound_by_sigterm(), _all_or_nothing(out, tally):
        _write_shards(_entries(paths, tally), out, name, tally, (max_count, max_bytes), on_sample)
        reports = index_shards(tally.shards, tokenizer_path=tokenizer_path)
    return PrepareSummary(
        shards=tuple(tally.shards),
        num_samples=tally.num_samples,
        num_bytes=tally.num_bytes,
        num_members=dict(sorted(tally.num_members.items())),
        num_skipped=tally.num_skipped,
        reports=tuple(reports),
    )


def _check_place(out: Path, name: str) -> None:
    if not name or set(name) & set("/\\\0"):
        raise ConfigError(
            f"{name!r} cannot begin the name of a shard",
            fix="give a name without slashes, e.g. 'photos'; the folder is set apart",
        )
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file, not a folder", fix="choose a folder for the shards")
    pattern = f"{glob.escape(name)}-*.tar"
    old = sorted(out.glob(pattern))
    if cut := sorted(out.glob(_unfinished(pattern))):
        raise ConfigError(
            f"an earlier call was killed: the shards of this name ({len(old)}) are not all of its samples",
            where=str(cut[0]),
            fix=f"remove those shards, their {INDEX_SUFFIX} files and the .part, or choose another folder or "
            "name; if that call still runs, wait for it",
        )
    if old:
        raise ConfigError(
            f"{out} already holds {len(old)} shards of this name, e.g. {old[0].name}",
            fix="choose another folder or name, or remove them",
        )


class _TerminatedError(BaseException):
    """SIGTERM came. Not an ``Exception``, so that nothing takes it for a failure that can be passed over."""


@contextlib.contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """Let the first SIGTERM unwind the block, then take effect as it would have without this.

    Does nothing outside the main thread, where signals cannot be handled, or if SIGTERM is ignored or was
    set up by another language.
    """
    previous = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or previous in (signal.SIG_IGN, None):
        yield
        return
    came = False

    def unwind(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if not came:  # another one must not end the clean-up
            came = True
            raise _TerminatedError

    try:
        signal.signal(signal.SIGTERM, unwind)
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        if came:
            signal.raise_signal(signal.SIGTERM)
            # Only here if the caller has a handler that returns; the call was cut short all the same.
            raise SystemExit(128 + signal.SIGTERM) from None


@contextlib.contextmanager
def _all_or_nothing(out: Path, tally: _Tally) -> Iterator[None]:
    """Remove the shards in ``tally`` and their indexes, and ``out`` if it is new, unless all went well."""
    is_new = not out.exists()
    try:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot make the folder {out}: {error.strerror}", fix="choose another folder"
            ) from error
        yield
    except BaseException as error:
        for shard in tally.shards:
            Path(shard).unlink(missing_ok=True)
            Path(index_path(shard)).unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):  # it holds something else by now, or was never made
                out.rmdir()
        if isinstance(error, OSError):
            raise DataError(
                f"cannot write shards: {error.strerror}",
                where=str(out),
                fix="free some space, or mend the disk",
            ) from error
        raise


def _write_shards(
    entries: Iterator[_Entry],
    out: Path,
    name: str,
    tally: _Tally,
    limits: tuple[int, int],
    on_sample: Callable[[], None] | None,
) -> None:
    keys: set[str] = set()
    writer: Any = None
    try:
        for entry in entries:
            # Made at the first sample: the writer opens a file at once, and none may stay empty.
            writer = writer or _shard_writer(out, name, tally, limits)
            content = {suffix: _payload(source) for suffix, source in entry.members.items()}
            writer.write({"__key__": _free_key(entry.key, keys), **content})
            tally.num_samples += 1
            tally.num_bytes += sum(map(len, content.values()))
            tally.num_members.update(str(modality_of(suffix) or OTHER) for suffix in content)
            if on_sample is not None:
                on_sample()
        if writer is not None:
            writer.close()
    except BaseException:
        # What was being written is cut: it goes, and is never given the name of a shard.
        if writer is not None:
            writer.post = None
            with contextlib.suppress(OSError):  # a full disk refuses the tar's end again
                writer.close()
        tally.open_shard.discard()
        raise


def _shard_writer(out: Path, name: str, tally: _Tally, limits: tuple[int, int]) -> Any:
    from webdataset.writer import ShardWriter  # it brings much that only this command needs

    def start(path: str) -> BinaryIO:
        return tally.open_shard.open(path)

    def finish(path: str) -> None:
        tally.shards.append(path)  # first, so that an interruption between the two leaves nothing behind
        tally.open_shard.publish()

    pattern = str(out / name).replace("%", "%%") + "-%06d.tar"
    return ShardWriter(
        pattern,
        maxcount=limits[0],
        maxsize=limits[1],
        post=finish,
        opener=start,
        verbose=0,
        encoder=False,
        mtime=0,
    )


def _payload(source: Path | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return source.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {source}: {error.strerror}", fix="check the file and its permissions"
        ) from error


def _free_key(wish: str, taken: set[str]) -> str:
    """Return ``wish`` made a valid key (no dot, no control character, not too long) that is not taken yet."""
    base = _NOT_IN_KEY.sub("_", wish).strip("/ ")[:MAX_KEY_CHARS] or "sample"
    key, number = base, 2
    while key in taken:
        key, number = f"{base}-{number}", number + 1
    taken.add(key)
    return key


def _entries(paths: Sequence[Path], tally: _Tally) -> Iterator[_Entry]:
    for path in paths:
        if path.is_dir():
            yield from _folder_entries(path, tally)
        elif path.suffix == ".jsonl" and path.is_file():
            yield from _manifest_entries(path)
        else:
            raise ConfigError(
                f"{path} is neither a folder nor a .jsonl manifest"
                if path.exists()
                else f"there is no {path}",
                fix="name a folder with media or text files, or a .jsonl manifest",
            )


def _folder_entries(root: Path, tally: _Tally) -> Iterator[_Entry]:
    samples: dict[str, dict[str, Path | bytes]] = {}
    for path in sorted(item for item in root.rglob("*") if item.is_file()):
        match = _NAME.fullmatch(path.name)
        if match is None or path.name.startswith("."):
            tally.num_skipped += 1
            continue
        key = (path.relative_to(root).parent / match[1]).as_posix()
        samples.setdefault(key, {})[match[2][1:]] = path
    for key, members in samples.items():
        if any(modality_of(suffix) for suffix in members):
            yield _Entry(key, members)
        else:
            tally.num_skipped += len(members)


def _manifest_entries(path: Path) -> Iterator[_Entry]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _line_entry(line, number, path)


def _line_entry(line: bytes, number: int, path: Path) -> _Entry:
    where = f"{path}, line {number}"
    try:
        content = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise ConfigError(f"line is no JSON: {error}", where=where, fix="mend or remove the line") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"line holds a {type(content).__name__}, not an object",
            where=where,
            fix="mend or remove the line",
        )
    key = next((str(content.pop(name)) for name in KEY_NAMES if name in content), f"{number:09d}")
    members: dict[str, Path | bytes] = {}
    extra: dict[str, Any] = {}
    for name, value in content.items():
        if not isinstance(value, str):
            extra[name] = value
            continue
        suffix, payload = _member(name, value, path.parent, where)
        if suffix in members:
            raise ConfigError(
                f"two fields give member {suffix!r}", where=where, fix="name them apart, e.g. left.jpg"
            )
        members[suffix] = payload
    if not any(modality_of(suffix) for suffix in members):
        raise ConfigError("sample has neither media nor text", where=where, fix="mend or remove the line")
    if extra:
        members["json"] = json.dumps(extra, sort_keys=True).encode()
    return _Entry(key, members)


def _member(name: str, value: str, folder: Path, where: str) -> tuple[str, Path | bytes]:
    """Return (suffix, payload) of one field of a manifest line."""
    if not _FIELD.fullmatch(name) or name.startswith("_"):
        raise ConfigError(
            f"field {name!r} cannot name a member", where=where, fix="use letters, digits, '-', '_' and '.'"
        )
    if name in TEXT_NAMES or name.endswith(".txt"):
        try:
            return "txt" if name in TEXT_NAMES else name, value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"text of field {name!r} is not valid Unicode: {error.reason}",
                where=where,
                fix="mend the text",
            ) from error
    file = folder / value
    if "\0" in value or not file.is_file():
        raise ConfigError(
            f"field {name!r} names a file that does not exist: {value}",
            where=where,
            fix="paths are relative to the manifest; text belongs in 'text' or a field ending in .txt",
        )
    ending = file.suffix[1:].lower()
    if modality_of(name) is not None:
        return name, file
    return ending if name in MEDIA_NAMES else f"{name}.{ending}", file
