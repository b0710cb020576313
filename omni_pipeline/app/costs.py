"""The cost model of a run: sizes of its model, the machine it names, and what has been measured there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from balancer.cost import LLM, CostModel, Passes
from balancer.fitted import load_fits, read_fits
from balancer.hardware import load_hardware
from balancer.shapes import TransformerShape, audio_shape, vision_shape
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.core.media import MediaEncoder
from omni_pipeline.core.sample import Modality
from trainer.config import ModelConfig

# Of the built-in kinds; others are read by the encoder of their name.
ENCODER_OF = {Modality.IMAGE: "vision", Modality.VIDEO: "vision", Modality.AUDIO: "audio"}


def cost_model(config: RunConfig) -> CostModel:
    """Return the costs of the run's model on the machine of ``balance``.

    Raises:
        ConfigError: No such machine, or the fitted costs are not of this run.
    """
    encoders, llm = all_encoder_shapes(config), llm_shape(config.model)
    path = config.balance.costs
    shapes = {**encoders, LLM: llm}
    return CostModel(
        encoders=encoders,
        llm=llm,
        encoder_of=encoder_of(config),
        hardware=load_hardware(config.balance.hardware),
        passes=part_passes(config),
        row_ways=_row_ways(config),
        fits=load_fits(path, shapes=shapes, precision=config.run.precision) if path else {},
        value_bytes={"fp32": 4, "bf16": 2}[config.run.precision],
    )


def part_passes(config: RunConfig) -> dict[str, Passes]:
    """Return what is computed of each encoder and of the LLM.

    The projector counts as its encoder: beside one whose blocks are frozen it is little.
    """
    frozen = config.optimizer.freeze
    return {
        # Gradients pass through a frozen LLM, to the encoders that are trained.
        name: Passes(backward=2 if name not in frozen else int(name == LLM), again=part.recompute)
        for name, part in config.parts.items()
    }


def _row_ways(config: RunConfig) -> int:
    """2 unless all encoders and projectors are frozen: then no gradient travels back."""
    return 1 + any(name != LLM and name not in config.optimizer.freeze for name in config.part_names)


def encoder_of(config: RunConfig) -> dict[Modality, str]:
    """Return the encoder that reads each media modality of a run."""
    return ENCODER_OF | {added.kind.modality: added.name for added in config.added_encoders}


def costs_content(config: RunConfig) -> dict[str, Any]:
    """Return what the files of ``balance.hardware`` and ``balance.costs`` hold, JSON-plain.

    Raises:
        ConfigError: One is missing or wrong.
    """
    path = config.balance.costs
    return {
        "hardware": load_hardware(config.balance.hardware).model_dump(mode="json"),
        "costs": read_fits(path).model_dump(mode="json") if path else None,
    }


def encoder_shapes(model: ModelConfig) -> dict[str, TransformerShape]:
    """Return the sizes of a model's encoders, by name."""
    return {"vision": _vision_shape(model), "audio": _audio_shape(model)}


def all_encoder_shapes(config: RunConfig) -> dict[str, TransformerShape]:
    """Return the sizes of all encoders of a run, by name: those of its model, and those it attaches."""
    width = config.model.llm.hidden
    added = {encoder.name: _added_shape(encoder, width) for encoder in config.added_encoders}
    return {**encoder_shapes(config.model), **added}


def llm_shape(model: ModelConfig) -> TransformerShape:
    """Return the sizes of a model's LLM, its head included."""
    llm, experts = model.llm, model.llm.experts
    shape = TransformerShape(
        hidden=llm.hidden,
        layers=llm.layers,
        ffn=llm.intermediate,
        heads=llm.heads,
        kv_heads=llm.kv_heads,
        head_dim=llm.head_dim,
        causal=True,
        output_widths=(llm.hidden, llm.vocab_size),
    )
    if experts is None:
        return shape
    return replace(
        shape,
        sparse_layers=len(llm.sparse_layers),
        num_experts=experts.count,
        active_experts=experts.top_k,
        expert_ffn=experts.intermediate,
    )


def _vision_shape(model: ModelConfig) -> TransformerShape:
    vision, sizes = model.vision, model.sizes.vision
    return vision_shape(
        layers=vision.layers,
        hidden=vision.hidden,
        ffn=vision.intermediate,
        heads=vision.heads,
        patch_values=model.patch_values,
        merge=sizes.merge,
        window_patches=vision.window // sizes.patch,
        full_attention_layers=len(vision.full_attention_layers),
        llm_hidden=model.llm.hidden,
    )


def _audio_shape(model: ModelConfig) -> TransformerShape:
    audio = model.audio
    return audio_shape(
        layers=audio.layers,
        hidden=audio.hidden,
        ffn=audio.intermediate,
        heads=audio.heads,
        num_mels=model.sizes.audio.num_mels,
        chunk_frames=audio.chunk,
        llm_hidden=model.llm.hidden,
    )


def _added_shape(encoder: MediaEncoder, llm_hidden: int) -> TransformerShape:
    """Its units are its positions, and a row is made of consecutive ones."""
    kind = encoder.kind
    return TransformerShape(
        hidden=encoder.hidden,
        layers=encoder.layers,
        ffn=encoder.ffn,
        heads=encoder.heads,
        kv_heads=encoder.heads,
        head_dim=encoder.hidden // encoder.heads,
        gated=False,
        input_dim=kind.unit_values,
        output_widths=(kind.units_per_row * encoder.hidden, llm_hidden),
        positions_per_row=kind.units_per_row,
        joins=False,
    )
