"""The tables below the settings of ``omni config show``: parameters and operations of the model."""

from __future__ import annotations

from rich.console import Console

from omni_pipeline.app.model_counts import CLIP, IMAGE, ModelCounts
from omni_pipeline.cli.tables import make_table, say


def print_counts(counts: ModelCounts, *, seq_len: int) -> None:
    """Print parameters by part, and operations."""
    console = Console()
    parameters = make_table("Parameters", ["part"], ["number", "billions"])
    rows = {**counts.parameters, "total": counts.total}
    if counts.active != counts.total:
        rows["active for a token"] = counts.active
    for name, number in rows.items():
        parameters.add_row(name, f"{number:,}", f"{number / 1e9:,.3f}")
    console.print(parameters)
    if counts.not_counted:
        say(console, f"attached encoders are not counted: {', '.join(counts.not_counted)}")
    flops = make_table("Operations, without recomputation", ["of"], ["number"])
    words = {
        "llm_forward_per_token": f"forward of the LLM, per token of a text of {seq_len} tokens",
        "image_forward": f"forward of an image of {IMAGE.width} x {IMAGE.height} pixels",
        "video_forward_per_s": f"forward of a second of video of {CLIP.width} x {CLIP.height} pixels",
        "audio_forward_per_s": "forward of a second of audio",
        "llm_training_per_pack": f"training of the LLM on a pack, one text of {seq_len} tokens",
    }
    for name, flop in counts.flops.items():
        flops.add_row(words[name], flop_words(flop))
    console.print(flops)


def flop_words(flop: float) -> str:
    """Return operations in four digits: ``15.78 GFLOP``."""
    powers = {"PFLOP": 1e15, "TFLOP": 1e12, "GFLOP": 1e9, "MFLOP": 1e6, "kFLOP": 1e3}
    unit = next((unit for unit, power in powers.items() if flop >= power), "FLOP")
    return f"{flop / powers.get(unit, 1.0):.4g} {unit}"
