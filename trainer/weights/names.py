"""Names and shapes of the reference's tensors and of our parameters: one table, both ways. Free of torch.

The reference is the "thinker" of Qwen2.5-Omni in transformers, or a language model by itself (Qwen3-MoE). A
parameter of ours has the reference's name behind another prefix, and the same numbers in the same order; it
may be made of several tensors of the reference (experts), or have fewer dims (the patch convolution). So
every parameter is a tuple of ``Piece``s, and copying pieces to and fro is all there is to import and export.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config import CHANNELS, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]

PATCH_EMBED = "encoders.vision.patch_embed.proj.weight"
# Of a thinker, named as ours would be; no forward reads them. They are kept, so that an export is whole.
UNUSED = ("encoders.audio.audio_bos_eos_token.weight",)
# Of the published whole model: speech output, which this project does not train.
LEFT_OUT = ("talker.", "token2wav.")
_EXPERTS = re.compile(r"(?P<block>llm\.layers\.\d+\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)")


@dataclass(frozen=True)
class Layout:
    """How the reference names its tensors in one kind of file.

    Args:
        prefixes: Ours and theirs; the first that fits counts. Parameters under none are not in the file.
        splits_experts: Whether every expert is tensors of its own.
    """

    prefixes: tuple[tuple[str, str], ...]
    splits_experts: bool = True

    def behind(self, prefix: str) -> Layout:
        """Return the same layout with ``prefix`` before every name of the reference."""
        return Layout(tuple((ours, prefix + theirs) for ours, theirs in self.prefixes), self.splits_experts)

    def rename(self, name: str) -> str | None:
        """Return the reference's name of our parameter ``name``, or None if such a file has none."""
        for ours, theirs in self.prefixes:
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return None


_LLM = (("llm.lm_head.", "lm_head."), ("llm.", "model."))
LLM = Layout(_LLM)
"""Files of a language model by itself."""
THINKER = Layout((("encoders.vision.", "visual."), ("encoders.audio.", "audio_tower."), *_LLM))
"""Files of a thinker, as ``save_pretrained`` writes them."""
WHOLE = THINKER.behind("thinker.")
"""Files of the published model, in which the thinker is one part."""
LLM_IN_MEMORY = Layout(_LLM, splits_experts=False)
"""``state_dict`` of the library's language model."""
THINKER_IN_MEMORY = Layout(
    (
        ("encoders.vision.", "model.visual."),
        ("encoders.audio.", "model.audio_tower."),
        ("llm.lm_head.", "lm_head."),
        ("llm.", "model.language_model."),
    ),
    splits_experts=False,
)
"""``state_dict`` of the library's thinker."""


@dataclass(frozen=True)
class Piece:
    """One tensor of the reference, and where it stands in a parameter of ours.

    Args:
        name: In the reference.
        shape: In the reference.
        index: ``parameter[index]``, row-major, holds the same numbers in the same order.
    """

    name: str
    shape: Shape
    index: Index = ()


def pieces_of(name: str, shape: Shape, *, layout: Layout, config: ModelConfig) -> tuple[Piece, ...]:
    """Return the tensors of the reference that make up our parameter, none if ``layout`` has no such part.

    Args:
        name: Of our parameter, as ``named_parameters`` gives it.
        shape: Of our parameter.
        layout: Of the file.
        config: Of the model.
    """
    theirs = layout.rename(name)
    if theirs is None:
        return ()
    if name == PATCH_EMBED:
        vision = config.sizes.vision
        kernel = (CHANNELS, vision.temporal_patch, vision.patch, vision.patch)
        return (Piece(theirs, (shape[0], *kernel)),)
    experts = _EXPERTS.fullmatch(name)
    if experts is None or not layout.splits_experts:
        return (Piece(theirs, shape),)
    stem = theirs.removesuffix(experts["kind"])
    found = []
    for expert in range(shape[0]):
        if experts["kind"] == "down_proj":
            found.append(Piece(f"{stem}{expert}.down_proj.weight", shape[1:], (expert,)))
            continue
        half = shape[1] // 2
        for part, rows in (("gate_proj", slice(0, half)), ("up_proj", slice(half, 2 * half))):
            found.append(Piece(f"{stem}{expert}.{part}.weight", (half, shape[2]), (expert, rows)))
    return tuple(found)


def part_of(name: str) -> str:
    """Return the encoder that a parameter belongs to, or ``llm``."""
    head, *rest = name.split(".")
    return rest[0] if head == "encoders" else head


def from_reference(
    tensors: Mapping[str, Tensor], *, shapes: Mapping[str, Shape], layout: Layout, config: ModelConfig
) -> dict[str, Tensor]:
    """Return parameters of ours made of tensors of the reference; without copies where one is one.

    Args:
        tensors: By the reference's name. More than is needed does no harm.
        shapes: Of our parameters, by name.
        layout: Of ``tensors``.
        config: Of the model.

    Raises:
        KeyError: A tensor is missing.
        ValueError: One has another shape.
    """
    found = {}
    for name, shape in shapes.items():
        pieces = pieces_of(name, shape, layout=layout, config=config)
        for piece in pieces:
            if tuple(tensors[piece.name].shape) != piece.shape:
                raise ValueError(f"{piece.name} is {tuple(tensors[piece.name].shape)}, wanted {piece.shape}")
        if len(pieces) == 1:
            found[name] = tensors[pieces[0].name].reshape(shape)
        elif pieces:
            found[name] = tensors[pieces[0].name].new_empty(shape)
            for piece in pieces:
                found[name][piece.index] = tensors[piece.name]
    return found


def to_reference(tensors: Mapping[str, Tensor], *, layout: Layout, config: ModelConfig) -> dict[str, Tensor]:
    """Return tensors of the reference that view the parameters ``tensors`` of ours, or their gradients."""
    return {
        piece.name: tensor[piece.index].reshape(piece.shape)
        for name, tensor in tensors.items()
        for piece in pieces_of(name, tuple(tensor.shape), layout=layout, config=config)
    }
