"""Settings of the optimizer and its schedule. Free of torch, so that the command line reads it quickly."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainer.parts_config import PART_NAMES


class PartOptimizerConfig(BaseModel):
    """What one part of the model has of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float | None = Field(
        None, gt=0, description="Peak learning rate of this part, same schedule; unset: optimizer.lr."
    )
    weight_decay: float | None = Field(
        None, ge=0, description="Weight decay of this part; unset: optimizer.weight_decay."
    )


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
    z_loss: float = Field(
        0.0,
        ge=0,
        description="Weight of the z-loss (squared log-partition of the head, mean over labels) beside the "
        "cross entropy; usual is 1e-4, 0 is none.",
    )
    freeze: tuple[str, ...] = Field(
        (),
        description="Parts that are not trained: no gradient of theirs is computed. Names: "
        f"{', '.join(PART_NAMES)}, and those of attached encoders. May change between starts of a run.",
    )
    parts: dict[str, PartOptimizerConfig] = Field(
        default_factory=dict, description="What parts have of their own; names as in optimizer.freeze."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.parts:
            if name in self.freeze:
                raise ValueError(f"parts.{name} is set, but freeze names {name!r}")
        return self

    def lr_ratio(self, part: str) -> float:
        """Return the learning rate of a part (or of any other name: 1) as a multiple of ``lr``."""
        own = self._own(part).lr
        return 1.0 if own is None else own / self.lr

    def decay_of(self, part: str) -> float:
        """Return the weight decay of a part's matrices."""
        own = self._own(part).weight_decay
        return self.weight_decay if own is None else own

    def _own(self, part: str) -> PartOptimizerConfig:
        return next((own for name, own in self.parts.items() if name == part), PartOptimizerConfig())
