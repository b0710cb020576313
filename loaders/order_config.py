"""Settings of the order: what decides which samples come in which pack of which step."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from loaders.bucketing_config import BucketingConfig
from loaders.packing import UNLIMITED, Budgets
from omni_pipeline.core.batch import EndRule


class OrderConfig(BaseModel):
    """How samples are ordered and packed; all of it is part of the run's identity."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lanes: int = Field(
        64, ge=1, description="Independent sample streams; must divide packs_per_step. Groups share them out."
    )
    packs_per_step: int = Field(ge=1, description="Packs of one global batch; a multiple of lanes.")
    seq_len: int = Field(ge=1, description="Sequence positions of one pack, tokens.")
    look_ahead: int = Field(64, ge=1, description="Samples buffered per lane, from which packs are filled.")
    shuffle_block: int = Field(
        1024,
        ge=1,
        description="Consecutive samples of a lane that are shuffled together. A node reads from at most "
        "(its lanes) x (sources) x (shuffle_block / samples of a shard + 2) shards at once.",
    )
    max_patches: int | None = Field(
        None, ge=1, description="Most vision patches in one pack; unset: no limit."
    )
    max_mel_frames: int | None = Field(
        None, ge=1, description="Most mel frames of audio in one pack; unset: no limit."
    )
    max_samples: int | None = Field(None, ge=1, description="Most samples in one pack; unset: no limit.")
    unit: Literal["tokens", "samples"] = Field(
        "tokens", description="What the sources' weights are shares of."
    )
    oversize: Literal["drop", "cut"] = Field(
        "drop",
        description="A sample too large for a pack: drop and record it, or cut its last text (never media).",
    )
    epochs: int | None = Field(None, ge=1, description="Times that every source is seen; unset: endless.")
    bucketing: BucketingConfig | None = Field(
        None, description="Packs by bucket: samples of like length, padded. Unset: best fit, without padding."
    )

    end: EndRule = Field(
        "pad",
        description="Where data ends: 'pad' goes on with empty packs until every sample is seen; 'drop' ends "
        "before the first step in which a lane would give an empty pack. Changes no step before.",
    )

    @model_validator(mode="after")
    def _lanes_divide_packs(self) -> OrderConfig:
        if self.packs_per_step % self.lanes:
            above = (self.packs_per_step // self.lanes + 1) * self.lanes
            divisor = max(d for d in range(1, self.lanes + 1) if self.packs_per_step % d == 0)
            raise ValueError(
                f"order.packs_per_step = {self.packs_per_step} is no multiple of order.lanes = {self.lanes}: "
                f"set packs_per_step = {above}, or lanes = {divisor} (in a new run: it changes the order)"
            )
        return self

    @model_validator(mode="after")
    def _buckets_fit_a_pack(self) -> OrderConfig:
        if self.bucketing is not None:
            problem = self.bucketing.problem(seq_len=self.seq_len, max_patches=self.max_patches)
            if problem:
                raise ValueError(problem)
        return self

    @property
    def packs_per_lane(self) -> int:
        """Packs that every lane gives to a step."""
        return self.packs_per_step // self.lanes

    @property
    def budgets(self) -> Budgets:
        """What one pack may hold."""
        return Budgets(
            tokens=self.seq_len,
            patches=UNLIMITED if self.max_patches is None else self.max_patches,
            mel_frames=UNLIMITED if self.max_mel_frames is None else self.max_mel_frames,
            samples=UNLIMITED if self.max_samples is None else self.max_samples,
        )
