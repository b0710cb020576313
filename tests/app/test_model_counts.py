"""Operations of a model by what it reads: the numbers of the whole, summed by hand, and of its data."""

from __future__ import annotations

from typing import Any

import pytest

from omni_pipeline.app.model_counts import model_counts
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.cli.config_tables import flop_words, print_counts

SOURCE = {"name": "texts", "shards": "none.tar", "layout": {"kind": "fields", "fields": ["txt"]}}


def _run(seq_len: int = 4096, **model: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"dir": "none", "steps": 1},
            "sources": [SOURCE],
            "order": {"packs_per_step": 64, "seq_len": seq_len},
            "model": {"size": "7b", **model},
        }
    )


def test_a_forward_is_two_operations_per_matrix_number_and_the_pairs_of_attention() -> None:
    counts = model_counts(_run(seq_len=4096))
    llm = counts.parameters["llm"]
    embedding, norms = 152_064 * 3584, 57 * 3584
    biases = 28 * (28 + 2 * 4) * 128
    # Two products of two operations for each pair and channel; half of the pairs is masked.
    attention = 28 * 4 * 4096 * 3584 / 2
    expected = 2 * (llm - embedding - norms - biases) + attention
    assert counts.flops["llm_forward_per_token"] == pytest.approx(expected, rel=1e-12)
    assert counts.flops["llm_training_per_pack"] == pytest.approx(3 * 4096 * expected, rel=1e-12)


def test_media_are_resized_as_the_run_says() -> None:
    whole = model_counts(_run()).flops
    small = model_counts(_run(sizes={"vision": {"max_pixels": 512 * 512}})).flops
    # 1024 x 1024 pixels become 35 x 35 rows of 2 x 2 patches within 1280 rows, else 18 x 18; more than in
    # proportion, because four blocks see every pair.
    assert 1.02 < whole["image_forward"] / small["image_forward"] / (35**2 / 18**2) < 1.2
    assert whole["audio_forward_per_s"] == small["audio_forward_per_s"]
    # A row is four mel frames: 25 a second through 32 blocks of 20 million numbers, twice as many before.
    assert whole["audio_forward_per_s"] == pytest.approx(2 * 50 * 635e6, rel=0.05)


def test_attached_encoders_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    run = _run().model_dump() | {"encoders": {"depth": {"file": "examples/depth/depth_encoder.py"}}}
    counts = model_counts(RunConfig.model_validate(run))
    assert counts.not_counted == ("depth",)
    print_counts(counts, seq_len=4096)
    assert "attached encoders are not counted: depth" in capsys.readouterr().out


def test_a_token_passes_only_its_experts() -> None:
    dense = model_counts(_run())
    sparse = model_counts(_run(llm={"experts": {"count": 64, "top_k": 4}}))
    assert dense.active == dense.total == sum(dense.parameters.values())
    assert sparse.active < sparse.total


@pytest.mark.parametrize(
    ("flop", "words"), [(12.0, "12 FLOP"), (294912.0, "294.9 kFLOP"), (2.5e15, "2.5 PFLOP"), (0.0, "0 FLOP")]
)
def test_operations_are_written_in_four_digits(flop: float, words: str) -> None:
    assert flop_words(flop) == words
