"""Order: the same packs however lanes are spread, exact resume, finite epochs, clear refusals."""

from __future__ import annotations

import json
import logging
from collections import Counter
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from loaders.order import Order, merge_states, restrict
from loaders.weight import Weight, WeightTable
from omni_pipeline.core.errors import ConfigError, DataError, StateMismatchError
from tests.support.orders import build, config, ends, ids, mixed_sources
from tests.support.strategies import MemorySource, source_sets, text_source

FAST = settings(deadline=None, max_examples=12)
STEPS = 6


@FAST
@given(sources=source_sets(), data=st.data())
def test_the_packs_of_a_step_do_not_depend_on_how_lanes_are_spread(
    sources: list[MemorySource], data: st.DataObject
) -> None:
    settings_ = config(lanes=6, packs_per_step=12)
    owner = data.draw(st.lists(st.integers(0, 3), min_size=6, max_size=6))
    whole = build(settings_, sources)
    parts = [
        build(settings_, sources, lanes=[lane for lane in range(6) if owner[lane] == g]) for g in range(4)
    ]
    for step in range(3):
        try:
            expected = whole.next_step(step)
        except DataError:
            return
        packs = [pack for part in parts for pack in part.next_step(step)]
        assert sorted(packs, key=lambda pack: (pack.lane, pack.number)) == expected
        assert [(pack.lane, pack.number) for pack in expected] == [
            (lane, 2 * step + index) for lane in range(6) for index in range(2)
        ]


def test_resume_at_every_step_through_json_gives_the_same_rest_and_again() -> None:
    straight = build(config(), mixed_sources())
    states = [json.dumps(straight.state_dict())]
    packs = []
    for step in range(STEPS):
        packs.append(straight.next_step(step))
        states.append(json.dumps(straight.state_dict()))
    for start in range(STEPS):
        order = build(config(), mixed_sources())
        order.load_state_dict(json.loads(states[start]))
        assert json.dumps(order.state_dict()) == states[start]
        for step in range(start, STEPS):
            if step == start + 2:  # a resumed run is resumed a second time
                state = json.loads(json.dumps(order.state_dict()))
                order = build(config(), mixed_sources())
                order.load_state_dict(state)
            assert order.next_step(step) == packs[step]
            assert json.dumps(order.state_dict()) == states[step + 1]


@FAST
@given(sources=source_sets(), stop=st.integers(0, 3), groups=st.integers(1, 4))
def test_a_state_restored_on_other_groups_of_lanes_continues_exactly(
    sources: list[MemorySource], stop: int, groups: int
) -> None:
    settings_ = config(epochs=3)
    whole = build(settings_, sources)
    halves = [build(settings_, sources, lanes=lanes) for lanes in ([0, 3], [1, 2])]
    for step in range(stop):
        whole.next_step(step)
        for half in halves:
            half.next_step(step)
    state = json.loads(json.dumps(merge_states([half.state_dict() for half in halves])))
    assert state == whole.state_dict()
    parts = [build(settings_, sources, lanes=range(group, 4, groups)) for group in range(groups)]
    for part in parts:
        part.load_state_dict(state)
    for step in range(stop, stop + 2):
        packs = [pack for part in parts for pack in part.next_step(step)]
        assert sorted(packs, key=lambda pack: (pack.lane, pack.number)) == whole.next_step(step)


@FAST
@given(sources=source_sets(), epochs=st.integers(1, 3), oversize=st.sampled_from(["drop", "cut"]))
def test_finite_epochs_give_every_sample_exactly_that_often_or_count_it_as_left_out(
    sources: list[MemorySource], epochs: int, oversize: str
) -> None:
    try:
        order = build(config(epochs=epochs, oversize=oversize), sources)
    except ConfigError:
        return  # a source of which nothing fits
    packs = [pack for step in ends(order) for pack in step]
    counts = Counter(ids(packs))
    dropped = {item.id for item in order.drain_dropped()}
    rows = {source.sample(ordinal).id for source in sources for ordinal in range(sum(source.shard_sizes))}
    assert counts == dict.fromkeys(rows - dropped, epochs), "a row is seen in all epochs or recorded"
    left_out = order.left_out
    assert left_out.total() == epochs * len(dropped)
    assert {reason for _, reason in left_out} <= {"oversize"}
    for pack in packs:
        assert pack.num_tokens <= 400
    assert order.drain_dropped() == []
    assert not any(order.remaining().values())


def test_an_epoch_cap_of_one_source_leaves_the_others_going_on_and_is_announced() -> None:
    sources = [text_source("small", [8], [100]), text_source("large", [60], [100])]
    order = Order(
        config(),
        sources=sources,
        weights={"small": 3, "large": 1},
        seed=0,
        lanes=range(4),
        epochs={"small": 2},
    )
    packs = [pack for step in range(10) for pack in order.next_step(step)]
    assert Counter(found.source for found in ids(packs))["small"] == 16
    assert all(pack.samples for pack in packs)
    assert not order.exhausted
    events = order.drain_used_up()
    assert sorted((event.source, event.lane) for event in events) == [("small", lane) for lane in range(4)]
    assert all(event.shares == {"large": 1.0, "small": 0.0} for event in events)
    assert order.drain_used_up() == []
    assert order.remaining() == {"small": 0}


def test_an_exhausted_lane_gives_empty_packs_so_the_geometry_stays() -> None:
    order = build(config(epochs=1), [text_source("text", [3], [100])])
    steps = ends(order)
    steps.append(order.next_step(len(steps)))
    assert [len(step) for step in steps] == [8] * len(steps)
    assert all(not pack.samples for pack in steps[-1])
    assert [pack.number for pack in steps[-1]][:2] == [2 * len(steps) - 2, 2 * len(steps) - 1]
    assert order.exhausted


def test_an_endless_order_is_never_exhausted() -> None:
    order = build(config(), [text_source("text", [3], [100])])
    for step in range(20):
        assert all(pack.samples for pack in order.next_step(step))
    assert not order.exhausted


@pytest.mark.parametrize("curve", ["constant", "linear"])
@pytest.mark.parametrize("start", [0, 1000, 10**9])
def test_a_source_that_waits_for_tokens_comes_at_the_latest_when_nothing_else_is_left(
    curve: Literal["constant", "linear"], start: int
) -> None:
    points = ((start, 0.0), (start + 10**9, 1.0))
    later = WeightTable(points=points, over="tokens", curve=curve)
    sources = [text_source("now", [9], [100]), text_source("later", [200], [100])]
    settings_ = config(epochs=1)
    order = build(settings_, sources, weights={"now": 1, "later": later})
    steps = ends(order)
    assert Counter(found.source for step in steps for found in ids(step)) == {"now": 9, "later": 200}
    assert not any(order.remaining().values())
    again = build(settings_, sources, weights={"now": 1, "later": later})
    for step in range(len(steps)):
        fresh = build(settings_, sources, weights={"now": 1, "later": later})
        fresh.load_state_dict(json.loads(json.dumps(again.state_dict())))
        assert fresh.next_step(step) == again.next_step(step) == steps[step]


def test_a_source_that_waits_for_a_step_comes_at_that_step_after_empty_packs() -> None:
    sources = [text_source("now", [9], [100]), text_source("later", [9], [100])]
    order = build(config(epochs=1), sources, weights={"now": 1, "later": [[0, 0], [30, 0], [31, 1]]})
    steps = ends(order)
    assert [step for step, packs in enumerate(steps) if "later" in {item.source for item in ids(packs)}] == [
        31
    ]


def test_exhausted_state_is_kept_by_resume() -> None:
    order = build(config(epochs=1), mixed_sources())
    ends(order)
    again = build(config(epochs=1), mixed_sources())
    again.load_state_dict(order.state_dict())
    assert again.exhausted
    assert ids(again.next_step(99)) == []


def test_exhausted_state_is_kept_by_resume_where_a_source_was_scheduled_away() -> None:
    sources = [text_source("kept", [40], [100]), text_source("gone", [40], [100])]
    weights: dict[str, Weight] = {"kept": 1, "gone": [[0, 1], [1, 0]]}
    order = build(config(epochs=1), sources, weights=weights)
    ends(order)
    assert order.remaining()["gone"] > 0
    again = build(config(epochs=1), sources, weights=weights)
    again.load_state_dict(order.state_dict())
    assert again.exhausted


@pytest.mark.parametrize("unit", ["tokens", "samples"])
def test_sources_get_their_share_of_tokens_or_samples(unit: str) -> None:
    sources = [text_source("long", [500], [90, 100]), text_source("short", [500], [10, 20, 30])]
    order = build(config(unit=unit), sources, weights={"long": 1, "short": 3})
    packs = [pack for step in range(60) for pack in order.next_step(step)]
    drawn: Counter[str] = Counter()
    for pack in packs:
        for sample in pack.samples:
            drawn[sample.id.source] += sample.num_tokens if unit == "tokens" else 1
    slack = 4 * (5 + 1) * (100 if unit == "tokens" else 1)  # per lane: the buffer and one sample
    assert abs(drawn["long"] - 0.25 * drawn.total()) <= slack
    assert drawn.total() > 10 * slack


def test_a_schedule_follows_the_step_being_filled() -> None:
    sources = [text_source("a", [500], [100]), text_source("b", [500], [100])]
    weights: dict[str, Weight] = {"a": [[0, 1], [9, 1], [10, 0]], "b": [[9, 0], [10, 1]]}
    order = build(config(look_ahead=1), sources, weights=weights)
    by_step = [Counter(found.source for found in ids(order.next_step(step))) for step in range(12)]
    assert all(set(counts) == {"a"} for counts in by_step[:10])
    assert set(by_step[11]) == {"b"}


def test_a_source_that_is_used_up_leaves_and_the_others_go_on() -> None:
    sources = [text_source("small", [4], [100]), text_source("large", [60], [100])]
    order = build(config(epochs=1), sources, weights={"small": 1, "large": 1})
    found = Counter(sample.source for step in ends(order) for sample in ids(step))
    assert found == {"small": 4, "large": 60}


def test_a_cut_sample_comes_back_cut_from_the_buffer() -> None:
    sources = [text_source("text", [30], [900, 100])]
    order = build(config(), sources)
    order.next_step(0)
    again = build(config(), sources)
    again.load_state_dict(json.loads(json.dumps(order.state_dict())))
    packs = again.next_step(1)
    assert packs == order.next_step(1)
    assert max(sample.num_tokens for pack in packs for sample in pack.samples) == 400


def test_the_state_is_plain_and_as_small_as_it_says() -> None:
    order = build(config(), mixed_sources())
    for step in range(STEPS):
        order.next_step(step)
        state = order.state_dict()
        assert json.loads(json.dumps(state)) == state
        assert sorted(state) == ["0", "1", "2", "3"]
        for lane in state.values():
            assert sorted(lane) == ["buffer", "number", "sources", "tokens"]
            assert lane["number"] == 2 * (step + 1)
            assert sorted(lane["sources"]) == ["images", "talks", "text", "video"]
            assert all(sorted(saved) == ["begun", "credit", "position"] for saved in lane["sources"].values())
            assert len(lane["buffer"]) <= 5


def test_state_dict_shares_nothing_and_changes_nothing() -> None:
    order, control = build(config(), mixed_sources()), build(config(), mixed_sources())
    order.next_step(0)
    control.next_step(0)
    state = order.state_dict()
    kept = json.dumps(state)
    state["0"]["sources"]["text"]["credit"] = 1e9
    state["0"]["buffer"].clear()
    assert json.dumps(order.state_dict()) == kept
    assert order.next_step(1) == control.next_step(1)


def test_loading_a_state_without_an_own_lane_is_refused_in_full_words() -> None:
    state = build(config(), mixed_sources(), lanes=[0, 2]).state_dict()
    with pytest.raises(StateMismatchError) as caught:
        build(config(), mixed_sources()).load_state_dict(state)
    assert str(caught.value) == (
        "state has no lanes 1, 3; it has 2 lanes\n"
        "  fix:   resume with the order.lanes it was saved with, and merge the states of all groups first"
    )


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda lane: lane.pop("number"), "malformed"),
        (lambda lane: lane["sources"].clear(), "malformed"),
        (lambda lane: lane["buffer"].append(["text", 10**6]), "buffers samples that it says were not drawn"),
        (lambda lane: lane["buffer"].append(lane["buffer"][-1]), "or not in order"),
        (lambda lane: lane["buffer"].append([lane["buffer"][-1][0], -1]), "or not in order"),
        (lambda lane: lane["sources"]["text"].update(position=10**6), "rows of source 'text', here it has"),
        (lambda lane: lane["sources"]["text"].update(credit="much"), "malformed"),
    ],
)
def test_a_damaged_state_is_refused_before_anything_changes(damage: Any, what: str) -> None:
    order = build(config(epochs=9), mixed_sources())
    order.next_step(0)
    state = json.loads(json.dumps(order.state_dict()))
    damage(state["3"])
    fresh = build(config(epochs=9), mixed_sources())
    before = fresh.state_dict()
    with pytest.raises(StateMismatchError, match=what):
        fresh.load_state_dict(state)
    assert fresh.state_dict() == before


def test_loading_after_the_first_step_is_a_misuse() -> None:
    order = build(config(), mixed_sources())
    state = order.state_dict()
    order.next_step(0)
    with pytest.raises(RuntimeError, match="fresh Order"):
        order.load_state_dict(state)


def test_sources_may_come_and_go_between_runs(caplog: pytest.LogCaptureFixture) -> None:
    order = build(config(), mixed_sources())
    order.next_step(0)
    state = json.loads(json.dumps(order.state_dict()))
    changed = [s for s in mixed_sources() if s.name != "talks"] + [text_source("new", [9], [40])]
    again = build(config(), changed)
    with caplog.at_level(logging.DEBUG):
        again.load_state_dict(state)
    assert "sources talks are no longer in the run" in caplog.text
    names = {found.source for step in range(1, 5) for found in ids(again.next_step(step))}
    assert names == {"text", "images", "video", "new"}
    for lane in again.state_dict().values():
        assert sum(saved["credit"] for saved in lane["sources"].values()) == pytest.approx(0, abs=1e-6)


def test_merged_states_must_agree_and_restrict_takes_a_part() -> None:
    order = build(config(), mixed_sources())
    early = order.state_dict()
    order.next_step(0)
    late = order.state_dict()
    assert merge_states([restrict(late, [3, 1]), restrict(late, [0, 1, 2])]) == late
    with pytest.raises(StateMismatchError, match="two states differ about lane 0"):
        merge_states([early, late])


def test_packs_per_step_must_be_a_multiple_of_lanes_and_the_message_says_how_to_mend() -> None:
    with pytest.raises(ValidationError) as caught:
        config(lanes=64, packs_per_step=100)
    assert caught.value.errors()[0]["msg"] == (
        "Value error, order.packs_per_step = 100 is no multiple of order.lanes = 64: "
        "set packs_per_step = 128, or lanes = 50 (in a new run: it changes the order)"
    )


def test_names_weights_and_lanes_must_fit() -> None:
    twice = [text_source("text", [3], [9])] * 2
    with pytest.raises(ConfigError, match="named twice: text"):
        build(config(), twice, weights={"text": 1})
    with pytest.raises(ConfigError, match="one weight per source"):
        build(config(), twice[:1], weights={"other": 1})
    with pytest.raises(ConfigError, match=r"not all in \[0, 4\)"):
        build(config(), twice[:1], lanes=[4])


def test_the_order_does_not_depend_on_the_order_in_which_sources_are_named() -> None:
    weights: dict[str, Weight] = {"text": 1, "images": 2, "video": 1, "talks": 1}
    one = build(config(), mixed_sources(), weights=weights)
    other = build(config(), mixed_sources()[::-1], weights=dict(reversed(weights.items())))
    assert [one.next_step(s) for s in range(3)] == [other.next_step(s) for s in range(3)]


def test_a_group_without_lanes_gives_no_packs() -> None:
    order = build(config(), mixed_sources(), lanes=[])
    assert order.next_step(0) == []
    assert order.exhausted, "it has nothing to give, so it does not keep others from ending"
    assert order.state_dict() == {}
