"""What a saved loader state must have in common with the run that loads it.

All of the identity must be equal, but for its sources: a run may add, remove and reweight them, and those it
keeps go on where they were. A source that is kept must be the same, since positions are places in it, and so
must be what it leaves out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from loaders.filters import Filter
from loaders.loader_config import LoaderConfig
from omni_pipeline.core.errors import StateMismatchError
from omni_pipeline.core.state import check_head

logger = logging.getLogger(__name__)

STATE_VERSION = 3
_BY_SOURCE = ("sources", "filters")


def full_identity(order: Mapping[str, Any], config: LoaderConfig) -> dict[str, Any]:
    """Return the identity of a loader: that of its order, and how it decodes.

    How media are decoded changes the numbers that are trained on, though not the order.
    """
    return {**order, "loader": config.model_dump(include={"video_backend", "max_image_pixels"})}


class Identified(Protocol):
    """What the identity has of a source."""

    @property
    def name(self) -> str:
        """Unique among the sources of a run."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest of all that decides which samples its positions are."""
        ...

    @property
    def filter(self) -> Filter:
        """What it leaves out."""
        ...


def sources_identity(sources: Iterable[Identified]) -> dict[str, Any]:
    """Return the part of the identity that is by source."""
    every = list(sources)
    filters = {source.name: source.filter.identity for source in every if source.filter.identity}
    return {"sources": {source.name: source.fingerprint for source in every}, "filters": filters}


def check_identity(
    state: Mapping[str, Any], *, version: int, identity: Mapping[str, Any], where: str, announce: bool
) -> None:
    """Raise unless ``state`` fits a run of ``identity``.

    Args:
        state: With the head of ``core.state``.
        version: That this program reads.
        identity: Of the run; its "sources", if there, are fingerprints by name, its "filters" are
            ``Filter.identity`` by name.
        where: For messages.
        announce: Log the sources that were added or removed.

    Raises:
        StateMismatchError: Another version, a setting that differs, or a source that changed.
    """
    saved = state.get("identity")
    if not isinstance(saved, Mapping) or not _is_readable(saved):
        raise StateMismatchError(
            "state has no readable identity", where=where, fix="resume from another checkpoint"
        )
    bare = {**state, "identity": _without_sources(saved)}
    check_head(bare, version=version, identity=_without_sources(identity), where=where)
    _check_sources(saved.get("sources", {}), identity.get("sources", {}), where=where, announce=announce)
    for name in sorted(saved.get("sources", {}).keys() & identity.get("sources", {}).keys()):
        before, here = saved.get("filters", {}).get(name, {}), identity.get("filters", {}).get(name, {})
        _check_filter(name, before, here, where=where)


def step_and_lanes(state: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
    """Return the next step and the lanes of a loader's state.

    Raises:
        StateMismatchError: It is damaged.
    """
    step, lanes = state.get("step"), state.get("lanes")
    if not isinstance(step, int) or step < 0 or not isinstance(lanes, Mapping):
        raise StateMismatchError(
            f"loader state has step {step!r} and lanes of type {type(lanes).__name__}",
            fix="resume from another checkpoint: this one is damaged",
        )
    return step, lanes


def _is_readable(identity: Mapping[str, Any]) -> bool:
    sources, filters = (identity.get(name, {}) for name in _BY_SOURCE)
    return (
        isinstance(sources, Mapping)
        and isinstance(filters, Mapping)
        and all(isinstance(item, Mapping) for item in filters.values())
    )


def _check_filter(name: str, saved: Mapping[str, Any], present: Mapping[str, Any], *, where: str) -> None:
    for part, title, verb, shown in (
        ("where", "filter", "was", _condition),
        ("deny", "deny-list", "had", _entries),
    ):
        if saved.get(part) != present.get(part):
            now = {"was": "is", "had": "has"}[verb]
            raise StateMismatchError(
                f"the {title} of source {name!r} {verb} {shown(saved.get(part))} when saved, "
                f"{now} {shown(present.get(part))} here",
                where=where,
                fix=f"put its `{part}` back, give the source another name to read it from its beginning, or "
                "start a new run.dir",
            )


def _condition(text: str | None) -> str:
    return "not set" if text is None else f"`{text}`"


def _entries(deny: Any) -> str:
    if not isinstance(deny, Mapping):
        return "no entries"
    number = deny.get("entries")
    return f"{number} {'entry' if number == 1 else 'entries'} (digest {deny.get('digest')})"


def _without_sources(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in identity.items() if name not in _BY_SOURCE}


def _check_sources(
    saved: Mapping[str, str], present: Mapping[str, str], *, where: str, announce: bool
) -> None:
    changed = ", ".join(
        repr(name) for name in sorted(present) if saved.get(name, present[name]) != present[name]
    )
    if changed:
        raise StateMismatchError(
            f"the data of source {changed} changed since the state was saved: its places mean other samples",
            where=where,
            fix="put the shards, the layout, the tokenizer (and the epochs of a source with fewer rows than "
            "lanes) back, give the source another name to read it from its beginning, or start a new run.dir",
        )
    if not announce:
        return
    if added := sorted(present.keys() - saved.keys()):
        logger.warning("sources added since the state was saved, read from their start: %s", ", ".join(added))
    if removed := sorted(saved.keys() - present.keys()):
        logger.warning(
            "sources removed since the state was saved, their place is lost: %s", ", ".join(removed)
        )
