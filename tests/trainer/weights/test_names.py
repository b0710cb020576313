"""Names of the reference: all of its tensors and none beside, checked against the library itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.reference_library import transformers
from trainer.config import ModelConfig
from trainer.model.omni import build_model
from trainer.weights.names import (
    LLM,
    PATCH_EMBED,
    THINKER,
    THINKER_IN_MEMORY,
    UNUSED,
    WHOLE,
    from_reference,
    pieces_of,
    to_reference,
)

CONFIG = ModelConfig.model_validate({"size": "tiny", "llm": {"vocab_size": 320}})


def thinker() -> Any:
    """Return a thinker of the library as large as ``CONFIG``, on the meta device."""
    config = transformers.Qwen2_5OmniThinkerConfig(
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "window_size": 56,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
        audio_config={
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "output_dim": 64,
        },
        text_config={
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    )
    with torch.device("meta"):
        return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)


def test_names_and_shapes_are_those_of_the_library() -> None:
    theirs = {name: tuple(tensor.shape) for name, tensor in thinker().named_parameters()}
    ours = to_reference(
        dict(build_model(CONFIG, device="meta").named_parameters()), layout=THINKER_IN_MEMORY, config=CONFIG
    )
    unused = {THINKER_IN_MEMORY.rename(name) for name in UNUSED}
    assert unused <= set(theirs)
    assert {name: tuple(tensor.shape) for name, tensor in ours.items()} == {
        name: shape for name, shape in theirs.items() if name not in unused
    }


@pytest.mark.parametrize("layout", [THINKER, WHOLE, THINKER_IN_MEMORY])
def test_to_the_reference_and_back_is_bit_exact(layout: Any) -> None:
    ours = dict(build_model(CONFIG, seed=3).named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in ours.items()}
    theirs = to_reference(ours, layout=layout, config=CONFIG)
    back = from_reference(theirs, shapes=shapes, layout=layout, config=CONFIG)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], parameter) for name, parameter in ours.items())


def test_files_of_a_language_model_hold_nothing_of_the_encoders() -> None:
    assert pieces_of(PATCH_EMBED, (32, 1176), layout=LLM, config=CONFIG) == ()
    (piece,) = pieces_of("llm.lm_head.weight", (320, 64), layout=LLM, config=CONFIG)
    assert (piece.name, piece.shape, piece.index) == ("lm_head.weight", (320, 64), ())


def test_fused_experts_are_tensors_of_their_own_in_files() -> None:
    name = "llm.layers.1.mlp.experts.gate_up_proj"
    ours = {
        name: torch.arange(3 * 8 * 2.0).reshape(3, 8, 2),
        name.replace("gate_up", "down"): torch.arange(3 * 2 * 4.0).reshape(3, 2, 4),
    }
    theirs = to_reference(ours, layout=LLM, config=CONFIG)
    assert len(theirs) == 9
    up = theirs["model.layers.1.mlp.experts.2.up_proj.weight"]
    assert torch.equal(up, ours[name][2, 4:])
    shapes = {name: tuple(tensor.shape) for name, tensor in ours.items()}
    back = from_reference(theirs, shapes=shapes, layout=LLM, config=CONFIG)
    assert all(torch.equal(back[name], tensor) for name, tensor in ours.items())


def test_a_tensor_of_another_shape_is_refused() -> None:
    shapes = {"llm.lm_head.weight": (320, 64)}
    with pytest.raises(ValueError, match=r"^lm_head.weight is \(64, 320\), wanted \(320, 64\)$"):
        from_reference({"lm_head.weight": torch.zeros(64, 320)}, shapes=shapes, layout=THINKER, config=CONFIG)
