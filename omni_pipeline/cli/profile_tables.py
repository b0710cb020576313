"""The tables of ``omni profile``; readable on a terminal of 80 columns."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from omni_pipeline.app.profile import KINDS, RunProfile, Spread
from omni_pipeline.app.profile_words import PARTS, milliseconds, step_texts
from omni_pipeline.app.worst_steps import WorstStep
from omni_pipeline.cli.tables import count, make_table, say


def print_profile(profile: RunProfile) -> None:
    """Print where the time of a run went."""
    console = Console()
    say(console, _head(profile))
    _print_stages(console, profile)
    for line in _facts(profile):
        say(console, line)
    _print_balance(console, profile)
    _print_worst(console, profile.worst)
    for note in profile.notes:
        say(console, f"note: {note}")


def _head(profile: RunProfile) -> str:
    ranks = "" if profile.num_ranks is None else f" on {count(profile.num_ranks, 'rank')}"
    parts = [
        f"{profile.run}: {count(profile.num_steps, 'step')}{ranks}, {count(profile.num_starts, 'start')}",
        f"{profile.tokens_per_s:,.0f} tokens/s",
    ]
    if profile.mfu is not None and profile.peak_flops_per_s is not None:
        peak = f"{profile.peak_flops_per_s / 1e12:,.3g} TFLOP/s"
        parts.append(f"MFU {100 * profile.mfu:.1f} % of {peak} per rank ({profile.hardware})")
    return "; ".join(parts)


def _print_stages(console: Console, profile: RunProfile) -> None:
    if not profile.stages:
        return
    left_out = ", the first step of each start left out" if profile.num_left_out else ""
    say(console, f"one step, mean over ranks and steps{left_out}")
    table = make_table("", ["stage"], ["ms", "share", "own ms"])
    for row in profile.stages:
        own = "" if row.own_s is None else milliseconds(row.own_s)
        table.add_row(row.name, milliseconds(row.seconds), f"{100 * row.share:.1f} %", own)
    console.print(table)


def _facts(profile: RunProfile) -> list[str]:
    step = profile.step_s
    lines = [
        f"step time on the slowest rank: p50 {milliseconds(step.p50)} ms, p99 {milliseconds(step.p99)} ms,"
        f" worst {milliseconds(step.worst)} ms (step {step.worst_step})",
        f"data stall {100 * profile.data_stall:.1f} % of the step; padding {100 * profile.padding:.1f} %,"
        f" packs {100 * profile.pack_fill:.1f} % full",
    ]
    if profile.plan_s is not None:
        plan = profile.plan_s
        lines.append(
            f"planning, beside the step: p50 {milliseconds(plan.p50)} ms, p99 {milliseconds(plan.p99)} ms,"
            f" {100 * profile.plan_share:.2f} % of the step"
        )
    lines.append(
        f"outside of steps (checkpoints, evaluation): {100 * profile.outside_share:.1f} % of the time"
    )
    return lines


def _print_balance(console: Console, profile: RunProfile) -> None:
    if not profile.balance:
        return
    table = make_table(
        "imbalance (largest / mean; 1 is perfect)", ["", ""], ["p50", "p99", "worst", "at step"]
    )
    last = ""
    for row in profile.balance:
        if last not in ("", row.part):
            table.add_section()
        table.add_row(PARTS[row.part] if row.part != last else "", KINDS[row.kind], *_spread(row.spread))
        last = row.part
    console.print(table)


def _print_worst(console: Console, worst: list[WorstStep]) -> None:
    if not worst:
        return
    table = make_table("worst steps, and what held them up", [], ["step", "ms"])
    table.add_column("worst by", overflow="fold")
    table.add_column("who held the others up", overflow="fold")
    for index, item in enumerate(worst):
        if index:
            table.add_section()
        lines = [
            line for text, samples in step_texts(item) for line in (text, *(f"  {one}" for one in samples))
        ]
        table.add_row(
            str(item.cause.step),
            milliseconds(item.cause.step_s),
            "\n".join(item.worst_by),
            escape("\n".join(lines)),
        )
    console.print(table)


def _spread(spread: Spread) -> list[str]:
    return [f"{spread.p50:.2f}", f"{spread.p99:.2f}", f"{spread.worst:.2f}", str(spread.worst_step)]
