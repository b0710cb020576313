"""Angles at the published sizes are the reference's to the last bit: positions go far, and so do errors."""

from __future__ import annotations

import pytest
import torch

from tests.support.reference_library import transformers
from tests.support.reference_thinker import reference_config
from trainer.config import ModelConfig
from trainer.model.audio import sinusoids
from trainer.model.rotary import frequencies

modeling = transformers.models.qwen2_5_omni.modeling_qwen2_5_omni


@pytest.mark.parametrize("size", ["3b", "7b"])
def test_rates_and_sinusoids_are_the_same_bits(size: str) -> None:
    config = ModelConfig.model_validate({"size": size})
    theirs = reference_config(config)
    llm, vision, audio = config.llm, config.vision, config.audio
    for count, theta, kind, settings in (
        (llm.head_dim // 2, llm.rope_theta, modeling.Qwen2_5OmniRotaryEmbedding, theirs.text_config),
        (
            vision.hidden // vision.heads // 4,
            vision.rope_theta,
            modeling.Qwen2_5OmniVisionRotaryEmbedding,
            theirs.vision_config,
        ),
    ):
        rates = frequencies(count, theta=theta, device=torch.device("cpu"), dtype=torch.float32)
        assert torch.equal(rates, kind(settings).inv_freq)
    table = modeling.SinusoidsPositionEmbedding(1500, audio.hidden).positional_embedding
    ours = sinusoids(1500, hidden=audio.hidden, device=torch.device("cpu"), dtype=torch.float32)
    assert torch.equal(ours, table)
