"""The files of a checkpoint: how they are named, when they are complete, and the state of the loader in them.

Free of torch, so that what only wants to know where a run stands (``omni plan``) need not load it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

SEAL_NAME = "complete.json"
STATE_NAME = "state.json"
LOADER_NAME = "loader.json"
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
