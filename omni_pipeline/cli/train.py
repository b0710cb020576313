"""``omni train``: start the ranks of a run, or be one of them."""

from __future__ import annotations

from pathlib import Path

import click

from omni_pipeline.core.config import load_config


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": False})
@click.argument("run_file", type=click.Path(path_type=Path))
@click.option(
    "--nproc", type=click.IntRange(1), default=None, help="Ranks to start on this machine (default 1)."
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def command(run_file: Path, nproc: int | None, flags: tuple[str, ...]) -> None:
    """Train as RUN_FILE (TOML) says; continues from the latest complete checkpoint in run.dir.

    FLAGS are assignments into the file: --optimizer.lr 1e-4 --sources.0.weight 2. Under torchrun this is one
    rank; otherwise --nproc ranks are started here. Relative paths in the file start where you stand.

    SIGTERM, SIGUSR1 and Ctrl-C write a checkpoint, then end the run (exit 0; 130 for Ctrl-C).

    Example: omni train examples/own_media/run.toml --nproc 2 --run.steps 100
    """
    from omni_pipeline.app.environment import Environment
    from omni_pipeline.app.run_config import RunConfig

    config = load_config(RunConfig, run_file, flags)
    place = Environment.read()
    if place is not None:
        if nproc is not None and nproc != place.world_size:
            raise click.UsageError(
                f"--nproc {nproc}, but this is one of {place.world_size} ranks (WORLD_SIZE)"
            )
        from omni_pipeline.app.rank import run_rank  # imports torch

        run_rank(config, place)
        return
    from omni_pipeline.app.launch import RankProcesses
    from omni_pipeline.app.wire import check_run

    check_run(config, world_size=nproc or 1)
    with RankProcesses(["train", str(run_file), *flags], num_ranks=nproc or 1) as ranks:
        ranks.wait()
