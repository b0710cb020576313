"""``omni simulate``: a step of a run on any number of ranks, or the published workloads; nothing is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from omni_pipeline.cli.progress import ProgressBar
from omni_pipeline.core.config import load_config

BAR_AFTER_S = 1.0
RUN_ONLY = ("ranks", "ranks_per_node", "tp", "pp", "cp", "mixture", "strategy")
PAPER_ONLY = ("workload", "seed", "public_only", "out")


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("run_file", type=click.Path(path_type=Path), required=False)
@click.option("--ranks", type=click.IntRange(1), help="World size (default 8).")
@click.option("--ranks-per-node", type=click.IntRange(1), help="Ranks of one machine (default: hardware's).")
@click.option("--hardware", help="Machine: h100, h200, cpu, or a profile's path (default: the run's).")
@click.option("--tp", type=click.IntRange(1), help="Tensor-parallel degree of the LLM (default 1).")
@click.option("--pp", type=click.IntRange(1), help="Pipeline stages (default 1).")
@click.option("--cp", type=click.IntRange(1), help="Context-parallel degree of the LLM (default 1).")
@click.option("--mixture", help="NAME=SHARE,NAME=SHARE: only these sources, at these shares.")
@click.option(
    "--steps",
    type=click.IntRange(1),
    help="Steps, from step 0; their mean is shown (default 1).",
)
@click.option("--strategy", multiple=True, help="Only this strategy; may be repeated.")
@click.option("--paper", is_flag=True, help="The published workloads over their mixtures, not RUN_FILE.")
@click.option("--workload", multiple=True, help="With --paper: only A, B, C, D or three; may be repeated.")
@click.option("--seed", type=click.IntRange(0), help="With --paper: seed of the samples (default 0).")
@click.option("--public-only", is_flag=True, help="With --paper: sizes of public sets only.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="With --paper: write a page of it to this folder."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def command(run_file: Path | None, flags: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Simulate steps of RUN_FILE on any number of ranks, without running them.

    The packs are those of the run's sources from step 0, the plans those that its ranks would make; compute,
    exchanges, collectives and memory are modelled. Every strategy is simulated on the same packs: encoder-LLM
    multiplexing, the baselines (encoder in stage 0, own pool, bubble filling, static plan), and multiplexing
    without one of its parts.

    Example: omni simulate examples/own_media/run.toml --ranks 64 --hardware h100
    """
    if options["paper"] == (run_file is not None):
        raise click.UsageError("give either RUN_FILE or --paper")
    other = RUN_ONLY if options["paper"] else PAPER_ONLY
    for name in other:
        if options[name] not in (None, (), False):
            raise click.UsageError(
                f"--{name.replace('_', '-')} goes {'without' if options['paper'] else 'with'} --paper"
            )
    if run_file is None:
        _paper(options, as_json)
    else:
        _run(run_file, flags, options, as_json)


def _run(run_file: Path, flags: tuple[str, ...], options: dict[str, Any], as_json: bool) -> None:
    from omni_pipeline.app.mixture_flag import with_mixture
    from omni_pipeline.app.run_config import RunConfig
    from omni_pipeline.app.simulate import Layout, simulate_run
    from omni_pipeline.cli.simulate_tables import print_run

    if options["hardware"] is not None:
        flags = (*flags, "--balance.hardware", options["hardware"])
    config = load_config(RunConfig, run_file, flags)
    if options["mixture"] is not None:
        config = with_mixture(config, options["mixture"])
    layout = Layout(
        options["ranks"] or 8,
        ranks_per_node=options["ranks_per_node"],
        tp=options["tp"] or 1,
        cp=options["cp"] or 1,
        pp=options["pp"] or 1,
    )
    with ProgressBar("simulating", after_s=BAR_AFTER_S) as progress:
        run = simulate_run(
            config,
            layout=layout,
            num_steps=options["steps"] or 1,
            strategies=options["strategy"],
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(run.to_dict()))
    else:
        print_run(run)


def _paper(options: dict[str, Any], as_json: bool) -> None:
    from omni_pipeline.app.paper_results import Data
    from omni_pipeline.app.simulate_page import write_page
    from omni_pipeline.app.simulate_paper import simulate_paper
    from omni_pipeline.cli.simulate_tables import print_paper

    with ProgressBar("simulating") as progress:
        paper = simulate_paper(
            options["workload"] or None,
            hardware=options["hardware"] or "h100",
            num_steps=options["steps"] or 1,
            data=Data(options["seed"] or 0, public_only=options["public_only"]),
            progress=progress,
        )
    page = None if options["out"] is None else write_page(paper, options["out"])
    if as_json:
        click.echo(json.dumps(paper.to_dict()))
    else:
        print_paper(paper)
        if page:
            click.echo(f"wrote {page}")
