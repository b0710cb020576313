"""The demo's media: their content is their answer, sizes vary, and equal seeds give equal media."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError

from omni_pipeline.app.demo import real, shapes, tones
from omni_pipeline.app.demo.generate import DemoCounts, DemoMedia, generate_media
from omni_pipeline.app.demo.motion import encode_video, render_motion
from omni_pipeline.app.demo.questions import QUIZZES, plan_quiz, swap
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.sample import Modality, RawSize
from omni_pipeline.core.seeding import generator
from omni_pipeline.core.sizes import media_grid
from trainer.config import ModelConfig

COUNTS = DemoCounts(
    shapes=64,
    motion=12,
    tones=36,
    photos=8,
    clips=2,
    speech=3,
    prose=24,
    held_out_shapes=64,
    held_out_motion=8,
    held_out_tones=18,
)
TINY = DemoCounts(
    shapes=6,
    motion=3,
    tones=5,
    photos=2,
    clips=1,
    speech=1,
    prose=2,
    held_out_shapes=0,
    held_out_motion=0,
    held_out_tones=0,
)


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> DemoMedia:
    return generate_media(tmp_path_factory.mktemp("demo"), seed=3, counts=COUNTS, workers=1)


def media_file(folder: Path, key: str) -> Path:
    (path,) = (path for path in folder.glob(f"{key}.*") if path.suffix != ".txt")
    return path


def text_of(folder: Path, key: str, member: str) -> str:
    return (folder / f"{key}.{member}").read_text(encoding="utf-8")


def image_of(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def decode_video(data: bytes) -> tuple[NDArray[np.uint8], list[Fraction]]:
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(video=0))
    times = [frame.pts * frame.time_base for frame in frames]
    return np.stack([frame.to_ndarray(format="rgb24") for frame in frames]), times


def object_pixels(pixels: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Where the picture is strongly coloured: its grounds are greyish."""
    channels = pixels.astype(int)
    return np.asarray(channels.max(axis=2) - channels.min(axis=2) > 75)


def mostly(pixels: NDArray[np.uint8]) -> str:
    """The letter of the colour nearest to the mean of the object."""
    mean = pixels[object_pixels(pixels)].mean(axis=0)
    return min(shapes.COLOURS, key=lambda letter: float(np.abs(mean - shapes.COLOURS[letter]).sum()))


def outline(pixels: NDArray[np.uint8]) -> str:
    """The letter of the shape, by its moment of inertia over its squared area (a circle by its fill).

    Exact values: circle 1 / 2 pi = 0.159, square 1 / 6 = 0.167, triangle sqrt(3) / 9 = 0.192, cross 0.24.
    """
    rows, columns = np.nonzero(object_pixels(pixels))
    reach = np.hypot(rows - rows.mean(), columns - columns.mean())
    if len(rows) > 0.8 * np.pi * (np.quantile(reach, 0.995) + 0.5) ** 2:
        return "c"
    spread = (reach**2).sum() / len(rows) ** 2
    return "s" if spread < 0.18 else "t" if spread < 0.213 else "x"


def shape_grid(height: int, width: int) -> tuple[int, int, int]:
    """The patch grid that the demo's model sees of a picture, (1, rows, columns)."""
    sizes = ModelConfig.model_validate({"size": "demo"}).sizes
    return media_grid(Modality.IMAGE, RawSize(height=height, width=width), sizes)


def pitch_and_timbre(path: Path) -> tuple[str, str]:
    """What a recording holds, by its spectrum and by how steady its level is."""
    sound, rate = soundfile.read(path, dtype="float64", always_2d=True)
    wave = sound.mean(axis=1)
    power = np.abs(np.fft.rfft(wave)) ** 2
    hertz = np.fft.rfftfreq(len(wave), 1 / rate)
    peak = hertz[power.argmax()]
    pitch = min(tones.PITCHES, key=lambda letter: abs(np.log(peak / np.mean(tones.PITCHES[letter]))))
    block = rate // 50
    inner = wave[block * 2 : len(wave) - block * 2]
    level = np.sqrt((inner[: len(inner) // block * block].reshape(-1, block) ** 2).mean(axis=1))
    if level.min() < 0.15 * level.max():
        return pitch, "n"
    third = power[(hertz > 2.9 * peak) & (hertz < 3.1 * peak)].max()
    return pitch, "q" if third > 0.03 * power.max() else "s"


def test_colour_and_shape_of_each_picture_are_its_traits() -> None:
    seen: list[tuple[str, str]] = []
    for piece in plan_quiz("shapes", "shapes", seed=8, split=0, count=96):
        rng = generator(8, "demo-shapes", 0, piece.number)
        pixels = shapes.render_shape(rng, shape=piece.traits[0], colour=piece.traits[1])
        assert mostly(pixels) == piece.traits[1]
        rows, columns = np.nonzero(object_pixels(pixels))
        assert max(np.ptp(rows), np.ptp(columns)) + 1 >= 0.4 * min(pixels.shape[:2])
        seen.append((outline(pixels), piece.traits[0]))
    right = sum(found == shown for found, shown in seen)
    assert right >= 0.95 * len(seen), [pair for pair in seen if pair[0] != pair[1]]


def test_picture_files_show_the_answer_to_their_question(media: DemoMedia) -> None:
    folder = media.held_out["held-out-shapes"]
    for key, question in folder.questions.items():
        pixels = image_of(media_file(folder.path, key))
        if question == "colour? ":
            assert mostly(pixels) == folder.answers[key], key


def test_the_object_of_a_clip_moves_where_the_answer_says(media: DemoMedia) -> None:
    moves = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}
    for folder in (media.train["motion"], media.held_out["held-out-motion"]):
        for key, answer in folder.answers.items():
            frames, _ = decode_video(media_file(folder.path, key).read_bytes())
            light = frames.astype(int).sum(axis=3)
            centres = []
            for frame in (light[0], light[-1]):
                rows, columns = np.nonzero(np.abs(frame - np.median(light)) > 100)
                centres.append(np.array([np.median(rows), np.median(columns)]))
            way = (centres[1] - centres[0]) / np.array(light.shape[1:])
            assert way @ moves[answer] > 0.4, (key, answer, way)
            assert abs(way @ moves[answer][::-1]) < 0.1, (key, answer, way)


def test_start_and_end_of_a_path_do_not_tell_up_from_down() -> None:
    first = {}
    for direction in "ud":
        frames, _ = render_motion(generator(0, "path"), direction=direction)
        first[direction] = list(frames)
    assert len(first["u"]) == len(first["d"]) > 2
    for up, down in zip(first["u"], reversed(first["d"]), strict=True):
        assert np.array_equal(up, down)


@pytest.mark.parametrize("extension", ["mp4", "webm"])
def test_frames_come_back_at_their_times(extension: str) -> None:
    frames = [np.full((64, 80, 3), 10 * number, dtype=np.uint8) for number in range(25)]
    decoded, times = decode_video(encode_video(frames, rate=10, extension=extension))
    assert [round(float(time), 3) for time in times] == [number / 10 for number in range(25)]
    assert np.abs(decoded.mean(axis=(1, 2, 3)) - 10.0 * np.arange(25)).max() < 4


def test_pitch_and_timbre_of_each_recording_are_heard(media: DemoMedia) -> None:
    for folder in (media.train["tones"], media.held_out["held-out-tones"]):
        for key, question in folder.questions.items():
            pitch, timbre = pitch_and_timbre(media_file(folder.path, key))
            assert (pitch if question == "pitch? " else timbre) == folder.answers[key], (key, question)


@pytest.mark.parametrize("extension", tones.EXTENSIONS)
@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100])
def test_every_audio_format_takes_every_rate(extension: str, rate: int) -> None:
    sound = np.zeros((rate // 2, 2), dtype=np.float32)
    info = soundfile.info(io.BytesIO(tones.encode_audio(sound, rate=rate, extension=extension)))
    assert (info.samplerate, info.channels, info.frames) == (rate, 2, rate // 2)


def test_square_and_sine_differ_at_the_highest_pitch_and_lowest_rate() -> None:
    assert 3 * tones.PITCHES["h"][1] < 8_000 / 2


def test_sizes_and_lengths_really_vary(media: DemoMedia) -> None:
    sides = [
        image_of(media_file(folder.path, key)).shape[:2]
        for folder in (media.train["shapes"], media.held_out["held-out-shapes"])
        for key in folder.answers
    ]
    assert sum(height != width for height, width in sides) > 0.7 * len(sides)
    photos = [image_of(path).shape[:2] for path in media.train["photos"].path.glob("*.jpg")]
    pixels = [height * width for height, width in sides + photos]
    assert max(pixels) > 40 * min(pixels)
    sizes = {shape_grid(height, width) for height, width in sides}
    assert sizes == {(1, 4, 4)}, "quiz pictures all become the same patches; real ones do not"
    assert len({shape_grid(height, width) for height, width in photos}) > 3
    tone = media.train["tones"]
    lengths = [soundfile.info(media_file(tone.path, key)).duration for key in tone.answers]
    assert max(lengths) > 3 * min(lengths)
    speech = [soundfile.info(path).duration for path in media.train["speech"].path.glob("*.wav")]
    assert max(speech) > 1.5 * max(lengths)
    texts = [len(path.read_text(encoding="utf-8")) for path in media.train["prose"].path.iterdir()]
    assert max(texts) > 5 * min(texts)
    assert min(texts) >= 100
    assert max(texts) <= 2500
    rates = {soundfile.info(media_file(tone.path, key)).samplerate for key in tone.answers}
    assert rates == {8_000, 16_000, 22_050, 44_100}


def test_all_file_formats_occur() -> None:
    for kind, quiz in QUIZZES.items():
        planned = {piece.extension for piece in plan_quiz(kind, kind, seed=0, split=0, count=96)}
        assert planned == set(quiz.extensions)


@pytest.mark.parametrize("kind", QUIZZES)
@pytest.mark.parametrize("times", [1, 2])
def test_answers_balance_exactly_over_full_rounds(kind: str, times: int) -> None:
    quiz = QUIZZES[kind]
    pieces = plan_quiz(kind, kind, seed=5, split=1, count=times * quiz.num_combinations)
    cells = [(piece.question, piece.traits) for piece in pieces]
    assert len(set(cells)) == quiz.num_combinations
    assert {cells.count(cell) for cell in cells} == {times}
    assert len({piece.key for piece in pieces}) == len(pieces)


def test_swapped_sets_keep_questions_and_answers_and_permute_the_media(media: DemoMedia) -> None:
    for name, swapped in media.swapped.items():
        true = media.held_out[name.replace("swapped", "held-out")]
        assert swapped.answers == true.answers
        assert swapped.questions == true.questions
        for key in true.answers:
            for member in ("question.txt", "answer.txt"):
                assert text_of(swapped.path, key, member) == text_of(true.path, key, member)
        for question in set(true.questions.values()):
            keys = [key for key in true.answers if true.questions[key] == question]
            before = [media_file(true.path, key).read_bytes() for key in keys]
            after = [media_file(swapped.path, key).read_bytes() for key in keys]
            assert sorted(before) == sorted(after)
            assert all(one != other for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_a_swap_moves_every_media_file_and_only_within_its_question(seed: int) -> None:
    pieces = plan_quiz("tones", "tones", seed=1, split=1, count=36)
    given = swap(pieces, seed=seed)
    question = {piece.key: piece.question for piece in pieces}
    assert sorted(given) == sorted(given.values()) == sorted(question)
    assert all(key != other and question[key] == question[other] for key, other in given.items())


def test_agreement_counts_the_media_that_still_show_the_answer(media: DemoMedia) -> None:
    folder = media.swapped["swapped-motion"]
    true = media.held_out["held-out-motion"]
    owner = {media_file(true.path, key).read_bytes(): key for key in true.answers}
    same = [
        true.answers[owner[media_file(folder.path, key).read_bytes()]] == answer
        for key, answer in folder.answers.items()
    ]
    assert folder.agreement == pytest.approx(np.mean(same))
    assert true.agreement == 1.0


def test_over_many_seeds_a_perfect_reader_is_right_by_chance_on_swapped_media() -> None:
    pieces = plan_quiz("motion", "motion", seed=0, split=1, count=64)
    answer = {piece.key: piece.answer for piece in pieces}
    shares = [
        np.mean([answer[key] == answer[other] for key, other in swap(pieces, seed=seed).items()])
        for seed in range(60)
    ]
    # of the 63 others, 15 have the same answer
    assert np.mean(shares) == pytest.approx(15 / 63, abs=0.025)


def test_chance_is_one_over_the_classes(media: DemoMedia) -> None:
    assert media.chance == pytest.approx({"shapes": 1 / 4, "motion": 1 / 4, "tones": 1 / 3})
    assert media.swapped["swapped-tones"].chance == pytest.approx(1 / 3)


def test_files_are_one_stem_per_sample_and_the_answer_is_one_letter(media: DemoMedia) -> None:
    for name, folder in {**media.train, **media.held_out, **media.swapped}.items():
        stems = {path.name.split(".", 1)[0] for path in folder.path.iterdir()}
        assert len(stems) == folder.num_samples, name
        for key, answer in folder.answers.items():
            assert text_of(folder.path, key, "answer.txt") == answer
            assert len(answer) == 1
            assert text_of(folder.path, key, "question.txt") == folder.questions[key]
    assert set(media.folders) == set(media.train) | set(media.held_out) | set(media.swapped)


def test_broken_pictures_open_but_do_not_decode(media: DemoMedia) -> None:
    assert len(media.broken) == 2
    for key in media.broken:
        with Image.open(media_file(media.train["shapes"].path, key)) as image:
            assert min(image.size) >= 28
            with pytest.raises((OSError, SyntaxError)):
                image.load()
    assert not set(media.broken) & set(media.train["shapes"].answers)


def test_real_media_come_with_their_text(media: DemoMedia) -> None:
    photos, clips, speech = (media.train[name] for name in ("photos", "clips", "speech"))
    sizes = set()
    for path in sorted(photos.path.glob("*.jpg")):
        with Image.open(path) as image:
            image.load()
            sizes.add(image.size)
        assert path.with_suffix(".txt").read_text(encoding="utf-8") in real.CAPTIONS.values()
    assert len(sizes) == photos.num_samples
    for path in sorted(clips.path.glob("*.[mw]*4*")) + sorted(clips.path.glob("*.webm")):
        frames, times = decode_video(path.read_bytes())
        assert frames.std() > 20
        assert times == sorted(set(times))
        assert text_of(clips.path, path.stem, "txt") == real.CAPTIONS["bigbuckbunny"]
    assert {path.suffix for path in clips.path.iterdir()} == {".mp4", ".webm", ".txt"}
    said = {path.read_text(encoding="utf-8") for path in speech.path.glob("*.txt")}
    assert "Hello world." in said


def test_every_shipped_file_has_its_licence_named_and_all_are_small() -> None:
    licences = (real.MEDIA_DIR / "LICENSES.md").read_text(encoding="utf-8")
    files = [path for path in real.MEDIA_DIR.iterdir() if path.name != "LICENSES.md"]
    for path in files:
        named = "speech-*" + path.suffix if path.name.startswith("speech-") else path.name
        assert f"`{named}`" in licences, path.name
    assert sum(path.stat().st_size for path in files) < 3_000_000


def test_equal_seeds_give_equal_files_whatever_the_number_of_processes(tmp_path: Path) -> None:
    one = generate_media(tmp_path / "one", seed=11, counts=TINY, workers=1)
    two = generate_media(tmp_path / "two", seed=11, counts=TINY, workers=2)
    names = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.*"))
    assert names == sorted(path.relative_to(tmp_path / "two") for path in (tmp_path / "two").rglob("*.*"))
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    assert one.train["shapes"].answers == two.train["shapes"].answers


def test_other_seeds_give_other_pictures() -> None:
    pictures = [
        shapes.render_shape(generator(seed, "demo-shapes", 0, 0), shape="c", colour="r") for seed in range(2)
    ]
    assert pictures[0].shape != pictures[1].shape or not np.array_equal(pictures[0], pictures[1])


def test_progress_ends_at_the_number_of_samples(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    counts = DemoCounts(**dict.fromkeys(DemoCounts.model_fields, 0) | {"prose": 30})
    media = generate_media(
        tmp_path, seed=0, counts=counts, workers=1, progress=lambda made, total: calls.append((made, total))
    )
    assert calls[-1] == (30, 30)
    assert calls == sorted(calls)
    assert len(calls) > 1
    assert list(media.train) == ["prose"]
    assert media.held_out == media.swapped == {}


def test_an_existing_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "tones").mkdir()
    with pytest.raises(ConfigError) as caught:
        generate_media(tmp_path, seed=0, counts=TINY, workers=1)
    assert str(caught.value) == (
        f"folder {tmp_path / 'tones'} exists already; its files would mix with the demo's\n"
        f"  where: {tmp_path}\n"
        "  fix:   give another folder, or remove this one"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["tones"]


def test_held_out_counts_that_cannot_balance_are_refused() -> None:
    with pytest.raises(ValidationError, match="held_out_tones = 20 is no multiple of 18"):
        DemoCounts(held_out_tones=20)
