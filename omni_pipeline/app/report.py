"""One HTML page that tells how a run went: for a performance engineer to read and to hand on.

The page needs nothing but itself: charts are inline SVG, media are data URIs, the only script shows numbers
under the pointer. It is made from the files of a run folder; whatever was not recorded is said to be missing.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from omni_pipeline.app.data_end import data_end, has_ended
from omni_pipeline.app.profile_words import milliseconds, step_texts
from omni_pipeline.app.report_charts import compact, percent
from omni_pipeline.app.report_figures import figures
from omni_pipeline.app.report_gallery import GalleryPack
from omni_pipeline.app.report_run import RunData, base_name, is_swapped, last_values, load_run, marks_of
from omni_pipeline.app.run_dir import Event
from omni_pipeline.app.sinks import format_duration
from omni_pipeline.app.worst_steps import worst_shown

MAX_QUARANTINE_ROWS = 100


@dataclass(frozen=True)
class KeyNumber:
    """One number of the page's head."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class HeldOut:
    """One row of the held-out table; None where it was not measured."""

    name: str
    true: float | None
    swapped: float | None
    chance: float | None
    loss: float | None
    samples: str


def write_report(
    run_dir: Path,
    out: Path,
    *,
    gallery: Sequence[GalleryPack] = (),
    events: Sequence[Event] = (),
    summary: Mapping[str, Any] | None = None,
) -> Path:
    """Write the page of the run in ``run_dir`` to ``out`` and return ``out``.

    Args:
        run_dir: Folder with ``metrics.jsonl`` and perhaps ``quarantine.jsonl``.
        out: HTML file; its folder is made.
        gallery: Packs to show with their media.
        events: Kills, resumes and the like, drawn into the charts. Resumes that only the metrics know of are
            added.
        summary: Facts of the run. Plain values are listed; ``title`` names the page; ``chance`` maps the name
            of a held-out set to the accuracy of guessing.

    Raises:
        ConfigError: The folder has no metrics.
    """
    page = render(load_run(run_dir), gallery=gallery, events=events, summary=summary or {})
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    return out


def render(
    run: RunData, *, gallery: Sequence[GalleryPack], events: Sequence[Event], summary: Mapping[str, Any]
) -> str:
    """Return the page; all text of the run is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("omni_pipeline.app", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "base64": _base64,
        "percent": percent,
        "wave": _wave,
        "milliseconds": milliseconds,
    }
    marks = marks_of(events, run.attempts)
    reasons = Counter(f"{record.stage}: {_first_line(record.reason)}" for record in run.quarantine)
    return environment.get_template("report_template.html").render(
        title=str(summary.get("title") or run.name),
        period=_period(run),
        key_numbers=(numbers := key_numbers(run)),
        num_columns=min((5, 4, 3), key=lambda columns: -len(numbers) % columns),
        figures=figures(run, marks),
        marks=marks,
        sources=(sources := source_table(run)),
        left_out=[word for word in ("filtered", "dropped") if any(row[word] for row in sources)],
        used_up=used_up(run, events),
        held_out=held_out_table(run, summary),
        worst=[(item, step_texts(item)) for item in worst_shown(run.worst)],
        quarantine=run.quarantine[:MAX_QUARANTINE_ROWS],
        num_quarantined=len(run.quarantine),
        reasons=reasons.most_common(8),
        gallery=gallery,
        facts=_facts(summary),
    )


def key_numbers(run: RunData) -> list[KeyNumber]:
    """Return the numbers of the head, those that were recorded only."""
    found: list[KeyNumber] = []
    steps = sorted({int(step) for _, (own, _) in run.metrics.items() for step in own})
    starts = f"{len(run.attempts)} starts" if len(run.attempts) > 1 else "one start"
    found.append(KeyNumber("Steps", f"{len(steps):,}", starts))
    if (losses := run.values("trainer/loss")).size:
        tail = float(losses[-max(1, len(losses) // 20) :].mean())
        found.append(KeyNumber("Loss", f"{losses[0]:.3f} → {tail:.3f}", "first step, mean of the last 5%"))
    if (tokens := run.values("trainer/tokens")).size:
        labels = run.values("trainer/labels").sum()
        note = f"{compact(labels)} with a label" if labels else "all positions"
        found.append(KeyNumber("Tokens", compact(tokens.sum()), note))
    if (rates := run.values("trainer/tokens_per_s")).size:
        step_s = run.values("trainer/step_s")
        note = f"{np.median(step_s):.3g} s per step" if step_s.size else "over all ranks"
        found.append(KeyNumber("Tokens/s, median", compact(float(np.median(rates))), note))
    waits, step_s = run.values("loader/wait_s"), run.values("trainer/step_s")
    if waits.size and step_s.sum() > 0:
        note = f"{format_duration(waits.sum())} of {format_duration(step_s.sum())}"
        found.append(KeyNumber("Waiting for data", percent(waits.sum() / step_s.sum()), note))
    for part, label in (("encoder", "Encoder imbalance"), ("llm", "LLM imbalance")):
        before = run.values(f"balancer/{part}_imbalance_before")
        after = run.values(f"balancer/{part}_imbalance_after")
        if before.size and after.size:
            value = f"{before.mean():.2f} → {after.mean():.2f}"
            found.append(KeyNumber(label, value, "largest / mean load"))
    if (fill := run.values("loader/pack_fill")).size:
        padding = run.values("loader/padding")
        note = f"{percent(1 - fill.mean())} of seq_len unused"
        if padding.any():
            note = f"{percent(padding.mean())} of the positions are padding"
        found.append(KeyNumber("Pack fill", percent(fill.mean()), note))
    if samples := sum(float(np.nansum(values)) for _, values in run.by_prefix("loader/samples/").values()):
        found.append(KeyNumber("Samples", f"{samples:,.0f}", "trained on"))
    note = "kept aside with their reason" if run.quarantine else "no bad sample met"
    found.append(KeyNumber("Quarantined", f"{len(run.quarantine):,}", note))
    return found


def source_table(run: RunData) -> list[dict[str, Any]]:
    """Return name, tokens and share of tokens of each source, largest first, and what became of its samples.

    Samples are trained on, left out (filtered, or dropped because no pack can hold them), left over, or bad.
    """
    tokens = {name: np.nansum(values) for name, (_, values) in run.by_prefix("loader/tokens/").items()}
    samples = {name: np.nansum(values) for name, (_, values) in run.by_prefix("loader/samples/").items()}
    filtered = {name: np.nansum(values) for name, (_, values) in run.by_prefix("loader/filtered/").items()}
    dropped = {name: np.nansum(values) for name, (_, values) in run.by_prefix("loader/dropped/").items()}
    bad = Counter(record.source for record in run.quarantine)
    used = data_end(run.metrics)
    total = float(sum(tokens.values()))
    order = {name: index for index, name in enumerate(tokens)}
    rows = [
        {
            "name": name,
            "colour": order.get(name, 0) % 8,
            "tokens": float(tokens.get(name, 0.0)),
            "samples": float(samples.get(name, 0.0)),
            "share": float(tokens.get(name, 0.0)) / total if total else 0.0,
            "bad": bad.get(name, 0),
            "filtered": float(filtered.get(name, 0.0)),
            "dropped": float(dropped.get(name, 0.0)),
            "left": used.left.get(name) if used else None,
        }
        for name in sorted({*tokens, *samples})
    ]
    return sorted(rows, key=lambda row: (-row["tokens"], row["name"]))


def used_up(run: RunData, events: Sequence[Event]) -> str:
    """Return in a sentence how far data that ends was used up; "" if it has no end."""
    used = data_end(run.metrics)
    if used is None:
        return ""
    num_left = sum(used.left.values())
    num_steps = run.attempts[-1].last_step + 1
    if has_ended(events, num_steps):
        left = f"{num_left:,} samples were left over" if num_left else "every sample was seen"
        return f"The data ended at step {num_steps}: {left}; {used.padding}."
    return f"{num_left:,} samples are left; {used.padding}."


def held_out_table(run: RunData, summary: Mapping[str, Any]) -> list[HeldOut]:
    """Return the last accuracy of each held-out set beside that with swapped media and that of guessing.

    Sets are joined by name: ``held-out-shapes`` (or ``shapes``) with ``swapped-shapes``.
    """
    last = last_values(run.by_prefix("evaluation/"))
    names = sorted({name.rsplit("/", 1)[0] for name in last})
    given = summary.get("chance")
    chance = given if isinstance(given, Mapping) else {}
    rows: list[HeldOut] = []
    for base in sorted({base_name(name) for name in names}):
        true = next((name for name in names if base_name(name) == base and not is_swapped(name)), None)
        swapped = next((name for name in names if base_name(name) == base and is_swapped(name)), None)
        rows.append(
            HeldOut(
                name=base,
                true=last.get(f"{true}/accuracy"),
                swapped=last.get(f"{swapped}/accuracy"),
                chance=float(chance[base]) if isinstance(chance.get(base), int | float) else None,
                loss=last.get(f"{true}/loss"),
                samples=_sample_counts(last, true),
            )
        )
    return rows


def _sample_counts(last: Mapping[str, float], name: str | None) -> str:
    """Return how many samples of a held-out set were seen, and why others were not."""
    counts = {word: int(last.get(f"{name}/{word}", 0)) for word in ("seen", "failed", "dropped", "filtered")}
    told = [f"{count:,} {word}" for word, count in counts.items() if count or word == "seen"]
    return ", ".join(told) if f"{name}/seen" in last else "-"


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    plain = [(key, value) for key, value in summary.items() if isinstance(value, str | int | float | bool)]
    return [
        (key.replace("_", " "), f"{value:.6g}" if isinstance(value, float) else str(value))
        for key, value in plain
        if key != "title"
    ]


def _period(run: RunData) -> str:
    seconds = sum(max(times) - min(times) for item in run.attempts if (times := _finite(item.times.values())))
    return format_duration(seconds) if seconds else ""


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _wave(peaks: Sequence[float]) -> str:
    """Return the path of a mirrored waveform in a view box of len(peaks) x 40."""
    return "".join(
        f"M{index + 0.5:g} {20 - 19 * peak:.1f}V{20 + 19 * peak:.1f}" for index, peak in enumerate(peaks)
    )
