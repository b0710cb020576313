"""Settings of the parallel layout of one module. Free of torch, so that the command line reads it quickly."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from omni_pipeline.core.errors import ConfigError

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


def ranks_per_copy(dp_shard: int, *, world_size: int, setting: str) -> int:
    """Return how many ranks share one copy of the parameters.

    Args:
        dp_shard: As in ``ParallelConfig``; -1: all ranks.
        world_size: Ranks of the run.
        setting: Name of the setting, for the message.

    Raises:
        ConfigError: ``dp_shard`` does not divide the number of ranks.
    """
    shard = world_size if dp_shard == -1 else dp_shard
    if world_size % shard:
        raise ConfigError(
            f"setting {setting!r}: {shard} does not divide the number of ranks, {world_size}",
            fix="choose a divisor of the number of ranks, or -1 for all of them",
        )
    return shard
