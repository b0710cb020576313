"""Names of the parts of the model that are trained or frozen by themselves. Free of torch."""

from __future__ import annotations

from typing import Literal, get_args

PartName = Literal["vision", "vision_projector", "audio", "audio_projector", "llm"]
PART_NAMES: tuple[PartName, ...] = get_args(PartName)
