"""What is known of a sample before anything is decoded: its identity, its segments, their sizes.

Planning needs numbers only. A ``Sample`` is what the index and the pure functions of ``core.sizes`` say
about one training item; the bytes stay where they are until the rank that needs them fetches them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, ClassVar, ParamSpec, TypeVar

FieldsT = ParamSpec("FieldsT")
FrozenT = TypeVar("FrozenT")


class Modality(str):
    """The kind of a segment, by name; one object for each name, so ``is`` compares also what was pickled.

    Those named here are built in; others come with encoders that a run attaches, see ``core.media``.
    """

    __slots__ = ()

    TEXT: ClassVar[Modality]
    IMAGE: ClassVar[Modality]
    VIDEO: ClassVar[Modality]
    AUDIO: ClassVar[Modality]

    def __new__(cls, name: str) -> Modality:
        """Return the modality of this name."""
        return _MODALITY_OF.setdefault(name, str.__new__(cls, name))


_MODALITY_OF: dict[str, Modality] = {}
Modality.TEXT = Modality("text")
Modality.IMAGE = Modality("image")
Modality.VIDEO = Modality("video")
Modality.AUDIO = Modality("audio")


@dataclass(frozen=True, slots=True)
class RawSize:
    """What a header says of one member, before decoding. Fields that do not apply are zero.

    ``height`` and ``width`` are pixels after EXIF or container rotation. ``duration_s`` is seconds.
    ``num_samples`` counts audio samples per channel at ``sample_rate`` Hz; of a video those of its sound, and
    zero if it is silent. ``num_chars`` and ``num_bytes`` describe text (UTF-8).
    """

    height: int = 0
    width: int = 0
    num_frames: int = 0
    duration_s: float = 0.0
    sample_rate: int = 0
    num_samples: int = 0
    num_chars: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, order=True)
class SampleId:
    """Identity of a sample: source name, shard number within the source, row within the shard's index."""

    source: str
    shard: int
    row: int


@dataclass(frozen=True, slots=True)
class Segment:
    """One run of one modality in a sample, sized for the model.

    Args:
        modality: What it is.
        member: Tar member name or column that holds the bytes.
        offset: First byte of the payload in the shard.
        length: Payload bytes.
        grid: Encoder input units. Image and video: (temporal, rows, columns) of patches; audio:
            (mel frames, 1, 1); text: (tokens, 1, 1).
        num_rows: Embedding rows that the encoder makes of it; 0 for text.
        num_tokens: Positions it takes in the packed sequence, its begin and end markers included.
        loss: Whether its text tokens are trained on; always false for media.
        patch_s: Video: seconds from one temporal patch to the next.
        is_track: Audio: the sound of the clip before it, whose rows stand among the clip's; see
            ``core.interleave``.
    """

    modality: Modality
    member: str
    offset: int
    length: int
    grid: tuple[int, int, int]
    num_rows: int
    num_tokens: int
    loss: bool = False
    patch_s: float = 0.0
    is_track: bool = False

    @property
    def num_units(self) -> int:
        """Encoder input units: patches, or mel frames; for text its tokens."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def is_media(self) -> bool:
        """Whether an encoder is needed."""
        return self.modality is not Modality.TEXT


@dataclass(frozen=True, slots=True)
class Sample:
    """One training item as plans see it.

    Args:
        id: Where it lives in its source.
        key: The name people know it by (webdataset key).
        shard: Path or URL of its shard.
        segments: In sequence order.
        num_tokens: Positions in the packed sequence, markers and end-of-sample token included.
        num_labels: Positions with a label.
    """

    id: SampleId
    key: str
    shard: str
    segments: tuple[Segment, ...] = field(repr=False)
    num_tokens: int
    num_labels: int


def quick_constructor(kind: Callable[FieldsT, FrozenT]) -> Callable[FieldsT, FrozenT]:
    """Return a constructor of a frozen dataclass with slots that takes half the time of its own.

    Its own fills the fields through ``object.__setattr__``, past the guard of the class. This fills those of
    an open class of the same slots, then makes the result an instance of ``kind``. It knows no defaults.
    """
    names = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    open_kind: Any = make_dataclass("_Open", names, slots=True, eq=False, repr=False)

    def make(*values: FieldsT.args, **named: FieldsT.kwargs) -> FrozenT:
        made: FrozenT = open_kind(*values, **named)
        made.__class__ = kind  # type: ignore[assignment]
        return made

    return make
