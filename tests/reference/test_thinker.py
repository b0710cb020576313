"""The whole thinker against the reference: from samples to logits, loss, and gradients of every parameter.

Tokens and positions of ours come from the loader; the reference gets token ids and grids, and makes its own
positions. Bound: the defaults of ``assert_close`` in float32, on tensors divided by their largest entry.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from omni_pipeline.core.sample import Modality, Sample
from tests.support.reference_thinker import (
    CONFIG,
    Pair,
    assert_equal,
    assert_gradients_equal,
    make_pair,
    run_ours,
    run_theirs,
    zero_gradients,
)
from tests.support.strategies import clip_with_sound, make_sample, media_segment, text_segment
from trainer.weights.names import THINKER_IN_MEMORY

IMAGE, VIDEO, AUDIO = Modality.IMAGE, Modality.VIDEO, Modality.AUDIO

SAMPLES: dict[str, Sample] = {
    "text": make_sample([text_segment(6, loss=False), text_segment(9)], row=1),
    "one image": make_sample([media_segment(IMAGE, (1, 4, 6)), text_segment(5)], row=2),
    "images": make_sample(
        [
            text_segment(2, loss=False),
            media_segment(IMAGE, (1, 2, 2)),
            media_segment(IMAGE, (1, 6, 10)),
            text_segment(4),
            media_segment(IMAGE, (1, 10, 2)),
        ],
        row=3,
    ),
    "video": make_sample([media_segment(VIDEO, (4, 4, 6)), text_segment(5)], row=4),
    "audio": make_sample(
        [
            media_segment(AUDIO, (47, 1, 1)),
            text_segment(3),
            media_segment(AUDIO, (20, 1, 1)),
            text_segment(2),
        ],
        row=5,
    ),
    "video with sound": make_sample(
        [
            text_segment(3),
            media_segment(AUDIO, (12, 1, 1)),
            # 12 s in six chunks, sound of 3 s in two; then a clip shorter than its sound.
            *clip_with_sound((6, 4, 2), 300, patch_s=2.0),
            media_segment(IMAGE, (1, 4, 4)),
            *clip_with_sound((2, 2, 4), 450),
            text_segment(4),
        ],
        row=7,
    ),
    "all mixed": make_sample(
        [
            text_segment(4),
            media_segment(IMAGE, (1, 6, 4)),
            media_segment(AUDIO, (41, 1, 1)),
            media_segment(VIDEO, (3, 2, 6)),
            text_segment(3),
            media_segment(IMAGE, (1, 2, 10)),
            media_segment(VIDEO, (2, 6, 4)),
            text_segment(1, loss=False),
            media_segment(AUDIO, (4, 1, 1)),
        ],
        row=6,
    ),
}
PARTS: dict[str, list[str]] = {
    "text": ["llm."],
    "one image": ["llm.", "encoders.vision."],
    "images": ["llm.", "encoders.vision."],
    "video": ["llm.", "encoders.vision."],
    "audio": ["llm.", "encoders.audio."],
    "video with sound": ["llm.", "encoders."],
    "all mixed": ["llm.", "encoders."],
}


@functools.cache
def _pair(*, tied: bool = False) -> Pair:
    data = CONFIG.model_dump()
    data["llm"]["tied_head"] = tied
    return make_pair(CONFIG.model_validate(data))


def assert_equals_reference(pair: Pair, samples: Sequence[Sample], *, parts: Sequence[str]) -> None:
    zero_gradients(pair)
    ours, theirs = run_ours(pair, samples), run_theirs(pair, samples)
    for sample, own, other in zip(samples, ours.logits, theirs.logits, strict=True):
        assert own.shape == (sample.num_tokens, pair.config.llm.vocab_size)
        assert_equal(own, other, what=sample.key)
    torch.testing.assert_close(ours.loss, theirs.loss)
    torch.autograd.backward(ours.loss)
    torch.autograd.backward(theirs.loss)
    assert_gradients_equal(pair, parts=parts)
    if theirs.sounds:
        assert_equal(ours.sound_gradient, theirs.sound_gradient)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", SAMPLES)
def test_logits_loss_and_gradients_are_those_of_the_reference(case: str, tied: bool) -> None:
    assert_equals_reference(_pair(tied=tied), [SAMPLES[case]], parts=PARTS[case])


@pytest.mark.parametrize("fps", [0.7, 1.0, 3.0, 25.0])
def test_videos_stand_at_their_time_at_any_rate(fps: float) -> None:
    clip = media_segment(VIDEO, (4, 4, 6), patch_s=2 / fps)
    assert_equals_reference(_pair(), [make_sample([clip, text_segment(5)], row=4)], parts=PARTS["video"])


def test_a_pack_equals_its_samples_one_by_one() -> None:
    assert_equals_reference(_pair(), list(SAMPLES.values()), parts=["llm.", "encoders."])


def test_epsilons_of_norms_are_those_of_the_reference() -> None:
    # At the size of activations here they are below the bound of the other tests.
    pair = _pair()
    modules = dict(pair.theirs.named_modules())
    norms = {name: module for name, module in pair.ours.named_modules() if hasattr(module, "eps")}
    assert norms
    for name, module in norms.items():
        theirs = THINKER_IN_MEMORY.rename(name + ".")
        assert theirs is not None
        other: Any = modules[theirs.removesuffix(".")]
        epsilon = other.eps if isinstance(other, nn.LayerNorm) else other.variance_epsilon
        assert module.eps == epsilon, name
