"""Clips with their own sound: tokens as of transformers' Qwen2.5-Omni processor, positions as of its model.

Called without weights and without a tokenizer: what they need of their objects is given to the functions.
"""

from __future__ import annotations

from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from loaders.assemble import sample_tokens
from loaders.decode.text import SpecialTokens
from loaders.positions import sample_positions
from omni_pipeline.core.interleave import sample_layout
from omni_pipeline.core.sample import Modality, Sample, Segment
from tests.support.reference_library import transformers
from tests.support.strategies import clip_with_sound, grids, make_sample, media_segment, text_segment

processing = transformers.models.qwen2_5_omni.processing_qwen2_5_omni.Qwen2_5OmniProcessor
thinker = (
    transformers.models.qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5OmniPreTrainedModelForConditionalGeneration
)

SPECIAL = SpecialTokens(
    eos=1, vision_start=2, vision_end=3, image=4, video=5, audio_start=6, audio_end=7, audio=8
)
TEXT = 9
MERGE = 2
# Rates whose temporal positions are whole numbers, and some that are truncated; frames may be far apart.
FPS = (0.3, 0.7, 1.0, 1.5, 2.0, 3.0, 7.0, 25.0)


class Processor:
    """What the functions of the processor read: one character a token."""

    video_token, audio_token, audio_bos_token, audio_eos_token = "v", "a", "[", "]"
    video_processor = SimpleNamespace(merge_size=MERGE)
    get_chunked_index = processing.get_chunked_index
    replace_video_with_audio_token = processing.replace_video_with_audio_token


class Model:
    """What the functions of the model read."""

    spatial_merge_size = MERGE
    config = SimpleNamespace(
        image_token_id=SPECIAL.image,
        video_token_id=SPECIAL.video,
        audio_token_id=SPECIAL.audio,
        vision_start_token_id=SPECIAL.vision_start,
        audio_start_token_id=SPECIAL.audio_start,
        position_id_per_seconds=25,
        seconds_per_chunk=2,
    )
    get_llm_pos_ids_for_vision = thinker.get_llm_pos_ids_for_vision
    get_chunked_index = thinker.get_chunked_index
    get_rope_index = thinker.get_rope_index


IDS = {"v": SPECIAL.video, "a": SPECIAL.audio, "[": SPECIAL.audio_start, "]": SPECIAL.audio_end}


def joint_tokens(clip: Segment, sound: Segment) -> list[int]:
    """Return what the processor writes for a clip with its sound, and the markers of its template."""
    replaced: str = Processor().replace_video_with_audio_token(
        {"video_grid_thw": np.array([clip.grid]), "video_second_per_grid": [clip.patch_s]},
        0,
        {"num_audio_tokens": [sound.num_rows]},
        0,
        position_id_per_seconds=25,
        seconds_per_chunk=2.0,
    )
    return [SPECIAL.vision_start, *(IDS[character] for character in replaced), SPECIAL.vision_end]


def reference_tokens(sample: Sample) -> list[int]:
    """Return the tokens of ``sample``."""
    tokens: list[int] = []
    for index, segment in enumerate(sample.segments):
        if segment.modality is Modality.TEXT:
            tokens += [TEXT] * segment.num_tokens
        elif segment.modality is Modality.VIDEO:
            tokens += joint_tokens(segment, sample.segments[index + 1])
        elif segment.modality is Modality.IMAGE:
            tokens += [SPECIAL.vision_start, *[SPECIAL.image] * segment.num_rows, SPECIAL.vision_end]
        elif not segment.is_track:
            tokens += [SPECIAL.audio_start, *[SPECIAL.audio] * segment.num_rows, SPECIAL.audio_end]
    return [*tokens, SPECIAL.eos]


def reference_positions(sample: Sample, tokens: list[int]) -> torch.Tensor:
    """Return the positions of ``sample``, int64 [3, num_tokens]."""

    def of(modality: Modality) -> list[Segment]:
        return [segment for segment in sample.segments if segment.modality is modality]

    def grid_table(modality: Modality) -> torch.Tensor:
        return torch.tensor([segment.grid for segment in of(modality)]).reshape(-1, 3)

    positions, _ = Model().get_rope_index(
        input_ids=torch.tensor([tokens]),
        image_grid_thw=grid_table(Modality.IMAGE),
        video_grid_thw=grid_table(Modality.VIDEO),
        use_audio_in_video=True,
        audio_seqlens=torch.tensor([segment.grid[0] for segment in of(Modality.AUDIO)]),
        second_per_grids=torch.tensor([segment.patch_s for segment in of(Modality.VIDEO)]),
    )
    return positions[:, 0]


def our_tokens(sample: Sample) -> list[int]:
    texts = {
        index: np.full(segment.num_tokens, TEXT)
        for index, segment in enumerate(sample.segments)
        if segment.modality is Modality.TEXT
    }
    tokens: list[int] = sample_tokens(sample, texts, special=SPECIAL)[0].tolist()
    return tokens


@st.composite
def clips(draw: st.DrawFn, fps: tuple[float, ...] = FPS) -> list[Segment]:
    """A clip and its sound, either longer than the other."""
    grid = draw(st.integers(1, 20)), 2 * draw(st.integers(1, 3)), 2 * draw(st.integers(1, 3))
    return clip_with_sound(grid, draw(st.integers(4, 1000)), patch_s=2 / draw(st.sampled_from(fps)))


@st.composite
def sound_samples(draw: st.DrawFn) -> Sample:
    """Pictures, recordings, text, and clips that all have sound: the reference wants all or none to."""
    one = st.one_of(
        clips(),
        st.integers(1, 5).map(lambda count: [text_segment(count)]),
        st.builds(lambda grid: [media_segment(Modality.IMAGE, grid)], grids(Modality.IMAGE)),
        st.builds(lambda grid: [media_segment(Modality.AUDIO, grid)], grids(Modality.AUDIO)),
    )
    parts = draw(st.lists(one, min_size=1, max_size=4))
    return make_sample([segment for part in parts for segment in part])


@settings(max_examples=100)
@given(sound_samples())
def test_tokens_and_positions_of_any_sample_equal_the_references(sample: Sample) -> None:
    tokens = reference_tokens(sample)
    assert our_tokens(sample) == tokens
    expected = reference_positions(sample, tokens)
    assert sample_positions(sample, merge=MERGE).tolist() == expected.tolist()


@pytest.mark.parametrize("mel_frames", [4, 199, 200, 203, 204, 404, 3001])
def test_borders_of_chunks_equal_the_references(mel_frames: int) -> None:
    sample = make_sample(clip_with_sound((7, 4, 2), mel_frames))
    tokens = reference_tokens(sample)
    assert our_tokens(sample) == tokens
    assert sample_positions(sample, merge=MERGE).tolist() == reference_positions(sample, tokens).tolist()


def test_where_processor_and_model_cut_differently_rows_follow_the_one_and_times_the_other() -> None:
    clip, sound = clip_with_sound((14, 2, 4), 6000, patch_s=2 / 0.52)
    sample = make_sample([clip, sound])
    tokens = reference_tokens(sample)
    assert our_tokens(sample) == tokens
    expected, found = reference_positions(sample, tokens), sample_positions(sample, merge=MERGE)
    assert found.tolist() != expected.tolist()
    # The same positions for the same rows: only their places differ, by the rows between the two borders.
    of_clip, of_sound = sample_layout(sample).values()
    for rows, layout in ((range(28), of_clip), (range(sound.num_rows), of_sound)):
        places = [first + row for first, count in layout.runs for row in range(count)]
        times = [int(np.float32(row // 2) * np.float32(clip.patch_s) * np.float32(25)) for row in rows]
        assert found[0, places].tolist() == [1 + time for time in (times if layout is of_clip else rows)]
    assert sorted(map(tuple, found.T.tolist())) == sorted(map(tuple, expected.T.tolist()))
