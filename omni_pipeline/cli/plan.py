"""``omni plan``: what a step would do, when a sample is seen, what a rank gets; without running anything."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from omni_pipeline.cli.progress import ProgressBar
from omni_pipeline.core.config import load_config

if TYPE_CHECKING:
    from omni_pipeline.app.run_config import RunConfig

BAR_AFTER_S = 1.0


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("run_file", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(0), help="Step to show, from 0 (the default).")
@click.option("--sample", help="Tell when this sample is seen: KEY, SOURCE/KEY or SHARD/KEY.")
@click.option("--rebuild", type=click.IntRange(0), help="Step whose arrays are made again.")
@click.option("--ranks", type=click.IntRange(1), help="World size (default 1).")
@click.option("--ranks-per-node", type=click.IntRange(1), help="Ranks of one machine (default: all).")
@click.option("--group", type=click.IntRange(0), help="Group of replicas to show, from 0 (the default).")
@click.option("--all-groups", is_flag=True, help="Show every group.")
@click.option("--rank", type=click.IntRange(0), help="With --rebuild: the rank, from 0 (the default).")
@click.option("--microbatch", type=click.IntRange(0), help="With --rebuild: only this one.")
@click.option("--out", type=click.Path(path_type=Path), help="With --rebuild: write the arrays to this .npz.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def command(run_file: Path, flags: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Explain RUN_FILE without running it.

    By default: the plan of one step, with every pack, its samples, where each runs and who encodes what. With
    --sample: when and where a sample was or will be seen, and with --ranks on which rank. With --rebuild: the
    exact arrays that one rank gets of a step, fetched and decoded here.

    The order is followed from the nearest checkpoint in run.dir, else from step 0.

    Example: omni plan examples/own_media/run.toml --step 12 --ranks 2
    """
    from omni_pipeline.app.run_config import RunConfig

    mode = _mode(options)
    config = load_config(RunConfig, run_file, flags)
    show = {"step": _show_step, "sample": _show_sample, "rebuild": _rebuild}[mode]
    show(config, options, as_json)


def _mode(options: dict[str, Any]) -> str:
    """Return which of the three is asked for; stop at options that do not go together."""
    modes = [name for name in ("step", "sample", "rebuild") if options[name] is not None] or ["step"]
    if len(modes) > 1:
        raise click.UsageError(f"--{modes[0]} and --{modes[1]} are two questions: ask one at a time")
    mode = modes[0]
    allowed = {"step": ("group", "all_groups"), "sample": (), "rebuild": ("rank", "microbatch", "out")}
    for other, names in allowed.items():
        for name in names:
            if options[name] not in (None, False) and other != mode:
                raise click.UsageError(f"--{name.replace('_', '-')} goes with --{other}, not with --{mode}")
    if options["all_groups"] and options["group"] is not None:
        raise click.UsageError("--group and --all-groups exclude each other")
    return mode


def _show_step(config: RunConfig, options: dict[str, Any], as_json: bool) -> None:
    from omni_pipeline.app.explain import explain_step
    from omni_pipeline.cli.plan_tables import print_step

    with ProgressBar("following the order", after_s=BAR_AFTER_S) as progress:
        explained = explain_step(
            config,
            step=options["step"] or 0,
            world_size=options["ranks"] or 1,
            ranks_per_node=options["ranks_per_node"],
            groups=None if options["all_groups"] else (options["group"] or 0,),
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(explained.to_dict()))
    else:
        print_step(explained)


def _show_sample(config: RunConfig, options: dict[str, Any], as_json: bool) -> None:
    from omni_pipeline.app.find_sample import find_sample
    from omni_pipeline.cli.plan_tables import print_sample

    with ProgressBar("looking", after_s=BAR_AFTER_S) as progress:
        found = find_sample(
            config,
            options["sample"],
            world_size=options["ranks"],
            ranks_per_node=options["ranks_per_node"],
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(found.to_dict()))
    else:
        print_sample(found)


def _rebuild(config: RunConfig, options: dict[str, Any], as_json: bool) -> None:
    from omni_pipeline.app.rebuild import rebuild, table_of, write_arrays
    from omni_pipeline.cli.plan_tables import print_rebuilt

    with ProgressBar("following the order", after_s=BAR_AFTER_S) as progress:
        rebuilt = rebuild(
            config,
            step=options["rebuild"],
            rank=options["rank"] or 0,
            world_size=options["ranks"] or 1,
            ranks_per_node=options["ranks_per_node"],
            progress=progress,
        )
    arrays = rebuilt.arrays(options["microbatch"])
    rows = table_of(arrays)
    if options["out"] is not None:
        write_arrays(options["out"], arrays)
    if as_json:
        out = None if options["out"] is None else str(options["out"])
        click.echo(json.dumps({**rebuilt.to_dict(), "arrays": [asdict(row) for row in rows], "out": out}))
    else:
        print_rebuilt(rebuilt, rows, out=options["out"])
