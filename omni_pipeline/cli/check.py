"""``omni data check``: everything that is wrong with shards, in one pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from omni_pipeline.cli.progress import ProgressBar

if TYPE_CHECKING:
    from loaders.check_members import CheckSettings, ShardJob

BAR_AFTER_S = 1.0


@click.command()
@click.argument("shards", nargs=-1)
@click.option("--decode", is_flag=True, help="Decode everything too, in processes with a deadline.")
@click.option("--layout", help="Members that a sample must have, as 'jpg|png,txt'.")
@click.option(
    "--run",
    "run_file",
    type=click.Path(path_type=Path),
    help="Run file: check against its layouts, sizes and limits; without SHARDS all shards of its sources.",
)
@click.option("--fix", type=click.Path(path_type=Path), help="Write the samples to leave out to this file.")
@click.option("--workers", type=click.IntRange(0), help="Processes (default: one for each core).")
@click.option(
    "--encoder",
    multiple=True,
    type=click.Path(path_type=Path),
    help="File of an encoder that is not built in, for its kind of media; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(
    shards: tuple[str, ...],
    decode: bool,
    layout: str | None,
    run_file: Path | None,
    fix: Path | None,
    workers: int | None,
    encoder: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Find all that is wrong with SHARDS (paths, patterns, URLs, manifests), and say how to mend it.

    Reads headers, names, texts and indexes; nothing is changed. Problems lose or change samples: exit 1.
    Notes are read right, and may surprise: exit 0. With --fix FILE the samples that cannot be used are
    written to a deny-list, for `deny` in a run file. See docs/check.md for all that is looked for.

    Example: omni data check 'shards/photos-*.tar' --layout 'jpg|png,txt' --decode
    """
    if layout is not None and run_file is not None:
        raise click.UsageError("--layout and --run exclude each other: the run file has the layouts")
    if not shards and run_file is None:
        raise click.UsageError("name the SHARDS to check, or a run file with --run")
    from loaders.check import available_cores, check_shards
    from omni_pipeline.cli.check_tables import print_check, to_dict
    from omni_pipeline.core.encoder_file import load_encoder

    for path in encoder:
        load_encoder(path)
    jobs, settings, deadline_s = _of_run(run_file, shards) if run_file else _of_layout(layout, shards)
    with ProgressBar("decoding" if decode else "checking", after_s=BAR_AFTER_S) as progress:
        report = check_shards(
            jobs,
            settings,
            num_workers=available_cores() if workers is None else workers,
            decode=decode,
            decode_deadline_s=deadline_s,
            deny_list=fix,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(to_dict(report)))
    else:
        print_check(report)
    if report.found.num_problems:
        click.get_current_context().exit(1)


def _of_run(run_file: Path, shards: tuple[str, ...]) -> tuple[list[ShardJob], CheckSettings, float]:
    from loaders.manifest import list_shards
    from omni_pipeline.app.check_run import run_check_settings, run_jobs
    from omni_pipeline.app.run_config import RunConfig
    from omni_pipeline.core.config import load_config

    config = load_config(RunConfig, run_file)
    return run_jobs(config, list_shards(shards)), run_check_settings(config), config.loader.deadline_s


def _of_layout(layout: str | None, shards: tuple[str, ...]) -> tuple[list[ShardJob], CheckSettings, float]:
    from loaders.check import DECODE_DEADLINE_S
    from loaders.check_members import CheckSettings, ShardJob
    from loaders.manifest import list_shards
    from loaders.source_config import FieldsLayout
    from omni_pipeline.core.config import validate

    layouts: tuple[FieldsLayout, ...] = ()
    if layout is not None:
        fields = [field.strip() for field in layout.split(",")]
        layouts = (validate(FieldsLayout, {"fields": fields}, where=f"--layout {layout!r}"),)
    return [ShardJob(shard, layouts) for shard in list_shards(shards)], CheckSettings(), DECODE_DEADLINE_S
