"""How near the model comes to this machine's own matrix products, and what packing saves over padding.

    python -m benchmarks.model --json

Encoders and LLM run forward and backward, the LLM with its loss, on samples of varied lengths held in memory:
packed, as the trainer runs them, and padded to the longest (see ``benchmarks.model_parts``). Rounds are
interleaved: each measures matrix products of the model's shapes (forward and both of the backward), then
every part once. The peak is the best of those shapes in that round, by the same clock, threads and type; a
*share of peak* is (operations of what is no padding / seconds) / peak. With one thread the clock is the CPU
time of the thread, which other programs do not change; with more it is the wall's.

The last line of ``--json`` is one object: ``llm_share_of_peak``, ``encoder_share_of_peak`` (vision and audio
together) and of each, ``packed_over_padded`` (samples per second of the LLM, packed over padded; also of the
encoders), medians over the rounds with ``_range``; ``fill`` (share of the padded units that are no padding),
``units_per_s`` and ``peak_flops_per_s``.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import torch

from benchmarks.model_parts import MODEL, Bench, Samples
from trainer.parallel.sharding import DTYPES

PARTS = ("vision", "audio", "llm")
REPEATS = 3
Round = Mapping[str, float]
"""Seconds of each part by name, and under "peak" the best rate of a product, operations per second."""


@click.command()
@click.option(
    "--rounds", default=5, show_default=True, type=click.IntRange(1), help="Rounds after the first."
)
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Threads of torch.")
@click.option("--precision", default="fp32", show_default=True, type=click.Choice(["fp32", "bf16"]))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def main(*, rounds: int, threads: int, precision: str, as_json: bool) -> None:
    """Measure shares of the peak, and packed against padded.

    Example: python -m benchmarks.model --json
    """
    torch.set_num_threads(threads)
    load = os.getloadavg()[1]
    bench = Bench(MODEL, Samples(), dtype=DTYPES[precision])
    clock = time.thread_time if threads == 1 else time.perf_counter
    # The first round finds memory and kernels cold.
    measured = [measure(bench, clock=clock) for _ in range(rounds + 1)][1:]
    result = {**summary(measured, bench), "precision": precision, "threads": threads, "load_before": load}
    print(f"{precision}, {threads} threads, load of the machine before: {load:.1f}")
    print(f"peak: {result['peak_flops_per_s'] / 1e9:.1f} GFLOP/s of matrix products of these shapes")
    for name in (*PARTS, "encoder"):
        low, high = result[f"{name}_share_of_peak_range"]
        print(f"{name:8} {result[f'{name}_share_of_peak']:.0%} of the peak ({low:.0%} to {high:.0%})")
    for name in PARTS:
        found, fill = result[_of("packed_over_padded", name)], result["fill"][name]
        print(f"{name:8} packed {found:.2f} x padded (fill {fill:.0%}), {result['units_per_s'][name]:,.0f}/s")
    if as_json:
        print(json.dumps(result))


def measure(bench: Bench, *, clock: Callable[[], float]) -> Round:
    """Return one round: the peak, then the seconds of every part."""
    found = {"peak": max(_product_rate(*shape, bench.dtype, clock) for shape in bench.product_shapes())}
    for name, run in bench.parts().items():
        found[name] = _seconds(run, clock)
    return found


def summary(rounds: Sequence[Round], bench: Bench) -> dict[str, Any]:
    """Return the results: medians over the rounds, and their ranges."""
    flops, units = bench.flops(), bench.units()
    encoders = {"encoder": ("vision", "audio")}
    shares = {**{name: (name,) for name in PARTS}, **encoders}
    result: dict[str, Any] = {}
    for name, parts in shares.items():
        work = sum(flops[part] for part in parts)
        values = [work / sum(one[part] for part in parts) / one["peak"] for one in rounds]
        result[f"{name}_share_of_peak"] = statistics.median(values)
        result[f"{name}_share_of_peak_range"] = [min(values), max(values)]
    for name in PARTS:
        values = [one[f"{name}_padded"] / one[name] for one in rounds]
        result[_of("packed_over_padded", name)] = statistics.median(values)
        result[f"{_of('packed_over_padded', name)}_range"] = [min(values), max(values)]
    padded = bench.units(padded=True)
    result["fill"] = {name: units[name] / padded[name] for name in PARTS}
    result["units_per_s"] = {
        name: units[name] / statistics.median(one[name] for one in rounds) for name in PARTS
    }
    result["peak_flops_per_s"] = statistics.median(one["peak"] for one in rounds)
    return result


def _of(name: str, part: str) -> str:
    """The LLM's result has the plain name."""
    return name if part == "llm" else f"{part}_{name}"


def _product_rate(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, clock: Callable[[], float]
) -> float:
    """Return the operations per second of a linear layer's three products: forward, and two backward."""
    x, weight = torch.randn(rows, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
    gradient = torch.randn(rows, outputs, dtype=dtype)
    # The best of some: a peak that something else disturbed would flatter every share.
    seconds = min(
        _seconds(lambda: (x @ weight.T, gradient @ weight, gradient.T @ x), clock) for _ in range(REPEATS)
    )
    return 3 * 2 * rows * inputs * outputs / seconds


def _seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    started = clock()
    run()
    return max(clock() - started, 1e-9)


if __name__ == "__main__":
    main()
