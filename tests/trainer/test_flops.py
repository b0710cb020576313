"""The formulas against torch's own count of the matrix products that run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainer.config import ModelConfig
from trainer.flops import audio_flops, llm_flops, training_flops, vision_flops
from trainer.model.omni import build_model

CONFIG = ModelConfig(size="tiny")


@torch.no_grad()
def _counted(part: torch.nn.Module, *args: object) -> int:
    # The counter knows the products of the plain formula, not those inside the fused CPU kernel.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        part(*args)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("grid", [(1, 8, 8), (2, 6, 10)])
def test_vision_flops_are_those_that_run(grid: tuple[int, int, int]) -> None:
    patches = torch.zeros(int(np.prod(grid)), 1176, dtype=torch.uint8)
    counted = _counted(build_model(CONFIG).encoders["vision"], patches, np.array([grid]))
    assert vision_flops(CONFIG, grid) == counted


@pytest.mark.parametrize("mel_frames", [200, 400, 60])
def test_audio_flops_are_those_that_run(mel_frames: int) -> None:
    counted = _counted(
        build_model(CONFIG).encoders["audio"], torch.zeros(mel_frames, 16), np.array([(mel_frames, 1, 1)])
    )
    assert audio_flops(CONFIG, mel_frames) == counted


def test_llm_flops_are_those_that_run_with_causal_attention_at_half() -> None:
    tokens = torch.zeros(50, dtype=torch.int64)
    none = tokens[:0]
    counted = _counted(
        build_model(CONFIG).llm,
        tokens,
        tokens.expand(3, 50),
        np.array([0, 50]),
        torch.zeros(0, 64),
        none,
        tokens,
    )
    llm = CONFIG.llm
    full_attention = 4 * llm.heads * llm.head_dim * llm.layers * 50**2
    assert llm_flops(CONFIG, 50) == counted - full_attention // 2


def test_training_is_three_forwards_of_everything_and_splitting_samples_costs_less() -> None:
    parts = vision_flops(CONFIG, (1, 4, 4)) + audio_flops(CONFIG, 90) + 2 * llm_flops(CONFIG, 30)
    total = training_flops(CONFIG, grids=[(1, 4, 4)], mel_frames=[90], sample_tokens=[30, 30])
    assert total == 3 * parts
    assert 2 * llm_flops(CONFIG, 30) < llm_flops(CONFIG, 60)
    assert training_flops(CONFIG, grids=[], mel_frames=[], sample_tokens=[]) == 0
