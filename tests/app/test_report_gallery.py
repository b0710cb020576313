"""Packs are shown with media made small; what cannot be shown says so."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omni_pipeline.app import report_gallery, report_media
from omni_pipeline.app.report_gallery import GalleryMedia, GalleryText, gallery_from_plan
from omni_pipeline.core.errors import DataError
from omni_pipeline.core.plan import StepPlan
from omni_pipeline.core.sample import Modality
from tests.app import synthetic_run
from tests.support.shards import video_bytes


@pytest.fixture(scope="module")
def made() -> tuple[StepPlan, synthetic_run.Store]:
    store = synthetic_run.Store()
    return synthetic_run.mixed_plan(store), store


def test_packs_show_where_each_piece_is_encoded(made: tuple[StepPlan, synthetic_run.Store]) -> None:
    plan, store = made
    packs = gallery_from_plan(plan, store.read, max_packs=3)
    assert [(pack.lane, pack.number, pack.replica, pack.microbatch) for pack in packs] == [
        (0, 400, 0, 0),
        (1, 401, 1, 0),
        (2, 402, 0, 1),
    ]
    shown = {
        (index, place, which): part.ranks
        for index, pack in enumerate(packs)
        for place, sample in enumerate(pack.samples)
        for which, part in enumerate(sample.parts)
        if isinstance(part, GalleryMedia)
    }
    assert shown == {
        (item.pack, item.sample, item.segment): item.ranks for item in plan.media if item.pack < 3
    }
    assert packs[0].encoding_ranks == (0, 1, 2)


def test_each_modality_is_made_small(made: tuple[StepPlan, synthetic_run.Store]) -> None:
    plan, store = made
    image, audio, video, text = (
        sample.parts[0] for sample in gallery_from_plan(plan, store.read, max_packs=1)[0].samples[:4]
    )
    assert isinstance(image, GalleryMedia)
    assert isinstance(video, GalleryMedia)
    assert isinstance(audio, GalleryMedia)
    assert image.note == "220 x 160"
    assert len(image.frames) == 1
    assert image.data == b""
    with Image.open(io.BytesIO(image.frames[0])) as thumbnail:
        assert max(thumbnail.size) <= 264
    assert video.note == "128 x 96, 12 frames, 0.9 s"
    assert len(video.frames) == report_media.NUM_FRAMES
    assert video.mime == "video/mp4"
    assert audio.note == "0.8 s, 16 kHz"
    assert len(audio.peaks) == report_media.NUM_PEAKS
    assert max(audio.peaks) == 1.0
    assert audio.data[:4] == b"RIFF"
    assert isinstance(text, GalleryText)
    assert text.text.startswith("A round shape")


def test_a_broken_piece_says_why_and_costs_nothing_else(made: tuple[StepPlan, synthetic_run.Store]) -> None:
    plan, store = made

    def read(url: str, offset: int, length: int) -> bytes:
        if offset == 0:
            raise DataError("shard is gone", where=url)
        raw = store.read(url, offset, length)
        return raw if raw[:1].isalpha() and raw[:4] != b"RIFF" else raw[: len(raw) // 3]

    parts = [
        part
        for pack in gallery_from_plan(plan, read, max_packs=1)
        for sample in pack.samples
        for part in sample.parts
    ]
    notes = [part.note for part in parts if isinstance(part, GalleryMedia)]
    assert notes[0] == "cannot be shown: shard is gone"
    assert notes[2].startswith("cannot be shown: ")
    texts = [part.text for part in parts if isinstance(part, GalleryText)]
    assert all(text.startswith("A round shape") for text in texts)


def test_the_budget_of_embedded_bytes_is_kept(
    made: tuple[StepPlan, synthetic_run.Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, store = made
    monkeypatch.setattr(report_gallery, "PAGE_BUDGET_BYTES", 60_000)
    packs = gallery_from_plan(plan, store.read, max_packs=4)
    media = [part for pack in packs for sample in pack.samples for part in sample.parts]
    sizes = [len(part.data) for part in media if isinstance(part, GalleryMedia)]
    assert 0 < sum(sizes) <= 60_000


def test_the_sound_of_a_clip_is_shown_as_a_wave_that_the_clip_plays(
    made: tuple[StepPlan, synthetic_run.Store],
) -> None:
    plan, store = made
    raw = video_bytes(8, fps=8, sound_s=1.0)
    sample = store.sample("clips", "k", (Modality.VIDEO, "mp4", raw, 10), (Modality.AUDIO, "mp4", raw, 30))
    clip, track = sample.segments
    sample = replace(sample, segments=(clip, replace(track, is_track=True)))
    pack = replace(plan.packs[0], samples=(sample,))
    alone = replace(plan, packs=(pack,), slots=plan.slots[:1], media=())
    (shown,) = gallery_from_plan(alone, store.read, max_packs=1)
    of_clip, of_track = shown.samples[0].parts
    assert isinstance(of_clip, GalleryMedia)
    assert isinstance(of_track, GalleryMedia)
    assert of_clip.data == raw
    assert (of_track.modality, of_track.data, of_track.note) == ("audio", b"", "1.0 s, 48 kHz")
    assert len(of_track.peaks) == report_media.NUM_PEAKS


def test_long_texts_are_cut_and_bad_bytes_replaced() -> None:
    store = synthetic_run.Store()
    long = synthetic_run.mixed_plan(store, num_packs=1, texts=lambda _: "\u00e4" * 5000)
    sample = gallery_from_plan(long, store.read, max_packs=1)[0].samples[3]
    (text,) = sample.parts
    assert isinstance(text, GalleryText)
    assert text.text.endswith("\u00e4 ...")
    assert len(text.text) == report_gallery.MAX_TEXT_CHARS + 4


def test_a_gallery_survives_its_file(made: tuple[StepPlan, synthetic_run.Store], tmp_path: Path) -> None:
    plan, store = made
    packs = gallery_from_plan(plan, store.read, max_packs=2)
    path = tmp_path / "gallery.json"
    assert report_gallery.read_gallery(path) == []
    report_gallery.write_gallery(path, packs)
    assert report_gallery.read_gallery(path) == packs


def test_pictures_are_upright_and_without_alpha() -> None:
    image = Image.new("RGBA", (40, 20), (255, 0, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6
    out = io.BytesIO()
    image.save(out, "PNG", exif=exif)
    shown = report_media.image_thumbnail(out.getvalue())
    assert shown.note == "20 x 40"
    with Image.open(io.BytesIO(shown.frames[0])) as thumbnail:
        assert thumbnail.size == (20, 40)
        assert np.asarray(thumbnail).min() > 250


def test_silence_is_a_flat_wave() -> None:
    assert set(report_media.waveform_peaks(np.zeros(500, dtype=np.float32))) == {0.0}
