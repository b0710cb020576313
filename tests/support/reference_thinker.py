"""The library's thinker and ours with the same random weights, and samples run through both.

Ours runs as in training: plan, arrays and positions made by the loader's own functions, one pack. The
reference gets one sample alone, as token ids and grids; it makes its own positions and its own loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loaders.assemble import ModelInputs, Piece, assemble_microbatch, pieces_of, sample_tokens, segment_of
from loaders.decode.text import ByteTokenizer
from omni_pipeline.core.batch import IGNORE_LABEL, Batch
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Modality, Sample
from omni_pipeline.core.seeding import generator
from omni_pipeline.core.topology import Topology
from tests.support import parity
from tests.support.reference_library import transformers
from trainer.config import ModelConfig
from trainer.model.omni import OmniModel, build_model
from trainer.reshard import reshard
from trainer.weights.names import THINKER_IN_MEMORY, from_reference
from trainer.weights.reference_config import thinker_settings

SPECIAL = ByteTokenizer.special
NUM_BYTES = 256
# More layers than the tiny model has, and full attention in the middle: an order can be seen.
CONFIG = ModelConfig.model_validate(
    {
        "size": "tiny",
        "vision": {"layers": 3, "full_attention_layers": [1]},
        "audio": {"chunk": 20},
        "llm": {"layers": 3, "rope_theta": 1e6},
    }
)


@dataclass(frozen=True)
class Pair:
    """The two models, with equal weights."""

    config: ModelConfig
    ours: OmniModel
    theirs: Any

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return next(self.ours.parameters()).dtype


def make_pair(config: ModelConfig = CONFIG, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Pair:
    """Return both models with the same weights, every one of them random, so that none can hide."""
    theirs = transformers.Qwen2_5OmniThinkerForConditionalGeneration(reference_config(config)).to(dtype)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(_random_weight(name, parameter, random))
    ours = build_model(config).to(dtype)
    ours.load_state_dict(_under_our_names(dict(theirs.state_dict()), ours, config))
    return Pair(config, ours, theirs)


def reference_config(config: ModelConfig) -> Any:
    """Return the reference's settings for a model of these sizes and the byte tokenizer."""
    settings = thinker_settings(config, like={}, special=asdict(SPECIAL), dtype="float32")
    return transformers.Qwen2_5OmniThinkerConfig(**settings)


def assert_equal(actual: Tensor, expected: Tensor, *, what: str = "") -> None:
    """Check with the default bounds of ``assert_close``, after both are divided by the largest entry.

    So the absolute bound (1e-5 in float32) is one on tensors of any size, and small ones are not let through.
    """
    scale = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
    torch.testing.assert_close(actual / scale, expected / scale, msg=lambda text: f"{what}: {text}")


def assert_gradients_equal(pair: Pair, *, parts: Sequence[str] = ("encoders.", "llm.")) -> None:
    """Check the gradient of every parameter under ``parts``, and that each has one that is not zero."""
    theirs = dict(pair.theirs.named_parameters())
    expected = _under_our_names(
        {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in theirs.items()},
        pair.ours,
        pair.config,
    )
    checked = [name for name in expected if name.startswith(tuple(parts))]
    assert checked, parts
    for name, parameter in pair.ours.named_parameters():
        if name in checked:
            assert parameter.grad is not None, name
            assert expected[name].any(), name
            assert_equal(parameter.grad, expected[name], what=name)


def head_weight(model: OmniModel) -> Tensor:
    """Return the weight [vocabulary, width] that makes logits."""
    head = model.llm.embed_tokens if model.llm.lm_head is None else model.llm.lm_head
    weight: Tensor = head.weight
    return weight


def zero_gradients(pair: Pair) -> None:
    """Forget the gradients of both."""
    pair.ours.zero_grad()
    pair.theirs.zero_grad()


@dataclass(frozen=True)
class Ran:
    """What a model made of samples.

    Args:
        logits: [tokens, vocabulary] of each sample.
        loss: Cross entropy, the mean over the labels of all samples.
        sounds: [mel frames, mels] of the recordings, leaves of the graph.
    """

    logits: list[Tensor]
    loss: Tensor
    sounds: list[Tensor]

    @property
    def sound_gradient(self) -> Tensor:
        """[mel frames, mels] of all recordings."""
        return torch.cat([one.grad for one in self.sounds if one.grad is not None])


def run_ours(pair: Pair, samples: Sequence[Sample]) -> Ran:
    """Run the samples in one pack, as one rank does."""
    (microbatch,) = make_batch([samples], config=pair.config).microbatches
    encoders, inputs = pair.ours.encoders, microbatch.inputs
    sounds = torch.from_numpy(inputs["audio"].values).to(pair.dtype).requires_grad_()
    pictures = torch.from_numpy(inputs["vision"].values)
    rows = [
        encoders["vision"](pictures, inputs["vision"].grids),
        encoders["audio"](sounds, inputs["audio"].grids),
    ]
    # On one rank the plan has no hop, and no process group is asked for.
    media_rows, media_positions = reshard(torch.cat(rows), microbatch.reshard, groups={})
    out = pair.ours.llm(
        torch.from_numpy(microbatch.tokens),
        torch.from_numpy(microbatch.positions),
        microbatch.cu_seqlens,
        media_rows,
        media_positions,
        torch.from_numpy(microbatch.labels),
    )
    logits = F.linear(out.hidden, head_weight(pair.ours))
    num_labels = sum(sample.num_labels for sample in samples)
    cut = [logits[span.start : span.end] for span in microbatch.spans]
    return Ran(cut, out.loss_sum / num_labels, [sounds])


def run_theirs(pair: Pair, samples: Sequence[Sample]) -> Ran:
    """Run the samples one by one; losses are added, weighted by their labels."""
    ran = [_run_alone(pair, sample) for sample in samples]
    num_labels = sum(sample.num_labels for sample in samples)
    losses = [one.loss * sample.num_labels / num_labels for one, sample in zip(ran, samples, strict=True)]
    return Ran(
        [logits for one in ran for logits in one.logits],
        torch.stack(losses).sum(),
        [sounds for one in ran for sounds in one.sounds],
    )


def reference_inputs(sample: Sample) -> dict[str, Tensor]:
    """Return what the reference wants to know of a sample but its pixels and sounds."""
    tokens, _ = sample_tokens(sample, texts_of(sample), special=SPECIAL)
    found = {
        "input_ids": torch.from_numpy(tokens)[None],
        "attention_mask": torch.ones(1, len(tokens), dtype=torch.int64),
    }
    for modality, name in ((Modality.IMAGE, "image_grid_thw"), (Modality.VIDEO, "video_grid_thw")):
        if grids := [segment.grid for segment in sample.segments if segment.modality is modality]:
            found[name] = torch.tensor(grids)
    if seconds := [segment.patch_s for segment in sample.segments if segment.modality is Modality.VIDEO]:
        found["video_second_per_grid"] = torch.tensor(seconds)
    return found


def _run_alone(pair: Pair, sample: Sample) -> Ran:
    inputs = reference_inputs(sample)
    for modality, name in ((Modality.IMAGE, "pixel_values"), (Modality.VIDEO, "pixel_values_videos")):
        if patches := _values_of(sample, modality):
            inputs[name] = torch.cat([pixels_of(one) for one in patches]).to(pair.dtype)
    frames = [torch.from_numpy(one) for one in _values_of(sample, Modality.AUDIO)]
    leaves = []
    if frames:
        sounds = torch.cat(frames).to(pair.dtype).requires_grad_()
        leaves.append(sounds)
        lengths = [len(one) for one in frames]
        padded = nn.utils.rnn.pad_sequence(list(sounds.split(lengths)), batch_first=True)
        inputs["input_features"] = padded.transpose(1, 2)
        inputs["feature_attention_mask"] = (
            torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        ).long()
    has_tracks = any(segment.is_track for segment in sample.segments)
    labels = _reference_labels(sample, inputs["input_ids"][0])
    out = pair.theirs(**inputs, labels=labels[None], use_audio_in_video=has_tracks)
    return Ran([out.logits[0]], out.loss, leaves)


def _reference_labels(sample: Sample, tokens: Tensor) -> Tensor:
    """Return the tokens that are learned, at their own places: the reference shifts them by itself."""
    labels = torch.full_like(tokens, IGNORE_LABEL)
    start = 0
    for segment in sample.segments:
        end = start + segment.num_tokens
        if segment.loss:
            labels[start:end] = tokens[start:end]
        start = end
    if any(segment.loss for segment in sample.segments):
        labels[start] = tokens[start]
    return labels


def pixels_of(patches: npt.NDArray[np.uint8]) -> Tensor:
    """Return uint8 patches [P, V] as the reference's image processor gives them: float64 [P, V]."""
    mean, std = (
        torch.tensor(values, dtype=torch.float64)[:, None]
        for values in (transformers.image_utils.OPENAI_CLIP_MEAN, transformers.image_utils.OPENAI_CLIP_STD)
    )
    channels = torch.from_numpy(patches).double().reshape(len(patches), len(mean), -1)
    return ((channels / 255 - mean) / std).flatten(1)


def texts_of(sample: Sample) -> dict[int, npt.NDArray[np.int64]]:
    """Return random bytes for each text of a sample, by segment."""
    return {
        index: _bytes_of(sample, index)
        for index, segment in enumerate(sample.segments)
        if segment.modality is Modality.TEXT
    }


def make_batch(contents: Sequence[Sequence[Sample]], *, config: ModelConfig) -> Batch:
    """Return the batch of a single rank: one microbatch for each of ``contents``, a pack."""
    packs = [Pack(lane, 0, tuple(samples)) for lane, samples in enumerate(contents)]
    planner = parity.make_planner(Topology(world_size=1), num_packs=len(packs), balance=False)
    plan = planner.plan(packs, step=0, group=0)
    inputs = ModelInputs(config.sizes, SPECIAL, parity.INPUTS.encoders)
    microbatches = []
    for index in range(plan.num_microbatches):
        arrays: dict[Piece, npt.NDArray[Any]] = {}
        for piece in pieces_of(plan, microbatch=index, rank=0, replica=0, with_text=True, model=inputs):
            sample, segment = segment_of(plan, piece)
            values = _media_of if segment.is_media else _bytes_of
            arrays[piece] = values(sample, piece.segment)
        microbatches.append(
            assemble_microbatch(
                plan,
                planner.reshard(plan, microbatch=index, rank=0),
                microbatch=index,
                rank=0,
                replica=0,
                arrays=arrays,
                failed=frozenset(),
                model=inputs,
            )
        )
    return Batch(plan, tuple(microbatches), failed=frozenset(), state={}, num_bytes=0, timings={})


def _values_of(sample: Sample, modality: Modality) -> list[npt.NDArray[Any]]:
    return [
        _media_of(sample, index)
        for index, segment in enumerate(sample.segments)
        if segment.modality is modality
    ]


def _media_of(sample: Sample, segment_index: int) -> npt.NDArray[Any]:
    return parity.media_content(sample, segment_index).values


def _bytes_of(sample: Sample, segment_index: int) -> npt.NDArray[np.int64]:
    random = generator(7, "reference text", sample.id.row, segment_index)
    return random.integers(0, NUM_BYTES, sample.segments[segment_index].num_tokens)


def _random_weight(name: str, parameter: Tensor, random: torch.Generator) -> Tensor:
    """Return weights of a lively network: neither its matrices nor its biases and norms can be left out."""
    normal = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
    if name.endswith("bias"):
        return 0.2 * normal
    if parameter.ndim == 1:
        return 1 + 0.2 * normal
    return normal / math.sqrt(math.prod(parameter.shape[1:]))


def _under_our_names(
    tensors: Mapping[str, Tensor], ours: OmniModel, config: ModelConfig
) -> dict[str, Tensor]:
    shapes = {name: tuple(parameter.shape) for name, parameter in ours.named_parameters()}
    return from_reference(tensors, shapes=shapes, layout=THINKER_IN_MEMORY, config=config)
