"""Costs fitted to measured microbatches: non-negative least squares on relative errors.

What a microbatch takes is modelled as ``a x pairs + b x positions + c x segments + d`` with none of them
below zero (Lawson and Hanson 1974), so that more work never costs less. Each microbatch weighs as much as
any other whatever its size, because rows are divided by their seconds. The error is that of microbatches
left out of the fit one at a time: what is said of sizes that were not measured. A microbatch that does not
fit is named.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from balancer.fitted import FittedCost
from balancer.shapes import TransformerShape
from balancer.work import Sizes
from omni_pipeline.core.errors import DataError

FloatArray = npt.NDArray[np.float64]
NUM_COEFFICIENTS = 4
MIN_MEASURED = 2 * NUM_COEFFICIENTS


@dataclass(frozen=True, slots=True)
class Measured:
    """One microbatch of one encoder or of the LLM, as measured.

    Args:
        what: What it was, in words.
        items: Sizes of its segments or samples.
        forward_s: Seconds of the forward, above 0.
        backward_s: Seconds of the backward, above 0.
    """

    what: str
    items: tuple[Sizes, ...]
    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        """Seconds, forward and backward."""
        return self.forward_s + self.backward_s


def fit_cost(measured: Sequence[Measured], *, shape: TransformerShape) -> FittedCost:
    """Return the cost that fits ``measured``, with its error on microbatches left out one at a time.

    Raises:
        DataError: Fewer than eight microbatches, or one that took no time.
    """
    if len(measured) < MIN_MEASURED:
        raise DataError(
            f"{len(measured)} microbatches were measured, a fit of {NUM_COEFFICIENTS} numbers needs "
            f"{MIN_MEASURED}",
            fix="give the measurement more time",
        )
    for item in measured:
        if not (item.forward_s > 0 and item.backward_s > 0):
            raise DataError(f"microbatch {item.what} took {item.seconds} s", fix="measure it again")
    features = np.array([_features(item, shape) for item in measured], dtype=np.float64)
    seconds = np.array([item.seconds for item in measured], dtype=np.float64)
    errors = _left_out_errors(features, seconds)
    worst = max(range(len(errors)), key=errors.__getitem__)
    pair_s, position_s, segment_s, microbatch_s = _non_negative(features, seconds).tolist()
    return FittedCost(
        pair_s=pair_s,
        position_s=position_s,
        segment_s=segment_s,
        microbatch_s=microbatch_s,
        forward_fraction=statistics.median(item.forward_s / item.seconds for item in measured),
        median_error=statistics.median(errors),
        max_error=errors[worst],
        worst=measured[worst].what,
        num_measured=len(measured),
        shape=shape.digest,
    )


def _features(item: Measured, shape: TransformerShape) -> list[float]:
    pairs = sum(sizes.pairs(shape) for sizes in item.items)
    positions = sum(sizes.positions for sizes in item.items)
    return [pairs, positions, len(item.items), 1]


def _left_out_errors(features: FloatArray, seconds: FloatArray) -> list[float]:
    """The relative error on each row of a fit of all others."""
    errors = []
    for left_out in range(len(seconds)):
        others = np.arange(len(seconds)) != left_out
        coefficients = _non_negative(features[others], seconds[others])
        errors.append(float(abs(features[left_out] @ coefficients / seconds[left_out] - 1)))
    return errors


def _non_negative(features: FloatArray, seconds: FloatArray) -> FloatArray:
    """Return float64 [features], none negative: the least sum of squared relative errors."""
    from scipy.optimize import nnls  # slow to import, and no plan needs it

    rows = features / seconds[:, None]
    # Columns of like length: pairs are a million times as many as segments.
    scale = np.maximum(np.linalg.norm(rows, axis=0), np.finfo(np.float64).tiny)
    coefficients: FloatArray = nnls(rows / scale, np.ones(len(seconds)))[0] / scale
    return coefficients
