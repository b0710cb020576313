"""Order and mixture together: shares of whole lanes, groups, weights over tokens, caps, changed weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.lanes import LaneOrder
from loaders.mixture import Mixture, Moment
from loaders.order import Order, OrderConfig
from loaders.weight import Weight, WeightTable
from omni_pipeline.core.plan import Pack
from tests.support.strategies import MemorySource, text_segment, text_source

FAST = settings(deadline=None, max_examples=15)
LANES, SEED, BLOCK = 3, 5, 8
LENGTHS = {"a": [9, 70, 31], "b": [99], "c": [3, 5], "d": [20, 64, 1, 77]}
GROUP_OF = {"a": "web/clean", "b": "web/clean", "c": "web"}
GROUPS: dict[str, Weight] = {"web": 2, "web/clean": 1}


def config(**changes: Any) -> OrderConfig:
    values: dict[str, Any] = {"lanes": LANES, "packs_per_step": 6, "seq_len": 200, "look_ahead": 4}
    return OrderConfig(**(values | {"shuffle_block": BLOCK} | changes))


def source(name: str, num_samples: int) -> MemorySource:
    return text_source(name, [num_samples], LENGTHS[name])


def build(
    settings_: OrderConfig,
    *,
    weights: Mapping[str, Weight],
    groups: Mapping[str, Weight] = GROUPS,
    epochs: Mapping[str, int] | None = None,
    num_samples: int = 40,
) -> Order:
    return Order(
        settings_,
        sources=[source(name, num_samples) for name in weights],
        weights=weights,
        seed=SEED,
        lanes=range(LANES),
        group_of={name: group for name, group in GROUP_OF.items() if name in weights},
        groups=groups,
        epochs=epochs,
    )


def drawn_by_lane(order: Order, *, by_tokens: bool, num_samples: int = 40) -> list[dict[str, int]]:
    """What each lane has drawn of each source, found from its places alone."""
    drawn = []
    for lane, state in order.state_dict().items():
        amounts = {}
        for name, saved in state["sources"].items():
            rows = LaneOrder(
                [num_samples], name=name, lanes=LANES, seed=SEED, shuffle_block=BLOCK, epochs=None
            )
            sizes = [
                source(name, num_samples).sample(rows.ordinal(int(lane), position)).num_tokens
                for position in range(saved["position"])
            ]
            amounts[name] = sum(sizes) if by_tokens else len(sizes)
        drawn.append(amounts)
    return drawn


def count(packs: Iterable[Pack]) -> Counter[tuple[str, int]]:
    """How often each sample (source, row) is in the packs."""
    return Counter((sample.id.source, sample.id.row) for pack in packs for sample in pack.samples)


@FAST
@given(
    weights=st.fixed_dictionaries(dict.fromkeys(LENGTHS, st.sampled_from([0.01, 1.0, 3.0]))),
    groups=st.fixed_dictionaries(dict.fromkeys(["web", "web/clean"], st.sampled_from([0.1, 1.0, 9.0]))),
    unit=st.sampled_from(["tokens", "samples"]),
)
def test_all_that_a_lane_has_drawn_is_within_few_samples_of_its_shares(
    weights: dict[str, float], groups: dict[str, float], unit: Literal["tokens", "samples"]
) -> None:
    order = build(config(unit=unit), weights=weights, groups=groups)
    shares = Mixture(weights, group_of=GROUP_OF, groups=groups).shares(Moment(0))
    largest = max(map(max, LENGTHS.values())) + 1 if unit == "tokens" else 1
    for step in range(6):
        order.next_step(step)
        for drawn in drawn_by_lane(order, by_tokens=unit == "tokens"):
            total = sum(drawn.values())
            for name, share in zip(sorted(drawn), shares, strict=True):
                # One sample by the rule of ``Draw``, and the phases in which the sources begin.
                samples = 2 + share * (len(shares) - 2)
                assert abs(share * total - drawn[name]) <= largest * samples * (1 + 1e-9)


def test_lanes_draw_a_rare_source_at_different_times() -> None:
    lanes, steps = 20, 60
    rare, common = (MemorySource(name, [5000], [[text_segment(19)]]) for name in ("rare", "common"))
    order = Order(
        config(unit="samples", lanes=lanes, packs_per_step=lanes, seq_len=100, oversize="drop"),
        sources=[rare, common],
        weights={"rare": [[0, 0.0], [9, 0.0], [10, 0.02]], "common": 0.98},
        seed=SEED,
        lanes=range(lanes),
    )
    found = [
        sum(sample.id.source == "rare" for pack in order.next_step(step) for sample in pack.samples)
        for step in range(steps)
    ]
    assert not any(found[:9])
    # 5 samples in a pack, 1 of 50 rare: two a step, where lanes in phase have 20 in one step of ten.
    assert sum(found[20:]) == pytest.approx(2 * len(found[20:]), abs=4)
    assert max(found) <= 5


def test_resume_at_every_step_with_groups_curves_over_tokens_and_caps_gives_the_same_rest() -> None:
    def fresh() -> Order:
        over_tokens = WeightTable(points=((0, 3.0), (5000, 0.5)), over="tokens", curve="cosine")
        weights: dict[str, Weight] = {"a": over_tokens, "b": [[0, 0], [4, 2]], "c": 1, "d": 1}
        return build(config(), weights=weights, groups=GROUPS | {"web": over_tokens}, epochs={"c": 3, "d": 1})

    straight, packs = fresh(), []
    states = [json.dumps(straight.state_dict())]
    for step in range(12):
        packs.append(straight.next_step(step))
        states.append(json.dumps(straight.state_dict()))
    assert {event.source for event in straight.drain_used_up()} == {"c", "d"}
    for start in range(12):
        order = fresh()
        order.load_state_dict(json.loads(states[start]))
        for step in range(start, 12):
            assert order.next_step(step) == packs[step]
            assert json.dumps(order.state_dict()) == states[step + 1]


def test_a_curve_over_tokens_follows_what_all_lanes_have_drawn() -> None:
    until, since = [
        WeightTable(points=((0, 1.0 - late), (6000, late)), over="tokens", curve="constant")
        for late in (0.0, 1.0)
    ]
    order = build(config(look_ahead=1), weights={"b": until, "d": since})
    drawn, names = 0, []
    for step in range(12):
        before = drawn
        packs = order.next_step(step)
        drawn = sum(state["tokens"] for state in order.state_dict().values())
        names.append((before, {sample.id.source for pack in packs for sample in pack.samples}))
    slack = LANES * 200
    assert all(found == {"b"} for before, found in names if before < 6000 - slack)
    assert all(found == {"d"} for before, found in names if before > 6000 + slack)
    assert names[-1][0] > 6000 + 2 * slack


def test_reweighted_and_added_sources_leave_the_kept_ones_in_their_place() -> None:
    settings_ = config(epochs=1)
    first = build(settings_, weights={"a": 1, "b": 5}, groups={"web": 1, "web/clean": 1})
    packs = [pack for step in range(3) for pack in first.next_step(step)]
    state = json.loads(json.dumps(first.state_dict()))
    second = build(settings_, weights={"a": 7, "b": 1, "c": 2, "d": 1}, groups={"web": 3, "web/clean": 1})
    second.load_state_dict(state)
    step = 3
    while not second.exhausted:
        packs += second.next_step(step)
        step += 1
        assert step < 200
    assert count(packs) == Counter({(name, row): 1 for name in LENGTHS for row in range(40)})


@pytest.mark.parametrize("num_samples", [1, 2])
def test_sources_with_fewer_samples_than_lanes_keep_their_shares(num_samples: int) -> None:
    order = build(
        config(unit="samples"), weights={"a": 1, "d": 3}, groups=GROUPS | {"web": 1}, num_samples=num_samples
    )
    for step in range(20):
        order.next_step(step)
    for drawn in drawn_by_lane(order, by_tokens=False, num_samples=num_samples):
        assert abs(drawn["a"] - 0.25 * sum(drawn.values())) <= 2
        assert drawn["a"] > 10


def test_a_cap_of_a_source_in_a_group_gives_its_share_to_its_group() -> None:
    order = build(
        config(), weights={"a": 1, "b": 1, "d": 1}, groups={"web": 1, "web/clean": 1}, epochs={"a": 1}
    )
    for step in range(8):
        order.next_step(step)
    events = order.drain_used_up()
    assert {event.source for event in events} == {"a"}
    assert all(event.shares == {"a": 0.0, "b": 0.5, "d": 0.5} for event in events)
