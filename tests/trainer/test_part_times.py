"""Microbatches of single parts, measured: every size gets its turn, and the time is bounded."""

from __future__ import annotations

import math

import pytest
import torch

from omni_pipeline.core.sizes import audio_rows
from trainer.config import ModelConfig
from trainer.part_times import Part, part_grids

PARTS = ["vision", "audio", "llm"]
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("size", ["tiny", "demo", "3b"])
def test_grids_rise_vary_and_fit_the_sequence(name: str, size: str) -> None:
    config = ModelConfig.model_validate({"size": size})
    found = part_grids(config, name, seq_len=512)
    units = [sum(math.prod(grid) for grid in grids) for grids in found]
    assert units == sorted(units)
    assert 8 <= len(found) <= 24
    assert len(set(found)) == len(found)
    assert len({grids[0] for grids in found}) >= 3
    assert len({len(grids) for grids in found}) >= 3
    rows = {
        "vision": lambda grid: math.prod(grid) // 4,
        "audio": lambda grid: audio_rows(grid[0]),
        "llm": lambda grid: grid[0],
    }[name]
    assert max(sum(map(rows, grids)) for grids in found) <= 512


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", PARTS)
def test_every_part_runs_forward_and_backward(name: str, precision: str) -> None:
    config = ModelConfig(size="tiny")
    part = Part(config, name, device=CPU, precision="bf16" if precision == "bf16" else "fp32")
    grids = part_grids(config, name, seq_len=64)
    forward_s, backward_s = part.run(grids[-1])
    assert forward_s > 0
    assert backward_s > 0
    gradients = [parameter.grad for parameter in part.module.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


def test_all_sizes_are_measured_in_turns_and_larger_ones_take_longer() -> None:
    config = ModelConfig(size="tiny")
    told: list[float] = []
    small, large = ((16, 1, 1),), ((512, 1, 1),) * 8
    part = Part(config, "llm", device=CPU, precision="fp32")
    one, two = part.times(
        [small, large],
        budget_s=20,
        progress=lambda name, share: told.append(share) if name == "llm" else None,
    )
    assert (one.grids, two.grids) == (small, large)
    assert two.forward_s > 2 * one.forward_s
    assert two.backward_s > 2 * one.backward_s
    assert one.num_rounds == two.num_rounds == 8
    assert len(told) == 18
    assert told == sorted(told)
    assert told[-1] == 1


def test_no_turn_begins_after_the_time_is_up() -> None:
    part = Part(ModelConfig(size="tiny"), "llm", device=CPU, precision="fp32")
    small, large = ((16, 1, 1),), ((2000, 1, 1),)
    assert [item.num_rounds for item in part.times([small, small], budget_s=0)] == [1]
    # A large one takes more time than there is, and others have no turn.
    found = part.times([small, large, large], budget_s=0.1)
    assert len(found) < 3
    assert max(item.num_rounds for item in found) == 1
