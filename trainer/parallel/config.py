"""Settings of the parallel layout of one module. Free of torch, so that the command line reads it quickly."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Precision = Literal["fp32", "bf16"]


class ParallelConfig(BaseModel):
    """How one module (an encoder or the LLM) is spread over the ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dp_shard: int = Field(
        -1,
        description="Ranks that share one copy of the parameters; -1: all ranks. Must divide the world size; "
        "smaller means several copies (hybrid sharding).",
    )

    reshard: Literal["microbatch", "step"] = Field(
        "microbatch",
        description="When gathered parameters are freed and gradients summed over ranks: in every microbatch "
        "(least memory), or once per step (fewest messages; each rank holds a whole copy and its gradients).",
    )

    @field_validator("dp_shard")
    @classmethod
    def _is_a_degree(cls, value: int) -> int:
        if value < 1 and value != -1:
            raise ValueError("must be at least 1, or -1 for all ranks")
        return value
