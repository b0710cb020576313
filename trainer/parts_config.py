"""Names of the parts of the model that are trained or frozen by themselves. Free of torch."""

from __future__ import annotations

PART_NAMES = ("vision", "vision_projector", "audio", "audio_projector", "llm")
"""Those of the model family; an encoder that a run attaches is one more, of its name."""
