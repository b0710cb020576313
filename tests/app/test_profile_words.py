"""The cause of a slow step in words."""

from __future__ import annotations

from dataclasses import replace

from omni_pipeline.app.profile_words import milliseconds, step_texts
from omni_pipeline.app.worst_steps import SampleName, WorstStep
from omni_pipeline.core.sample import SampleId
from trainer.step_causes import HeavySample, PartCause, StepCause

HEAVY = HeavySample(SampleId("captions", 0, 5), 1, units=1600, modelled_s=0.5, num_ranks=2)
LIGHT = replace(HEAVY, id=SampleId("captions", 0, 6), modelled_s=0.05, num_ranks=1)
ELSEWHERE = replace(HEAVY, id=SampleId("captions", 0, 7), microbatch=0)
ENCODER = PartCause("encoder", 1.8, 1.3, 1.25, 3, 1, 0.3, 0.1, (HEAVY, LIGHT, ELSEWHERE))
EVEN = PartCause("llm", 1.1, 1.0, 1.01, 0, 0, 0.101, 0.1, (HEAVY,))
STEP = StepCause(7, 1.0, 0.1, 0.2, (ENCODER, EVEN))


def worst(cause: StepCause) -> WorstStep:
    return WorstStep(cause, ("time",), (SampleName(HEAVY.id, "000005", "data/captions-0.tar"),))


def test_a_rank_that_stood_out_is_told_with_what_it_had_in_that_microbatch() -> None:
    assert step_texts(worst(STEP)) == [
        (
            "encoders: rank 3 worked 300 ms in microbatch 1, the mean is 100;"
            " imbalance 1.80 -> 1.30, measured 1.25",
            ["captions/000005 (captions-0.tar row 5): 1,600 units, split over 2 ranks, modelled 500 ms"],
        )
    ]


def test_without_measured_work_the_modelled_load_is_told() -> None:
    part = replace(ENCODER, imbalance_measured=None, microbatch=-1)
    (text, samples), *rest = step_texts(worst(replace(STEP, parts=(part,))))
    assert rest == []
    assert text == ("encoders: rank 3 has 300 ms of modelled work, the mean is 100; imbalance 1.80 -> 1.30")
    assert [line.split(" ")[0] for line in samples] == ["captions/000005", "captions/?"]


def test_a_sample_that_was_read_twice_is_told_once() -> None:
    part = replace(ENCODER, part="llm", samples=(HEAVY, HEAVY))
    ((_, samples),) = step_texts(worst(replace(STEP, parts=(part,))))
    assert samples == [
        "captions/000005 (captions-0.tar row 5): 1,600 tokens, split over 2 ranks, modelled 500 ms"
    ]


def test_a_step_that_waited_for_data_says_so_and_an_even_one_says_that() -> None:
    assert step_texts(worst(replace(STEP, wait_s=0.5, parts=(EVEN,)))) == [("waiting for data: 500 ms", [])]
    assert step_texts(worst(replace(STEP, parts=(EVEN,)))) == [("no rank was far above the mean", [])]
    idle = replace(EVEN, own_s=0.0, mean_s=0.0)
    assert step_texts(worst(replace(STEP, parts=(idle,)))) == [("no rank was far above the mean", [])]


def test_milliseconds_have_three_digits_or_are_whole() -> None:
    assert [milliseconds(seconds) for seconds in (0.0, 0.00012345, 0.0123, 0.0996, 1.2345)] == [
        "0",
        "0.123",
        "12.3",
        "100",
        "1,234",
    ]
