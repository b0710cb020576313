"""The search for samples at fault; the whole way is in test_step."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from trainer.culprits import find_by_halving


@given(st.integers(0, 300), st.sets(st.integers(0, 299), max_size=6), st.integers(0, 5))
def test_halving_finds_the_first_bad_ones_in_few_calls(count: int, bad: set[int], limit: int) -> None:
    calls = []

    def is_bad(tried: range) -> bool:
        calls.append(tried)
        return any(number in tried for number in bad)

    found = find_by_halving(count, is_bad, limit=limit)
    assert found == sorted(number for number in bad if number < count)[:limit]
    per_one = 2 * math.ceil(math.log2(count)) + 1 if count > 1 else 1
    assert len(calls) <= 1 + per_one * max(1, len(found))


def test_what_is_bad_only_together_is_not_blamed_on_one() -> None:
    assert find_by_halving(8, lambda tried: len(tried) > 4, limit=4) == []
