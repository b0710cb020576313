"""How large a run's model is: parameters by part, and operations by what it reads. Nothing is built.

Operations come from the cost model's one formula (``balancer.work``) at the shapes of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from balancer.work import FORWARD_AND_BACKWARD, media_flops, sequence_flops
from omni_pipeline.app.costs import ENCODER_OF, encoder_shapes, llm_shape
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.core.sample import Modality, RawSize
from omni_pipeline.core.sizes import SAMPLE_RATE, media_grid
from trainer.counts import parameter_counts

IMAGE = RawSize(height=1024, width=1024)
CLIP_S = 10
CLIP = RawSize(height=720, width=1280, num_frames=CLIP_S * 30, duration_s=float(CLIP_S))
RECORDING = RawSize(num_samples=CLIP_S * SAMPLE_RATE, sample_rate=SAMPLE_RATE, duration_s=float(CLIP_S))


@dataclass(frozen=True)
class ModelCounts:
    """Parameters and operations of a run's model.

    Args:
        parameters: By part.
        total: Of all parts.
        active: Of all parts, those that one token passes; fewer than ``total`` with experts.
        flops: Operations, by what they are of; those of the LLM with its head, those of an encoder with its
            projector, all without recomputation.
        not_counted: Encoders that the run attaches by a file: they are known when they are built.
    """

    parameters: Mapping[str, int]
    total: int
    active: int
    flops: Mapping[str, float]
    not_counted: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return asdict(self)


def model_counts(config: RunConfig) -> ModelCounts:
    """Return the counts of a run's model; its data is not read."""
    parameters = parameter_counts(config.model)
    return ModelCounts(
        parameters=parameters,
        total=sum(parameters.values()),
        active=sum(parameter_counts(config.model, active=True).values()),
        flops=_flops(config),
        not_counted=tuple(encoder.name for encoder in config.added_encoders),
    )


def _flops(config: RunConfig) -> dict[str, float]:
    """A pack is one text of ``order.seq_len`` tokens; media are resized as the run says."""
    shapes, seq_len = encoder_shapes(config.model), config.order.seq_len

    def forward(modality: Modality, raw: RawSize) -> float:
        grid = media_grid(modality, raw, config.model.sizes)
        return media_flops(shapes[ENCODER_OF[modality]], grid) / FORWARD_AND_BACKWARD

    pack = sequence_flops(llm_shape(config.model), seq_len)
    return {
        "llm_forward_per_token": pack / FORWARD_AND_BACKWARD / seq_len,
        "image_forward": forward(Modality.IMAGE, IMAGE),
        "video_forward_per_s": forward(Modality.VIDEO, CLIP) / CLIP_S,
        "audio_forward_per_s": forward(Modality.AUDIO, RECORDING) / CLIP_S,
        "llm_training_per_pack": float(pack),
    }
