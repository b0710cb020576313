"""Settings of a source: where its shards are, and which of their members make a sample."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from loaders.index import modality_of
from loaders.weight import Weight
from loaders.where import FieldKind, parse_where
from loaders.where_columns import HAD_BY, OF_SAMPLE
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.media import KINDS
from omni_pipeline.core.sample import Modality


class FieldConfig(BaseModel):
    """One segment of a sample: which member holds it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    member: str = Field(
        min_length=1, description="Suffix of the member, e.g. 'jpg'; alternatives as 'jpg|png', first found."
    )
    loss: bool = Field(True, description="Whether text of this member is trained on; no meaning for media.")

    sound: bool = Field(
        False,
        description="Whether a clip brings its own sound, interleaved with it by time; a silent clip, and a "
        "member that is no clip, stay as they are.",
    )

    @field_validator("member")
    @classmethod
    def _check_known(cls, member: str) -> str:
        for suffix in member.split("|"):
            if modality_of(suffix) is None:
                known = ", ".join(KINDS.of_suffix)
                raise ValueError(
                    f"{suffix!r} is no known kind of member; known endings: {known}; others need the file of "
                    "their encoder, encoders.NAME.file"
                )
        return member

    @field_validator("sound")
    @classmethod
    def _check_sound(cls, sound: bool, info: ValidationInfo) -> bool:
        member = info.data.get("member")
        kinds = [modality_of(suffix) for suffix in (member or "").split("|")]
        if sound and member is not None and Modality.VIDEO not in kinds:
            raise ValueError(f"only a clip has a sound of its own, and {member!r} is none: leave `sound` out")
        return sound

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The alternatives, lower case, in order of preference."""
        return tuple(self.member.lower().split("|"))

    @property
    def modalities(self) -> frozenset[Modality]:
        """What the member may be."""
        return frozenset(kind for suffix in self.suffixes if (kind := modality_of(suffix)) is not None)


def _field_of_name(value: Any) -> Any:
    return {"member": value} if isinstance(value, str) else value


class FieldsLayout(BaseModel):
    """A sample is the listed members, in this order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["fields"] = Field("fields", description="Members of one key, in a fixed order.")
    fields: tuple[Annotated[FieldConfig, BeforeValidator(_field_of_name)], ...] = Field(
        min_length=1, description="Suffixes, or tables {member, loss, sound}, in sequence order."
    )

    @property
    def kinds(self) -> tuple[FieldKind, ...]:
        """The fields as ``where`` knows them."""
        return tuple(FieldKind(item.suffixes, item.modalities) for item in self.fields)


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
    where: str | None = Field(
        None,
        description="Condition that samples must satisfy, as 'height >= 64 and duration < 30'; names: "
        f"{', '.join([*HAD_BY, *OF_SAMPLE[:1]])}. Part of the run's identity.",
    )
    deny: tuple[Path, ...] = Field(
        (),
        description="Samples to leave out: quarantine.jsonl of earlier runs, and lists of keys (one a line, "
        "KEY or SHARD/KEY). Their content is part of the run's identity.",
    )

    @field_validator("where")
    @classmethod
    def _check_where(cls, where: str | None, info: ValidationInfo) -> str | None:
        layout = info.data.get("layout")
        if where is not None and layout is not None:
            try:
                parse_where(where, layout.kinds)
            except ConfigError as error:
                raise ValueError(f"{error.what} ({error.fix})") from error
        return where
