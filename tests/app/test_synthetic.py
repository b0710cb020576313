"""Packs of the published workloads: the mixture asked for, full sequences, the same again."""

from __future__ import annotations

from collections import Counter

import pytest

from balancer.simulator.workloads import MIXTURES, WORKLOADS
from omni_pipeline.app.synthetic import workload_packs


@pytest.mark.parametrize("mixture", MIXTURES)
def test_packs_hold_the_mixture_and_are_nearly_full(mixture: tuple[int, int]) -> None:
    workload = WORKLOADS["three"]
    steps = workload_packs(workload, mixture, num_steps=3, seed=0)
    assert [len(packs) for packs in steps] == [workload.packs_per_step] * 3
    tokens: Counter[str] = Counter()
    for pack in (pack for packs in steps for pack in packs):
        assert pack.num_tokens <= workload.seq_len
        for sample in pack.samples:
            tokens[sample.id.source] += sample.num_tokens
    total = sum(tokens.values())
    assert total > 0.97 * 3 * workload.packs_per_step * workload.seq_len
    for name, share in workload.weights(mixture).items():
        assert tokens[name] / total == pytest.approx(share, abs=0.05)


def test_equal_seeds_give_equal_packs_and_others_do_not() -> None:
    workload = WORKLOADS["A"]
    first, again, other = (workload_packs(workload, (5, 5), num_steps=1, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
