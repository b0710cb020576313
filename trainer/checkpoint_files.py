"""The files of a checkpoint: how they are named, when they are complete, and the state of the loader in them.

A folder of files is complete or invisible: all is written under a temporary name, flushed, sealed with a list
of the files and their sizes, and only then renamed (rename is atomic). A seal that does not fit is none.

Free of torch, so that what only wants to know where a run stands (``omni plan``) need not load it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SEAL_NAME = "complete.json"
STATE_NAME = "state.json"
LOADER_NAME = "loader.json"
TENSORS_NAME = "tensors"
TEMPORARY_PREFIX = ".tmp-"
_STEP_NAME = re.compile(r"step-(\d{8,})")


def path_of(folder: Path, num_steps: int) -> Path:
    """Return where the checkpoint after ``num_steps`` steps lies."""
    return folder / f"step-{num_steps:08d}"


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """Return (steps done, path) of the folders named like checkpoints, by step; complete or not."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _STEP_NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in found)


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in ``folder``, or None."""
    for _, path in reversed(numbered(folder)):
        if is_complete(path):
            return path
    return None


def is_complete(path: Path) -> bool:
    """Return whether ``path`` has its seal and every file has the size that the seal says."""
    try:
        sizes = json.loads((path / SEAL_NAME).read_text(encoding="utf-8"))["sizes_bytes"]
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def read_loader_state(path: Path) -> dict[str, Any]:
    """Return the loader's state of a complete checkpoint."""
    state: dict[str, Any] = json.loads((path / LOADER_NAME).read_text(encoding="utf-8"))
    return state


@contextlib.contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """Give a folder beside ``path`` to write into; at the end it becomes ``path``, at an error it goes.

    What a killed process left of an earlier one is removed first.
    """
    draft = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        publish(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def seal(draft: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write ``files`` (JSON by name) into ``draft``, then the list that tells that all is there."""
    for name, content in files.items():
        (draft / name).write_text(json.dumps(content), encoding="utf-8")
    written = [item for item in sorted(draft.rglob("*")) if item.is_file()]
    sizes = {str(item.relative_to(draft)): item.stat().st_size for item in written}
    (draft / SEAL_NAME).write_text(json.dumps({"sizes_bytes": sizes}), encoding="utf-8")


def publish(draft: Path, path: Path) -> None:
    """Flush all of ``draft``, then make it ``path``, in the place of what was there."""
    for item in [*draft.rglob("*"), draft]:
        _flush(item)
    if path.exists():
        remove(path)
    draft.rename(path)
    _flush(path.parent)


def remove(path: Path) -> None:
    """Remove a folder: renamed first, so that one half removed never looks complete."""
    doomed = path.with_name(f"{TEMPORARY_PREFIX}removed-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
