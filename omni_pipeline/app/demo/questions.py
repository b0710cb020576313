"""Which samples there are, before any is made: question, answer, traits and file format of each.

All combinations of question and traits take turns, so answers are balanced over a set (exactly, if its
count is a multiple of the combinations) and no trait tells another. The swapped set is the control: the same
questions and answers beside the media of another sample that was asked the same, so reading the media no
longer helps.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from omni_pipeline.app.demo import motion, shapes, tones
from omni_pipeline.core.seeding import generator


@dataclass(frozen=True, slots=True)
class Quiz:
    """A generated source: its questions, the answers to each, and its file formats.

    ``traits`` are the properties of one sample, each a tuple of letters; ``questions[i]`` asks for
    ``traits[i]``. A format that ``extensions`` names more than once is drawn more often.
    """

    questions: tuple[str, ...]
    traits: tuple[tuple[str, ...], ...]
    extensions: tuple[str, ...]

    @property
    def num_combinations(self) -> int:
        """Question times traits: a count that is a multiple of this balances exactly."""
        total = len(self.questions)
        for letters in self.traits:
            total *= len(letters)
        return total


# VP9 and MP3 take several times the encoding time of their peers, so fewer files are of these.
_VIDEO: Final = ("mp4", "mp4", "webm")
_AUDIO: Final = ("wav",) * 6 + ("flac",) * 5 + ("mp3",)

QUIZZES: Final[dict[str, Quiz]] = {
    "shapes": Quiz(("shape? ", "colour? "), (tuple(shapes.SHAPES), tuple(shapes.COLOURS)), shapes.EXTENSIONS),
    "motion": Quiz(("direction? ",), (tuple(motion.DIRECTIONS),), _VIDEO),
    "tones": Quiz(("pitch? ", "timbre? "), (tuple(tones.PITCHES), tuple(tones.TIMBRES)), _AUDIO),
}


@dataclass(frozen=True, slots=True)
class Piece:
    """One sample to be made.

    Args:
        kind: What makes it: a source name, or ``broken``.
        folder: Folder below the output folder.
        key: Stem of its files.
        split: 0 train, 1 held out; with ``number`` it names the random stream.
        number: Place in its set, from 0.
        extension: File format of the media, where there is a choice.
        question: What is asked; empty for real media.
        answer: One letter; empty for real media.
        traits: Letters of what the media shows, in the order of the ``Quiz``.
    """

    kind: str
    folder: str
    key: str
    split: int
    number: int
    extension: str = ""
    question: str = ""
    answer: str = ""
    traits: tuple[str, ...] = ()


def plan_quiz(kind: str, folder: str, *, seed: int, split: int, count: int) -> list[Piece]:
    """Return ``count`` samples of a generated source in a seeded order, all combinations in turn."""
    quiz = QUIZZES[kind]
    rng = generator(seed, f"demo-plan-{kind}", split)
    asked = range(len(quiz.questions))
    cells = [(which, traits) for traits in itertools.product(*quiz.traits) for which in asked]
    pieces = []
    for number, cell in enumerate(rng.permutation(count).tolist()):
        which, traits = cells[cell % len(cells)]
        pieces.append(
            Piece(
                kind=kind,
                folder=folder,
                key=f"{number + 1:06d}",
                split=split,
                number=number,
                extension=str(rng.choice(quiz.extensions)),
                question=quiz.questions[which],
                answer=traits[which],
                traits=traits,
            )
        )
    return pieces


def swap(pieces: list[Piece], *, seed: int) -> dict[str, str]:
    """Return, for the key of each sample, the key of the sample whose media it gets in the swapped set.

    Among the samples of one question the media go round one random cycle (Sattolo 1986): a permutation, no
    media stay where they were, and answers play no part. A question asked once keeps its media.
    """
    keys_by_question: dict[str, list[str]] = defaultdict(list)
    for piece in pieces:
        keys_by_question[piece.question].append(piece.key)
    given: dict[str, str] = {}
    for index, keys in enumerate(keys_by_question.values()):
        rng = generator(seed, f"demo-swap-{pieces[0].kind}", index)
        order = list(keys)
        for last in range(len(order) - 1, 0, -1):
            other = int(rng.integers(0, last))
            order[last], order[other] = order[other], order[last]
        given.update(zip(keys, order, strict=True))
    return given


def chance_level(questions: Mapping[str, str], answers: Mapping[str, str]) -> float:
    """Return the best accuracy without the media: the commonest answer to each question, always given."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for key, question in questions.items():
        counts[question][answers[key]] += 1
    return sum(max(counter.values()) for counter in counts.values()) / len(questions)
