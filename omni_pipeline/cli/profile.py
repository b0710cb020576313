"""``omni profile``: where the time of a trained run went; and what the machine can do, measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from omni_pipeline.core.config import load_config
from omni_pipeline.core.errors import ConfigError


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--calibrate", is_flag=True, help="Measure this machine with the model of a run file.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="With --calibrate: folder to write (run.dir/calibration)."
)
@click.option(
    "--nproc", type=click.IntRange(1), help="With --calibrate: ranks that share the machine (default 1)."
)
@click.option(
    "--seconds", type=click.FloatRange(1.0), help="With --calibrate: time to measure, about (default 60)."
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def command(run: Path, flags: tuple[str, ...], as_json: bool, calibrate: bool, **options: Any) -> None:
    """Tell where the time of a trained run went, and which samples its worst steps had.

    RUN is the folder of a run, or its run file; FLAGS are assignments into the file.

    With --calibrate, RUN is a run file: the rates of this machine and the time that its encoders and LLM take
    are measured, without data, and written as two files that plans and simulations read. Start it on as many
    ranks as the run has on one machine.

    Example: omni profile demo-run/run
    """
    if calibrate:
        from omni_pipeline.cli.calibrate import run_calibration

        run_calibration(run, flags, as_json=as_json, **options)
        return
    for name, value in options.items():
        if value is not None:
            raise click.UsageError(f"--{name} goes with --calibrate")
    from omni_pipeline.app.profile import profile_run
    from omni_pipeline.cli.profile_tables import print_profile

    run_dir, hardware = _run_of(run, flags)
    found = profile_run(run_dir, hardware=hardware)
    if as_json:
        click.echo(json.dumps(found.to_dict()))
    else:
        print_profile(found)


def _run_of(run: Path, flags: tuple[str, ...]) -> tuple[Path, str | None]:
    """Return the folder of the run, and the hardware that its run file names."""
    if run.is_dir():
        if flags:
            raise click.UsageError(f"flags change a run file, and {run} is a folder")
        return run, None
    if not run.exists():
        raise ConfigError(f"there is no run {run}", fix="give the folder of a run, or a run file (TOML)")
    from omni_pipeline.app.run_config import RunConfig

    config = load_config(RunConfig, run, flags)
    return config.run.dir, config.balance.hardware
