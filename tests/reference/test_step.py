"""A step of training against the reference: the mean loss of a global batch and its gradients.

Bound: the defaults of ``assert_close`` in float32, gradients divided by their largest entry.
"""

from __future__ import annotations

import torch

from omni_pipeline.core.sample import Modality
from tests.support.ranks import run_ranks
from tests.support.reference_thinker import assert_gradients_equal, make_batch, make_pair, run_theirs
from tests.support.steps import step_alone
from tests.support.strategies import make_sample, media_segment, text_segment


def test_a_step_has_loss_and_gradients_of_the_reference() -> None:
    pair = make_pair()
    # Labels differ in number: a mean of means would be another loss.
    samples = [
        make_sample([media_segment(Modality.IMAGE, (1, 6, 4)), text_segment(4)], row=1),
        make_sample(
            [
                text_segment(5),
                media_segment(Modality.AUDIO, (33, 1, 1)),
                text_segment(9),
                media_segment(Modality.VIDEO, (2, 4, 6)),
            ],
            row=2,
        ),
    ]
    batch = make_batch([[sample] for sample in samples], config=pair.config)
    ((result, gradients),) = run_ranks(1, step_alone, args=(pair.config, pair.ours.state_dict(), batch))
    expected = run_theirs(pair, samples).loss
    torch.testing.assert_close(result.loss, expected.item(), rtol=1.3e-6, atol=0)
    torch.autograd.backward(expected)
    for name, parameter in pair.ours.named_parameters():
        parameter.grad = gradients[name]
    assert_gradients_equal(pair)
