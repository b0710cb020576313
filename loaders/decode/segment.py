"""One media or text segment: fetch its bytes, decode them, return exactly what the plan promised.

This is all that a decode worker runs. It is free of torch and of any state but a cached tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from loaders.decode.audio import decode_audio
from loaders.decode.image import decode_image
from loaders.decode.text import decode_text, load_tokenizer
from loaders.decode.track import decode_track
from loaders.decode.video import decode_video
from loaders.storage import read_range
from loaders.storage_config import StorageConfig
from omni_pipeline.core.encoder_file import run_encoder_files
from omni_pipeline.core.errors import DataError, SampleError
from omni_pipeline.core.media import KINDS, EncoderFile
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.sizes import ModelSizes


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """What to decode, and the size it must have.

    Args:
        url: Path or URL of the shard.
        offset: First byte of the payload.
        length: Payload bytes.
        modality: What it is.
        member: Member name; its suffix tells containers apart.
        grid: As in ``core.sample.Segment``; for text (tokens, 1, 1).
        where: Source, shard and member, for messages.
        units: First patch or mel frame to return, and the one behind the last: the share of this rank. None
            returns all. The whole is decoded all the same: its size is checked, and most formats give
            nothing less.
        is_track: Audio: whether it is the sound of the clip in these bytes.
    """

    url: str
    offset: int
    length: int
    modality: Modality
    member: str
    grid: tuple[int, int, int]
    where: str
    units: tuple[int, int] | None = None
    is_track: bool = False


class DecodeSettings(BaseModel):
    """How segments are decoded; the same in every worker of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sizes: ModelSizes = Field(ModelSizes(), description="How raw sizes become patches and frames.")
    tokenizer_path: Path | None = Field(None, description="A tokenizer.json; none for plain bytes.")
    max_image_pixels: int = Field(
        178_956_970, ge=1, description="Largest picture that is decoded, pixels before resizing."
    )
    encoder_files: tuple[EncoderFile, ...] = Field(
        (), description="Files of encoders that a run attaches, as they were read at its start."
    )
    storage: StorageConfig = Field(StorageConfig(), description="How remote shards are read.")
    video_backend: Literal["pyav", "decord"] = Field(
        "pyav", description="Library that decodes video; decord gives wrong frames on some files."
    )


def decode_segment(request: DecodeRequest, settings: DecodeSettings) -> npt.NDArray[Any]:
    """Return the decoded segment of ``request``.

    Returns:
        Text: int32 [tokens], cut at the planned number (plans may cut text, never media); image and video:
        uint8 [patches, 3 * temporal_patch * patch * patch]; audio: float32 [mel frames, mels]. Only the
        ``units`` of the request, if it names some.

    Raises:
        SampleError: The bytes are damaged, or do not give what the plan promised.
        ShardError: The shard cannot be read there.
    """
    return decode_bytes(read_range(request.url, request.offset, request.length), request, settings)


def decode_bytes(data: bytes, request: DecodeRequest, settings: DecodeSettings) -> npt.NDArray[Any]:
    """Return what ``decode_segment`` returns, of bytes already fetched (workers time the two apart).

    Raises:
        SampleError: The bytes are damaged, or do not give what the plan promised.
    """
    try:
        array = _decode(data, request, settings)
        # A copy, so that the rest of the array is not kept.
        return array if request.units is None else array[slice(*request.units)].copy()
    except DataError as error:
        where = error.where or f"{request.where}, byte {request.offset}"
        raise type(error)(error.what, where=where, fix=error.fix) from error


def _decode(data: bytes, request: DecodeRequest, settings: DecodeSettings) -> npt.NDArray[Any]:
    vision, audio = settings.sizes.vision, settings.sizes.audio
    if request.modality is Modality.TEXT:
        return _decode_tokens(data, request.grid[0], settings.tokenizer_path)
    if request.modality is Modality.IMAGE:
        return decode_image(data, request.grid, vision, max_pixels=settings.max_image_pixels)
    if request.modality is Modality.VIDEO:
        return decode_video(
            data,
            request.grid,
            vision,
            max_pixels=settings.max_image_pixels,
            backend=settings.video_backend,
        )
    if request.is_track:
        return decode_track(data, request.grid[0], audio)
    if request.modality is Modality.AUDIO:
        return decode_audio(data, request.grid[0], audio, suffix=request.member.rpartition(".")[2])
    run_encoder_files(settings.encoder_files)
    return KINDS[request.modality].checked_decode(data, request.grid)


def _decode_tokens(data: bytes, num_tokens: int, tokenizer_path: Path | None) -> npt.NDArray[np.int32]:
    tokens = load_tokenizer(tokenizer_path).encode(decode_text(data))
    if len(tokens) < num_tokens:
        raise SampleError(
            f"text has {len(tokens)} tokens, the index says at least {num_tokens}",
            fix="run `omni data index` again: the shard or the tokenizer has changed",
        )
    return tokens[:num_tokens]
