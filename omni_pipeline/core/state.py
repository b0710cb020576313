"""What resumes: the ``Stateful`` protocol, and the check that a state fits this run.

A state is JSON-plain. Its head is ``{"version", "identity", "saved_with"}``: ``identity`` must be equal,
``saved_with`` is for people only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from omni_pipeline.core.errors import StateMismatchError


class Stateful(Protocol):
    """The names and meaning are torch's, so DCP takes our objects as they are."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a fresh object needs to continue; cheap, without side effects."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; validates all of it before changing anything."""
        ...


def check_head(state: Mapping[str, Any], *, version: int, identity: Mapping[str, Any], where: str) -> None:
    """Raise unless ``state`` has this version and identity.

    Raises:
        StateMismatchError: Names the first differing key with both values.
    """
    if state.get("version") != version:
        raise StateMismatchError(
            f"state has version {state.get('version')!r}, this program reads {version}",
            where=where,
            fix="resume with the program that wrote it, or start a new run.dir",
        )
    saved = state.get("identity", {})
    difference = _first_difference(saved, identity)
    if difference is not None:
        name, old, new = difference
        raise StateMismatchError(
            f"{name!r} was {_shown(old)} when saved, is {_shown(new)} here",
            where=where,
            fix="put it back, or start a new run.dir",
        )


def _first_difference(saved: Any, here: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return (dotted name, saved, here) of the first leaf that differs."""
    if saved == here:
        return None
    if not (isinstance(saved, Mapping) and isinstance(here, Mapping)):
        return name, saved, here
    for key in sorted({*saved, *here}):
        place = f"{name}.{key}" if name else str(key)
        found = _first_difference(saved.get(key), here.get(key), place)
        if found is not None:
            return found
    return name, saved, here


def _shown(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
