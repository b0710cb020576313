"""The charts of the report: which metrics go where, and the words beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omni_pipeline.app.report_charts import (
    WIDE,
    Chart,
    Line,
    Mark,
    compact,
    line_chart,
    percent,
    share_chart,
)
from omni_pipeline.app.report_run import NO_VALUES, RunData, base_name, is_swapped, replays_of
from omni_pipeline.app.stages import stage_series


@dataclass(frozen=True)
class Figure:
    """A chart with its words; without a chart the page says that it was not recorded."""

    title: str
    note: str
    chart: Chart | None


def figures(run: RunData, marks: Sequence[Mark]) -> dict[str, Figure | None]:
    """Return every chart of the page by its place in the template."""
    get = run.metrics.get
    return {
        "loss": _loss_figure(run, marks),
        "replay": _replay_figure(run, marks),
        "throughput": Figure(
            "Throughput",
            "Tokens per second over all ranks.",
            line_chart(
                [Line("tokens/s", *get("trainer/tokens_per_s", NO_VALUES), 0, "smooth")],
                label="Tokens per second by step",
                form=compact,
                marks=marks,
                from_zero=True,
            ),
        ),
        "wait": Figure(
            "Waiting for data",
            "Share of each step that the trainer waited for its batch.",
            line_chart(
                [Line("data wait", *run.wait_shares, 2, "smooth")],
                label="Share of step time spent waiting for data",
                form=percent,
                marks=marks,
                from_zero=True,
            ),
        ),
        "stages": _stage_figure(run, marks),
        "encoder": _imbalance_figure(run, "encoder", "Encoder load", marks),
        "llm": _imbalance_figure(run, "llm", "LLM load", marks),
        "mixture": Figure(
            "Mixture",
            "Share of the tokens by source.",
            share_chart(run.by_prefix("loader/tokens/"), label="Share of tokens by source", marks=marks),
        ),
        "fill": _fill_figure(run, marks),
        "grad_norm": Figure(
            "Gradient norm",
            "Global norm over all meshes, before clipping.",
            line_chart(
                [Line("gradient norm", *get("trainer/grad_norm", NO_VALUES), 3, "smooth")],
                label="Gradient norm by step",
                form=compact,
                marks=marks,
                from_zero=True,
            ),
        ),
        "lr": Figure(
            "Learning rate",
            "As the schedule gave it.",
            line_chart(
                [Line("learning rate", *get("trainer/lr", NO_VALUES), 4)],
                label="Learning rate by step",
                form=compact,
                marks=marks,
                from_zero=True,
            ),
        ),
        "accuracy": _accuracy_figure(run, marks),
    }


def _loss_figure(run: RunData, marks: Sequence[Mark]) -> Figure:
    note = "Sum over the labels of the global batch divided by their number."
    line = Line("loss", *run.metrics.get("trainer/loss", NO_VALUES), 0, "smooth")
    return Figure("Loss", note, line_chart([line], label="Loss", form=compact, width=WIDE, marks=marks))


def _replay_figure(run: RunData, marks: Sequence[Mark]) -> Figure | None:
    """Draw the last resume step by step: the losses before the kill under those computed again."""
    replays = replays_of(run.attempts, "trainer/loss")
    if not replays:
        return None
    shown = replays[-1]
    first, last = int(shown.steps[0]), int(shown.steps[-1])
    margin = max(8, last - first)
    steps, values = run.metrics.get("trainer/loss", NO_VALUES)
    near = (steps >= first - margin) & (steps <= last + margin)
    lines = [
        Line("loss of the run", steps[near], values[near], 0),
        Line("before the kill", shown.steps, shown.values, 3, "dashed"),
    ]
    repeated = sum(replay.num_repeated for replay in replays)
    gap = max(replay.largest_difference for replay in replays)
    same = "each loss is the same bit for bit" if gap == 0 else f"the losses differ by at most {gap:.1e}"
    again = (
        f"{repeated} steps were computed again and {same}" if repeated else "no step is computed again yet"
    )
    near_marks = [mark for mark in marks if first - margin <= mark.step <= last + margin]
    return Figure(
        "Around the resume",
        f"The run went on from its last checkpoint; {again}.",
        line_chart(lines, label="Loss around the resume", form=compact, width=WIDE, marks=near_marks),
    )


def _stage_figure(run: RunData, marks: Sequence[Mark]) -> Figure | None:
    """Draw what the steps are made of; nothing for a run that did not measure it."""
    shares = stage_series(run)
    if not shares:
        return None
    return Figure(
        "What a step is made of",
        "Mean over ranks, waiting for other ranks included; neighbouring steps are summed.",
        share_chart(shares, label="Share of the step by stage", width=WIDE, marks=marks),
    )


def _imbalance_figure(run: RunData, part: str, title: str, marks: Sequence[Mark]) -> Figure:
    """Draw the modelled imbalance before and after balancing, and the measured one."""
    kinds = [("before", 7), ("after", 0)]
    note = "Largest / mean load, modelled, with and without the plan's reordering; 1 is perfect."
    if run.values(f"balancer/{part}_imbalance_measured").size:
        kinds.append(("measured", 2))
        note = "Largest / mean: modelled load before and after the plan's reordering, and measured own work."
    lines = [
        Line(kind, *run.metrics.get(f"balancer/{part}_imbalance_{kind}", NO_VALUES), colour, "smooth")
        for kind, colour in kinds
    ]
    before, after = (run.values(f"balancer/{part}_imbalance_{when}") for when in ("before", "after"))
    if before.size and after.size:
        note += f" Saves {percent(1 - after.mean() / before.mean())} of the modelled time."
    label = f"{title}: imbalance before and after balancing"
    return Figure(title, note, line_chart(lines, label=label, form=_two_digits, marks=marks, reference=1.0))


def _fill_figure(run: RunData, marks: Sequence[Mark]) -> Figure:
    lines = [Line("pack fill", *run.metrics.get("loader/pack_fill", NO_VALUES), 1, "smooth")]
    note = "Used share of seq_len; packs are not padded, the rest is left unused."
    if run.values("loader/padding").any():
        lines.append(Line("padding", *run.metrics["loader/padding"], 3, "smooth"))
        note = "Share of seq_len that holds tokens; padding: share of the computed positions that hold none."
    chart = line_chart(lines, label="Share of positions used", form=_fine_percent, marks=marks, reference=1.0)
    return Figure("Pack fill", note, chart)


def _accuracy_figure(run: RunData, marks: Sequence[Mark]) -> Figure | None:
    found = run.by_prefix("evaluation/")
    names = [name for name, (steps, _) in found.items() if name.endswith("/accuracy") and len(steps) > 1]
    if not names:
        return None
    bases = sorted({base_name(name.removesuffix("/accuracy")) for name in names})
    lines = [
        Line(
            name.removesuffix("/accuracy"),
            *found[name],
            bases.index(base_name(name.removesuffix("/accuracy"))),
            "dashed" if is_swapped(name) else "solid",
        )
        for name in names
    ]
    chart = line_chart(
        lines, label="Held-out accuracy by step", form=percent, width=WIDE, marks=marks, from_zero=True
    )
    return Figure("Accuracy during the run", "Dashed: the media of another sample.", chart)


def _two_digits(value: float) -> str:
    return f"{value:.2f}"


def _fine_percent(value: float) -> str:
    return f"{100 * value:.1f}%"
