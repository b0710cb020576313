"""``omni demo``: media to shards to a trained, killed, resumed and evaluated run, with its report.

Nothing here is special to the demo but the media and the moment of the kill: shards are made by the code of
``omni data prepare``, the run is ``omni train`` with an ordinary run file, and the numbers are read from the
metrics that every run writes.
"""

from __future__ import annotations

import logging
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loaders.prepare import prepare
from loaders.quarantine import read_quarantine
from omni_pipeline.app.demo.generate import DemoMedia, generate_media
from omni_pipeline.app.demo.run_file import write_run_file
from omni_pipeline.app.finish import report_of
from omni_pipeline.app.launch import RankProcesses
from omni_pipeline.app.report_run import replays_of
from omni_pipeline.app.run_dir import Event, RunDir
from omni_pipeline.app.sinks import read_attempts, read_metrics
from omni_pipeline.core.errors import ConfigError, OmniError, RankError

logger = logging.getLogger(__name__)

MODALITY_OF = {"shapes": "image", "motion": "video", "tones": "audio"}
KILL_TIMEOUT_S = 600.0
POLL_S = 0.1


@dataclass(frozen=True)
class DemoSettings:
    """What ``omni demo`` can be told.

    Args:
        out: Folder for media, shards and the run; replaced if an earlier demo made it.
        num_ranks: World size.
        steps: Training steps.
        seed: Seed of media, order and weights.
    """

    out: Path
    num_ranks: int = 2
    steps: int = 160
    seed: int = 0

    @property
    def save_every(self) -> int:
        """Steps between checkpoints: a quarter of the run, so that the kill falls between two."""
        return max(1, self.steps // 4)

    @property
    def kill_step(self) -> int:
        """The step after which a rank is killed: past the half, and some steps past a checkpoint."""
        return self.save_every * 2 + max(1, self.save_every // 4)


def run_demo(settings: DemoSettings) -> dict[str, Any]:
    """Run it all and return the numbers that ``omni demo --json`` prints.

    Raises:
        ConfigError: ``out`` holds something that is no demo.
        OmniError: A part of the path failed.
    """
    console = Console(stderr=True)
    start = time.monotonic()
    _make_room(settings.out)
    run_file, media = _make_shards(settings, console)
    run = RunDir(settings.out / "run")
    console.print(f"[bold]train[/bold]  {settings.steps} steps on {settings.num_ranks} ranks")
    killed_rank = settings.num_ranks - 1
    _train_until_killed(run_file, run, settings, rank=killed_rank)
    console.print(
        f"[bold]killed[/bold] rank {killed_rank} with SIGKILL after step {settings.kill_step}; resuming"
    )
    with RankProcesses(["train", str(run_file)], num_ranks=settings.num_ranks) as ranks:
        ranks.wait()
    result = _result(run, media, settings)
    result["seconds"] = round(time.monotonic() - start, 1)
    run.write_summary({"title": "omni demo", **result, "chance": dict(media.chance)})
    result["report"] = str(report_of(run.path))
    _print_result(console, result, media.chance)
    return result


def _make_room(out: Path) -> None:
    """Remove an earlier demo; refuse to touch anything else."""
    marker = out / ".omni-demo"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not marker.exists():
            raise ConfigError(
                f"{out} is not empty and was not made by omni demo",
                fix="give an empty or new folder with --out",
            )
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _make_shards(settings: DemoSettings, console: Console) -> tuple[Path, DemoMedia]:
    with console.status("making media"):
        began = time.monotonic()
        media = generate_media(settings.out / "media", seed=settings.seed)
    console.print(f"[bold]media[/bold]  {len(media.folders)} sets in {time.monotonic() - began:.1f} s")
    began, samples, size = time.monotonic(), 0, 0
    with console.status("preparing shards"):
        for name, folder in media.folders.items():
            made = prepare([folder], settings.out / "shards", name=name, max_count=200)
            samples, size = samples + made.num_samples, size + made.num_bytes
    console.print(
        f"[bold]shards[/bold] {samples} samples, {size / 1e6:.1f} MB, prepared and indexed"
        f" in {time.monotonic() - began:.1f} s"
    )
    return write_run_file(
        settings.out, steps=settings.steps, save_every=settings.save_every, seed=settings.seed
    ), media


def _train_until_killed(run_file: Path, run: RunDir, settings: DemoSettings, *, rank: int) -> None:
    """Start the run, SIGKILL one rank after ``kill_step``, and see that all the others end by themselves."""
    with RankProcesses(["train", str(run_file)], num_ranks=settings.num_ranks) as ranks:
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while run.last_step() < settings.kill_step:
            if ranks.poll() or time.monotonic() > deadline:
                raise OmniError(f"the run ended before step {settings.kill_step}, so no rank could be killed")
            time.sleep(POLL_S)
        ranks.processes[rank].send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        try:
            ranks.wait()
        except RankError as error:
            logger.info("%s", error.what)
        else:
            raise OmniError("the run went on although a rank was killed")
    run.add_event(Event(step=settings.kill_step, text=f"rank {rank} killed (SIGKILL)"))
    logger.info("all ranks had ended %.1f s after the kill", time.monotonic() - killed_at)


def _result(run: RunDir, media: DemoMedia, settings: DemoSettings) -> dict[str, Any]:
    metrics = read_metrics(run.metrics_path)
    values = {name: list(series) for name, (_, series) in metrics.items()}
    losses = values["trainer/loss"]
    tail = max(1, len(losses) // 20)
    replays = replays_of(read_attempts(run.metrics_path), "trainer/loss")
    resumed = [event.step for event in run.events() if event.text.startswith("resumed")]
    return {
        "steps": settings.steps,
        "seconds": 0.0,
        "loss_first": losses[0],
        "loss_last": sum(losses[-tail:]) / tail,
        "accuracy": {kind: _accuracy(values, f"held-out-{name}") for name, kind in MODALITY_OF.items()},
        "accuracy_swapped": {
            kind: _accuracy(values, f"swapped-{name}") for name, kind in MODALITY_OF.items()
        },
        "imbalance": {
            part: {when: _mean(values[f"balancer/{part}_imbalance_{when}"]) for when in ("before", "after")}
            for part in ("encoder", "llm")
        },
        "padding_fraction": 1.0 - _mean(values["loader/pack_fill"]),
        "data_wait_fraction": sum(values["loader/wait_s"]) / sum(values["trainer/step_s"]),
        "tokens_per_s": sum(values["trainer/tokens"]) / sum(values["trainer/step_s"]),
        "samples_per_source": {
            name.removeprefix("loader/samples/"): int(sum(series))
            for name, series in values.items()
            if name.startswith("loader/samples/")
        },
        "quarantined": len({(r.source, r.key) for r in read_quarantine(run.quarantine_path)}),
        "resumed_at_step": resumed[-1] if resumed else 0,
        "replayed_steps": sum(replay.num_repeated for replay in replays),
        "replayed_loss_difference": max((replay.largest_difference for replay in replays), default=0.0),
    }


def _accuracy(values: Mapping[str, list[float]], name: str) -> float:
    return values[f"evaluation/{name}/accuracy"][-1]


def _mean(series: list[float]) -> float:
    return sum(series) / len(series)


def _print_result(console: Console, result: Mapping[str, Any], chance: Mapping[str, float]) -> None:
    table = Table(title="held-out answers that are right", title_justify="left")
    for column in ("modality", "true media", "swapped media", "chance"):
        table.add_column(column, justify="left" if column == "modality" else "right")
    for name, kind in MODALITY_OF.items():
        table.add_row(
            kind,
            f"{result['accuracy'][kind]:.3f}",
            f"{result['accuracy_swapped'][kind]:.3f}",
            f"{chance[name]:.3f}",
        )
    console.print(table)
    for line in _result_lines(result):
        console.print(line)
    console.print(f"report {result['report']}  ({result['seconds']:.0f} s in all)")


def _result_lines(result: Mapping[str, Any]) -> list[str]:
    encoder, llm = result["imbalance"]["encoder"], result["imbalance"]["llm"]
    fill = 1 - result["padding_fraction"]
    return [
        f"loss {result['loss_first']:.3f} -> {result['loss_last']:.3f}",
        f"imbalance: encoder {encoder['before']:.2f} -> {encoder['after']:.2f},"
        f" LLM {llm['before']:.2f} -> {llm['after']:.2f}",
        f"{result['tokens_per_s']:.0f} tokens/s, data wait {100 * result['data_wait_fraction']:.1f} %,"
        f" pack fill {fill:.3f}, {result['quarantined']} samples in quarantine",
        f"resumed at step {result['resumed_at_step']}: {result['replayed_steps']} steps done again,"
        f" largest difference of a loss {result['replayed_loss_difference']:.1e}",
    ]
