"""Who encodes what where no plan says it: longest first, to who has the least so far (LPT, Graham 1969)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from balancer.partition import lpt
from balancer.simulator.setup import Setup
from balancer.simulator.work import PlacedSegment


def places_by_cost(
    segments: Sequence[PlacedSegment], costs: Sequence[float], *, group_of: Mapping[int, int], num_places: int
) -> list[int]:
    """Return the place of each segment, 0 to ``num_places`` - 1, by LPT in each microbatch of each group.

    Args:
        segments: What is placed.
        costs: Of each.
        group_of: By replica, whose media are placed together.
        num_places: Of every group.
    """
    together: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, item in enumerate(segments):
        together[group_of[item.replica], item.microbatch].append(number)
    places = [0] * len(segments)
    for numbers in together.values():
        found = lpt(np.asarray([costs[number] for number in numbers]), num_places)
        for number, place in zip(numbers, found.tolist(), strict=True):
            places[number] = place
    return places


def placed_with_shares(
    segments: Sequence[PlacedSegment], hosts_of: Mapping[int, Sequence[int]], setup: Setup
) -> list[PlacedSegment]:
    """Return the segments on hosts, longest first, each where the load is least so far.

    Args:
        segments: One that several ranks share goes to as many neighbouring hosts, if there are as many.
        hosts_of: By replica, the ranks that may encode its media, ascending.
        setup: The run.
    """
    model = setup.cost_model
    loads: dict[tuple[int, int], list[float]] = {}
    costs = [model.media_cost(item.segment) for item in segments]
    placed = list(segments)
    for number in sorted(range(len(segments)), key=lambda index: -costs[index]):
        item = segments[number]
        hosts = hosts_of[item.replica]
        load = loads.setdefault((hosts[0], item.microbatch), [0.0] * len(hosts))
        degree = len(item.ranks) if len(item.ranks) <= len(hosts) else 1
        starts = range(0, len(hosts) - degree + 1, degree)
        start = min(starts, key=lambda first: max(load[first : first + degree]))
        split = model.split(item.segment, degree) if degree > 1 else None
        for place, seconds in enumerate(split.costs if split else (costs[number],), start):
            load[place] += seconds
        placed[number] = item.moved_to(*hosts[start : start + degree])
    return placed
