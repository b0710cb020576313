"""Rotary positions against complex numbers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.model.reference import turn
from trainer.model.rotary import mrope, rotary_2d


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=20, deadline=None)
@given(positions=st.lists(st.integers(0, 5000), min_size=0, max_size=8))
def test_mrope_with_equal_axes_is_plain_rope(positions: list[int]) -> None:
    x = _random(len(positions), 3, 16)
    axes = torch.tensor([positions] * 3, dtype=torch.int64)
    rates = 10_000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    angle = torch.tensor(positions, dtype=torch.float64)[:, None] * rates
    rotary = mrope(axes, sections=(2, 3, 3), theta=10_000.0, dtype=torch.float64)
    torch.testing.assert_close(rotary.rotate(x), turn(x, angle))


def test_each_section_reads_its_own_axis() -> None:
    x = _random(1, 1, 16)
    at_zero = mrope(
        torch.zeros(3, 1, dtype=torch.int64), sections=(2, 3, 3), theta=100.0, dtype=torch.float64
    )
    for axis, section in enumerate([range(0, 2), range(2, 5), range(5, 8)]):
        positions = torch.zeros(3, 1, dtype=torch.int64)
        positions[axis] = 5
        turned = mrope(positions, sections=(2, 3, 3), theta=100.0, dtype=torch.float64).rotate(x)
        changed = (turned != at_zero.rotate(x)).flatten().nonzero().flatten().tolist()
        assert changed == [*section, *(index + 8 for index in section)]


def test_products_depend_on_the_distance_only() -> None:
    query, key = _random(1, 1, 16, seed=1), _random(1, 1, 16, seed=2)

    def product(first: tuple[int, int], second: tuple[int, int]) -> torch.Tensor:
        turned = [
            rotary_2d(torch.tensor(place)[:, None], head_dim=16, theta=100.0, dtype=torch.float64).rotate(x)
            for place, x in ((first, query), (second, key))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product((3, 1), (5, 9)), product((13, 21), (15, 29)))
    assert not torch.allclose(product((3, 1), (5, 9)), product((3, 1), (9, 5)))


def test_half_precision_turns_in_float32() -> None:
    x = _random(4, 2, 16).bfloat16()
    positions = torch.tensor([[0, 1, 999, 5000]] * 3)
    turned = mrope(positions, sections=(2, 3, 3), theta=1e6, dtype=torch.bfloat16).rotate(x)
    exact = mrope(positions, sections=(2, 3, 3), theta=1e6, dtype=torch.float64).rotate(x.double())
    assert turned.dtype == torch.bfloat16
    # Half a unit in the last of 8 bits, plus float32 angles at position 5000.
    torch.testing.assert_close(turned.double(), exact, rtol=2**-8, atol=2**-8)
