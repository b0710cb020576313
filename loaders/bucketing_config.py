"""Settings of bucketing: which lengths share a pack."""

from __future__ import annotations

import itertools

from pydantic import BaseModel, ConfigDict, Field, model_validator


class BucketingConfig(BaseModel):
    """Samples of like length share a pack, each padded to the longest that its bucket takes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    boundaries: tuple[int, ...] | None = Field(
        None, description="Longest sample of each bucket, tokens, rising; order.seq_len is always the last."
    )
    quantiles: int | None = Field(
        None,
        ge=1,
        description="In place of boundaries: so many buckets with like shares of the tokens, from the index.",
    )
    patch_boundaries: tuple[int, ...] | None = Field(
        None,
        description="Buckets also by vision patches, rising; order.max_patches, which must be set, is always "
        "the last, and samples without patches have buckets of their own. Unset: by length alone.",
    )
    patch_quantiles: int | None = Field(
        None,
        ge=1,
        description="In place of patch_boundaries: so many with like shares of the patches, from the index.",
    )

    @model_validator(mode="after")
    def _one_of_each(self) -> BucketingConfig:
        if (self.boundaries is None) == (self.quantiles is None):
            raise ValueError("set one of order.bucketing.boundaries and order.bucketing.quantiles")
        if self.patch_boundaries is not None and self.patch_quantiles is not None:
            raise ValueError(
                "set one of order.bucketing.patch_boundaries and order.bucketing.patch_quantiles, or none"
            )
        for name in ("boundaries", "patch_boundaries"):
            values = getattr(self, name) or ()
            if any(later <= earlier for earlier, later in itertools.pairwise((0, *values))):
                raise ValueError(f"order.bucketing.{name} = {list(values)} do not rise from above 0")
        return self

    @property
    def by_patches(self) -> bool:
        """Whether buckets are also by patches."""
        return self.patch_boundaries is not None or self.patch_quantiles is not None

    def problem(self, *, seq_len: int, max_patches: int | None) -> str:
        """Return what is wrong between these buckets and the budgets of a pack, or ""."""
        if self.boundaries and self.boundaries[-1] > seq_len:
            return (
                f"order.bucketing.boundaries go to {self.boundaries[-1]} tokens, a pack has {seq_len}: "
                f"end them at order.seq_len, or raise it"
            )
        if not self.by_patches:
            return ""
        if max_patches is None:
            return (
                "order.bucketing is by patches, and nothing says how many a pack may have: "
                "set order.max_patches"
            )
        if self.patch_boundaries and self.patch_boundaries[-1] > max_patches:
            return (
                f"order.bucketing.patch_boundaries go to {self.patch_boundaries[-1]} patches, a pack has "
                f"{max_patches}: end them at order.max_patches, or raise it"
            )
        return ""
