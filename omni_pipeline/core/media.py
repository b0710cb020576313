"""Kinds of media and their encoders, from files that a run names: what everyone else must know of them.

A ``MediaKind`` is the data half: which members are of this kind, how large one is, how its bytes become
units. A ``MediaEncoder`` adds the model's half: a factory of the module, and the sizes that its cost follows
from. Both are free of torch, so decode workers and planners can hold them; the factory imports it.

``KINDS`` is what this process knows: the built-in kinds, whose sizes and decoders are settings and modules of
their own, and those added by ``core.encoder_file``. A kind that was added stays, and never changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, field_validator

from omni_pipeline.core.errors import ConfigError, SampleError
from omni_pipeline.core.sample import Modality, RawSize

BUILT_IN: dict[Modality, tuple[str, ...]] = {
    Modality.TEXT: ("txt",),
    Modality.IMAGE: ("jpg", "jpeg", "png", "webp"),
    Modality.VIDEO: ("mp4", "webm", "mkv", "mov"),
    Modality.AUDIO: ("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac"),
}
"""Built-in kinds, and the suffixes of their members."""
TAKEN_NAMES = frozenset({"vision", "llm", "other"})
"""Names that an encoder cannot have either: parts of the model, and what the index calls unknown members."""

Grid = tuple[int, int, int]
Raw = Mapping[str, npt.NDArray[Any]]


class MediaKind(BaseModel):
    """What the data side must know of a kind of media."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        pattern="^[a-z][a-z0-9_]*$", description="Of the kind, and of the encoder that reads it."
    )
    suffixes: tuple[str, ...] = Field(
        min_length=1, description="Endings of its members, lower case; 'depth.png' goes before 'png'."
    )
    markers: tuple[str, str, str] = Field(
        description="Special tokens of a tokenizer.json: at its start, at each row, at its end. Without "
        "such a file the next free ids are taken."
    )
    unit_values: int = Field(ge=1, description="Numbers of one unit (patch, voxel, time step).")
    unit_dtype: str = Field("float32", description="numpy type of these numbers.")
    units_per_row: int = Field(ge=1, description="Consecutive units that make one embedding row.")
    measure: Callable[[BinaryIO], RawSize] = Field(
        description="measure(file): size of a member from its first bytes; SampleError if it is unusable."
    )
    grids: Callable[[Raw], npt.NDArray[np.int64]] = Field(
        description="grids(raw): int64 [n, 3] of units (frames, rows, columns) of n members, from arrays by "
        "field of RawSize. Attention never crosses frames; each has a multiple of units_per_row."
    )
    decode: Callable[[bytes, Grid], npt.NDArray[Any]] = Field(
        description="decode(data, grid): the units [frames * rows * columns, unit_values], row by row."
    )

    @field_validator("unit_dtype")
    @classmethod
    def _check_dtype(cls, name: str) -> str:
        try:
            return np.dtype(name).name
        except TypeError as error:
            raise ValueError(f"{name!r} is no numpy type") from error

    @property
    def modality(self) -> Modality:
        """The modality of its segments."""
        return Modality(self.name)

    def checked_grids(self, raw: Raw) -> tuple[npt.NDArray[np.int64], dict[int, SampleError]]:
        """Return the grids int64 [n, 3] of members, and by place why one has none; its grid is zero.

        Raises:
            ConfigError: ``grids`` does not return what it must.
        """
        num = len(next(iter(raw.values())))
        grids = np.asarray(self.grids(raw))
        if grids.shape != (num, 3) or grids.dtype.kind not in "iu":
            raise ConfigError(
                f"grids() of encoder {self.name!r} returns {grids.dtype} {grids.shape} for {num} members",
                fix=f"return int64 {(num, 3)}: frames, rows and columns of each",
            )
        grids = grids.astype(np.int64)
        is_bad = (grids < 1).any(axis=1) | (grids[:, 1] * grids[:, 2] % self.units_per_row != 0)
        problems = {place: self._no_grid(grids[place]) for place in np.flatnonzero(is_bad).tolist()}
        grids[is_bad] = 0
        return grids, problems

    def checked_decode(self, data: bytes, grid: Grid) -> npt.NDArray[Any]:
        """Return the units of one member, of the planned shape.

        Raises:
            SampleError: ``decode`` raised it, or gives something else.
        """
        units = self.decode(data, grid)
        wanted = (grid[0] * grid[1] * grid[2], self.unit_values)
        if not isinstance(units, np.ndarray) or units.shape != wanted or units.dtype.name != self.unit_dtype:
            found = f"{units.dtype} {units.shape}" if isinstance(units, np.ndarray) else type(units).__name__
            raise SampleError(
                f"{self.name} decodes to {found}, planned is {self.unit_dtype} {wanted}",
                fix="let measure(), grids() and decode() of its encoder's file agree, then index it again",
            )
        return units

    def _no_grid(self, grid: npt.NDArray[np.int64]) -> SampleError:
        return SampleError(
            f"{self.name} of {tuple(grid.tolist())} units: not whole rows of {self.units_per_row}",
            fix="let measure() of its encoder's file refuse it, or grids() round it",
        )


class EncoderFile(NamedTuple):
    """A file of an encoder as it was read, so that all processes of a run have the same, edited or not."""

    path: str
    text: str

    @property
    def digest(self) -> str:
        """Of its content."""
        return hashlib.blake2b(self.text.encode(), digest_size=8).hexdigest()


class MediaEncoder(BaseModel):
    """An encoder: its kind of media, its module, and the sizes of its transformer, which its cost follows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: MediaKind
    build: Callable[[int], Any] = Field(
        description="build(width): the torch.nn.Module, called as module(values, grids) with the units of "
        "all segments [units, unit_values] and their grids int64 [segments, 3] (numpy); returns the rows "
        "[rows, width] of the LLM. Without segments it returns 0 rows that need gradients of every parameter."
    )
    layers: int = Field(ge=1, description="Transformer blocks.")
    hidden: int = Field(ge=1, description="Width.")
    ffn: int = Field(ge=1, description="Inner width of the feed-forward layers.")
    heads: int = Field(ge=1, description="Attention heads.")
    file: EncoderFile = Field(
        EncoderFile("", ""), description="Where it comes from; filled in when it is read."
    )

    @property
    def name(self) -> str:
        """Its name in settings, plans and the model."""
        return self.kind.name


class MediaKinds:
    """The kinds that are known.

    Attributes:
        modalities: All of them, in the order in which they became known; grows in place.
        of_suffix: The modality of members by suffix, lower case.
        encoders: Those that were added, by name.
    """

    def __init__(self) -> None:
        self.modalities = list(BUILT_IN)
        self.of_suffix = {suffix: kind for kind, suffixes in BUILT_IN.items() for suffix in suffixes}
        self.encoders: dict[str, MediaEncoder] = {}

    def __getitem__(self, modality: Modality) -> MediaKind:
        """Return an added kind.

        Raises:
            ValueError: There is none of this name.
        """
        if modality not in self.encoders:
            raise ValueError(f"no encoder was added that reads {modality}")
        return self.encoders[modality].kind

    @property
    def files(self) -> tuple[EncoderFile, ...]:
        """The files of the encoders that were added, for other processes."""
        return tuple(encoder.file for encoder in self.encoders.values())

    def add(self, encoder: MediaEncoder) -> None:
        """Make an encoder and its kind known; nothing happens if the same file was added before.

        Raises:
            ConfigError: Its name or a suffix is taken.
        """
        name, path = encoder.name, encoder.file.path
        known = self.encoders.get(name)
        if known is not None and known.file.digest == encoder.file.digest:
            return
        if known is not None or name in self.modalities or name in TAKEN_NAMES or name.endswith("_projector"):
            owner = f"of {known.file.path}, another file" if known else "built in"
            raise ConfigError(
                f"the name {name!r} of an encoder is taken: it is {owner}",
                where=path,
                fix="give MediaKind another name",
            )
        for suffix in encoder.kind.suffixes:
            if suffix in self.of_suffix:
                raise ConfigError(
                    f"the suffix {suffix!r} of {name!r} is taken: such members are {self.of_suffix[suffix]}",
                    where=path,
                    fix="take a longer suffix, such as 'depth.png', or another one",
                )
        self.encoders[name] = encoder
        self.modalities.append(encoder.kind.modality)
        self.of_suffix |= dict.fromkeys(encoder.kind.suffixes, encoder.kind.modality)

    def modality_of(self, suffix: str) -> Modality | None:
        """Return what members of ``suffix`` hold, by its longest ending that is known; None if none is."""
        ending = suffix.lower()
        while ending:
            if ending in self.of_suffix:
                return self.of_suffix[ending]
            ending = ending.partition(".")[2]
        return None


KINDS = MediaKinds()
"""What this process knows."""
