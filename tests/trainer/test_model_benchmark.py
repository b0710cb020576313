"""benchmarks.model: padded runs that compute the same, and shares of what was measured."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.model import PARTS, measure, summary
from benchmarks.model_parts import Bench, Samples
from trainer.config import ModelConfig

SAMPLES = Samples(
    pictures=((1, 4, 6), (2, 2, 2), (1, 2, 4)), recordings=((40, 1, 1), (230, 1, 1)), texts=(9, 30, 4)
)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(ModelConfig(size="tiny"), SAMPLES, dtype=torch.float32)


def test_the_padded_batch_of_the_llm_has_the_loss_of_the_packed_samples(bench: Bench) -> None:
    parts = bench.parts()
    assert parts["llm_padded"]() == pytest.approx(parts["llm"](), rel=1e-5)
    assert parts["llm"]() > 40 * 0.9 * math.log(264)


def test_every_part_runs_backward_through_all_its_parameters(bench: Bench) -> None:
    modules = {**bench.model.encoders, "llm": bench.model.llm}
    for name, run in bench.parts().items():
        module = modules[name.removesuffix("_padded")]
        module.zero_grad()
        assert math.isfinite(run())
        assert all(parameter.grad is not None for parameter in module.parameters())


def test_padding_is_counted_in_no_result(bench: Bench) -> None:
    assert bench.units() == {"vision": 24 + 8 + 8, "audio": 270, "llm": 43}
    assert bench.units(padded=True) == {"vision": 3 * 24, "audio": 2 * 230, "llm": 3 * 30}
    flops = {name: 6.0 * count for name, count in bench.flops().items()}
    seconds = {name: flops[name] / 4e9 for name in PARTS}
    slower = {f"{name}_padded": 1.5 * seconds[name] for name in PARTS}
    found = summary([{"peak": 12e9, **seconds, **slower}] * 3, bench)
    for name in (*PARTS, "encoder"):
        assert found[f"{name}_share_of_peak"] == pytest.approx(4e9 / 6 / 12e9)
    assert found["packed_over_padded"] == found["vision_packed_over_padded"] == pytest.approx(1.5)
    assert found["fill"]["llm"] == 43 / 90
    assert found["units_per_s"]["llm"] == pytest.approx(43 / seconds["llm"])


def test_a_round_measures_the_peak_and_every_part(bench: Bench) -> None:
    ticks = iter(range(1000))
    found = measure(bench, clock=lambda: float(next(ticks)))
    assert set(found) == {"peak", *bench.parts()}
    # A clock that goes on by one at each look: the peak is the shape with most operations.
    largest = max(math.prod(shape) for shape in bench.product_shapes())
    assert found["peak"] == 3 * 2 * largest
