"""What the loader asks of an order: packs, state, and counts of what each step used and passed by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loaders.fitting import Dropped
from loaders.lane_cursor import FILTERS
from loaders.lane_packer import UsedUp
from omni_pipeline.core.plan import Pack


class PackOrder(Protocol):
    """Gives the packs of one group's lanes; ``loaders.order.Order`` is the one in use."""

    @property
    def exhausted(self) -> bool:
        """Whether all of its lanes have given all their samples."""
        ...

    def next_step(self, step: int) -> Sequence[Pack]:
        """Return the packs of ``step``, by lane then number."""
        ...

    def remaining(self) -> Mapping[str, int]:
        """Return how many samples of each source that ends its lanes have put into no pack so far."""
        ...

    @property
    def left_out(self) -> Counter[tuple[str, str]]:
        """Samples passed by so far, by (source, reason); a copy."""
        ...

    def drain_dropped(self) -> Sequence[Dropped]:
        """Return the samples to record that were passed by since the last call."""
        ...

    def drain_used_up(self) -> Sequence[UsedUp]:
        """Return the sources that ended in a lane since the last call."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state by lane; shares nothing with this object."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that has at least these lanes."""
        ...


@dataclass(frozen=True, slots=True)
class OrderCounts:
    """What the order says of one step beside its packs; each as in ``Batch``."""

    left: Mapping[str, int]
    dropped: Mapping[str, int]
    filtered: Mapping[str, int]
    used_up: Mapping[str, Mapping[str, float]]


def count_step(
    order: PackOrder, *, left_out_before: Counter[tuple[str, str]]
) -> tuple[OrderCounts, Counter[tuple[str, str]]]:
    """Return the counts of the step that ``order`` has just given, and what was left out up to it.

    Args:
        order: Forgets the sources that were used up in this step.
        left_out_before: What was left out up to the step before.
    """
    left_out = order.left_out
    dropped, filtered = Counter[str](), Counter[str]()
    for (source, reason), number in (left_out - left_out_before).items():
        (filtered if reason in FILTERS else dropped)[source] += number
    used_up: dict[str, Mapping[str, float]] = {}
    for item in order.drain_used_up():
        used_up.setdefault(item.source, item.shares)
    return OrderCounts(order.remaining(), dropped, filtered, used_up), left_out
