"""How good and how fast the partition of costs into bins is, against its rivals, bounds and optima.

    python -m benchmarks.partition --json

Costs are whole numbers drawn from distributions that media segments have. The last line of ``--json`` is one
object:

``cases``: by distribution, bins and items, for each algorithm the ``ratio`` of its makespan to the lower
bound (``balancer.partition.lower_bound``), the mean over the seeds, ``worst`` (the largest), ``optimal`` (the
share of the draws at the bound) and ``ms`` (processor time, the median); null where items x bins makes it too
slow to matter; ``small``: the same against the exact optimum; ``summary``: means of both by algorithm, over
the cases that all were run on.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click
import numpy as np

from balancer.partition import (
    FloatArray,
    IntArray,
    balance,
    lower_bound,
    lpt,
    makespan,
    multifit,
    refine,
)
from benchmarks.rivals import karmarkar_karp, lpt_equal_count, optimal_makespan
from omni_pipeline.core.seeding import generator

Partition = Callable[[FloatArray, int], IntArray]

BINS = (8, 64, 256)
ITEMS_PER_BIN = (2, 4, 8, 16, 32)
SMALL = tuple(itertools.product((2, 3, 4), (6, 9, 12)))
TICKS = 1e6
# Above so many items x bins an algorithm that costs that much takes longer than the whole plan may.
SLOW_CELLS = 1 << 18


def refined(first: Partition) -> Partition:
    """Return ``first`` followed by refinement."""
    return lambda costs, num_bins: refine(costs, first(costs, num_bins), num_bins)


def multifit_of_lpt(costs: FloatArray, num_bins: int) -> IntArray:
    """Return MULTIFIT with LPT as its upper bound."""
    return multifit(costs, lpt(costs, num_bins), num_bins)


ALGORITHMS: dict[str, Partition] = {
    "lpt": lpt,
    "lpt+refine": refined(lpt),
    "lpt_equal_count": lpt_equal_count,
    "lpt_equal_count+refine": refined(lpt_equal_count),
    "karmarkar_karp": karmarkar_karp,
    "karmarkar_karp+refine": refined(karmarkar_karp),
    "multifit": multifit_of_lpt,
    "multifit+refine": refined(multifit_of_lpt),
    "balance": balance,
}
SLOW = ("karmarkar_karp", "karmarkar_karp+refine")


def images(rng: np.random.Generator, num_items: int) -> FloatArray:
    """Costs of pictures: log-normal sides between 56 and 2000 pixels."""
    sides = np.clip(rng.lognormal(6.0, 0.6, num_items), 56, 2000)
    return sides**2 * rng.uniform(0.6, 1.6, num_items) / 1e6


def clips(rng: np.random.Generator, num_items: int) -> FloatArray:
    """Pictures, and one of 64 is a long clip of 20 to 80 times the cost."""
    costs = rng.lognormal(0.0, 0.5, num_items)
    costs[: max(1, num_items // 64)] *= rng.uniform(20, 80, max(1, num_items // 64))
    return costs


def split_clips(rng: np.random.Generator, num_items: int) -> FloatArray:
    """What long-short sequence parallelism leaves of ``clips``: none above half a mean load of 4 items."""
    costs = clips(rng, num_items)
    limit = 2 * costs.mean()
    degrees = np.minimum(8, 2 ** np.ceil(np.log2(np.maximum(1, costs / limit)))).astype(np.int64)
    return np.repeat(costs / degrees, degrees)[:num_items]


def equal(rng: np.random.Generator, num_items: int) -> FloatArray:
    """Pictures of one size, a quarter of them half as large again."""
    return np.where(rng.uniform(size=num_items) < 0.25, 1.5, 1.0)


def heavy_tail(rng: np.random.Generator, num_items: int) -> FloatArray:
    """Pareto with exponent 1.2: the largest item is a good part of the sum."""
    return rng.pareto(1.2, num_items) + 0.1


DISTRIBUTIONS = (images, clips, split_clips, equal, heavy_tail)


@click.command()
@click.option("--seeds", default=3, show_default=True, help="Draws of each case; small cases take ten times.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def main(*, seeds: int, as_json: bool) -> None:
    """Measure the partition algorithms.

    Example: python -m benchmarks.partition --json
    """
    cases = [
        measure(draw, num_bins, num_bins * per_bin, seeds=range(seeds), bound_of=lower_bound)
        for draw in DISTRIBUTIONS
        for num_bins, per_bin in itertools.product(BINS, ITEMS_PER_BIN)
    ]
    small = [
        measure(draw, num_bins, num_items, seeds=range(10 * seeds), bound_of=optimal_makespan)
        for draw in DISTRIBUTIONS
        for num_bins, num_items in SMALL
    ]
    result = {
        "cases": cases,
        "small": small,
        "summary": {"cases": summary(cases), "small": summary(small)},
    }
    for title, rows in result["summary"].items():
        print(f"{title}: ratio to the {'optimum' if title == 'small' else 'lower bound'}")
        for name, row in rows.items():
            print(
                f"  {name:24} mean {row['ratio']:.4f}, worst {row['worst']:.4f}, "
                f"at it {row['optimal']:.0%}, {row['ms']:.2f} ms (longest {row['longest_ms']:.1f})"
            )
    if as_json:
        print(json.dumps(result))


def measure(
    draw: Callable[[np.random.Generator, int], FloatArray],
    num_bins: int,
    num_items: int,
    *,
    seeds: Iterable[int],
    bound_of: Callable[[FloatArray, int], float],
) -> dict[str, Any]:
    """Return ratio to the bound and time of every algorithm for one distribution and size."""
    draws = [
        np.maximum(1.0, np.rint(draw(generator(seed, draw.__name__, num_bins, num_items), num_items) * TICKS))
        for seed in seeds
    ]
    bounds = [bound_of(costs, num_bins) for costs in draws]
    found: dict[str, Any] = {}
    for name, function in ALGORITHMS.items():
        if name in SLOW and num_bins * num_items > SLOW_CELLS:
            found[name] = None
            continue
        ratios, times = [], []
        for costs, bound in zip(draws, bounds, strict=True):
            start = time.process_time()
            bins = function(costs, num_bins)
            times.append(1000 * (time.process_time() - start))
            ratios.append(makespan(costs, bins, num_bins) / bound)
        found[name] = {
            "ratio": statistics.mean(ratios),
            "worst": max(ratios),
            "optimal": statistics.mean(ratio <= 1 for ratio in ratios),
            "ms": statistics.median(times),
        }
    return {"kind": draw.__name__, "bins": num_bins, "items": num_items, "algorithms": found}


def summary(cases: list[dict[str, Any]]) -> Mapping[str, Mapping[str, float]]:
    """Return mean, worst and time of each algorithm over the cases that all were run on."""
    shared = [case["algorithms"] for case in cases if all(case["algorithms"].values())]
    rows = {}
    for name in ALGORITHMS:
        found = [case[name] for case in shared]
        rows[name] = {
            "ratio": statistics.mean(row["ratio"] for row in found),
            "worst": max(row["worst"] for row in found),
            "optimal": statistics.mean(row["optimal"] for row in found),
            "ms": statistics.mean(row["ms"] for row in found),
            "longest_ms": max(row["ms"] for row in found),
        }
    return rows


if __name__ == "__main__":
    main()
