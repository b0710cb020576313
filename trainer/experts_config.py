"""Settings of mixture-of-experts layers, as in Qwen3-MoE. Free of torch."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ExpertsConfig(BaseModel):
    """Which layers of the LLM have experts, and how; the listed defaults are those of Qwen3-30B-A3B."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    count: int = Field(128, ge=1, description="Experts of a sparse layer.")
    top_k: int = Field(8, ge=1, description="Experts that each token passes; at most count.")
    intermediate: int = Field(768, ge=1, description="Inner width of the SwiGLU of one expert.")
    normalize_top_k: bool = Field(
        True, description="Whether the weights of a token's experts are scaled to sum to 1."
    )
    every: int = Field(1, ge=1, description="Layers every - 1, 2 x every - 1, ... are sparse; 1 is all.")
    dense_layers: tuple[int, ...] = Field(
        (), description="Layers, 0 .. layers - 1, that are dense although every names them."
    )
    balance_loss: float = Field(
        0.001, ge=0, description="Weight of the load-balancing loss beside the cross entropy."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.count:
            raise ValueError(f"top_k {self.top_k} is more than count {self.count}")
        return self

    def is_sparse(self, layer: int) -> bool:
        """Return whether ``layer``, counted from 0, has experts."""
        return (layer + 1) % self.every == 0 and layer not in self.dense_layers
