"""The tables of ``omni simulate``; readable on a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from balancer.simulator.compare import ABLATIONS, BASELINES, OURS, Compared
from omni_pipeline.app.paper_results import FIXED_AT_LAUNCH, LAUNCH_MIXTURE, Paper, mixture_name
from omni_pipeline.app.simulate import SimulatedRun
from omni_pipeline.app.simulate_words import NAMES, label_of

BUYS = {
    "no_multiplexing": "multiplexing",
    "no_balancing": "balancing",
    "no_lssp": "long-short splitting",
    "upfront": "encoding on demand",
}


def print_run(run: SimulatedRun) -> None:
    """Print the simulated steps of a run."""
    console, topology = Console(), run.topology
    _say(
        console,
        f"{_plural(topology.world_size, 'rank')} of {run.hardware.name}, {topology.ranks_per_node} a node;"
        f" tp {topology.tp}, cp {topology.cp}, pp {topology.pp}; {_plural(topology.num_replicas, 'replica')}"
        f" in {_plural(topology.num_groups, 'group')}; {_plural(run.num_packs, 'pack')},"
        f" {run.num_tokens:,.0f} tokens a step (mean of {_plural(run.num_steps, 'step')})",
    )
    _say(console, "tokens: " + ", ".join(f"{name} {share:.0%}" for name, share in run.shares.items()))
    table = _table(
        "strategies", ["", "step", "tokens/s", "MFU", "idle", "enc", "LLM", "xchg", "GB", "speed-up"]
    )
    for name, found in run.by_strategy.items():
        table.add_row(NAMES[name], *_numbers(found), _times(run.speedup(name)) if name != OURS else "")
    console.print(table)
    _say(
        console,
        "idle: share of time without work; enc, LLM: largest load / mean; xchg: rows travelling; GB: of the"
        f" fullest rank, which has {run.hardware.memory_bytes / 1e9:.0f}; speed-up: of multiplexing over it",
    )
    for name, word in BUYS.items():
        speedup = run.speedup(name)
        if speedup is not None:
            _say(console, f"{word} buys {_times(speedup)}{_imbalance(run, name)}")
    for note in run.notes:
        _say(console, f"note: {note}")


def print_paper(paper: Paper) -> None:
    """Print the speed-ups of the published workloads beside the published ones."""
    console = Console()
    _say(
        console,
        f"published workloads on {paper.hardware} nodes, {_plural(paper.num_steps, 'step')} at each point;"
        " media : text by tokens",
    )
    mixtures = list(dict.fromkeys(mixture_name(point.mixture) for point in paper.points))
    table = _table("speed-up of multiplexing", ["", "over", *mixtures])
    for workload in paper.workloads:
        points = paper.of(workload)
        for number, name in enumerate(BASELINES):
            cells = [_times(point.speedup(name)) for point in points]
            table.add_row(workload.name if not number else "", NAMES[name], *cells)
        for name in FIXED_AT_LAUNCH:
            cells = [_times(point.speedup_fixed(name)) for point in points]
            table.add_row("", f"{NAMES[name]} *", *cells)
    console.print(table)
    _say(
        console, f"*: made for {mixture_name(LAUNCH_MIXTURE)} and kept; the others are made for each mixture"
    )
    _say(console, "oom: a rank of the one or the other does not have memory enough")
    table = _table("best against a published baseline", ["workload", "simulated", "published", "over", "at"])
    for workload in paper.workloads:
        best = paper.best(workload)
        over = NAMES.get(best.baseline, "-")
        table.add_row(
            label_of(workload), _times(best.speedup), _times(workload.best_speedup), over, best.mixture or "-"
        )
    console.print(table)
    table = _table("throughput without", ["", "", *mixtures])
    for workload in paper.workloads:
        for number, name in enumerate(ABLATIONS):
            cells = [f"{100 / point.speedup_with_memory(name) - 100:+.1f}%" for point in paper.of(workload)]
            table.add_row(workload.name if not number else "", BUYS[name], *cells)
    console.print(table)


def _numbers(found: Compared) -> list[str]:
    memory = f"{found.peak_gb:.3g}" if found.peak_gb >= 0.01 else "<0.01"
    return [
        _seconds(found.step_s),
        _count(found.tokens_per_s),
        f"{found.mfu:.1%}",
        f"{found.bubble_fraction:.0%}",
        f"{found.encoder_imbalance:.2f}",
        f"{found.llm_imbalance:.2f}",
        _seconds(found.exchange_s),
        f"[red]{memory} oom[/]" if found.out_of_memory else memory,
    ]


def _imbalance(run: SimulatedRun, name: str) -> str:
    if name != "no_balancing":
        return ""
    before, after = run.by_strategy[name], run.by_strategy[OURS]
    parts: list[tuple[str, Callable[[Compared], float]]] = [
        ("encoders", lambda item: item.encoder_imbalance),
        ("LLM", lambda item: item.llm_imbalance),
    ]
    return "; imbalance " + ", ".join(
        f"{part} {value(before):.2f} -> {value(after):.2f}" for part, value in parts
    )


def _seconds(seconds: float) -> str:
    for limit, unit, factor in ((1, "s", 1), (1e-3, "ms", 1e3)):
        if seconds >= limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us" if seconds else "0"


def _count(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _times(value: float | None) -> str:
    return "oom" if value is None else f"{value:.2f}x"


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 or name == "over" else "right", no_wrap=True)
    return table


def _say(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False)
