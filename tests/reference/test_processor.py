"""Whole samples against the published processor: tokens, grids, lengths, positions and the media themselves.

A shard is written, indexed and opened as in training; the processor gets the same text, pictures, frames and
waves. Positions are those of the reference model for the processor's tokens.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import torch
from PIL import Image

from loaders.assemble import sample_tokens
from loaders.decode.segment import DecodeRequest, DecodeSettings, decode_segment
from loaders.decode.text import load_tokenizer
from loaders.index import index_shards
from loaders.positions import sample_positions
from loaders.source import open_source
from loaders.source_config import SourceConfig
from omni_pipeline.core.sample import Modality, Sample
from omni_pipeline.core.sizes import ModelSizes
from tests.support.clips import clip_of
from tests.support.omni_tokenizer import omni_tokenizer
from tests.support.reference_library import transformers
from tests.support.shards import image_bytes, write_tar
from trainer.model.vision import normalise_patches

# Inside the processor, where it hands a tensor to numpy.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SIZES = ModelSizes()
RATE = Fraction(10)
# Longest sound here; the published chunk is 300 s and only adds silence behind.
CHUNK_S = 8
PLACEHOLDERS = {
    Modality.IMAGE: "<|vision_bos|><|IMAGE|><|vision_eos|>",
    Modality.VIDEO: "<|vision_bos|><|VIDEO|><|vision_eos|>",
    Modality.AUDIO: "<|audio_bos|><|AUDIO|><|audio_eos|>",
}


@dataclass(frozen=True)
class Kit:
    """The processor and the tokenizer of one folder, and the reference model, without weights."""

    folder: Path
    processor: Any
    model: Any


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = omni_tokenizer()
    tokenizer.save_pretrained(folder)
    processor = transformers.Qwen2_5OmniProcessor(
        image_processor=transformers.Qwen2VLImageProcessorPil(),
        video_processor=transformers.Qwen2VLVideoProcessor(cap_pixels_per_frame=False),
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=CHUNK_S),
        tokenizer=tokenizer,
    )
    return Kit(folder, processor, thinker(tokenizer))


def thinker(tokenizer: Any) -> Any:
    """Return the reference's thinker, published but for its depth and vocabulary, on the meta device."""
    config = transformers.Qwen2_5OmniThinkerConfig(
        vision_config={"depth": 1},
        audio_config={"encoder_layers": 1},
        text_config={"num_hidden_layers": 1, "vocab_size": len(tokenizer)},
        image_token_index=tokenizer.image_token_id,
        video_token_index=tokenizer.video_token_id,
        audio_token_index=tokenizer.audio_token_id,
        audio_start_token_id=tokenizer.audio_bos_token_id,
        audio_end_token_id=tokenizer.audio_eos_token_id,
        vision_start_token_id=tokenizer.vision_bos_token_id,
        vision_end_token_id=tokenizer.vision_eos_token_id,
    )
    with torch.device("meta"):
        return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)


class Raw:
    """Media of one sample in order, as members of a shard and as a processor takes them."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.members: dict[str, bytes] = {}
        self.text = ""
        self.images: list[Image.Image] = []
        self.clips: list[npt.NDArray[np.uint8]] = []
        self.waves: list[npt.NDArray[np.float32]] = []
        self.tracks: list[int | None] = []

    def add_text(self, text: str) -> None:
        self._add("txt", text.encode())
        self.text += text

    def add_image(self, width: int, height: int) -> None:
        data = image_bytes(kind="PNG", pixels=self._pixels(height, width))
        self._add("png", data)
        self.images.append(Image.open(io.BytesIO(data)))
        self.text += PLACEHOLDERS[Modality.IMAGE]

    def add_clip(self, width: int, height: int, num_frames: int, *, sound_s: float | None = None) -> None:
        frames = np.stack([self._pixels(height, width) for _ in range(num_frames)])
        self._add("mkv", clip_of(frames, RATE, kind="mkv", exact=True))
        self.clips.append(frames)
        self.text += PLACEHOLDERS[Modality.VIDEO]
        if sound_s is not None:
            self._add_sound(sound_s, of_clip=len(self.clips) - 1)

    def add_sound(self, seconds: float) -> None:
        self._add_sound(seconds, of_clip=None)
        self.text += PLACEHOLDERS[Modality.AUDIO]

    def _add_sound(self, seconds: float, *, of_clip: int | None) -> None:
        waves = self._random.uniform(-0.5, 0.5, round(seconds * 16_000)).astype(np.float32)
        sink = io.BytesIO()
        soundfile.write(sink, waves, 16_000, format="WAV", subtype="FLOAT")
        self._add("wav", sink.getvalue())
        self.waves.append(waves)
        self.tracks.append(of_clip)

    def _pixels(self, height: int, width: int) -> npt.NDArray[np.uint8]:
        """Return a smooth picture, so that filters of different rounding agree to a level or two."""
        rows, columns = np.mgrid[0:height, 0:width]
        slopes = self._random.uniform(0.02, 0.1, (3, 2))
        waves = [np.sin(down * rows + right * columns) for down, right in slopes]
        return (127.5 + 120 * np.stack(waves, axis=-1)).astype(np.uint8)

    def _add(self, kind: str, data: bytes) -> None:
        self.members[f"k.{len(self.members)}.{kind}"] = data


def sample_of(raw: Raw, folder: Path, kit: Kit) -> Sample:
    """Return the sample as a source gives it; sounds that belong to a clip are marked as its track."""
    path = str(write_tar(folder / "s.tar", raw.members))
    index_shards([path], tokenizer_path=kit.folder)
    fields = [name.removeprefix("k.") for name in raw.members]
    layout = {"kind": "fields", "fields": fields}
    config = SourceConfig.model_validate({"name": "s", "shards": [path], "layout": layout})
    sample = open_source(config, SIZES, load_tokenizer(kit.folder)).sample(0)
    tracks = iter(raw.tracks)
    segments = [
        replace(segment, is_track=next(tracks) is not None) if segment.modality is Modality.AUDIO else segment
        for segment in sample.segments
    ]
    return replace(sample, segments=tuple(segments))


def decoded(sample: Sample, kit: Kit) -> list[npt.NDArray[Any]]:
    """Return each segment of ``sample`` as a decode worker gives it."""
    settings = DecodeSettings(sizes=SIZES, tokenizer_path=kit.folder)
    return [
        decode_segment(
            DecodeRequest(
                url=sample.shard,
                offset=segment.offset,
                length=segment.length,
                modality=segment.modality,
                member=segment.member,
                grid=segment.grid,
                where="here",
            ),
            settings,
        )
        for segment in sample.segments
    ]


def processed(raw: Raw, kit: Kit) -> Any:
    """Return what the processor makes of the sample and its end token."""
    has_tracks = any(clip is not None for clip in raw.tracks)
    known = [
        transformers.video_utils.VideoMetadata(total_num_frames=len(clip), fps=float(RATE))
        for clip in raw.clips
    ]
    videos = {"video_metadata": known, "do_sample_frames": True, "fps": SIZES.vision.video_fps}
    tracks = {"audio_from_video_indices": raw.tracks, "load_audio_from_video": True} if has_tracks else {}
    return kit.processor(
        text=[raw.text + "<|endoftext|>"],
        images=raw.images or None,
        videos=[torch.from_numpy(clip).permute(0, 3, 1, 2) for clip in raw.clips] or None,
        audio=raw.waves or None,
        return_tensors="pt",
        videos_kwargs=videos if raw.clips else {},
        **tracks,
    )


def assert_equals_processor(raw: Raw, folder: Path, kit: Kit) -> None:
    """Compare all that the loader and the processor make of ``raw``."""
    sample, expected = sample_of(raw, folder, kit), processed(raw, kit)
    arrays = decoded(sample, kit)
    texts = {place: arrays[place] for place, item in enumerate(sample.segments) if not item.is_media}
    tokens, _ = sample_tokens(sample, texts, special=load_tokenizer(kit.folder).special)
    np.testing.assert_array_equal(tokens, expected["input_ids"][0].numpy())
    assert_same_positions(sample, expected, kit)
    assert_same_media(sample, arrays, expected)


def assert_same_positions(sample: Sample, expected: Any, kit: Kit) -> None:
    """Compare positions, and the time that a temporal patch stands for."""
    lengths = expected["feature_attention_mask"].sum(-1) if "feature_attention_mask" in expected else None
    found, _ = kit.model.get_rope_index(
        expected["input_ids"],
        image_grid_thw=expected.get("image_grid_thw"),
        video_grid_thw=expected.get("video_grid_thw"),
        attention_mask=expected["attention_mask"],
        use_audio_in_video=any(segment.is_track for segment in sample.segments),
        audio_seqlens=lengths,
        second_per_grids=expected.get("video_second_per_grid"),
    )
    positions = sample_positions(sample, merge=SIZES.vision.merge)
    np.testing.assert_array_equal(positions, found[:, 0].numpy())
    seconds = [segment.patch_s for segment in sample.segments if segment.modality is Modality.VIDEO]
    np.testing.assert_array_equal(seconds, expected.get("video_second_per_grid", []))


def assert_same_media(sample: Sample, arrays: list[npt.NDArray[Any]], expected: Any) -> None:
    """Compare grids, lengths and values, segment by segment."""
    pairs = list(zip(sample.segments, arrays, strict=True))
    for modality, name, bound in ((Modality.IMAGE, "image", 1e-6), (Modality.VIDEO, "video", 0.05)):
        own = [(segment, array) for segment, array in pairs if segment.modality is modality]
        if not own:
            assert f"{name}_grid_thw" not in expected
            continue
        assert [list(segment.grid) for segment, _ in own] == expected[f"{name}_grid_thw"].tolist()
        patches = torch.from_numpy(np.concatenate([array for _, array in own]))
        values = expected["pixel_values" if modality is Modality.IMAGE else "pixel_values_videos"]
        # See test_images and test_videos for the bounds; frames here are smooth: three levels of 255.
        torch.testing.assert_close(
            normalise_patches(patches, dtype=torch.float32), values, atol=bound, rtol=0
        )
    sounds = [(segment, array) for segment, array in pairs if segment.modality is Modality.AUDIO]
    for place, (segment, array) in enumerate(sounds):
        assert int(expected["feature_attention_mask"][place].sum()) == segment.grid[0]
        frames = expected["input_features"][place].T[: segment.grid[0]]
        torch.testing.assert_close(torch.from_numpy(array), frames, atol=2e-4, rtol=0)
    assert len(sounds) == len(expected.get("input_features", []))


def test_text_alone_has_the_tokens_of_the_processor(kit: Kit, tmp_path: Path) -> None:
    raw = Raw(0)
    raw.add_text("What's in a name? 12 Kühe, 几只猫.\n\n  And: <tool_call>")
    sample = sample_of(raw, tmp_path, kit)
    tokens, _ = sample_tokens(
        sample, {0: decoded(sample, kit)[0]}, special=load_tokenizer(kit.folder).special
    )
    assert tokens.tolist() == processed(raw, kit)["input_ids"][0].tolist()


def test_pictures_of_odd_sizes_between_texts(kit: Kit, tmp_path: Path) -> None:
    raw = Raw(1)
    raw.add_image(31, 57)
    raw.add_text("A cow,")
    raw.add_image(201, 93)
    raw.add_image(17, 300)
    raw.add_text(" then a lake.")
    assert_equals_processor(raw, tmp_path, kit)


def test_clips_and_pictures(kit: Kit, tmp_path: Path) -> None:
    raw = Raw(2)
    raw.add_text("First")
    raw.add_clip(62, 46, 37)
    raw.add_text("second")
    raw.add_image(60, 61)
    raw.add_clip(90, 140, 7)
    assert_equals_processor(raw, tmp_path, kit)


def test_sounds_of_several_lengths_between_the_rest(kit: Kit, tmp_path: Path) -> None:
    raw = Raw(3)
    raw.add_sound(0.0301)
    raw.add_text("hear")
    raw.add_sound(1.2345)
    raw.add_clip(60, 60, 12)
    raw.add_image(50, 70)
    raw.add_sound(2.5)
    raw.add_text("that")
    assert_equals_processor(raw, tmp_path, kit)


@pytest.mark.parametrize(("num_frames", "sound_s"), [(47, 4.7), (23, 5.1), (61, 1.93), (9, 0.05)])
def test_a_clip_with_its_own_sound_interleaved(
    num_frames: int, sound_s: float, kit: Kit, tmp_path: Path
) -> None:
    raw = Raw(num_frames)
    raw.add_text("Watch")
    raw.add_clip(40, 64, num_frames, sound_s=sound_s)
    raw.add_text("and listen.")
    assert_equals_processor(raw, tmp_path, kit)


def test_clips_with_their_own_sound_beside_pictures_and_other_sound(kit: Kit, tmp_path: Path) -> None:
    raw = Raw(4)
    raw.add_sound(0.7)
    raw.add_image(40, 64)
    raw.add_clip(40, 64, 31, sound_s=3.1)
    raw.add_text("Both at once.")
    raw.add_clip(64, 40, 12, sound_s=2.2)
    raw.add_sound(1.1)
    assert_equals_processor(raw, tmp_path, kit)
