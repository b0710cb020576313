"""Settings of a source: where its shards are, and which of their members make a sample."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from loaders.index import MODALITY_OF_SUFFIX, modality_of
from loaders.weight import Weight


class FieldConfig(BaseModel):
    """One segment of a sample: which member holds it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    member: str = Field(
        min_length=1, description="Suffix of the member, e.g. 'jpg'; alternatives as 'jpg|png', first found."
    )
    loss: bool = Field(True, description="Whether text of this member is trained on; no meaning for media.")

    @field_validator("member")
    @classmethod
    def _check_known(cls, member: str) -> str:
        for suffix in member.split("|"):
            if modality_of(suffix) is None:
                known = ", ".join(MODALITY_OF_SUFFIX)
                raise ValueError(f"{suffix!r} is no known kind of member; known endings: {known}")
        return member

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The alternatives, lower case, in order of preference."""
        return tuple(self.member.lower().split("|"))


def _field_of_name(value: Any) -> Any:
    return {"member": value} if isinstance(value, str) else value


class FieldsLayout(BaseModel):
    """A sample is the listed members, in this order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["fields"] = Field("fields", description="Members of one key, in a fixed order.")
    fields: tuple[Annotated[FieldConfig, BeforeValidator(_field_of_name)], ...] = Field(
        min_length=1, description="Suffixes, or tables {member, loss}, in sequence order."
    )


class SourceConfig(BaseModel):
    """One data set of the mixture."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, description="Name of the source; unique in the run.")
    shards: str | tuple[str, ...] = Field(
        description="Tar shards: a path, URL, {00..99} pattern, glob or .manifest.arrow, or a list of these."
    )
    layout: FieldsLayout = Field(description="How members make a sample.")
    weight: Weight = Field(
        1.0,
        description="Its part in the mixture, from 0; or [step, weight] points, linear between; or a table.",
    )
    group: str | None = Field(
        None, min_length=1, description="Its group, a path as 'web/clean'; unset: beside the top groups."
    )
    epochs: int | None = Field(
        None, ge=1, description="Times that it is seen, then it leaves the mixture; unset: as order.epochs."
    )
