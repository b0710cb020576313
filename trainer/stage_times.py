"""The stages of a microbatch, and the seconds that one rank spent in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ENCODER, EXCHANGE, LLM = STAGES = ("encoder", "exchange", "llm")

BySlot = Mapping[str, tuple[float, ...]]
"""Seconds by stage, then by microbatch; forward and backward together."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one rank in one step.

    Args:
        wall: From the end of the stage before to its own end, waiting for other ranks included.
        own: What this rank computed meanwhile, collectives' copying included and waiting left out; empty
            where it cannot be told (CUDA).
    """

    wall: BySlot = field(default_factory=dict)
    own: BySlot = field(default_factory=dict)

    def wall_s(self, stage: str) -> float:
        """Return the seconds of a stage over all microbatches."""
        return sum(self.wall.get(stage, ()))

    def own_s(self, stage: str) -> float:
        """Return its own seconds over all microbatches; 0 where they cannot be told."""
        return sum(self.own.get(stage, ()))
