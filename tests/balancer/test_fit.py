"""Fitted costs: known coefficients come back, errors and outliers show, files say what is wrong with them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.fit import Measured, fit_cost
from balancer.fitted import FittedCost, FittedCosts, load_fits, save_fits
from balancer.shapes import TransformerShape, vision_shape
from balancer.work import media_sizes
from omni_pipeline.core.errors import ConfigError, DataError

SHAPE = vision_shape(
    layers=4,
    hidden=16,
    ffn=12,
    heads=4,
    patch_values=24,
    merge=2,
    window_patches=4,
    full_attention_layers=1,
    llm_hidden=8,
)
TRUE = {"pair_s": 3e-9, "position_s": 2e-6, "segment_s": 1e-5, "microbatch_s": 4e-4}
GRIDS = [((1, side, 2 * side), count) for side in (4, 10, 18, 30) for count in (1, 3, 7)]


def measure(
    true: dict[str, float],
    *,
    noise: dict[int, float] | None = None,
    content: Sequence[tuple[tuple[int, int, int], int]] = GRIDS,
) -> list[Measured]:
    """Return microbatches that take exactly what ``true`` says, but for the factors of ``noise``."""
    found = []
    for index, (grid, count) in enumerate(content):
        sizes = media_sizes(SHAPE, grid)
        seconds = (
            true["pair_s"] * count * sizes.pairs(SHAPE)
            + true["position_s"] * count * sizes.positions
            + true["segment_s"] * count
            + true["microbatch_s"]
        ) * (noise or {}).get(index, 1.0)
        found.append(Measured(f"{count} of {grid}", (sizes,) * count, 0.4 * seconds, 0.6 * seconds))
    return found


coefficients = st.fixed_dictionaries(
    {name: st.just(0.0) | st.floats(value / 9, 9 * value) for name, value in TRUE.items()}
)


@settings(max_examples=50)
@given(coefficients.filter(lambda found: found["microbatch_s"] > 0))
def test_known_coefficients_are_recovered(true: dict[str, float]) -> None:
    fit = fit_cost(measure(true), shape=SHAPE)
    for name, value in true.items():
        assert getattr(fit, name) == pytest.approx(value, rel=1e-6, abs=1e-9 * TRUE[name])
    assert fit.max_error < 1e-9
    assert fit.forward_fraction == pytest.approx(0.4)
    assert (fit.num_measured, fit.shape) == (len(GRIDS), SHAPE.digest)


def test_an_outlier_is_named_and_shows_in_the_largest_error() -> None:
    fit = fit_cost(measure(TRUE, noise={5: 2.5}), shape=SHAPE)
    grid, count = GRIDS[5]
    assert fit.worst == f"{count} of {grid}"
    assert fit.max_error > 0.4
    assert fit.median_error < 0.2


def test_errors_are_those_of_microbatches_left_out() -> None:
    # Only the large one tells pairs from positions: a fit with it hits it, a fit without cannot.
    content = [((1, 4, 4), count) for count in range(1, 11)] + [((1, 90, 90), 1)]
    measured = measure(TRUE, content=content)
    fit = fit_cost(measured, shape=SHAPE)
    (sizes,) = measured[-1].items
    predicted = fit.seconds(pairs=sizes.pairs(SHAPE), positions=sizes.positions, segments=1)
    assert predicted + fit.microbatch_s == pytest.approx(measured[-1].seconds)
    assert fit.worst == "1 of (1, 90, 90)"
    assert fit.max_error > 0.3
    assert fit.median_error < 1e-9


def test_no_coefficient_is_below_zero() -> None:
    # Large ones quicker than small ones promise: a plain fit has a negative constant here.
    noise = {index: 1 / (1 + count) for index, (_, count) in enumerate(GRIDS)}
    fit = fit_cost(measure(TRUE, noise=noise), shape=SHAPE)
    assert min(fit.pair_s, fit.position_s, fit.segment_s, fit.microbatch_s) >= 0


def test_too_few_microbatches_say_so() -> None:
    with pytest.raises(DataError, match="7 microbatches were measured, a fit of 4 numbers needs 8"):
        fit_cost(measure(TRUE)[:7], shape=SHAPE)
    broken = [dataclasses.replace(measure(TRUE)[0], forward_s=0.0), *measure(TRUE)[1:]]
    with pytest.raises(DataError, match=r"microbatch 1 of \(1, 4, 8\) took"):
        fit_cost(broken, shape=SHAPE)


def costs() -> FittedCosts:
    """Return a file's content for one encoder."""
    fit = fit_cost(measure(TRUE), shape=SHAPE)
    return FittedCosts(machine="a processor", date="2026-12-01", precision="fp32", fits={"vision": fit})


def load(path: Path, *, shape: TransformerShape = SHAPE, precision: str = "fp32") -> dict[str, FittedCost]:
    """Load the fits of one encoder."""
    return load_fits(path, shapes={"vision": shape}, precision=precision)


def test_fits_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    save_fits(path, costs())
    assert load(path) == dict(costs().fits)
    assert load_fits(path, shapes={"audio": SHAPE}, precision="fp32") == {}


def test_fits_of_another_model_or_precision_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    save_fits(path, costs())
    with pytest.raises(ConfigError) as caught:
        load(path, shape=dataclasses.replace(SHAPE, layers=5))
    assert str(caught.value) == (
        "costs of 'vision' were measured with another model\n"
        f"  where: balance.costs {path}\n"
        "  fix:   measure again with `omni profile --calibrate`, or leave balance.costs out"
    )
    with pytest.raises(ConfigError, match="costs were measured in fp32, this run computes in bf16"):
        load(path, precision="bf16")
    save_fits(path, costs().model_copy(update={"recompute": True}))
    with pytest.raises(ConfigError, match="costs were measured with recomputation"):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 0}, "fitted costs have version 0, wanted 1"),
        ({"speed": 1}, "unknown setting 'speed'"),
        ({"precision": "fp8"}, "precision"),
        ({"fits": {"vision": {}}}, "setting 'fits.vision.pair_s' is required"),
    ],
)
def test_wrong_files_say_what_is_wrong(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**costs().model_dump(mode="json"), **change}))
    with pytest.raises(ConfigError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "cannot read"), ("[1]", "version None"), ("\xff", "cannot read")]
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=message):
        load(path)
    with pytest.raises(ConfigError, match="cannot read fitted costs: No such file"):
        load(tmp_path / "none.json")
