"""Settings of the optimizer and its schedule. Free of torch, so that the command line reads it quickly."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class OptimizerConfig(BaseModel):
    """AdamW with linear warm-up and cosine decay."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(3e-4, gt=0, description="Peak learning rate, per step.")
    betas: tuple[float, float] = Field(
        (0.9, 0.95), description="Decay rates of the first and second moment, each in [0, 1)."
    )
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(
        0.1, ge=0, description="Decoupled weight decay, as a share of lr; none on norms and biases."
    )
    warmup_steps: int = Field(100, ge=0, description="Steps of linear warm-up to lr.")
    min_lr_ratio: float = Field(
        0.1, ge=0, le=1, description="Learning rate at the last step, as a share of lr."
    )
    grad_clip: float = Field(
        1.0, gt=0, description="Largest global gradient norm; larger ones are scaled down."
    )
