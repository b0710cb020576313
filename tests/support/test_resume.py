"""The resume check itself: it passes a right iterator, and finds each way of being wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.resume import assert_resumes_anywhere


class Counter:
    """Yields 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.value = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.value += 1
            yield self.value - 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Forgetful(Counter):
    """Starts again."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


class Frozen(Counter):
    """Resumes right once; its state stands still from then on (a second resume would repeat)."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return self.loaded or super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loaded = state


class Growing(Counter):
    """Remembers one more key with each item."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, **{f"seen-{number}": True for number in range(self.value)}}


class Tupled(Counter):
    """Its state is a list after JSON."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "pair": (1, 2)}


def test_a_right_iterator_passes() -> None:
    assert_resumes_anywhere(Counter, num_items=4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Forgetful, "differs"),
        (Frozen, "state after item 0 differs"),
        (Growing, "changes its shape"),
        (Tupled, "does not survive JSON"),
    ],
)
def test_wrong_iterators_are_found(build: Callable[[], Counter], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_resumes_anywhere(build, num_items=4)
