"""``omni weights``: weights of the reference (Hugging Face folders) in and out."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from omni_pipeline.cli.progress import ProgressBar

if TYPE_CHECKING:
    from omni_pipeline.app.weights import Dtype

BAR_AFTER_S = 1.0
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "": 1}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|)", re.IGNORECASE)


class SizeType(click.ParamType[int]):
    """A number of bytes: 5GB, 500MB, 4096."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return bytes."""
        match = _SIZE.fullmatch(str(value).strip())
        num_bytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
        if num_bytes < 1:
            self.fail(f"{value!r} is no size; write it as 5GB, 500MB or a number of bytes", param, ctx)
        return num_bytes


@click.group()
def command() -> None:
    """Import published weights, and export trained ones to where everybody loads them.

    \b
    Example: omni weights import Qwen2.5-Omni-3B --out weights/3b
             omni train run.toml --model.weights weights/3b
             omni weights export runs/first --out exported
    """


@command.command(name="import", short_help="Make weights that a run can start from.")
@click.argument("hf_dir", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to make.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def import_(hf_dir: Path, out: Path, as_json: bool) -> None:
    """Make weights of HF_DIR (config.json and safetensors files) that a run can start from.

    A thinker of Qwen2.5-Omni, the published model that holds one, or the language model of a Qwen2, Qwen3 or
    Qwen3-MoE. Numbers are copied as they are, one block at a time.

    Example: omni weights import Qwen2.5-Omni-3B --out weights/3b
    """
    from trainer.weights.importer import import_weights

    with ProgressBar("importing", after_s=BAR_AFTER_S) as progress:
        found = import_weights(hf_dir, out, progress=progress)
    if as_json:
        click.echo(json.dumps({"out": str(out), **dataclasses.asdict(found)}))
        return
    click.echo(
        f"{out}: {found.num_parameters:,} parameters of {', '.join(found.parts)} "
        f"({', '.join(found.dtypes)}, {found.num_bytes / 1e9:.2f} GB)"
    )
    if found.kept:
        click.echo(f"kept for export, in no forward: {', '.join(found.kept)}")
    if found.left_out:
        parts = sorted({name.split(".")[0] for name in found.left_out})
        click.echo(f"left out: {len(found.left_out)} tensors of {', '.join(parts)}")
    if found.parts == ("llm",):
        click.echo("encoders are not in these weights: a run makes their first weights from its seed")
    click.echo(f'start a run from it: [model] weights = "{out}"')


@command.command(short_help="Write a folder that from_pretrained loads.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to make.")
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp32"]), help="Type of the tensors (default: as stored)."
)
@click.option("--max-shard-size", default="5GB", show_default=True, type=SizeType(), help="Largest file.")
@click.option(
    "--like",
    type=click.Path(path_type=Path),
    help="Take settings and tokenizer from this folder (default: what was imported).",
)
@click.option("--llm-only", is_flag=True, help="The language model alone.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def export(
    checkpoint: Path,
    out: Path,
    dtype: Dtype | None,
    max_shard_size: int,
    like: Path | None,
    llm_only: bool,
    as_json: bool,
) -> None:
    """Write CHECKPOINT as a folder that `from_pretrained` of transformers loads.

    CHECKPOINT is the folder of a run (its latest complete checkpoint), a checkpoint in it, or imported
    weights.

    Example: omni weights export runs/first --out exported --dtype bf16
    """
    from omni_pipeline.app import weights as app

    with ProgressBar("exporting", after_s=BAR_AFTER_S) as progress:
        weights, done = app.export(
            checkpoint,
            out,
            dtype=dtype,
            max_shard_bytes=max_shard_size,
            like=like,
            llm_only=llm_only,
            progress=progress,
        )
    if as_json:
        told = {"out": str(out), "source": str(weights.path), **dataclasses.asdict(done)}
        click.echo(json.dumps(told))
        return
    num_files = sum(name.endswith(".safetensors") for name in done.files)
    files = "1 file" if num_files == 1 else f"{num_files} files"
    click.echo(f"{out}: {done.class_name} of {weights.path}, {done.num_bytes / 1e9:.2f} GB in {files}")
    if done.made:
        click.echo(f"made of zeros, as nothing reads them: {', '.join(done.made)}")
    if done.left_out:
        click.echo(f"left out, as {done.class_name} has no such part: {', '.join(done.left_out)}")
    if not done.has_tokenizer:
        click.echo("no tokenizer file: the model was trained on bytes, or give one with --like")
