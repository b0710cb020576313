"""``omni demo``: the whole path on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("demo-run"), show_default=True)
@click.option("--nproc", type=click.IntRange(1), default=2, show_default=True, help="Ranks.")
@click.option("--steps", type=click.IntRange(8), default=None, help="Training steps.")
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object on standard output.")
def command(out: Path, nproc: int, steps: int | None, as_json: bool) -> None:
    """Make media, prepare shards, train on two ranks, kill one, resume, evaluate and report. No network.

    Example: omni demo --out demo-run
    """
    from omni_pipeline.app.demo.run import DemoSettings, run_demo

    settings = (
        DemoSettings(out=out, num_ranks=nproc)
        if steps is None
        else DemoSettings(out=out, num_ranks=nproc, steps=steps)
    )
    result = run_demo(settings)
    if as_json:
        click.echo(json.dumps(result))
