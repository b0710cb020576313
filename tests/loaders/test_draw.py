"""Draw: every source within one sample of its share, for any number of sources, sizes and both units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.draw import Draw

FAST = settings(deadline=None, max_examples=100)

weights = st.lists(
    st.one_of(st.floats(0.001, 100), st.integers(1, 5).map(float), st.sampled_from([1e-12, 1e-6, 1e6, 1e12])),
    min_size=1,
    max_size=9,
)
# Sizes of the coming samples of each source, repeated: both units, and sources of very different lengths.
lengths = st.lists(
    st.one_of(st.just([1]), st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.just([1, 9999])),
    min_size=9,
    max_size=9,
)


def normalised(values: Sequence[float]) -> list[float]:
    total = math.fsum(values)
    return [value / total for value in values]


def next_sizes(drawn: Sequence[int], sizes: Sequence[Sequence[int]]) -> list[int]:
    return [of_source[count % len(of_source)] for count, of_source in zip(drawn, sizes, strict=False)]


def run(draw: Draw, drawn: list[int], sizes: Sequence[Sequence[int]], num_draws: int) -> list[int]:
    """Draw, and count in ``drawn``; returns the sources in order."""
    chosen = []
    for _ in range(num_draws):
        heads = next_sizes(drawn, sizes)
        source = draw.next(heads)
        assert source is not None
        draw.charge(source, heads[source])
        drawn[source] += 1
        chosen.append(source)
    return chosen


@FAST
@given(values=weights, sizes=lengths, num_draws=st.integers(1, 400), per_step=st.integers(1, 50))
def test_with_constant_shares_no_source_is_ever_more_than_one_sample_from_its_share(
    values: list[float], sizes: list[list[int]], num_draws: int, per_step: int
) -> None:
    shares = normalised(values)
    exact = [Fraction(share) for share in shares]
    draw = Draw([0.0] * len(shares))
    given_by, drawn = [0] * len(shares), [0] * len(shares)
    largest = 0
    for number in range(num_draws):
        if number % per_step == 0:
            draw.set_shares(shares)
        heads = next_sizes(drawn, sizes)
        largest = max(largest, *heads)
        source = draw.next(heads)
        assert source is not None
        draw.charge(source, heads[source])
        drawn[source] += 1
        given_by[source] += heads[source]
        total = sum(given_by)
        for share, amount, owed in zip(exact, given_by, draw.credit, strict=True):
            assert float(share * total - amount) == pytest.approx(owed, abs=1e-6 * largest)
            assert -largest * (1 + 1e-9) <= owed <= largest * (1 + 1e-9)
