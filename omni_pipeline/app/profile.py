"""Where the time of a trained run went: its stages, its steps, its balance, and its worst steps.

Read from the files of the run, while it trains or after. The first step of each start is left out of the
times where there are others: it allocates and waits for the first batch. Percentiles are those of steps that
were: the 99th is a step, not a mean of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from balancer.hardware import HardwareProfile, load_hardware
from omni_pipeline.app.profile_words import PARTS
from omni_pipeline.app.report_run import NO_VALUES, RunData, load_run
from omni_pipeline.app.run_dir import RunDir
from omni_pipeline.app.sinks import MetricValues
from omni_pipeline.app.stages import own_work, stage_series
from omni_pipeline.app.worst_steps import WorstStep, worst_shown
from omni_pipeline.core.errors import ConfigError, OmniError

FloatArray = npt.NDArray[np.float64]

KINDS = {"before": "modelled, unbalanced", "after": "modelled, as planned", "measured": "measured, own work"}
OLD_RUN = "the run was trained before stages were measured: no times of stages"


@dataclass(frozen=True)
class Spread:
    """A number over steps: median, 99th percentile, and the step that has the largest."""

    p50: float
    p99: float
    worst: float
    worst_step: int


@dataclass(frozen=True)
class StageRow:
    """A stage of a step.

    Args:
        name: In words.
        seconds: Mean over steps and ranks, waiting for other ranks included.
        share: Of the step, 0 to 1.
        own_s: What the ranks computed in it; None where that is not told.
    """

    name: str
    seconds: float
    share: float
    own_s: float | None


@dataclass(frozen=True)
class BalanceRow:
    """Imbalance (largest / mean) of one part, before or after balancing or as measured."""

    part: str
    kind: str
    spread: Spread


@dataclass(frozen=True)
class RunProfile:
    """Where the time of a run went.

    Args:
        run: Folder of the run.
        num_steps: Steps trained.
        num_starts: Starts of the run.
        num_left_out: First steps of starts, which no time below counts.
        num_ranks: Of the last step; None if not recorded.
        step_s: Seconds of a step, on the slowest rank.
        tokens_per_s: Over all counted steps and ranks.
        stages: What a step is made of; they add up to it.
        outside_share: Share of the time from the first step to the last that is no step: checkpoints,
            evaluations.
        data_stall: Share of the steps that the slowest rank waited for data.
        padding: Share of the computed positions that are padding.
        pack_fill: Share of the positions of full packs that hold tokens.
        balance: Imbalances over the steps.
        plan_s: Seconds to plan a step, on the slowest rank; beside the step, not in it.
        plan_share: Of the step.
        mfu: Model FLOPs utilisation: operations that the model needs (nothing computed twice, no padding)
            over what the ranks could do in the time; None if not known.
        hardware: Whose peak that is.
        peak_flops_per_s: Of one rank.
        worst: The worst steps, by time then by imbalance.
        notes: What else there is to know, in sentences.
    """

    run: str
    num_steps: int
    num_starts: int
    num_left_out: int
    num_ranks: int | None
    step_s: Spread
    tokens_per_s: float
    stages: list[StageRow]
    outside_share: float
    data_stall: float
    padding: float
    pack_fill: float
    balance: list[BalanceRow]
    plan_s: Spread | None
    plan_share: float
    mfu: float | None
    hardware: str
    peak_flops_per_s: float | None
    worst: list[WorstStep]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {**asdict(self), "worst": [worst_to_dict(item) for item in self.worst]}


def profile_run(run_dir: Path, *, hardware: str | None = None) -> RunProfile:
    """Return where the time of the run in ``run_dir`` went.

    Args:
        run_dir: Its folder.
        hardware: Name or path of the hardware profile for the MFU; None: that of the run's settings.

    Raises:
        ConfigError: There is no run with metrics.
    """
    run = load_run(run_dir)
    folder = RunDir(run_dir)
    if not run.values("trainer/step_s").size:
        raise ConfigError(
            f"{run_dir} has no step times", where=str(folder.metrics_path), fix="give a run that has trained"
        )
    steps = _Steps(run)
    machine, notes = _hardware(hardware or _named_hardware(folder))
    stages = _stages(run, steps)
    plan_s = steps.values("loader/plan_s")
    total_s = float(steps.values("trainer/step_s").sum())
    num_ranks = steps.values("trainer/num_ranks")
    return RunProfile(
        run=str(run_dir),
        num_steps=len(run.metrics["trainer/step_s"][0]),
        num_starts=len(run.attempts),
        num_left_out=steps.num_left_out,
        num_ranks=int(num_ranks[-1]) if num_ranks.size else None,
        step_s=steps.spread("trainer/step_s"),
        tokens_per_s=float(steps.values("trainer/tokens").sum()) / total_s,
        stages=stages,
        outside_share=_outside_share(run),
        data_stall=float(steps.values("loader/wait_s").sum()) / total_s,
        padding=_mean(steps.values("loader/padding")),
        pack_fill=_mean(steps.values("loader/pack_fill")),
        balance=_balance(steps),
        plan_s=steps.spread("loader/plan_s") if plan_s.size else None,
        plan_share=float(plan_s.sum()) / total_s,
        mfu=_mfu(steps, machine),
        hardware="" if machine is None else machine.name,
        peak_flops_per_s=None if machine is None else machine.flops_per_s,
        worst=worst_shown(run.worst),
        notes=notes if stages else [*notes, OLD_RUN],
    )


def worst_to_dict(item: WorstStep) -> dict[str, Any]:
    """Return a worst step as plain data, its samples with their names."""
    content = asdict(item.cause)
    for part, cause in zip(content["parts"], item.cause.parts, strict=True):
        part["samples"] = [
            {
                "source": heavy.id.source,
                "key": item.name_of(heavy.id).key,
                "shard": item.name_of(heavy.id).shard,
                "row": heavy.id.row,
                "microbatch": heavy.microbatch,
                "units": heavy.units,
                "modelled_s": heavy.modelled_s,
                "num_ranks": heavy.num_ranks,
            }
            for heavy in cause.samples
        ]
    return {**content, "worst_by": list(item.worst_by)}


class _Steps:
    """The metrics of the steps whose times count."""

    def __init__(self, run: RunData) -> None:
        self._metrics = run.metrics
        trained = set(run.metrics["trainer/step_s"][0].tolist())
        first = {attempt.first_step for attempt in run.attempts} & trained
        self._left_out = first if first < trained else set()
        self.num_left_out = len(self._left_out)

    def series(self, name: str) -> MetricValues:
        """Return (steps, values), finite ones only; empty if it was not recorded."""
        return self.kept(self._metrics.get(name, NO_VALUES))

    def kept(self, series: MetricValues) -> MetricValues:
        """Return what counts of a series."""
        steps, values = series
        keep = np.isfinite(values) & ~np.isin(steps, sorted(self._left_out))
        return steps[keep], values[keep]

    def values(self, name: str) -> FloatArray:
        """Return the values alone."""
        return self.series(name)[1]

    def spread(self, name: str) -> Spread:
        """Return the spread of a metric that was recorded."""
        steps, values = self.series(name)
        worst = int(values.argmax())
        p99 = float(np.percentile(values, 99, method="higher"))
        return Spread(float(np.median(values)), p99, float(values[worst]), int(steps[worst]))


def _stages(run: RunData, steps: _Steps) -> list[StageRow]:
    series = {name: _mean(steps.kept(found)[1]) for name, found in stage_series(run).items()}
    total = sum(series.values())
    return [
        StageRow(name, seconds, seconds / total, _mean(own) if own.size else None)
        for name, seconds in series.items()
        for own in (steps.kept(own_work(run, name))[1],)
    ]


def _balance(steps: _Steps) -> list[BalanceRow]:
    return [
        BalanceRow(part, kind, steps.spread(name))
        for part in PARTS
        for kind in KINDS
        if steps.values(name := f"balancer/{part}_imbalance_{kind}").size
    ]


def _mfu(steps: _Steps, machine: HardwareProfile | None) -> float | None:
    flops = steps.values("trainer/flops")
    if machine is None or not flops.size:
        return None
    rank_s = steps.values("trainer/step_s") * steps.values("trainer/num_ranks")
    return float(flops.sum() / (rank_s.sum() * machine.flops_per_s))


def _named_hardware(folder: RunDir) -> str:
    settings: Mapping[str, Any] = folder.settings() or {}
    return str(settings.get("balance", {}).get("hardware", ""))


def _hardware(name: str) -> tuple[HardwareProfile | None, list[str]]:
    """Return the profile, and why there is none."""
    if not name:
        return None, ["the run names no hardware profile (balance.hardware), so there is no MFU"]
    try:
        return load_hardware(name), []
    except OmniError as error:
        return None, [f"no MFU: {error.what}"]


def _outside_share(run: RunData) -> float:
    """Share of the time between the first and the last step of each start that is no step."""
    passed_s = step_s = 0.0
    for attempt in run.attempts:
        own = attempt.values.get("trainer/step_s", {})
        last = sorted(own)[1:]
        if last:
            times = [attempt.times[step] for step in own]
            passed_s += max(times) - min(times)
            step_s += sum(own[step] for step in last)
    return max(0.0, 1 - step_s / passed_s) if passed_s > 0 else 0.0


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if values.size else 0.0
