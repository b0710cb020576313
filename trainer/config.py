"""What model is trained: named sizes, each part of which can be overridden. Free of torch.

The family is the "thinker" of Qwen2.5-Omni: a vision transformer with window attention, a Whisper-like audio
encoder, and a Qwen2.5 language model with M-RoPE. ``size`` picks a preset (``trainer.presets``); a part may
pick another (``[model.vision] size = "1b"``), and single numbers win over both (``[model.llm] layers = 8``).
Raw data sizes live in ``core.sizes`` and are part of the whole model's preset: the planner needs them without
the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from omni_pipeline.core.sizes import ModelSizes
from trainer.experts_config import ExpertsConfig
from trainer.presets import LLM_PRESETS, PRESETS, VISION_PRESETS, merged
from trainer.weights.numbers import laid_over_weights

CHANNELS = 3

ModelSize = Literal["tiny", "demo", "3b", "7b"]


class SizedPart(BaseModel):
    """A part of the model with sizes of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]]

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        size = data.get("size") if isinstance(data, Mapping) else None
        preset = cls.presets.get(size) if isinstance(size, str) else None
        return data if preset is None else {**preset, **data}


class VisionConfig(SizedPart):
    """The vision transformer; the listed defaults are those of 3b and 7b."""

    presets = VISION_PRESETS

    size: Literal["1b", "2.4b", "10b"] | None = Field(
        None, description="Preset of this part alone, its merger not counted; default: that of model.size."
    )
    layers: int = Field(32, ge=1, description="Transformer blocks.")
    hidden: int = Field(1280, ge=4, description="Width; a multiple of heads x 4.")
    intermediate: int = Field(3420, ge=1, description="Inner width of the SwiGLU.")
    heads: int = Field(16, ge=1, description="Attention heads.")
    window: int = Field(
        112, ge=1, description="Side of an attention window, pixels; a multiple of patch x merge."
    )
    full_attention_layers: tuple[int, ...] = Field(
        (7, 15, 23, 31),
        description="Blocks, 0 .. layers - 1, that attend over a whole picture (one temporal patch).",
    )
    rope_theta: float = Field(10_000.0, gt=1, description="Base of the 2-D rotary frequencies.")
    norm_eps: float = Field(1e-6, gt=0, description="Epsilon of RMSNorm.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hidden % (4 * self.heads):
            raise ValueError(f"hidden {self.hidden} is not a multiple of 4 x heads = {4 * self.heads}")
        beyond = [layer for layer in self.full_attention_layers if not 0 <= layer < self.layers]
        if beyond:
            raise ValueError(
                f"full_attention_layers names block {beyond[0]}, the blocks are 0 .. {self.layers - 1}"
            )
        return self


class AudioConfig(BaseModel):
    """The audio encoder; the listed defaults are those of 3b and 7b."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: int = Field(32, ge=1, description="Transformer blocks.")
    hidden: int = Field(1280, ge=4, description="Width; a multiple of heads, and even.")
    intermediate: int = Field(5120, ge=1, description="Inner width of the MLP.")
    heads: int = Field(20, ge=1, description="Attention heads.")
    chunk: int = Field(200, ge=2, description="Mel frames (10 ms each) that attend to each other; even.")
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon of LayerNorm.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hidden % self.heads or self.hidden % 2:
            raise ValueError(f"hidden {self.hidden} is not an even multiple of heads {self.heads}")
        if self.chunk % 2:
            raise ValueError(f"chunk {self.chunk} is odd; the convolution halves it")
        return self


class LlmConfig(SizedPart):
    """The language model; the listed defaults are those of 7b."""

    presets = LLM_PRESETS

    size: Literal["12b", "30b-a3b", "70b", "175b"] | None = Field(
        None, description="Preset of this part alone; default: that of model.size."
    )
    layers: int = Field(28, ge=1, description="Transformer blocks.")
    hidden: int = Field(3584, ge=2, description="Width.")
    intermediate: int = Field(18944, ge=1, description="Inner width of the SwiGLU.")
    heads: int = Field(28, ge=1, description="Query heads; a multiple of kv_heads.")
    kv_heads: int = Field(4, ge=1, description="Key and value heads.")
    head_dim: int = Field(128, ge=2, description="Width of a head; even.")
    vocab_size: int = Field(
        152_064,
        ge=1,
        description="Rows of the embedding table and of the head; a multiple of 64 or 128 is fastest.",
    )
    tied_head: bool = Field(False, description="Whether the output head is the embedding table.")
    rope_theta: float = Field(1_000_000.0, gt=1, description="Base of the rotary frequencies.")
    rope_sections: tuple[int, int, int] = Field(
        (16, 24, 24),
        description="Rotary frequencies turned by the temporal, height and width position; sum head_dim / 2.",
    )
    norm_eps: float = Field(1e-6, gt=0, description="Epsilon of RMSNorm.")
    attention_bias: bool = Field(
        True, description="Whether the query, key and value projections have a bias."
    )
    qk_norm: bool = Field(
        False, description="Whether every head of queries and keys is normalised before its rotary position."
    )
    experts: ExpertsConfig | None = Field(
        None, description="Mixture-of-experts layers; without this table all layers are dense."
    )

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers with experts, counted from 0."""
        experts = self.experts
        return () if experts is None else tuple(filter(experts.is_sparse, range(self.layers)))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2 or min(self.rope_sections) < 0 or 2 * sum(self.rope_sections) != self.head_dim:
            raise ValueError(
                f"rope_sections {self.rope_sections} do not sum to half of head_dim {self.head_dim}"
            )
        self._check_experts(self.experts)
        return self

    def _check_experts(self, experts: ExpertsConfig | None) -> None:
        if experts is None:
            return
        beyond = [layer for layer in experts.dense_layers if not 0 <= layer < self.layers]
        if beyond:
            raise ValueError(
                f"experts.dense_layers names layer {beyond[0]}, the layers are 0 .. {self.layers - 1}"
            )
        if not self.sparse_layers:
            raise ValueError(
                f"experts.every {experts.every} and experts.dense_layers {experts.dense_layers} leave no "
                f"sparse layer of {self.layers}"
            )


class ModelConfig(BaseModel):
    """The whole model: a preset by name, with single numbers overridden by the tables below it.

    With ``weights`` the numbers of those lie in the place of the preset's, and may not be overridden.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: ModelSize = Field("demo", description="Preset that fills every number not given here.")
    weights: Path | None = Field(
        None,
        description="First weights, and every number not given here: a folder of `omni weights import`, "
        "a checkpoint, or a run.",
    )
    sizes: ModelSizes = Field(
        ModelSizes(), description="Raw media to patches and frames; default: that of size."
    )
    vision: VisionConfig = Field(VisionConfig(), description="Vision encoder; default: that of size.")
    audio: AudioConfig = Field(AudioConfig(), description="Audio encoder; default: that of size.")
    llm: LlmConfig = Field(LlmConfig(), description="Language model; default: that of size.")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        """Put the preset under what is given, as plain data, so that one override keeps all the rest.

        A part with a size of its own takes nothing from the whole model's.
        """
        if not isinstance(data, Mapping):
            return data
        given = {name: _plain(value) for name, value in data.items()}
        if isinstance(weights := given.get("weights"), str | Path):
            tables = ("sizes", "vision", "audio", "llm")
            published = {name: cls.model_fields[name].default.model_dump() for name in tables}
            return laid_over_weights(given, Path(weights), published=published)
        size = given.get("size", cls.model_fields["size"].default)
        preset = PRESETS.get(size, {}) if isinstance(size, str) else {}
        sized = {name for name, value in given.items() if isinstance(value, Mapping) and value.get("size")}
        return merged({name: table for name, table in preset.items() if name not in sized}, given)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problem := self.sizes.vision.bounds_problem:
            raise ValueError(f"sizes.vision.{problem}")
        if self.vision.window % self.sizes.vision.factor:
            raise ValueError(
                f"vision.window {self.vision.window} is not a multiple of sizes.vision.patch x merge = "
                f"{self.sizes.vision.factor}"
            )
        return self

    @property
    def identity(self) -> dict[str, Any]:
        """All numbers, JSON-plain: what must be equal for a checkpoint to fit, however they were given."""
        names: Any = {"weights": True, "size": True, "vision": {"size"}, "llm": {"size"}}
        return self.model_dump(mode="json", exclude=names)

    @property
    def patch_values(self) -> int:
        """Numbers in one packed patch: channels x temporal_patch x patch x patch."""
        return CHANNELS * self.sizes.vision.temporal_patch * self.sizes.vision.patch**2


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
