"""Makes the demo's folders of media: generated ones whose content is the answer, and pieces of real works.

Each sample is a set of files with one stem (``000001.jpg``, ``000001.question.txt``, ``000001.answer.txt``),
which ``omni data prepare`` turns into WebDataset shards. Every sample has a random stream of its own, so the
files do not depend on the number of processes. Two pictures are broken on purpose: their headers read, their
pixels do not.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from omni_pipeline.app.demo import motion, real, shapes, tones
from omni_pipeline.app.demo.questions import QUIZZES, Piece, chance_level, plan_quiz, swap
from omni_pipeline.core.errors import ConfigError, WorkerError
from omni_pipeline.core.seeding import generator

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (samples made, samples in all) now and then."""

FIELDS: Final[dict[str, list[Any]]] = {
    **{
        kind: [
            "|".join(dict.fromkeys(quiz.extensions)),
            {"member": "question.txt", "loss": False},
            "answer.txt",
        ]
        for kind, quiz in QUIZZES.items()
    },
    "photos": ["jpg", "txt"],
    "clips": ["mp4|webm", "txt"],
    "speech": ["wav", "txt"],
    "prose": ["txt"],
}
"""Source name to the ``fields`` of its layout in a run file."""

_BATCH_SAMPLES = 12
_MAX_WORKERS = 4


class DemoCounts(BaseModel):
    """How many samples of each source the demo makes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shapes: int = Field(1200, ge=0, description="Training pictures of a shape, samples.")
    motion: int = Field(400, ge=0, description="Training clips of a moving object, samples.")
    tones: int = Field(500, ge=0, description="Training recordings of a tone, samples.")
    photos: int = Field(40, ge=0, description="Crops of real photographs, samples.")
    clips: int = Field(10, ge=0, description="Pieces of a real clip, samples.")
    speech: int = Field(5, ge=0, le=5, description="Real recordings, samples.")
    prose: int = Field(60, ge=0, description="Passages of public-domain text, samples.")
    held_out_shapes: int = Field(96, ge=0, description="Held-out pictures, samples; a multiple of 32.")
    held_out_motion: int = Field(64, ge=0, description="Held-out clips, samples; a multiple of 4.")
    held_out_tones: int = Field(72, ge=0, description="Held-out recordings, samples; a multiple of 18.")
    broken: int = Field(2, ge=0, description="Unreadable pictures among the training shapes, samples.")

    @model_validator(mode="after")
    def _held_out_sets_balance(self) -> DemoCounts:
        for kind, quiz in QUIZZES.items():
            count = getattr(self, f"held_out_{kind}")
            if count % quiz.num_combinations:
                raise ValueError(f"held_out_{kind} = {count} is no multiple of {quiz.num_combinations}")
        return self


@dataclass(frozen=True, slots=True)
class MediaFolder:
    """One folder of samples.

    Args:
        path: Where its files lie.
        fields: The ``fields`` of its layout in a run file.
        num_samples: Samples in it, broken ones included.
        questions: Key to question; empty for real media.
        answers: Key to the one-letter answer; empty for real media.
        chance: Best accuracy without looking at the media (1 / classes in the held-out and swapped sets); 0
            for real media.
        agreement: Share of samples whose media show the answer: 1, but in a swapped set only the share where
            the swap happened to bring media of the same answer, which is what a perfect reader scores there.
    """

    path: Path
    fields: list[Any]
    num_samples: int
    questions: dict[str, str] = field(default_factory=dict, repr=False)
    answers: dict[str, str] = field(default_factory=dict, repr=False)
    chance: float = 0.0
    agreement: float = 1.0


@dataclass(frozen=True, slots=True)
class DemoMedia:
    """What ``generate_media`` made. Folder names are the keys of ``train``, ``held_out`` and ``swapped``.

    Args:
        train: Training sources: shapes, motion, tones, photos, clips, speech, prose (those with samples).
        held_out: ``held-out-shapes`` and so on; never trained on.
        swapped: ``swapped-shapes`` and so on: the same questions and answers with the media permuted.
        broken: Keys of the unreadable pictures in the source ``shapes``.
    """

    train: dict[str, MediaFolder]
    held_out: dict[str, MediaFolder]
    swapped: dict[str, MediaFolder]
    broken: tuple[str, ...]

    @property
    def folders(self) -> dict[str, Path]:
        """Every set's folder by name: training, held-out, swapped."""
        return {name: made.path for name, made in (self.train | self.held_out | self.swapped).items()}

    @property
    def chance(self) -> dict[str, float]:
        """Accuracy without the media on the held-out (and swapped) set of each generated source."""
        return {name.removeprefix("held-out-"): made.chance for name, made in self.held_out.items()}


def generate_media(
    out: Path,
    *,
    seed: int,
    counts: DemoCounts | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> DemoMedia:
    """Write the demo's media below ``out``, one folder per set, and return what is where.

    Args:
        out: Made if missing; none of the folders to be written may exist in it.
        seed: Decides every file: equal seeds give equal pixels, samples and texts.
        counts: Samples per set; the defaults take some 20 MB.
        progress: Told how far it is.
        workers: Processes to use; 1 makes all in this one. Default: one per processor, at most 4.

    Raises:
        ConfigError: A folder exists already.
        WorkerError: A process died (memory, kill).
    """
    counts = counts or DemoCounts()
    train = _plan_train(counts, seed)
    held_out = {
        f"held-out-{kind}": plan_quiz(
            kind, f"held-out-{kind}", seed=seed, split=1, count=getattr(counts, f"held_out_{kind}")
        )
        for kind in QUIZZES
    }
    sets = {name: pieces for name, pieces in (train | held_out).items() if pieces}
    _make_folders(out, list(sets))
    _write_all(out, seed, [piece for pieces in sets.values() for piece in pieces], progress, workers)
    swapped = {
        name.replace("held-out", "swapped"): _write_swapped(out, sets[name], seed)
        for name in held_out
        if name in sets
    }
    media = DemoMedia(
        train={name: _describe(out, sets[name]) for name in train if name in sets},
        held_out={name: _describe(out, sets[name]) for name in held_out if name in sets},
        swapped=swapped,
        broken=tuple(piece.key for piece in train["shapes"] if piece.kind == "broken"),
    )
    logger.info("made %d samples below %s", sum(len(pieces) for pieces in sets.values()), out)
    return media


def _plan_train(counts: DemoCounts, seed: int) -> dict[str, list[Piece]]:
    train = {kind: plan_quiz(kind, kind, seed=seed, split=0, count=getattr(counts, kind)) for kind in QUIZZES}
    for number in range(counts.broken):
        form = ("cut-jpeg", "garbled-png")[number % 2]
        train["shapes"].append(
            Piece(
                kind="broken",
                folder="shapes",
                key=f"broken-{form}-{number + 1}",
                split=0,
                number=number,
                extension=form.rpartition("-")[2].replace("jpeg", "jpg"),
                question="shape? ",
                answer="c",
                traits=("c", "r"),
            )
        )
    for kind in ("photos", "clips", "prose"):
        train[kind] = [
            Piece(kind=kind, folder=kind, key=f"{number + 1:06d}", split=0, number=number)
            for number in range(getattr(counts, kind))
        ]
    train["speech"] = [
        Piece(kind="speech", folder="speech", key=name, split=0, number=number)
        for number, name in enumerate(real.speech_names()[: counts.speech])
    ]
    return train


def _make_folders(out: Path, names: Sequence[str]) -> None:
    folders = [out / name for name in names]
    folders += [out / name.replace("held-out", "swapped") for name in names if name.startswith("held-out")]
    for folder in folders:
        if folder.exists():
            raise ConfigError(
                f"folder {folder} exists already; its files would mix with the demo's",
                where=str(out),
                fix="give another folder, or remove this one",
            )
    for folder in folders:
        folder.mkdir(parents=True)


def _write_all(
    out: Path, seed: int, pieces: list[Piece], progress: Progress | None, workers: int | None
) -> None:
    batches = _batches(pieces)
    workers = workers if workers is not None else min(_MAX_WORKERS, os.cpu_count() or 1)
    made = 0
    for num_samples in _run_batches(out, seed, batches, min(workers, len(batches))):
        made += num_samples
        if progress is not None:
            progress(made, len(pieces))


def _run_batches(out: Path, seed: int, batches: list[list[Piece]], workers: int) -> Iterator[int]:
    """Yield the samples of each batch once it is written."""
    if workers <= 1:
        for batch in batches:
            yield _write_batch(out, seed, batch)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_leave_with_parent) as pool:
        futures = [pool.submit(_write_batch, out, seed, batch) for batch in batches]
        try:
            for future in futures:
                yield future.result()
        except BrokenProcessPool as error:
            raise WorkerError(
                "a process that makes the demo's media died",
                where=str(out),
                fix="see whether memory ran out; remove the folder and start again",
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _leave_with_parent() -> None:
    """End this process when its parent dies: a pool's worker waits on a queue that it holds open itself."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _batches(pieces: list[Piece]) -> list[list[Piece]]:
    """Return batches of one kind each, the dearest kinds first, so that the processes end together."""
    batches: list[list[Piece]] = []
    for kind in ("clips", "motion", "tones", "shapes", "photos", "speech", "prose", "broken"):
        same = [piece for piece in pieces if piece.kind == kind]
        size = len(same) if kind == "clips" else _BATCH_SAMPLES  # the real clip is decoded once per batch
        batches += [same[begin : begin + size] for begin in range(0, len(same), max(size, 1))]
    return batches


def _write_batch(out: Path, seed: int, batch: list[Piece]) -> int:
    if batch[0].kind == "clips":
        members = list(real.clips(seed, len(batch)))
    else:
        members = [_members(seed, piece) for piece in batch]
    for piece, files in zip(batch, members, strict=True):
        for suffix, payload in files.items():
            (out / piece.folder / f"{piece.key}.{suffix}").write_bytes(payload)
    return len(batch)


def _members(seed: int, piece: Piece) -> dict[str, bytes]:
    """Return the files of one sample by suffix."""
    if piece.kind == "photos":
        return real.photo(seed, piece.number)
    if piece.kind == "prose":
        return real.passage(seed, piece.number)
    if piece.kind == "speech":
        return real.speech(piece.key)
    return {
        piece.extension: _quiz_media(seed, piece),
        "question.txt": piece.question.encode(),
        "answer.txt": piece.answer.encode(),
    }


def _quiz_media(seed: int, piece: Piece) -> bytes:
    rng = generator(seed, f"demo-{piece.kind}", piece.split, piece.number)
    if piece.kind == "motion":
        frames, rate = motion.render_motion(rng, direction=piece.traits[0])
        return motion.encode_video(frames, rate=rate, extension=piece.extension)
    if piece.kind == "tones":
        sound, rate = tones.render_tone(rng, pitch=piece.traits[0], timbre=piece.traits[1])
        return tones.encode_audio(sound, rate=rate, extension=piece.extension)
    pixels = shapes.render_shape(rng, shape=piece.traits[0], colour=piece.traits[1])
    if piece.kind == "broken":
        return shapes.cut_jpeg(pixels) if piece.extension == "jpg" else shapes.garbled_png(rng, pixels)
    quality = int(rng.integers(60, 96))
    return shapes.encode_image(pixels, extension=piece.extension, quality=quality)


def _write_swapped(out: Path, pieces: list[Piece], seed: int) -> MediaFolder:
    given = swap(pieces, seed=seed)
    by_key = {piece.key: piece for piece in pieces}
    folder = out / pieces[0].folder.replace("held-out", "swapped")
    agreeing = 0
    for piece in pieces:
        other = by_key[given[piece.key]]
        for suffix in ("question.txt", "answer.txt"):
            shutil.copyfile(out / piece.folder / f"{piece.key}.{suffix}", folder / f"{piece.key}.{suffix}")
        shutil.copyfile(
            out / piece.folder / f"{other.key}.{other.extension}", folder / f"{piece.key}.{other.extension}"
        )
        agreeing += other.answer == piece.answer
    return _describe(out, pieces, path=folder, agreement=agreeing / len(pieces))


def _describe(
    out: Path, pieces: list[Piece], *, path: Path | None = None, agreement: float = 1.0
) -> MediaFolder:
    asked = [piece for piece in pieces if piece.answer and piece.kind != "broken"]
    questions = {piece.key: piece.question for piece in asked}
    answers = {piece.key: piece.answer for piece in asked}
    kind = next((piece.kind for piece in pieces if piece.kind != "broken"), "shapes")
    return MediaFolder(
        path=path or out / pieces[0].folder,
        fields=FIELDS[kind],
        num_samples=len(pieces),
        questions=questions,
        answers=answers,
        chance=chance_level(questions, answers) if questions else 0.0,
        agreement=agreement,
    )
