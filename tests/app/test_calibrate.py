"""Calibration: what it writes is what a run reads, on one process and on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from balancer.hardware import load_hardware
from omni_pipeline.app.calibrate import Calibration, calibrate, fitted
from omni_pipeline.app.costs import cost_model, encoder_shapes
from omni_pipeline.app.environment import Environment
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.wire import section_digests
from omni_pipeline.core.errors import DataError
from tests.support.ranks import run_ranks
from trainer.part_times import PartTime


def run_config(**balance: Any) -> RunConfig:
    """Return a run of the tiny model."""
    source = {"name": "texts", "shards": "texts.tar", "layout": {"kind": "fields", "fields": ["txt"]}}
    return RunConfig.model_validate(
        {
            "run": {"dir": "run", "steps": 1},
            "sources": [source],
            "order": {"lanes": 1, "packs_per_step": 1, "seq_len": 64},
            "model": {"size": "tiny"},
            "balance": {"hardware": "cpu", **balance},
        }
    )


def test_a_run_uses_what_was_measured(tmp_path: Path) -> None:
    told: list[str] = []
    found = calibrate(
        run_config(), tmp_path / "here", budget_s=12, progress=lambda name, share: told.append(name)
    )
    assert found is not None
    assert set(told) == {"vision", "audio", "llm"}
    config = run_config(hardware=str(found.hardware_path), costs=str(found.costs_path))
    model = cost_model(config)
    assert model.hardware == found.hardware
    assert dict(model.fits) == found.costs.fits
    assert found.links == {}
    known = load_hardware("cpu")
    assert found.hardware.node_bytes_per_s == known.node_bytes_per_s
    assert found.hardware.flops_per_s != known.flops_per_s
    # The measured microbatches themselves: the model says about what they took.
    small, large = (model.encoder_cost("vision", found.times["vision"][place].grids) for place in (0, -1))
    last = found.times["vision"][-1]
    assert large == pytest.approx(last.forward_s + last.backward_s, rel=0.8)
    assert small < large


def test_a_part_is_fitted_to_its_own_microbatches() -> None:
    shape = encoder_shapes(run_config().model)["audio"]
    times = [
        PartTime(((100 * n, 1, 1),) * n, forward_s=0.01 * n, backward_s=0.02 * n, num_rounds=1)
        for n in range(1, 10)
    ]
    fit = fitted(tuple(times), name="audio", shape=shape)
    assert fit.num_measured == 9
    assert fit.worst.endswith("x1x1")
    with pytest.raises(DataError, match="give the measurement more time"):
        fitted(tuple(times[:3]), name="audio", shape=shape)


def calibrate_on_rank(rank: int, out: Path) -> tuple[bool, int, float]:
    """Calibrate as one of two ranks; return whether something came back, and what it says of links."""
    place = Environment(rank, 2, local_rank=rank, local_world_size=2)
    found: Calibration | None = calibrate(run_config(), out, place=place, budget_s=12)
    if found is None:
        return False, 0, 0.0
    assert set(found.links) == {"all_to_all", "all_gather", "reduce_scatter"}
    return True, found.hardware.ranks_per_node, found.hardware.node_latency_s


@pytest.mark.slow
def test_ranks_measure_together_and_the_first_writes(tmp_path: Path) -> None:
    (wrote, num_ranks, latency_s), other = run_ranks(2, calibrate_on_rank, args=(tmp_path,), timeout_s=110)
    assert (wrote, num_ranks) == (True, 2)
    assert latency_s > 0
    assert other == (False, 0, 0.0)
    assert load_hardware(str(tmp_path / "hardware.toml")).ranks_per_node == 2


def test_the_content_of_profiles_and_fits_is_compared_between_ranks(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.toml", "two.toml", "three.toml")]
    text = (Path(load_hardware.__code__.co_filename).parent / "hardware_profiles/cpu.toml").read_text()
    for path in paths:
        path.write_text(text)
    paths[2].write_text(text.replace("flops_per_s = 2e10", "flops_per_s = 3e10"))
    one, two, three = (section_digests(run_config(hardware=str(path))) for path in paths)
    shipped = section_digests(run_config())
    assert one == two == shipped
    assert {name for name in one if one[name] != three[name]} == {"balance"}


def test_how_shards_are_read_may_differ_between_ranks(tmp_path: Path) -> None:
    config = run_config()
    storage = config.loader.storage.model_copy(update={"cache_dir": tmp_path, "timeout_s": 1.0})
    here = config.model_copy(update={"loader": config.loader.model_copy(update={"storage": storage})})
    assert section_digests(here) == section_digests(config)
