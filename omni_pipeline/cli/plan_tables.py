"""The tables of ``omni plan``; readable on a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from loaders.quarantine import QuarantineRecord
from omni_pipeline.app.explain import ExplainedGroup, ExplainedStep
from omni_pipeline.app.find_sample import FoundSample, SampleHistory
from omni_pipeline.app.rebuild import ArrayRow, Rebuilt
from omni_pipeline.cli.tables import count, make_table, say


def print_step(explained: ExplainedStep) -> None:
    """Print one step of some groups."""
    console = Console()
    ranks, groups = explained.topology.world_size, explained.topology.num_groups
    say(
        console,
        f"step {explained.step} on {count(ranks, 'rank')} in {count(groups, 'group')},"
        f" followed from {explained.start}",
    )
    for group in explained.groups:
        _print_group(console, group)
    _print_sources(console, explained)
    _print_failures(console, explained.failures, "in quarantine for this step")
    _print_notes(console, explained.notes)


def print_sample(found: FoundSample) -> None:
    """Print when some samples are seen."""
    console = Console()
    say(
        console,
        f"run of {count(found.num_steps, 'step')}, {found.num_trained} trained;"
        " packs are lane:number, places replica/microbatch",
    )
    for history in found.samples:
        _print_history(console, history, data_end=found.data_end)
    if found.num_matches > len(found.samples):
        _print_notes(
            console,
            [
                f"the first {len(found.samples)} of {found.num_matches} samples with this key;"
                " narrow with SOURCE/KEY or SHARD/KEY"
            ],
        )
    _print_notes(console, found.notes)


def print_rebuilt(rebuilt: Rebuilt, rows: Sequence[ArrayRow], *, out: Path | None) -> None:
    """Print the arrays of a rebuilt step."""
    console = Console()
    plan = rebuilt.batch.plan
    say(
        console,
        f"step {plan.step} of rank {rebuilt.rank}, group {plan.group}, followed from {rebuilt.start},"
        f" plan digest {plan.digest:016x}",
    )
    table = make_table("arrays (microbatch/name)", ["name", "type", "shape", "digest"])
    for row in rows:
        table.add_row(row.name, row.dtype, " x ".join(map(str, row.shape)), row.digest)
    console.print(table)
    if rebuilt.repeated:
        failed = ", ".join(
            sorted(f"{item.source} shard {item.shard} row {item.row}" for item in rebuilt.repeated)
        )
        say(console, f"failed in the run, so left without labels here: {failed}")
    _print_failures(console, rebuilt.failures, "failed here")
    _print_notes(console, rebuilt.notes)
    if out is not None:
        say(console, f"wrote {count(len(rows), 'array')} to {out}")


def _print_group(console: Console, group: ExplainedGroup) -> None:
    plan = group.plan
    say(
        console,
        f"group {plan.group}: {count(len(plan.packs), 'pack')}, {plan.num_tokens} tokens,"
        f" {100 * plan.padding:.1f} % of the positions padding,"
        f" {count(len(plan.media), 'media segment')} ({plan.num_long} long),"
        f" {count(plan.num_microbatches, 'microbatch', 'es')},"
        f" digest {plan.digest:016x}",
    )
    _print_packs(console, group)
    _print_encoding(console, group)
    _print_exchanges(console, group)
    encoder, llm = plan.encoder_balance, plan.llm_balance
    say(
        console,
        f"imbalance (max / mean): encoder {encoder.imbalance_before:.3f} -> {encoder.imbalance_after:.3f},"
        f" LLM {llm.imbalance_before:.3f} -> {llm.imbalance_after:.3f};"
        f" {100 * group.moved_fraction:.0f} % of the embedding rows cross ranks",
    )
    _print_samples(console, group)


def _print_packs(console: Console, group: ExplainedGroup) -> None:
    packs = make_table(
        "packs (lane:number) and their place (replica/microbatch)",
        ["place", "pack"],
        ["samples", "tokens", "positions", "fill", "LLM ms", "encoder ms"],
    )
    for row in group.packs:
        packs.add_row(
            f"{row.replica}/{row.microbatch}",
            f"{row.lane}:{row.number}" if row.lane >= 0 else "-",
            str(row.num_samples),
            str(row.num_tokens),
            str(row.num_positions),
            f"{row.fill:.3f}",
            f"{1e3 * row.llm_s:.3g}",
            f"{1e3 * row.encoder_s:.3g}",
        )
    console.print(packs)


def _print_encoding(console: Console, group: ExplainedGroup) -> None:
    ranks = make_table(
        "encoding", [], ["rank", "media before", "after", "long", "ms before", "after", "rows"]
    )
    for item in group.ranks:
        ranks.add_row(
            *map(str, (item.rank, item.num_media_before, item.num_media_after, item.num_long)),
            f"{1e3 * item.before_s:.3g}",
            f"{1e3 * item.after_s:.3g}",
            str(item.num_rows_after),
        )
    console.print(ranks)


def _print_exchanges(console: Console, group: ExplainedGroup) -> None:
    table = make_table(
        "exchange of embedding rows",
        ["microbatch", "kind"],
        ["rows", "moved", "MB in nodes", "MB between", "ms"],
    )
    for row in group.exchanges:
        table.add_row(
            str(row.microbatch),
            row.kind if row.num_moved else "-",
            str(row.num_rows),
            str(row.num_moved),
            f"{row.node_bytes / 1e6:.3g}",
            f"{row.network_bytes / 1e6:.3g}",
            f"{1e3 * row.exchange_s:.3g}",
        )
    console.print(table)


def _print_samples(console: Console, group: ExplainedGroup) -> None:
    samples = make_table("samples", ["place", "sample, shard, row"], ["tokens"])
    samples.add_column("units -> rows @ encoding rank", overflow="fold")
    last = None
    for sample_row in group.sample_rows():
        sample, place = sample_row.sample, (sample_row.replica, sample_row.microbatch)
        if last not in (None, place):
            samples.add_section()
        last = place
        name = escape(f"{sample.id.source}/{sample.key}")
        samples.add_row(
            f"{sample_row.replica}/{sample_row.microbatch}",
            f"{name}\n[dim]{escape(_file_name(sample.shard))} row {sample.id.row}[/dim]",
            str(sample.num_tokens),
            "\n".join(sample_row.segments),
        )
    console.print(samples)


def _print_sources(console: Console, explained: ExplainedStep) -> None:
    table = make_table("sources after the step", ["source"], ["rows", "left out", "share", "epoch"])
    for row in explained.sources:
        left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(row.left_out.items())) or "0"
        if row.num_counted < row.num_rows:
            left_out += f" of the first {row.num_counted}"
        table.add_row(escape(row.name), str(row.num_rows), left_out, f"{row.share:.3f}", f"{row.epoch:.2f}")
    console.print(table)


def _print_history(console: Console, history: SampleHistory, *, data_end: int | None) -> None:
    row = history.row
    say(console, f"{row.id.source}/{row.key}: {_file_name(row.shard)} row {row.id.row}")
    if history.visits:
        places = any(visit.place for visit in history.visits)
        names = ["epoch", "step", "pack", *(["place", "rank", "encoded by"] if places else [])]
        table = make_table("", [], names)
        table.add_column("state", overflow="fold")
        for visit in history.visits:
            cells = [str(visit.epoch), str(visit.step), f"{visit.lane}:{visit.pack}"]
            if visit.place is not None:
                place = visit.place
                cells += [f"{place.replica}/{place.microbatch}", _numbers(place.ranks)]
                cells.append(_numbers(place.encoded_by) or "-")
            state = f"failed: {visit.failure}" if visit.failure else visit.state
            if visit.state == "not reached":
                state += f": the data ended at step {data_end}"
            table.add_row(*cells, escape(state))
        console.print(table)
    _print_notes(console, [history.note] if history.note else [])


def _print_failures(console: Console, records: Sequence[QuarantineRecord], title: str) -> None:
    if not records:
        return
    table = make_table(title, ["sample", "stage"], ["rank"])
    table.add_column("reason", overflow="fold")
    for record in records:
        table.add_row(
            escape(f"{record.source}/{record.key}"), record.stage, str(record.rank), escape(record.reason)
        )
    console.print(table)


def _print_notes(console: Console, notes: Iterable[str]) -> None:
    for note in notes:
        say(console, f"note: {note}")


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _file_name(shard: str) -> str:
    return shard.rpartition("/")[2]
