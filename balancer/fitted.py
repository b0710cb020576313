"""Costs fitted to measured microbatches, and the file that keeps them.

A fitted cost is ``a x pairs + b x positions + c x segments + d``: the ``a L^2 + b L + c`` of attention
segments summed, so that windows count as what they are, and a constant per microbatch. ``balancer.fit``
makes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from balancer.shapes import TransformerShape
from omni_pipeline.core.config import validate
from omni_pipeline.core.errors import ConfigError

VERSION: Literal[1] = 1
FIX = "measure again with `omni profile --calibrate`, or leave balance.costs out"


class FittedCost(BaseModel):
    """Seconds, forward and backward, of one encoder or of the LLM on one rank, and how well they fit."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    pair_s: float = Field(ge=0, description="Per (query, key) pair of one layer.")
    position_s: float = Field(ge=0, description="Per attention position.")
    segment_s: float = Field(ge=0, description="Per media segment, or sample of a pack.")
    microbatch_s: float = Field(ge=0, description="Per microbatch, whatever is in it.")
    forward_fraction: float = Field(gt=0, lt=1, description="Share of the forward.")
    median_error: float = Field(ge=0, description="Median relative error on microbatches held out.")
    max_error: float = Field(ge=0, description="Largest relative error on microbatches held out.")
    worst: str = Field(description="The microbatch of the largest error, in words.")
    num_measured: int = Field(ge=1, description="Microbatches measured.")
    shape: str = Field(description="Digest of the sizes of the part that was measured.")

    def seconds(self, *, pairs: float, positions: float, segments: float) -> float:
        """Return the seconds of some work, without the constant of its microbatch."""
        return self.pair_s * pairs + self.position_s * positions + self.segment_s * segments


class FittedCosts(BaseModel):
    """The file of a machine's fitted costs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = VERSION
    machine: str = Field(description="What was measured: processor or GPU, and what it ran.")
    date: str = Field(description="When, ISO 8601.")
    precision: Literal["fp32", "bf16"] = Field(description="run.precision of the measurement.")
    recompute: bool = Field(False, description="Whether forwards were done again in the backward.")
    fits: dict[str, FittedCost] = Field(description="By encoder, and 'llm'.")


def save_fits(path: Path, costs: FittedCosts) -> None:
    """Write ``costs`` as JSON; ``path`` appears whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(costs.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def load_fits(path: Path, *, shapes: Mapping[str, TransformerShape], precision: str) -> dict[str, FittedCost]:
    """Return the fitted costs in ``path`` of those parts in ``shapes`` that were measured.

    Raises:
        ConfigError: No such file, another version, or it was measured with another model or precision.
    """
    costs = read_fits(path)
    where = f"balance.costs {path}"
    if costs.precision != precision:
        raise ConfigError(
            f"costs were measured in {costs.precision}, this run computes in {precision}",
            where=where,
            fix=FIX,
        )
    if costs.recompute:
        raise ConfigError("costs were measured with recomputation", where=where, fix=FIX)
    fits = {name: fit for name, fit in costs.fits.items() if name in shapes}
    for name, fit in fits.items():
        if fit.shape != shapes[name].digest:
            raise ConfigError(f"costs of {name!r} were measured with another model", where=where, fix=FIX)
    return fits


def read_fits(path: Path) -> FittedCosts:
    """Return the content of a file of fitted costs.

    Raises:
        ConfigError: No such file, no JSON, another version, or a wrong value.
    """
    where = f"balance.costs {path}"
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read fitted costs: {reason}", where=where, fix=FIX) from error
    if not isinstance(data, dict) or data.get("version") != VERSION:
        found = data.get("version") if isinstance(data, dict) else None
        raise ConfigError(f"fitted costs have version {found}, wanted {VERSION}", where=where, fix=FIX)
    return validate(FittedCosts, data, where=where, fix=FIX)
