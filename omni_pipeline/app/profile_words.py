"""The causes of slow steps in words, for the terminal and for the report."""

from __future__ import annotations

from omni_pipeline.app.worst_steps import WorstStep, telling_samples
from trainer.step_causes import HeavySample, PartCause

PARTS = {"encoder": "encoders", "llm": "LLM"}


def step_texts(item: WorstStep) -> list[tuple[str, list[str]]]:
    """Return what held a step up, each with the samples that explain it: parts in which a rank stood out."""
    found: list[tuple[str, list[str]]] = []
    if item.waited:
        found.append((f"waiting for data: {milliseconds(item.cause.wait_s)} ms", []))
    for part in item.outstanding:
        samples = [sample_text(item, heavy, part=part.part) for heavy in telling_samples(part)]
        found.append((part_text(part), samples))
    return found or [("no rank was far above the mean", [])]


def part_text(cause: PartCause) -> str:
    """Return in words which rank held the others up in one part."""
    where = f"{PARTS[cause.part]}: rank {cause.rank}"
    if cause.imbalance_measured is None:
        where += f" has {milliseconds(cause.own_s)} ms of modelled work"
        measured = ""
    else:
        where += f" worked {milliseconds(cause.own_s)} ms in microbatch {cause.microbatch}"
        measured = f", measured {cause.imbalance_measured:.2f}"
    return (
        f"{where}, the mean is {milliseconds(cause.mean_s)}; imbalance {cause.imbalance_before:.2f}"
        f" -> {cause.imbalance_after:.2f}{measured}"
    )


def sample_text(item: WorstStep, heavy: HeavySample, *, part: str) -> str:
    """Return a heavy sample in words: its name, where it lies, what it costs and who encodes it."""
    name = item.name_of(heavy.id)
    what = "tokens" if part == "llm" else "units"
    split = f", split over {heavy.num_ranks} ranks" if heavy.num_ranks > 1 else ""
    return (
        f"{heavy.id.source}/{name.key or '?'} ({name.shard.rpartition('/')[2]} row {heavy.id.row}):"
        f" {heavy.units:,} {what}{split}, modelled {milliseconds(heavy.modelled_s)} ms"
    )


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds, three digits or whole ones."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.0995 else f"{1e3 * seconds:.3g}"
