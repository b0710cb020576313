"""``omni config``: what a run file says, all defaults filled in, and where each value comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from omni_pipeline.core.config import assignments, merge_flags, read_toml, validate
from trainer.weights.folder import open_weights

if TYPE_CHECKING:
    from omni_pipeline.app.run_config import RunConfig


@click.group()
def command() -> None:
    """Show the settings of a run.

    Example: omni config show examples/own_media/run.toml
    """


@command.command(context_settings={"ignore_unknown_options": True})
@click.argument("run_file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def show(run_file: Path, as_json: bool, flags: tuple[str, ...]) -> None:
    """Print every setting of RUN_FILE with FLAGS applied, and if it is from a flag, file, weights or default.

    Below: the parameters of each part of the model, and the operations of a forward and of training. With
    --json they are one more entry beside the settings, "counts".

    Example: omni config show examples/own_media/run.toml --optimizer.lr 1e-4
    """
    from omni_pipeline.app.model_counts import model_counts
    from omni_pipeline.app.run_config import RunConfig
    from omni_pipeline.cli.config_tables import print_counts

    data = read_toml(run_file)
    config = validate(RunConfig, merge_flags(data, flags), where=str(run_file))
    settings, counts = config.model_dump(mode="json"), model_counts(config)
    if as_json:
        click.echo(json.dumps({**settings, "counts": counts.to_dict()}))
        return
    origins = {
        "flag": {name for name, _ in assignments(flags)},
        "file": set(_flat(data)),
        "weights": _in_weights(config),
    }
    for name, value in _flat(settings).items():
        origin = next((origin for origin, given in origins.items() if _is_within(name, given)), "default")
        click.echo(f"{name} = {json.dumps(value)}  # {origin}")
    click.echo()
    print_counts(counts, seq_len=config.order.seq_len)


def _in_weights(config: RunConfig) -> set[str]:
    """Return the settings that the weights of ``model.weights`` give, if they are not given otherwise."""
    if config.model.weights is None:
        return set()
    weights = open_weights(config.model.weights)
    tokenizer = {"tokenizer.path"} if weights.tokenizer is not None else set()
    return tokenizer | {f"model.{name}" for name in _flat(weights.model)}


def _is_within(name: str, given: set[str]) -> bool:
    """Return whether ``name`` or a table that holds it was given."""
    parts = name.split(".")
    return any(".".join(parts[:length]) in given for length in range(1, len(parts) + 1))


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = {str(index): item for index, item in enumerate(value)}.items()
    else:
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, item in items:
        found.update(_flat(item, f"{prefix}.{key}" if prefix else str(key)))
    return found
