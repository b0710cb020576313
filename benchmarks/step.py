"""What balancing and LSSP buy in real training steps: two ranks on this machine, one thread each.

    python -m benchmarks.step --json

Both ranks train one model of the family (small, sharded as in a run) on batches held in memory, so that only
the step counts. For each mixture of ``benchmarks.step_worlds`` the same packs are planned three ways by the
real planner, with costs measured on this machine at the start: in order, balanced, and balanced with long
segments shared. The variants take turns, step by step, in one process group; a ratio is the median over
pairs of neighbours in time, its spread their quartiles. ``modelled`` is what the plans promised. ``work`` is
the same ratio of the ranks' own work (CPU time, in each stage that of the slowest rank), which other
programs on the machine do not change.

The last line of ``--json`` is one object: ``speedup_skewed`` (in order / balanced), ``speedup_lssp``
(balanced / with LSSP, on long media), ``ratio_even`` (balanced with LSSP / in order), and beside each
``_quartiles``, ``_modelled`` and ``_work``; ``noise_quartiles``, of the time of a step against the one before
it of the same variant on the same packs; ``step_ms`` and ``modelled_ms`` by mixture and variant. A model says
nothing of what all variants have alike (sharding, optimizer, messages): compare differences of those two.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.step_worlds import NUM_RANKS
from benchmarks.timed_steps import Timed, run_mixtures, work_s
from tests.support.ranks import run_ranks

# Mixture of each result, the variant above the line, the one below.
RATIOS = {
    "speedup_skewed": ("skewed", "in_order", "balanced"),
    "speedup_lssp": ("long", "balanced", "lssp"),
    "ratio_even": ("even", "lssp", "in_order"),
}
Ranks = tuple[Timed, ...]
"""One step as each rank saw it."""


@click.command()
@click.option("--repeats", default=5, show_default=True, help="Steps of each variant on the same packs.")
@click.option("--seeds", default=3, show_default=True, help="Different packs of each mixture.")
@click.option("--calibrate-s", default=20.0, show_default=True, help="Seconds of measuring costs first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def main(*, repeats: int, seeds: int, calibrate_s: float, as_json: bool) -> None:
    """Measure what balancing and LSSP buy in real steps of two ranks.

    Example: python -m benchmarks.step --json
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (Path(folder), seeds, repeats, calibrate_s)
        by_rank = run_ranks(NUM_RANKS, run_mixtures, args=arguments, timeout_s=3600)
    result = summary([tuple(step) for step in zip(*by_rank, strict=True)])
    print(f"load of the machine before: {os.getloadavg()[1]:.1f} (idle but for the benchmark: {NUM_RANKS})")
    for name, (mixture, above, below) in RATIOS.items():
        low, high = result[f"{name}_quartiles"]
        print(
            f"{mixture:7} {above} / {below}: {result[name]:.3f} ({low:.3f} to {high:.3f}), "
            f"modelled {result[f'{name}_modelled']:.3f}, of the ranks' own work {result[f'{name}_work']:.3f}"
        )
    low, high = result["noise_quartiles"]
    print(f"the same step again: {low:.3f} to {high:.3f}")
    if as_json:
        print(json.dumps(result))


def summary(steps: Sequence[Ranks]) -> dict[str, Any]:
    """Return the results; ``steps`` in the order in which they ran."""
    result: dict[str, Any] = {}
    for name, (mixture, above, below) in RATIOS.items():
        pairs = _pairs([step for step in steps if step[0].mixture == mixture], above, below)

        def ratios(time: Callable[[Ranks], float], pairs: list[tuple[Ranks, Ranks]] = pairs) -> list[float]:
            return [time(one) / time(other) for one, other in pairs]

        measured = ratios(lambda ranks: ranks[0].step_s)
        result[name] = statistics.median(measured)
        result[f"{name}_quartiles"] = _quartiles(measured)
        result[f"{name}_modelled"] = statistics.median(ratios(lambda ranks: ranks[0].modelled_s))
        result[f"{name}_work"] = statistics.median(ratios(work_s))
    result["noise_quartiles"] = _quartiles(_noise(steps))
    result["step_ms"] = _by_variant(steps, lambda ranks: ranks[0].step_s)
    result["modelled_ms"] = _by_variant(steps, lambda ranks: ranks[0].modelled_s)
    return result


def _by_variant(steps: Sequence[Ranks], seconds: Callable[[Ranks], float]) -> dict[str, dict[str, float]]:
    """Return median milliseconds by mixture and variant."""
    found: dict[str, dict[str, list[float]]] = {}
    for step in steps:
        of_mixture = found.setdefault(step[0].mixture, {})
        of_mixture.setdefault(step[0].variant, []).append(1e3 * seconds(step))
    return {
        mixture: {variant: statistics.median(times) for variant, times in variants.items()}
        for mixture, variants in found.items()
    }


def _noise(steps: Sequence[Ranks]) -> list[float]:
    """Return the ratios of steps to the next one of the same variant on the same packs."""
    last: dict[tuple[str, int, str], float] = {}
    ratios = []
    for step in (ranks[0] for ranks in steps):
        key = step.mixture, step.seed, step.variant
        if key in last:
            ratios.append(step.step_s / last[key])
        last[key] = step.step_s
    return ratios or [1.0]


def _quartiles(ratios: Sequence[float]) -> list[float]:
    ordered = sorted(ratios)
    return [ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]]


def _pairs(steps: Sequence[Ranks], above: str, below: str) -> list[tuple[Ranks, Ranks]]:
    """Return neighbours in time on the same packs, as (above, below)."""
    pairs = []
    for one, other in zip(steps[::2], steps[1::2], strict=True):
        found = {step[0].variant: step for step in (one, other)}
        assert one[0].seed == other[0].seed, "both variants of a round take the same packs"
        # Where samples run must not change what is learned.
        assert abs(one[0].loss - other[0].loss) <= 1e-4 * abs(one[0].loss), (one[0].loss, other[0].loss)
        pairs.append((found[above], found[below]))
    return pairs


if __name__ == "__main__":
    main()
