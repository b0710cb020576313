"""``omni data``: raw media to indexed shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from omni_pipeline.cli.check import command as check
from omni_pipeline.cli.progress import ProgressBar

if TYPE_CHECKING:
    from loaders.index import IndexReport

SHOWN_PROBLEMS = 10
_with_encoders = click.option(
    "--encoder",
    multiple=True,
    type=click.Path(path_type=Path),
    help="File of an encoder that is not built in, for its kind of media; may be repeated.",
)


@click.group()
def command() -> None:
    """Prepare shards from raw media; index and check shards that exist.

    Example: omni data prepare photos/ --out shards/
    """


command.add_command(check, "check")


@command.command()
@click.argument("inputs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for the shards.")
@click.option("--name", default="data", show_default=True, help="Shards are NAME-000000.tar and so on.")
@click.option(
    "--max-count", type=click.IntRange(1), default=10_000, show_default=True, help="Samples a shard."
)
@click.option(
    "--max-mb", type=click.FloatRange(0, min_open=True), default=1000.0, show_default=True, help="MB a shard."
)
@click.option("--tokenizer", type=click.Path(path_type=Path), help="tokenizer.json to count tokens with.")
@_with_encoders
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object.")
def prepare(
    inputs: tuple[Path, ...],
    out: Path,
    name: str,
    max_count: int,
    max_mb: float,
    tokenizer: Path | None,
    encoder: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Turn folders or JSONL manifests (INPUTS) into WebDataset tar shards, and index them.

    In a folder, files with the same name up to the suffix make a sample: 1.jpg and 1.txt. A manifest has one
    object per line: {"image": "photos/1.jpg", "text": "A red barn."}; paths are relative to the manifest.

    Example: omni data prepare photos/ --out shards/ --name photos --max-count 1000
    """
    from dataclasses import asdict

    from loaders.prepare import prepare as prepare_shards

    _load_encoders(encoder)
    with ProgressBar("preparing") as advance:
        made = prepare_shards(
            inputs,
            out,
            name=name,
            max_count=max_count,
            max_bytes=round(max_mb * 1e6),
            tokenizer_path=tokenizer,
            progress=advance,
        )
    if as_json:
        click.echo(json.dumps(asdict(made), default=str))
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(made.num_members.items()))
    size_mb = made.num_bytes / 1e6
    click.echo(f"{made.num_samples} samples ({kinds}), {size_mb:.1f} MB in {len(made.shards)} shards: {out}")
    if made.num_skipped:
        click.echo(f"{made.num_skipped} files belong to no sample and were left out")
    _echo_problems(_bad_members(made.reports), "bad members")


@command.command()
@click.argument("shards", nargs=-1, required=True)
@click.option("--tokenizer", type=click.Path(path_type=Path), help="tokenizer.json to count tokens with.")
@_with_encoders
@click.option("--workers", type=click.IntRange(0), default=2, show_default=True, help="Processes.")
@click.option("--force", is_flag=True, help="Index unchanged shards too.")
@click.option(
    "--manifest", help="Sum up the SHARDS in this file, NAME.manifest.arrow, to be named in sources.shards."
)
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object.")
def index(
    shards: tuple[str, ...],
    tokenizer: Path | None,
    encoder: tuple[Path, ...],
    workers: int,
    force: bool,
    manifest: str | None,
    as_json: bool,
) -> None:
    """Index existing tar SHARDS (paths, patterns, URLs) from headers only; unchanged ones are passed by.

    SHARDS may be manifests, for the shards they name. Exits 1, without a manifest, if a shard could not be
    indexed.

    Example: omni data index 'shards/photos-{000000..000003}.tar' --manifest shards/photos.manifest.arrow
    """
    from loaders.index import index_shards
    from loaders.manifest import check_manifest_path, list_shards, write_manifest

    _load_encoders(encoder)
    if manifest is not None:
        check_manifest_path(manifest)
    found = list_shards(shards)
    with ProgressBar("indexing") as advance:
        done = 0

        def on_report(report: IndexReport) -> None:
            nonlocal done
            done += 1
            advance(done, len(found))

        reports = index_shards(
            found, tokenizer_path=tokenizer, num_workers=workers, force=force, progress=on_report
        )
    bad = _bad_members(reports)
    broken = [f"{report.shard}: {report.error}" for report in reports if report.error]
    cut = [f"{report.shard}: {report.damage}" for report in reports if report.damage]
    if manifest is not None and not broken:
        write_manifest(manifest, found)
    summary = {
        "shards": len(reports),
        "unchanged": sum(report.is_unchanged for report in reports),
        "samples": sum(report.num_samples for report in reports),
        "bad_members": len(bad),
        "damaged_shards": len(cut),
        "failed_shards": len(broken),
    }
    if as_json:
        click.echo(json.dumps(summary))
    else:
        click.echo(", ".join(f"{value} {name.replace('_', ' ')}" for name, value in summary.items()))
        _echo_problems(bad, "bad members")
        _echo_problems(cut, "damaged shards")
        _echo_problems(broken, "without index")
    if broken:
        click.get_current_context().exit(1)


def _load_encoders(paths: tuple[Path, ...]) -> None:
    from omni_pipeline.core.encoder_file import load_encoder

    for path in paths:
        load_encoder(path)


def _bad_members(reports: Sequence[IndexReport]) -> list[str]:
    return [f"{report.shard}, {member}: {reason}" for report in reports for member, reason in report.bad]


def _echo_problems(problems: list[str], title: str) -> None:
    if not problems:
        return
    click.echo(f"{len(problems)} {title}:")
    for problem in problems[:SHOWN_PROBLEMS]:
        click.echo(f"  {problem}")
    if len(problems) > SHOWN_PROBLEMS:
        click.echo(f"  and {len(problems) - SHOWN_PROBLEMS} more")
