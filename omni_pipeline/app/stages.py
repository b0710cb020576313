"""What a step is made of: the stages of a rank, in the order they run, each a mean over ranks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omni_pipeline.app.report_run import NO_VALUES, RunData
from omni_pipeline.app.sinks import MetricValues

MEAN = "trainer/mean/"
OWN = {"encoders": "encoder", "exchange of rows": "exchange", "LLM": "llm"}
"""Stages of which own work is measured, and the metric that has it."""


def stage_series(run: RunData) -> dict[str, MetricValues]:
    """Return seconds by stage, over the steps that recorded them: waiting for other ranks included.

    The stages add up to the step. Empty for a run that did not measure them.
    """
    steps = run.metrics.get(f"{MEAN}llm_s", NO_VALUES)[0]
    if not steps.size:
        return {}
    names = ("step", "wait", "agree", "compute", "optimizer", "encoder", "exchange", "llm")
    step, wait, agree, compute, optimizer, encoder, exchange, llm = (
        _at(run.metrics[f"{MEAN}{name}_s"], steps) for name in names
    )
    seconds = {
        "wait for data": wait,
        "agree on the step": agree,
        "encoders": encoder,
        "exchange of rows": exchange,
        "LLM": llm,
        "gather losses and norms": compute - encoder - exchange - llm,
        "optimizer": optimizer,
        "other": step - wait - agree - compute - optimizer,
    }
    # Differences of clocks may fall a little below zero.
    return {name: (steps, np.maximum(values, 0.0)) for name, values in seconds.items()}


def own_work(run: RunData, stage: str) -> MetricValues:
    """Return the seconds that ranks computed in a stage; empty where that is not told."""
    return run.metrics.get(f"{MEAN}{OWN.get(stage, '')}_own_s", NO_VALUES)


def _at(series: MetricValues, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the values of a metric at ``steps``, which it was recorded at, too."""
    return series[1][np.searchsorted(series[0], steps)]
