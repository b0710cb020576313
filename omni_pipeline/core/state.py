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
    for name in sorted(set(saved) | set(identity)):
        if saved.get(name) != identity.get(name):
            raise StateMismatchError(
                f"setting {name!r} was {saved.get(name)!r} when saved, is {identity.get(name)!r} here",
                where=where,
                fix="put the setting back, or start a new run.dir: it changes the order of samples",
            )
