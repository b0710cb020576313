"""``omni plan``: what a step would do, on any number of ranks, without running it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from omni_pipeline.core.config import load_config

if TYPE_CHECKING:
    from omni_pipeline.app.explain import ExplainedStep


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("run_file", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(0), default=0, show_default=True, help="Step, from 0.")
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="World size.")
@click.option("--group", type=click.IntRange(0), default=0, show_default=True, help="Group of replicas.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def command(run_file: Path, step: int, ranks: int, group: int, as_json: bool, flags: tuple[str, ...]) -> None:
    """Print the plan of one step of RUN_FILE: packs, samples, where each runs, who encodes what.

    Example: omni plan demo-run/run.toml --step 12 --ranks 2
    """
    from omni_pipeline.app.explain import explain_step
    from omni_pipeline.app.run_config import RunConfig
    from omni_pipeline.core.plan import plan_to_dict

    config = load_config(RunConfig, run_file, flags)
    explained = explain_step(config, step=step, world_size=ranks, group=group)
    if as_json:
        click.echo(json.dumps(plan_to_dict(explained.plan)))
    else:
        _print(explained)


def _print(explained: ExplainedStep) -> None:
    from rich.console import Console
    from rich.table import Table

    plan = explained.plan
    console = Console()
    console.print(
        f"step {plan.step}, group {plan.group}: {len(plan.packs)} packs, {plan.num_tokens} tokens,"
        f" {100 * plan.padding:.1f} % of the positions padding,"
        f" {len(plan.media)} media segments, {plan.num_microbatches} microbatches, digest {plan.digest:016x}",
        soft_wrap=True,
    )
    packs = Table(title="packs (lane:number)", title_justify="left")
    columns = (
        "replica",
        "microbatch",
        "pack",
        "samples",
        "tokens",
        "positions",
        "fill",
        "LLM ms",
        "encoder ms",
    )
    for name in columns:
        packs.add_column(name, justify="right", no_wrap=True)
    for row in explained.packs:
        packs.add_row(
            str(row.replica),
            str(row.microbatch),
            f"{row.lane}:{row.number}" if row.lane >= 0 else "-",
            str(row.num_samples),
            str(row.num_tokens),
            str(row.num_positions),
            f"{row.fill:.3f}",
            f"{1e3 * row.llm_s:.3g}",
            f"{1e3 * row.encoder_s:.3g}",
        )
    console.print(packs)
    ranks = Table(title="encoding", title_justify="left")
    for name in ("rank", "media before", "after", "ms before", "after", "rows"):
        ranks.add_column(name, justify="right")
    for item in explained.ranks:
        ranks.add_row(
            *map(str, (item.rank, item.num_media_before, item.num_media_after)),
            f"{1e3 * item.before_s:.3g}",
            f"{1e3 * item.after_s:.3g}",
            str(item.num_rows_after),
        )
    console.print(ranks)
    encoder, llm = plan.encoder_balance, plan.llm_balance
    console.print(
        f"imbalance (max / mean): encoder {encoder.imbalance_before:.3f} -> {encoder.imbalance_after:.3f},"
        f" LLM {llm.imbalance_before:.3f} -> {llm.imbalance_after:.3f};"
        f" {100 * explained.moved_fraction:.0f} % of the embedding rows cross ranks"
    )
    samples = Table(title="samples", title_justify="left")
    for name in ("place", "sample", "tokens", "segments: units -> rows @ encoding rank"):
        samples.add_column(name, justify="right" if name == "tokens" else "left", overflow="fold")
    for place, sample, num_tokens, segments in explained.sample_rows():
        samples.add_row(place, sample, str(num_tokens), segments)
    console.print(samples)
