"""One page of the simulated workloads: speed-ups beside the published ones, and charts over the mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np

from balancer.simulator.compare import ABLATIONS, BASELINES, OURS, Compared
from balancer.simulator.workloads import Workload
from omni_pipeline.app.paper_results import FIXED_AT_LAUNCH, LAUNCH_MIXTURE, Best, Paper, Point, mixture_name
from omni_pipeline.app.report_charts import Line, compact, line_chart, percent
from omni_pipeline.app.report_figures import Figure
from omni_pipeline.app.simulate_words import MODELLED_AFTER, NAMES, PUBLISHED_ABLATIONS, label_of

COLOURS = {
    OURS: 0,
    "stage0": 1,
    "disaggregated": 2,
    "bubble_filling": 3,
    "static": 4,
    "no_balancing": 3,
    "no_lssp": 2,
    "no_multiplexing": 4,
    "upfront": 5,
}


@dataclass(frozen=True)
class WorkloadSection:
    """What the page shows of one workload."""

    workload: Workload
    best: Best
    points: Sequence[Point]
    figures: Sequence[Figure]


def write_page(paper: Paper, out: Path) -> Path:
    """Write the page to the folder ``out``; return its path."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "simulate.html"
    path.write_text(render(paper), encoding="utf-8")
    return path


def render(paper: Paper) -> str:
    """Return the page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("omni_pipeline.app", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "mixture": mixture_name, "label": label_of}
    sections = [
        WorkloadSection(workload, paper.best(workload), paper.of(workload), figures_of(paper, workload))
        for workload in paper.workloads
    ]
    return environment.get_template("simulate_template.html").render(
        title="Published workloads, simulated",
        num_columns=max(2, min(5, len(sections))),
        paper=paper,
        sections=sections,
        baselines=BASELINES,
        modelled_after=MODELLED_AFTER,
        fixed=FIXED_AT_LAUNCH,
        launch_mixture=LAUNCH_MIXTURE,
        ablations=ABLATIONS,
        published_ablations=PUBLISHED_ABLATIONS,
        names=NAMES,
    )


def figures_of(paper: Paper, workload: Workload) -> list[Figure]:
    """Return the charts of one workload over the mixture: throughput, imbalance, bubble, memory."""
    points = paper.of(workload)
    compared = (OURS, *BASELINES)

    def chart(
        title: str,
        note: str,
        *,
        strategies: Sequence[str],
        value: Callable[[Compared], float],
        form: Callable[[float], str],
        reference: float | None = None,
    ) -> Figure:
        lines = [_line(points, name, value) for name in strategies]
        label = f"{title}, workload {workload.name}"
        drawn = line_chart(
            lines, label=label, form=form, from_zero=True, reference=reference, axis="% of tokens with media"
        )
        return Figure(title, note, drawn)

    return [
        chart(
            "Throughput",
            "Tokens per second of all ranks, by share of tokens from samples with media, %. "
            "A line ends where a rank is out of memory.",
            strategies=compared,
            value=lambda item: np.nan if item.out_of_memory else item.tokens_per_s,
            form=compact,
        ),
        chart(
            "Encoder imbalance",
            "Largest load of a rank / mean.",
            strategies=(OURS, "no_lssp", "no_balancing"),
            value=lambda item: item.encoder_imbalance,
            form=compact,
            reference=1.0,
        ),
        chart(
            "Bubble",
            "Share of the ranks' time without work.",
            strategies=compared,
            value=lambda item: item.bubble_fraction,
            form=percent,
        ),
        chart(
            "Peak memory",
            f"GB of the fullest rank; the dotted line is what a rank has, {paper.memory_bytes / 1e9:.0f} GB.",
            strategies=compared,
            value=lambda item: item.peak_bytes / 1e9,
            form=compact,
            reference=paper.memory_bytes / 1e9,
        ),
    ]


def _line(points: Sequence[Point], strategy: str, value: Callable[[Compared], float]) -> Line:
    shares = [round(100 * point.mixture[0] / sum(point.mixture)) for point in points]
    values = [value(point.by_strategy[strategy]) for point in points]
    return Line(NAMES[strategy], np.array(shares), np.array(values, dtype=float), COLOURS[strategy])
