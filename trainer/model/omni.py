"""The whole model: encoders by name, and the LLM they feed.

No forward of its own: a step runs the encoders, moves their rows to the ranks that own them, and then runs
the LLM.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.media import MediaEncoder
from trainer.config import ModelConfig
from trainer.model.added import build_added
from trainer.model.audio import AudioEncoder
from trainer.model.init import init_weights, make_storage
from trainer.model.llm import Llm
from trainer.model.vision import VisionEncoder


class OmniModel(nn.Module):
    """Encoders and LLM.

    Attributes:
        encoders: By name, always in the order vision, audio, then those added: ``encoder(values, grids) ->
            rows [R, E]``.
        added: Descriptions of encoders that are not of the family.
        llm: See ``Llm.forward``.
    """

    def __init__(self, config: ModelConfig, added: Sequence[MediaEncoder] = ()) -> None:
        super().__init__()
        self.config = config
        self.added = tuple(added)
        self.encoders = nn.ModuleDict({"vision": VisionEncoder(config), "audio": AudioEncoder(config)})
        for encoder in added:
            if hasattr(self.encoders, encoder.name):
                raise ConfigError(
                    f"the name {encoder.name!r} of an encoder is taken: modules of torch have it",
                    where=encoder.file.path,
                    fix="give MediaKind another name",
                )
            self.encoders[encoder.name] = build_added(encoder, width=config.llm.hidden)
        self.llm = Llm(config.llm)

    def init_weights(self, seed: int) -> None:
        """Write the first weights; the same on every rank, device and layout. Needs a real device."""
        num_layers = {
            "encoders.vision.": self.config.vision.layers,
            "encoders.audio.": self.config.audio.layers,
            **{f"encoders.{encoder.name}.": encoder.layers for encoder in self.added},
            "llm.": self.config.llm.layers,
        }
        init_weights(self, seed=seed, num_layers=num_layers)


def build_model(
    config: ModelConfig,
    *,
    added: Sequence[MediaEncoder] = (),
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> OmniModel:
    """Return the model in float32 with first weights; on ``device="meta"`` without any.

    To shard a large model: build on meta, shard, ``make_storage``, ``init_weights(seed)``. There are no
    buffers, so nothing else has to be filled.

    Args:
        config: Sizes of the family's encoders and of the LLM.
        added: Encoders attached to it.
        seed: Of the first weights.
        device: Where.

    Raises:
        ConfigError: The module of an added encoder does not do what it must, or its name is taken.
    """
    with torch.device("meta"):
        model = OmniModel(config, added)
    if torch.device(device).type != "meta":
        make_storage(model, device=device)
        model.init_weights(seed)
    return model
