"""``omni profile --calibrate``: measure the machine, on one process or on ranks, and tell what was found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from balancer.hardware import load_hardware
from omni_pipeline.cli.progress import ProgressBar
from omni_pipeline.cli.tables import make_table, say
from omni_pipeline.core.config import load_config
from omni_pipeline.core.errors import ConfigError, OmniError

if TYPE_CHECKING:
    from omni_pipeline.app.calibrate import Calibration
    from omni_pipeline.app.environment import Environment
    from omni_pipeline.app.run_config import RunConfig

SECONDS = 60.0
FOLDER = "calibration"
PARTS = ("vision", "audio", "llm")


def run_calibration(
    run_file: Path,
    flags: tuple[str, ...],
    *,
    as_json: bool,
    out: Path | None,
    nproc: int | None,
    seconds: float | None,
) -> None:
    """Be a rank of the measurement, start its ranks, or measure in this process.

    Raises:
        ConfigError: Wrong settings, or the folder cannot be made.
    """
    from omni_pipeline.app.environment import Environment
    from omni_pipeline.app.run_config import RunConfig

    if run_file.is_dir():
        raise ConfigError(f"{run_file} is a folder", fix="give the run file (TOML): its model is measured")
    config = load_config(RunConfig, run_file, flags)
    load_hardware(config.balance.hardware)  # so that a wrong name is told once, before ranks start
    folder = config.run.dir / FOLDER if out is None else out
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}", fix="give --out") from error
    place = Environment.read()
    if place is None and nproc is not None and nproc > 1:
        _start_ranks([str(run_file), *flags], folder, as_json=as_json, num_ranks=nproc, seconds=seconds)
        return
    found = _measure(config, folder, place=place, seconds=seconds or SECONDS)
    if found is None:
        return
    if as_json:
        click.echo(json.dumps(to_dict(found)))
    else:
        print_calibration(found)


def to_dict(found: Calibration) -> dict[str, Any]:
    """Return what was found as plain data."""
    return {
        "settings": _settings(found),
        "hardware": found.hardware.model_dump(mode="json"),
        "costs": found.costs.model_dump(mode="json"),
        "links": {
            name: {"bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}
            for name, link in found.links.items()
        },
    }


def print_calibration(found: Calibration) -> None:
    """Print rates, fits with their errors, and the settings that use them."""
    console = Console()
    machine = found.hardware
    say(
        console,
        f"{machine.name}, {found.costs.precision}: peak {machine.flops_per_s / 1e9:,.4g} GFLOP/s,"
        f" copies {machine.hbm_bytes_per_s / 1e9:.3g} GB/s, kernel {machine.kernel_s * 1e6:.3g} us",
    )
    for name, link in found.links.items():
        say(
            console,
            f"{name} over {machine.ranks_per_node} ranks: {link.bytes_per_s / 1e9:.3g} GB/s,"
            f" {link.latency_s * 1e6:.3g} us",
        )
    table = make_table(
        "fitted costs, forward and backward",
        [""],
        ["ns per pair", "us per position", "us per segment", "ms per microbatch", "error", "worst", "of"],
    )
    for name, fit in found.costs.fits.items():
        table.add_row(
            name,
            f"{fit.pair_s * 1e9:.3g}",
            f"{fit.position_s * 1e6:.3g}",
            f"{fit.segment_s * 1e6:.3g}",
            f"{fit.microbatch_s * 1e3:.3g}",
            f"{100 * fit.median_error:.0f} %",
            f"{100 * fit.max_error:.0f} %",
            str(fit.num_measured),
        )
    console.print(table)
    say(console, "error: median and worst over microbatches, each left out of its own fit")
    for name, fit in found.costs.fits.items():
        say(console, f"worst of {name}: {fit.worst}")
    say(console, "put into the run file:")
    say(console, "[balance]")
    for name, value in _settings(found).items():
        say(console, f"{name.removeprefix('balance.')} = {json.dumps(value)}")


def _settings(found: Calibration) -> dict[str, str]:
    return {"balance.hardware": str(found.hardware_path), "balance.costs": str(found.costs_path)}


def _start_ranks(run: list[str], out: Path, *, as_json: bool, num_ranks: int, seconds: float | None) -> None:
    from omni_pipeline.app.launch import RankProcesses

    arguments = ["profile", *run, "--calibrate", "--out", str(out), "--seconds", str(seconds or SECONDS)]
    arguments += ["--json"] if as_json else []
    with RankProcesses(arguments, num_ranks=num_ranks) as ranks:
        ranks.wait()


def _measure(
    config: RunConfig, out: Path, *, place: Environment | None, seconds: float
) -> Calibration | None:
    from omni_pipeline.app.calibrate import calibrate  # imports torch

    is_first = place is None or place.rank == 0
    try:
        with ProgressBar("measuring") as bar:

            def tell(part: str, share: float) -> None:
                if is_first:
                    bar(round(100 * (PARTS.index(part) + share)), 100 * len(PARTS))

            return calibrate(config, out, place=place, budget_s=seconds, progress=tell)
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}", fix="give another --out") from error
    except OmniError as error:
        if is_first or not error.is_shared:
            raise
        sys.exit(error.exit_code)  # what all ranks know alike is told once
