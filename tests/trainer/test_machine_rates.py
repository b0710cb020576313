"""Rates of this machine: figures of the right kind, on one rank and on two."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import run_ranks
from trainer.machine_rates import LinkRate, copy_bytes_per_s, kernel_start_s, link_rates, product_rates

CPU = torch.device("cpu")


def test_products_and_memory_have_rates_that_machines_have() -> None:
    runs = [product_rates(256, inner=512, tokens=[1, 64], device=CPU, dtype=torch.float32) for _ in range(4)]
    assert [[tokens for tokens, _ in rates] for rates in runs] == [[1, 64]] * 4
    assert all(1e6 < rate < 1e14 for rates in runs for _, rate in rates)
    # One row has no reuse of the weight. The best of each: other work on the machine makes rates fall only.
    assert max(rates[1][1] for rates in runs) > max(rates[0][1] for rates in runs)
    assert 1e7 < copy_bytes_per_s(CPU) < 1e13
    assert 1e-8 < kernel_start_s(CPU) < 1e-2


def measure_links(rank: int) -> dict[str, LinkRate]:
    """Measure on this rank."""
    return link_rates(CPU)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_links_are_measured_between_all_ranks(num_ranks: int) -> None:
    for found in run_ranks(num_ranks, measure_links):
        names = {"all_to_all", "all_gather", "reduce_scatter"} if num_ranks > 1 else set()
        assert set(found) == names
        assert all(0 < rate.latency_s < 5 for rate in found.values())
        assert all(1e4 < rate.bytes_per_s < 1e15 for rate in found.values())
