"""The tables of docs/model.md are what the code counts; a failure shows the line that is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omni_pipeline.app.model_counts import ModelCounts, model_counts
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.cli.config_tables import flop_words
from trainer.presets import LLM_PRESETS, PRESETS, VISION_PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "model.md").read_text()
ROOT = Path(__file__).parents[2]
SEQ_LEN = 8192


def _counts(model: dict[str, Any]) -> ModelCounts:
    source = {"name": "texts", "shards": "none.tar", "layout": {"kind": "fields", "fields": ["txt"]}}
    run = {
        "run": {"dir": "none", "steps": 1},
        "sources": [source],
        "order": {"packs_per_step": 64, "seq_len": SEQ_LEN},
        "model": model,
    }
    return model_counts(RunConfig.model_validate(run))


def _row(name: str, *cells: str) -> str:
    return f"| {' | '.join((f'`{name}`', *cells))} |"


def _billions(number: int) -> str:
    return f"{number / 1e9:.3f}" if number >= 1e6 else f"{number / 1e9:.6f}"


@pytest.mark.parametrize("size", PRESETS)
def test_the_page_has_the_parameters_of_every_size(size: str) -> None:
    counts = _counts({"size": size})
    assert _row(size, *map(_billions, counts.parameters.values()), _billions(counts.total)) in PAGE


@pytest.mark.parametrize("size", PRESETS)
def test_the_page_has_the_operations_of_every_size(size: str) -> None:
    assert _row(size, *map(flop_words, _counts({"size": size}).flops.values())) in PAGE


@pytest.mark.parametrize("size", VISION_PRESETS)
def test_the_page_has_every_size_of_the_vision_encoder(size: str) -> None:
    counts = _counts({"size": "7b", "vision": {"size": size}})
    work = counts.flops["image_forward"], counts.flops["video_forward_per_s"]
    assert _row(size, _billions(counts.parameters["vision"]), *map(flop_words, work)) in PAGE


@pytest.mark.parametrize("size", LLM_PRESETS)
def test_the_page_has_every_size_of_the_llm(size: str) -> None:
    counts = _counts({"size": "7b", "llm": {"size": size}})
    active = counts.active - counts.total + counts.parameters["llm"]
    work = counts.flops["llm_forward_per_token"], counts.flops["llm_training_per_pack"]
    cells = _billions(counts.parameters["llm"]), _billions(active), *map(flop_words, work)
    assert _row(size, *cells) in PAGE


def test_the_page_names_every_file_of_the_architecture_and_no_other() -> None:
    files = {path.name for path in (ROOT / "trainer" / "model").glob("*.py")} - {"__init__.py"}
    named = {line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `") and ".py`" in line}
    assert named == files
