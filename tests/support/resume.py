"""Resume anywhere: the test that every stateful iterator has to pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Resumable(Protocol):
    """Yields items and can be told where to go on."""

    def __iter__(self) -> Iterator[Any]:
        """Return the iterator of what follows."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last item."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after that item."""
        ...


def assert_resumes_anywhere(
    build: Callable[[], Resumable],
    *,
    num_items: int,
    same: Callable[[Any, Any], bool] | None = None,
    finish: Callable[[Any], None] | None = None,
) -> None:
    """Check that a fresh object with any saved state yields exactly what the first one yielded after it.

    Every position from 0 (nothing taken) to ``num_items`` is restored, from its state as JSON; all that
    follows is compared; the state after each item must equal that of the unbroken run (so a *second* resume
    is right too, and one chain of resumes after every single item is run); and reading a state must change
    nothing. The shape of the state (its keys, lists as one) must stay the same throughout.

    Args:
        build: Makes a fresh object, always the same.
        num_items: Items that it yields at least; endless ones are compared up to there.
        same: Compares two items; equality by default.
        finish: Called with each object when it is done with, for those that must be closed.
    """
    equal = same if same is not None else lambda left, right: bool(left == right)
    done = finish if finish is not None else lambda _: None
    items, states = _unbroken(build, num_items, done)
    shapes = {json.dumps(_shape(state)) for state in states[1:]}
    assert len(shapes) <= 1, f"the state changes its shape: {sorted(shapes)}"

    for position in range(num_items + 1):
        loader = build()
        loader.load_state_dict(_through_json(states[position]))
        assert loader.state_dict() == states[position], f"a state read back at {position} differs"
        _follow(loader, range(position, num_items), items, states, equal, f"resumed at {position}")
        done(loader)

    state = states[0]
    for position in range(num_items):
        loader = build()
        loader.load_state_dict(_through_json(state))
        _follow(loader, range(position, position + 1), items, states, equal, f"chained resume {position}")
        state = loader.state_dict()
        done(loader)


def _unbroken(
    build: Callable[[], Resumable], num_items: int, done: Callable[[Any], None]
) -> tuple[list[Any], list[dict[str, Any]]]:
    loader = build()
    items: list[Any] = []
    states = [_through_json(loader.state_dict())]
    iterator = iter(loader)
    for _ in range(num_items):
        items.append(next(iterator))
        state = loader.state_dict()
        assert state == loader.state_dict(), "reading the state changes it"
        states.append(_through_json(state))
        assert states[-1] == state, "the state does not survive JSON"
    done(loader)
    return items, states


def _follow(
    loader: Resumable,
    positions: range,
    items: list[Any],
    states: list[dict[str, Any]],
    equal: Callable[[Any, Any], bool],
    what: str,
) -> None:
    iterator = iter(loader)
    for position in positions:
        item = next(iterator)
        assert equal(item, items[position]), f"{what}: item {position} differs"
        assert loader.state_dict() == states[position + 1], f"{what}: state after item {position} differs"


def _through_json(state: dict[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(state, allow_nan=False))
    return copied


def _shape(value: Any) -> Any:
    """Keys of dictionaries, in order; a list is one thing, whatever is in it."""
    if isinstance(value, dict):
        return {key: _shape(value[key]) for key in sorted(value)}
    return "list" if isinstance(value, list) else "value"
