"""Settings of the loader, apart from the loader itself, so that reading a run file imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from loaders.storage_config import StorageConfig


class LoaderConfig(BaseModel):
    """How samples are fetched and decoded. Nothing here changes which samples a step holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_workers: int = Field(
        2, ge=0, description="Decode processes per rank; 0 decodes in the rank, without deadline or shield."
    )
    deadline_s: float = Field(
        60.0, gt=0, description="Longest fetch and decode of one segment, seconds; then it is quarantined."
    )
    prefetch_steps: int = Field(2, ge=1, description="Steps that are fetched and decoded ahead of training.")
    prefetch_bytes: int = Field(
        1 << 30,
        ge=1,
        description="Most bytes of batches held per rank, ahead and in use; one step may exceed it.",
    )
    storage: StorageConfig = Field(
        default_factory=StorageConfig, description="Reading remote shards, and keeping them on the node."
    )
    max_bad_fraction: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Largest share of a source's samples that may fail before the run stops.",
    )
    # These two change what the samples hold: a run resumes with the same only (see OmniLoader's identity).
    max_image_pixels: int = Field(
        178_956_970, ge=1, description="Largest picture or frame that is decoded, pixels before resizing."
    )
    video_backend: Literal["pyav", "decord"] = Field(
        "pyav", description="Library that decodes video; decord gives wrong frames on some files."
    )
