"""``omni profile``: where the time of a trained run went."""

from __future__ import annotations

import json
from pathlib import Path

import click

from omni_pipeline.core.config import load_config
from omni_pipeline.core.errors import ConfigError


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def command(run: Path, flags: tuple[str, ...], as_json: bool) -> None:
    """Tell where the time of a trained run went, and which samples its worst steps had.

    RUN is the folder of a run, or its run file; FLAGS are assignments into the file.

    Example: omni profile demo-run/run
    """
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
