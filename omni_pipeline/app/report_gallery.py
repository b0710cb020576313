"""The gallery of the report: packs of a step with their media, as small as a web page needs them.

Everything is read through one ranged-read function and made small here: pictures and frames become JPEG
thumbnails, recordings a waveform and a short player, texts an excerpt. A piece that cannot be shown says why,
and never costs the page: the budget of embedded bytes is fixed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omni_pipeline.app.report_media import CANNOT_SHOW, Shown, image_thumbnail, video_thumbnails, waveform
from omni_pipeline.core.errors import OmniError
from omni_pipeline.core.media import KINDS
from omni_pipeline.core.plan import MediaPlacement, StepPlan
from omni_pipeline.core.sample import Modality, Sample, Segment

ReadRange = Callable[[str, int, int], bytes]

MAX_TEXT_CHARS = 320
MAX_READ_BYTES = 8_000_000
MAX_EMBEDDED_BYTES = 400_000
PAGE_BUDGET_BYTES = 2_500_000

_MIME_BY_SUFFIX = {
    "wav": "audio/wav",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "ogg": "audio/ogg",
    "opus": "audio/ogg",
    "m4a": "audio/mp4",
    "mp4": "video/mp4",
    "webm": "video/webm",
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "png": "image/png",
    "webp": "image/webp",
    "gif": "image/gif",
}
_PLAYABLE = {mime for mime in _MIME_BY_SUFFIX.values() if not mime.startswith("image/")}


@dataclass(frozen=True)
class GalleryMedia:
    """One media segment, ready to be shown.

    Args:
        modality: "image", "video" or "audio".
        mime: Type of ``data``.
        data: What a player gets (audio, video); empty if too large or not needed.
        ranks: Ranks that encode it.
        rows: Embedding rows.
        num_tokens: Positions in the pack, markers included.
        member: Tar member or column.
        frames: JPEG thumbnails: one of an image, several of a video in time order.
        peaks: Waveform of a recording: largest magnitude in equal intervals, 0 to 1.
        note: Size or length in words, or why it cannot be shown.
    """

    modality: str
    mime: str
    data: bytes
    ranks: tuple[int, ...]
    rows: int
    num_tokens: int
    member: str = ""
    frames: tuple[bytes, ...] = ()
    peaks: tuple[float, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class GalleryText:
    """One text segment: its beginning, and whether the model is trained to say it."""

    text: str
    num_tokens: int
    loss: bool
    modality: str = "text"


@dataclass(frozen=True)
class GallerySample:
    """One sample of a pack with its parts in sequence order."""

    key: str
    source: str
    num_tokens: int
    parts: tuple[GalleryMedia | GalleryText, ...]


@dataclass(frozen=True)
class GalleryPack:
    """One pack: where it comes from, where it runs, and its samples."""

    step: int
    lane: int
    number: int
    replica: int
    microbatch: int
    num_tokens: int
    samples: tuple[GallerySample, ...]

    @property
    def encoding_ranks(self) -> tuple[int, ...]:
        """Ranks that encode a part of it, ascending."""
        parts = [part for sample in self.samples for part in sample.parts]
        return tuple(
            sorted({rank for part in parts if isinstance(part, GalleryMedia) for rank in part.ranks})
        )


def gallery_from_plan(plan: StepPlan, read: ReadRange, *, max_packs: int) -> list[GalleryPack]:
    """Return the ``max_packs`` packs of ``plan`` with most kinds of media, in plan order.

    Args:
        plan: Any step plan.
        read: (url, offset, length) -> bytes; a data error of it is shown in place of the piece.
        max_packs: Packs to show.
    """
    kinds = [
        len({segment.modality for sample in pack.samples for segment in sample.segments})
        for pack in plan.packs
    ]
    chosen = sorted(sorted(range(len(plan.packs)), key=lambda index: (-kinds[index], index))[:max_packs])
    placements = {(item.pack, item.sample, item.segment): item for item in plan.media}
    slots = {slot.pack: slot for slot in plan.slots}
    maker = _Maker(read)
    gallery: list[GalleryPack] = []
    for index in chosen:
        pack, slot = plan.packs[index], slots[index]
        samples = tuple(
            GallerySample(
                key=sample.key,
                source=sample.id.source,
                num_tokens=sample.num_tokens,
                parts=tuple(
                    maker.part(sample, segment, placements.get((index, place, number)))
                    for number, segment in enumerate(sample.segments)
                ),
            )
            for place, sample in enumerate(pack.samples)
        )
        gallery.append(
            GalleryPack(
                step=plan.step,
                lane=pack.lane,
                number=pack.number,
                replica=slot.replica,
                microbatch=slot.microbatch,
                num_tokens=pack.num_tokens,
                samples=samples,
            )
        )
    return gallery


def write_gallery(path: Path, packs: Sequence[GalleryPack]) -> None:
    """Write ``packs`` as JSON, so that the report of a run can be made again without its shards."""
    path.write_text(json.dumps([asdict(pack) for pack in packs], default=_encode), encoding="utf-8")


def read_gallery(path: Path) -> list[GalleryPack]:
    """Return what ``write_gallery`` wrote; nothing if there is no file."""
    if not path.exists():
        return []
    return [
        GalleryPack(**{**pack, "samples": tuple(_sample_of(item) for item in pack["samples"])})
        for pack in json.loads(path.read_text(encoding="utf-8"))
    ]


class _Maker:
    """Makes parts, and counts the bytes that players may still take."""

    def __init__(self, read: ReadRange) -> None:
        self._read = read
        self._left_bytes = PAGE_BUDGET_BYTES

    def part(
        self, sample: Sample, segment: Segment, placement: MediaPlacement | None
    ) -> GalleryMedia | GalleryText:
        if not segment.is_media:
            return self._text(sample, segment)
        suffix = segment.member.rsplit(".", 1)[-1].lower()
        fallback = {"image": "image/jpeg", "video": "video/mp4", "audio": "audio/wav"}.get(
            segment.modality, "application/octet-stream"
        )
        mime = _MIME_BY_SUFFIX.get(suffix, fallback)
        shown = Shown()
        try:
            raw = self._fetch(sample, segment)
            # The clip plays it.
            shown = waveform(raw) if segment.is_track else self._show(segment.modality, raw, mime)
        except CANNOT_SHOW as error:
            shown = Shown(note=f"cannot be shown: {_first_line(error)}")
        return GalleryMedia(
            modality=str(segment.modality),
            mime=mime,
            data=shown.data,
            ranks=placement.ranks if placement else (),
            rows=segment.num_rows,
            num_tokens=segment.num_tokens,
            member=segment.member,
            frames=shown.frames,
            peaks=shown.peaks,
            note=shown.note,
        )

    def _fetch(self, sample: Sample, segment: Segment) -> bytes:
        if segment.length > MAX_READ_BYTES:
            raise OmniError(f"{segment.length / 1e6:.0f} MB, more than a page should hold")
        return self._read(sample.shard, segment.offset, segment.length)

    def _text(self, sample: Sample, segment: Segment) -> GalleryText:
        try:
            raw = self._read(sample.shard, segment.offset, min(segment.length, 4 * MAX_TEXT_CHARS))
            text = raw.decode("utf-8", errors="replace")
        except CANNOT_SHOW as error:
            text = f"cannot be shown: {_first_line(error)}"
        if len(text) > MAX_TEXT_CHARS or (text and segment.length > 4 * MAX_TEXT_CHARS):
            text = text[:MAX_TEXT_CHARS].rstrip() + " ..."
        return GalleryText(text=text, num_tokens=segment.num_tokens, loss=segment.loss)

    def _show(self, modality: Modality, raw: bytes, mime: str) -> Shown:
        if modality is Modality.IMAGE:
            return image_thumbnail(raw)
        if modality in KINDS.encoders:
            return Shown(note=f"{modality}, no picture")
        shown = video_thumbnails(raw) if modality is Modality.VIDEO else waveform(raw)
        return replace(shown, data=self._embed(raw)) if mime in _PLAYABLE else shown

    def _embed(self, raw: bytes) -> bytes:
        if len(raw) > min(MAX_EMBEDDED_BYTES, self._left_bytes):
            return b""
        self._left_bytes -= len(raw)
        return raw


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0] or type(error).__name__


def _encode(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    raise TypeError(f"{type(value).__name__} is no part of a gallery")


def _sample_of(item: dict[str, Any]) -> GallerySample:
    return GallerySample(**{**item, "parts": tuple(_parts_of(item["parts"]))})


def _parts_of(parts: list[dict[str, Any]]) -> Iterator[GalleryMedia | GalleryText]:
    for part in parts:
        if part["modality"] == "text":
            yield GalleryText(**part)
        else:
            one_rank = [part.pop("rank")] if "rank" in part else []  # runs made before LSSP
            yield GalleryMedia(
                **{
                    **part,
                    "ranks": tuple(part.get("ranks", one_rank)),
                    "data": base64.b64decode(part["data"]),
                    "frames": tuple(base64.b64decode(frame) for frame in part["frames"]),
                    "peaks": tuple(part["peaks"]),
                }
            )
