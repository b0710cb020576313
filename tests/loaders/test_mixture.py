"""Mixture: shares by weights and groups at every moment, what is used up, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.mixture import Mixture, Moment
from loaders.weight import Weight, WeightTable
from omni_pipeline.core.errors import ConfigError

FAST = settings(deadline=None, max_examples=200)
NAMES = "abcdefgh"
PATHS = ["", "w", "w/x", "w/x/y", "w/z", "v", "v/x"]

values = st.sampled_from([0.0, 1e-9, 0.1, 0.5, 1.0, 2.0, 3.0, 1e6])


def named(weights: list[float]) -> dict[str, Weight]:
    return dict(zip(NAMES, weights, strict=False))


def naive_shares(
    weights: dict[str, float], group_of: dict[str, str], groups: dict[str, float], *, path: str, share: float
) -> dict[str, float]:
    """Share out ``share`` in the group at ``path``, by the words of the documentation."""

    def parent(group: str) -> str:
        return group.rpartition("/")[0]

    def has_some(group: str) -> bool:
        inside = [name for name in weights if group_of.get(name, "") == group and weights[name] > 0]
        return bool(inside) or any(
            groups[child] > 0 and has_some(child) for child in groups if parent(child) == group
        )

    sources = {name: w for name, w in weights.items() if group_of.get(name, "") == path and w > 0}
    below = {g: w for g, w in groups.items() if parent(g) == path and g != path and w > 0 and has_some(g)}
    total = sum(sources.values()) + sum(below.values())
    found = {name: share * weight / total for name, weight in sources.items()}
    for group, weight in below.items():
        found |= naive_shares(weights, group_of, groups, path=group, share=share * weight / total)
    return found


@FAST
@given(
    sources=st.lists(st.tuples(values, st.sampled_from(PATHS)), min_size=1, max_size=8),
    weight_of=st.fixed_dictionaries(dict.fromkeys(PATHS[1:], values)),
    used_up=st.sets(st.integers(0, 7)),
)
def test_shares_are_products_of_parts_among_those_that_have_something_to_give(
    sources: list[tuple[float, str]], weight_of: dict[str, float], used_up: set[int]
) -> None:
    weights = {name: weight for name, (weight, _) in zip(NAMES, sources, strict=False)}
    group_of = {name: path for name, (_, path) in zip(NAMES, sources, strict=False) if path}
    used = {path for path in PATHS[1:] for own in group_of.values() if f"{own}/".startswith(f"{path}/")}
    groups = {path: weight for path, weight in weight_of.items() if path in used}
    if not naive_shares(weights, group_of, groups, path="", share=1.0):
        with pytest.raises(ConfigError, match="all weights are zero at step 0"):
            Mixture(weights, group_of=group_of, groups=groups)
        return
    mixture = Mixture(weights, group_of=group_of, groups=groups)
    gone = frozenset(index for index in used_up if index < len(weights))
    left = {name: 0.0 if index in gone else weight for index, (name, weight) in enumerate(weights.items())}
    expected = naive_shares(left, group_of, groups, path="", share=1.0)
    shares = mixture.shares(Moment(0), used_up=gone)
    assert shares == pytest.approx([expected.get(name, 0.0) for name in mixture.names])
    assert math.fsum(shares) == pytest.approx(1.0 if expected else 0.0)


def test_a_used_up_source_leaves_its_share_to_its_group_and_an_empty_group_to_its_neighbours() -> None:
    mixture = Mixture(
        {"books": 1, "crawl": 3, "news": 1, "pictures": 1},
        group_of={"crawl": "web/clean", "news": "web/clean", "books": "web"},
        groups={"web": 1, "web/clean": 1},
    )
    assert mixture.names == ("books", "crawl", "news", "pictures")
    assert mixture.shares(Moment(0)) == (0.25, 0.1875, 0.0625, 0.5)
    assert mixture.shares(Moment(0), used_up=frozenset({1})) == (0.25, 0.0, 0.25, 0.5)
    assert mixture.shares(Moment(0), used_up=frozenset({1, 2})) == (0.5, 0.0, 0.0, 0.5)
    assert mixture.shares(Moment(0), used_up=frozenset({0, 1, 2})) == (0.0, 0.0, 0.0, 1.0)


def test_groups_and_sources_follow_their_own_clocks() -> None:
    by_tokens = WeightTable(points=((0, 1.0), (1000, 3.0)), over="tokens")
    mixture = Mixture(
        {"a": [[0, 1], [10, 0]], "b": 1, "c": 1},
        group_of={"a": "ab", "b": "ab"},
        groups={"ab": by_tokens},
    )
    assert mixture.shares(Moment(0, 0)) == (0.25, 0.25, 0.5)
    assert mixture.shares(Moment(10, 0)) == (0.0, 0.5, 0.5)
    assert mixture.shares(Moment(10, 1000)) == (0.0, 0.75, 0.25)
    assert mixture.shares(Moment(0, 500)) == (1 / 3, 1 / 3, 1 / 3)


def test_tokens_do_not_matter_where_no_weight_is_over_tokens() -> None:
    mixture = Mixture({"a": [[0, 1], [10, 0]], "b": 1})
    assert mixture.shares(Moment(5, 123)) == mixture.shares(Moment(5, 10**15))


def test_a_share_too_small_to_ever_be_drawn_is_none() -> None:
    mixture = Mixture({"a": 1.0, "b": 1e-40, "c": 1e308, "d": 1e308})
    assert mixture.shares(Moment(0)) == (0.0, 0.0, 0.5, 0.5)
    assert mixture.shares(Moment(0), used_up=frozenset({0, 2, 3})) == (0.0, 1.0, 0.0, 0.0)


def test_a_schedule_is_looked_up_by_step_in_any_order_of_asking() -> None:
    mixture = Mixture({"a": [[0, 1.0], [10, 0.0]], "b": [[0, 0.0], [10, 1.0]]})
    forward = [mixture.shares(Moment(step)) for step in range(12)]
    assert [mixture.shares(Moment(step)) for step in reversed(range(12))] == forward[::-1]


def test_when_a_source_is_used_up_the_others_renormalise() -> None:
    mixture = Mixture({"a": 1, "b": 1, "c": 2})
    assert mixture.shares(Moment(0), used_up=frozenset({2})) == (0.5, 0.5, 0.0)
    assert mixture.shares(Moment(0), used_up=frozenset({0, 1, 2})) == (0.0, 0.0, 0.0)


def test_shares_of_many_awkward_weights_sum_to_one() -> None:
    mixture = Mixture(named([0.1, 0.2, 0.3, 1e-9, 7, 1 / 3, 2 / 3, 1e9]))
    assert math.fsum(mixture.shares(Moment(0))) == pytest.approx(1, abs=1e-15)


def test_drawn_from_names_sources_that_still_have_a_weight_ahead() -> None:
    mixture = Mixture({"a": 1, "early": [[0, 1], [10, 0]], "late": [[50, 0], [60, 1]], "never": 0})
    assert mixture.drawn_from(Moment(0)) == {0, 1, 2}
    assert mixture.drawn_from(Moment(10)) == {0, 2}


def test_drawn_from_asks_for_a_time_at_which_the_source_and_all_its_groups_have_a_weight() -> None:
    mixture = Mixture(
        {"early": [[0, 1], [10, 0]], "late": [[0, 0], [10, 0], [20, 0.5], [30, 0]], "other": 1},
        group_of={"early": "end", "late": "end"},
        groups={"end": [[15, 0], [25, 1]]},
    )
    assert mixture.drawn_from(Moment(0)) == {1, 2}
    assert mixture.drawn_from(Moment(29)) == {1, 2}
    assert mixture.drawn_from(Moment(30)) == {2}


def test_drawn_from_sees_a_weight_that_is_only_above_zero_between_points() -> None:
    mixture = Mixture({"a": [[0, 0], [10, 1]], "b": 1}, group_of={"a": "g"}, groups={"g": [[0, 1], [10, 0]]})
    assert mixture.drawn_from(Moment(0)) == {0, 1}
    assert mixture.drawn_from(Moment(10)) == {1}


def test_weights_that_are_all_zero_at_some_step_are_refused_in_full_words() -> None:
    with pytest.raises(ConfigError) as caught:
        Mixture({"b": [[0, 1], [10, 0]], "a": [[10, 0], [20, 1]]})
    assert str(caught.value) == (
        "all weights are zero at step 10\n"
        "  where: sources a, b\n"
        "  fix:   give at least one source a positive weight at every moment"
    )


def test_weights_on_two_clocks_must_not_be_zero_at_any_pair_of_moments() -> None:
    by_tokens = WeightTable(points=((0, 0.0), (900, 1.0)), over="tokens", curve="constant")
    with pytest.raises(ConfigError) as caught:
        Mixture({"a": [[0, 1], [10, 0]], "b": by_tokens})
    assert caught.value.what == "all weights are zero at step 10 and 0 tokens"


@pytest.mark.parametrize(
    ("group_of", "groups", "what"),
    [
        ({"a": "web"}, {}, "group 'web' of source 'a' has no weight"),
        (
            {"a": "web/cleen"},
            {"web": 1, "web/clean": 1},
            "group 'web/cleen' of source 'a' has no weight; did you mean 'web/clean'?",
        ),
        ({"a": "web/clean"}, {"web/clean": 1}, "group 'web' of source 'a' has no weight"),
        ({}, {"web": 1}, "no source is in group 'web'"),
        (
            {"a": "web"},
            {"web": 1, "wep": 1},
            "no source is in group 'wep'; did you mean 'web'?",
        ),
        ({"a": "web//x"}, {"web": 1}, "group 'web//x' of source 'a' has a part without a name"),
    ],
)
def test_groups_that_do_not_fit_the_sources_are_refused(
    group_of: dict[str, str], groups: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Mixture({"a": 1, "b": 1}, group_of=group_of, groups=groups)
    assert caught.value.what == what


def test_a_wrong_weight_of_a_group_says_which() -> None:
    with pytest.raises(ConfigError) as caught:
        Mixture({"a": 1}, group_of={"a": "web"}, groups={"web": -1})
    assert str(caught.value) == (
        "weight -1.0 is not a finite number of at least 0\n"
        "  where: group 'web'\n"
        "  fix:   give a number of at least 0, a list of [step, weight], or a table {points, over, curve}"
    )


@pytest.mark.parametrize(
    ("weight", "what"),
    [
        (-1.0, "weight -1.0 is not a finite number of at least 0"),
        (math.nan, "weight nan is not a finite number of at least 0"),
        ([[0, 1], [5, math.inf]], "weight inf is not a finite number of at least 0"),
        ([[5, 1], [5, 2]], "steps [5, 5] of the weight do not rise"),
        ([[-1, 1]], "weight has a point at steps -1, which is below 0"),
        ([[0.5, 1]], "weight has a point at step 0.5, which is no step"),
        ([], "weight [] is no number, no list of [step, weight] points, and no table with points"),
        (
            [[1, 2, 3]],
            "weight [[1, 2, 3]] is no number, no list of [step, weight] points, and no table with points",
        ),
    ],
)
def test_a_wrong_weight_says_what_is_wrong(weight: Weight, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Mixture({"laion": weight, "other": 1})
    assert caught.value.what == what
    assert caught.value.where == "source 'laion'"


def test_a_mixture_needs_a_source() -> None:
    with pytest.raises(ConfigError, match="no sources"):
        Mixture({})


def test_where_nothing_can_be_drawn_the_clock_of_tokens_goes_on_to_where_something_can() -> None:
    grows = WeightTable(points=((100, 0.0), (300, 1.0)), over="tokens")
    shrinks = WeightTable(points=((100, 1.0), (300, 0.0)), over="tokens")
    mixture = Mixture(
        {"now": 1, "between": shrinks, "late": [[5, 0], [6, 1]]},
        group_of={"between": "g"},
        groups={"g": grows},
    )
    between, late, now = range(3)
    assert mixture.names == ("between", "late", "now")
    assert mixture.wake(Moment(0, 7), used_up=frozenset()) == Moment(0, 7)
    assert mixture.wake(Moment(0, 7), used_up=frozenset({now})) == Moment(0, 200), "only between the points"
    assert mixture.wake(Moment(0, 7), used_up=frozenset({now, between})) == Moment(0, 7), "steps go on anyway"
    assert mixture.wake(Moment(6, 7), used_up=frozenset({now, between})) == Moment(6, 7)
    assert mixture.wake(Moment(6, 7), used_up=frozenset({now, between, late})) == Moment(6, 7)
