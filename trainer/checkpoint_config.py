"""Settings of checkpoints. Free of torch, so that the command line reads it quickly."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class CheckpointConfig(BaseModel):
    """When a checkpoint is written and how many stay. The end of a run always writes one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every_steps: int = Field(0, ge=0, description="Steps between checkpoints; 0: none by step.")
    every_minutes: float = Field(20.0, ge=0, description="Minutes between checkpoints; 0: none by time.")
    keep: int = Field(3, ge=1, description="Newest complete checkpoints that stay.")
