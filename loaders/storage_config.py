"""Settings of reading remote shards. They change when bytes come, never which: ranks may differ."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class StorageConfig(BaseModel):
    """How shards of remote stores are read, and where a node keeps them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout_s: float = Field(
        10.0, gt=0, description="Longest silence of a remote store, seconds; then it is asked again."
    )
    attempts: int = Field(
        4, ge=1, description="Requests in a row that may bring nothing before a remote read fails."
    )
    read_timeout_s: float = Field(
        45.0,
        gt=0,
        description="Longest remote read, with its repeats and pauses, seconds; "
        "in a decode worker 0.6 of loader.deadline_s at most.",
    )
    cache_dir: Path | None = Field(
        None,
        description="Folder on a disk of the node where remote shards are kept whole; default: none is.",
    )
    cache_bytes: int = Field(100 << 30, ge=1, description="Most bytes of shards in cache_dir.")
    cache_wait_s: float = Field(
        20.0,
        ge=0,
        description="Longest wait of a read for its shard to be in the cache, seconds, before it reads the "
        "store; in a decode worker 0.25 of loader.deadline_s at most.",
    )
