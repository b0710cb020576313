"""The simulator against this machine: the same plans simulated and trained, 2 and 4 ranks, one thread each.

    python -m benchmarks.reality --json

For each number of ranks the machine is measured first (``omni profile --calibrate``), by all ranks at the
same time. Then every setting trains real steps on batches held in memory, and ``simulate_step`` is given the
plans of these steps. ``measured`` is the time of a step, from the first rank's start to the last one's end;
``simulated`` what the simulator says, in which collectives run beside the computing, as they do on GPUs;
``serial`` the same with nothing hidden, because here the cores that compute also carry the bytes. ``work``
compares the computing alone: the ranks' own work (CPU time), in each stage and microbatch that of the slowest
rank, which other programs on the machine do not change. ``outside`` is the part of ``measured`` that agrees
on the step and runs the optimizer. An error is simulated / measured - 1.

Costs are CPU time. Ranks beyond the cores of the machine share these, so there all costs are multiplied by
the ranks per core for the simulator: what a rank gets while all compute. One that computes while another
waits gets more, which the simulator does not know, so it must be too slow where work is uneven.

The last line of ``--json`` is one object: ``settings`` (a list), ``speedups`` (what balancing buys, by pair),
``median_error``, ``median_error_serial``, ``median_error_work`` (absolute, by number of ranks), and ``load``
of the machine before: wall times and link rates are worth something on an idle machine only.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from balancer.simulator.simulate import SimulatedStep
from benchmarks.reality_steps import Seen, Setting, run_settings
from tests.support.ranks import run_ranks
from trainer.stage_times import ENCODER, LLM

SETTINGS = (
    *(Setting(mixture, "small", "step", balance) for mixture in (0.1, 0.5, 0.9) for balance in (False, True)),
    *(Setting(0.5, "small", "microbatch", balance) for balance in (False, True)),
    *(Setting(0.5, "wide", "step", balance) for balance in (False, True)),
)

HEAD = (
    "ranks, media, model, sharding, balance | ms: measured, simulated, serial | own work: measured, simulated"
)
_ON = {False: "off", True: "on "}


@click.command()
@click.option("--ranks", multiple=True, type=int, default=(2, 4), show_default=True, help="Numbers of ranks.")
@click.option("--seeds", default=3, show_default=True, help="Different steps of each setting.")
@click.option("--repeats", default=5, show_default=True, help="Times that each step is trained.")
@click.option("--calibrate-s", default=20.0, show_default=True, help="Seconds of measuring each model first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def main(*, ranks: Sequence[int], seeds: int, repeats: int, calibrate_s: float, as_json: bool) -> None:
    """Compare simulated with measured steps.

    Example: python -m benchmarks.reality --json
    """
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load before: {load:.1f}")
    rows: list[dict[str, Any]] = []
    for num_ranks in ranks:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (num_ranks, Path(folder), SETTINGS, seeds, repeats, calibrate_s)
            by_rank = run_ranks(num_ranks, run_settings, args=arguments, timeout_s=3600)
        rows += [row_of(seen) for seen in zip(*by_rank, strict=True)]
    print(HEAD)
    for row in rows:
        print(text_of(row))
    medians = summary(rows)
    for name, of_ranks in medians.items():
        print(
            f"{name}: "
            + ", ".join(f"{100 * value:.0f} % on {ranks} ranks" for ranks, value in of_ranks.items())
        )
    bought = speedups(rows)
    for pair in bought:
        setting = f"{pair['ranks']} ranks, {pair['mixture']} media, {pair['model']}, {pair['reshard']}"
        ratios = ", ".join(f"{name} {pair[name]:.2f}" for name in ("measured", "simulated", "work"))
        print(f"balancing buys on {setting}: {ratios}")
    result = {"load": load, "settings": rows, "speedups": bought, **medians}
    if as_json:
        print(json.dumps(result))


def row_of(seen: Sequence[Seen]) -> dict[str, Any]:
    """Return one setting, seen by all of its ranks; seconds are means over its steps."""
    first = seen[0]
    steps = first.simulated
    work_s = 0.0
    for stage in (ENCODER, LLM):
        work_s += sum(map(max, zip(*(item.own_s[stage] for item in seen), strict=True)))
    seconds = {
        "measured_s": max(item.step_s for item in seen),
        "simulated_s": sum(item.step_s for item in steps),
        "outside_s": max(item.outside_s for item in seen),
        "serial_s": sum(item.step_s + item.collective_s for item in steps),
        "work_s": work_s,
        "simulated_work_s": sum(map(_work_s, steps)) / first.ranks_per_core,
    }
    return {
        "ranks": len(seen),
        **asdict(first.setting),
        **{name: value / len(steps) for name, value in seconds.items()},
        "error": seconds["simulated_s"] / seconds["measured_s"] - 1,
        "error_serial": seconds["serial_s"] / seconds["measured_s"] - 1,
        "error_work": seconds["simulated_work_s"] / seconds["work_s"] - 1,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the median absolute errors by number of ranks."""
    found: dict[str, dict[str, float]] = {}
    for name in ("error", "error_serial", "error_work"):
        found[f"median_{name}"] = {
            str(ranks): statistics.median(abs(row[name]) for row in rows if row["ranks"] == ranks)
            for ranks in sorted({row["ranks"] for row in rows})
        }
    return found


def speedups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what balancing buys, measured and simulated, for each pair that differs in it alone."""
    alike = ("ranks", "mixture", "model", "reshard")
    found = []
    for off in (row for row in rows if not row["balance"]):
        for on in (row for row in rows if row["balance"] and all(row[name] == off[name] for name in alike)):
            ratios = {name: off[f"{name}_s"] / on[f"{name}_s"] for name in ("measured", "simulated", "work")}
            found.append({**{name: off[name] for name in alike}, **ratios})
    return found


def text_of(row: dict[str, Any]) -> str:
    """Return one line of the table, in milliseconds."""
    seconds = ("measured_s", "simulated_s", "serial_s", "work_s", "simulated_work_s")
    measured, simulated, serial, work, simulated_work = (1e3 * row[name] for name in seconds)
    error, error_serial, error_work = (100 * row[f"error{name}"] for name in ("", "_serial", "_work"))
    return (
        f"{row['ranks']} {row['mixture']:.1f} {row['model']:5} {row['reshard']:10} {_ON[row['balance']]}"
        f"{measured:8.0f}{simulated:8.0f} {error:+4.0f}%{serial:8.0f} {error_serial:+4.0f}%"
        f"{work:8.0f}{simulated_work:8.0f} {error_work:+4.0f}%"
    )


def _work_s(step: SimulatedStep) -> float:
    """Seconds of encoders and LLM if each microbatch takes as long as its slowest rank."""
    encoder_s = step.busy_s.get("encoder", 0.0) * step.encoder_imbalance
    return encoder_s + step.busy_s.get("llm", 0.0) * step.llm_imbalance


if __name__ == "__main__":
    main()
