"""``omni report``: the HTML page of a run."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="Page to write (RUN_DIR/report.html)."
)
def command(run_dir: Path, out: Path | None) -> None:
    """Write the self-contained HTML report of the run in RUN_DIR and print its path.

    Example: omni report demo-run/run
    """
    from omni_pipeline.app.finish import report_of

    click.echo(report_of(run_dir, out=out))
