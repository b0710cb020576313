"""The metrics file survives kills and resumes; console and log lines say what they should."""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from omni_pipeline.app import sinks
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.metrics import MemoryMetrics


def write(path: Path, *, first: int, last: int, offset: float = 0.0) -> None:
    metrics = sinks.JsonlMetrics(path)
    for step in range(first, last + 1):
        metrics.record("trainer/loss", step + offset, step)
        metrics.record("trainer/lr", 0.1, step)
    metrics.close()


def test_each_step_is_one_json_object_with_step_and_time(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    metrics = sinks.JsonlMetrics(path, clock=lambda: 12.5)
    metrics.record("trainer/loss", 2.0, 0)
    metrics.record("trainer/lr", 0.1, 0)
    metrics.record("trainer/loss", 1.5, 1)
    metrics.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"step": 0, "time_s": 12.5, "attempt": 0, "trainer/loss": 2.0, "trainer/lr": 0.1}
    assert [line["step"] for line in lines] == [0, 1]


def test_a_complete_step_is_on_disk_before_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = sinks.JsonlMetrics(path)
    metrics.record("trainer/loss", 2.0, 0)
    metrics.record("trainer/loss", 1.0, 1)
    assert sinks.read_metrics(path)["trainer/loss"][0].tolist() == [0]
    metrics.flush()
    assert sinks.read_metrics(path)["trainer/loss"][0].tolist() == [0, 1]
    metrics.close()


def test_a_resumed_attempt_supersedes_its_steps_and_the_stale_tail(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, first=0, last=9)
    write(path, first=5, last=7, offset=0.5)
    steps, values = sinks.read_metrics(path)["trainer/loss"]
    assert steps.tolist() == list(range(8))
    assert values.tolist() == [0, 1, 2, 3, 4, 5.5, 6.5, 7.5]
    attempts = sinks.read_attempts(path)
    assert [(item.first_step, item.last_step) for item in attempts] == [(0, 9), (5, 7)]


def test_an_evaluation_at_the_resumed_step_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = sinks.JsonlMetrics(path)
    metrics.record("trainer/loss", 1.0, 4)
    metrics.flush()
    metrics.record("evaluation/digits/accuracy", 0.75, 5)
    metrics.close()
    write(path, first=5, last=6)
    assert sinks.read_metrics(path)["evaluation/digits/accuracy"][1].tolist() == [0.75]


def test_late_numbers_of_a_flushed_step_join_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = sinks.JsonlMetrics(path)
    metrics.record("trainer/loss", 1.0, 3)
    metrics.flush()
    metrics.record("evaluation/a/accuracy", 0.5, 3)
    metrics.close()
    found = sinks.read_metrics(path)
    assert found["trainer/loss"][1].tolist() == [1.0]
    assert found["evaluation/a/accuracy"][1].tolist() == [0.5]


@given(cut=st.integers(min_value=1, max_value=60))
def test_a_line_cut_anywhere_costs_that_line_only(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    write(path, first=0, last=4)
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    steps = sinks.read_metrics(path)["trainer/loss"][0].tolist()
    assert steps in ([0, 1, 2, 3], [0, 1, 2, 3, 4])
    write(path, first=4, last=6)
    assert sinks.read_metrics(path)["trainer/loss"][0].tolist() == list(range(7))


def test_damaged_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "trainer/loss": 1}\n\n[1]\nnull\n{"step": true}\n{"a": 1}\n\ufeff{}\n{"st')
    steps, values = sinks.read_metrics(path)["trainer/loss"]
    assert (steps.tolist(), values.tolist()) == ([1], [1.0])


def test_lines_without_an_attempt_start_one_when_the_step_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "trainer/loss": {step}}}\n' for step in (0, 1, 2, 1)))
    assert sinks.read_metrics(path)["trainer/loss"][0].tolist() == [0, 1]


def test_a_loss_that_is_no_number_stays_json_and_reads_as_nan(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = sinks.JsonlMetrics(path)
    metrics.record("trainer/loss", math.nan, 0)
    metrics.close()
    assert '"trainer/loss": null' in path.read_text()
    assert math.isnan(sinks.read_metrics(path)["trainer/loss"][1][0])


def test_an_empty_file_has_no_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.touch()
    assert sinks.read_metrics(path) == {}


def test_a_missing_file_is_a_config_error_that_says_what_to_give(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(ConfigError) as caught:
        sinks.read_metrics(path)
    assert str(caught.value) == (
        f"there is no metrics file {path}\n  fix:   give the folder of a run that has trained a step"
    )


def test_multi_metrics_reach_every_sink(tmp_path: Path) -> None:
    memory = MemoryMetrics()
    path = tmp_path / "metrics.jsonl"
    metrics = sinks.MultiMetrics([memory, sinks.JsonlMetrics(path)])
    metrics.record("trainer/loss", 1.0, 2)
    metrics.flush()
    metrics.close()
    assert memory.values == {"trainer/loss": {2: 1.0}}
    assert sinks.read_metrics(path)["trainer/loss"][0].tolist() == [2]


def record_step(metrics: sinks.ConsoleMetrics, step: int) -> None:
    metrics.record("trainer/loss", 2.5, step)
    metrics.record("trainer/tokens_per_s", 12345.0, step)
    metrics.record("trainer/step_s", 2.0, step)
    metrics.record("loader/wait_s", 0.05, step)
    metrics.record("balancer/encoder_imbalance_before", 1.8, step)
    metrics.record("balancer/encoder_imbalance_after", 1.05, step)
    metrics.record("balancer/llm_imbalance_before", 1.4, step)
    metrics.record("balancer/llm_imbalance_after", 1.02, step)


def test_a_pipe_gets_occasional_plain_lines() -> None:
    out, now = io.StringIO(), [0.0]
    console = Console(file=out, force_terminal=False)
    metrics = sinks.ConsoleMetrics(100, console=console, period_s=10.0, clock=lambda: now[0])
    for step in range(10):
        record_step(metrics, step)
        now[0] += 4.0
    metrics.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == (
        "step 0/100  loss 2.5000  12,345 tokens/s  data wait 2.5%  ETA 3 min 18 s"
        "  imbalance encoder 1.80->1.05 LLM 1.40->1.02"
    )
    assert [line.split()[1] for line in lines] == ["0/100", "3/100", "6/100", "9/100"]


def test_padding_is_shown_where_there_is_some() -> None:
    metrics = sinks.ConsoleMetrics(console=Console(file=io.StringIO()))
    for step, padding in enumerate((0.0, 0.125)):
        metrics.record("trainer/loss", 2.5, step)
        metrics.record("loader/padding", padding, step)
        assert ("padding 12.5%" in metrics.line()) == bool(padding)


def test_a_terminal_gets_one_live_line() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160)
    metrics = sinks.ConsoleMetrics(2, console=console)
    record_step(metrics, 0)
    record_step(metrics, 1)
    metrics.close()
    assert "step 1/2" in out.getvalue()
    assert "\x1b" in out.getvalue()


def test_the_console_line_needs_no_metric_at_all() -> None:
    metrics = sinks.ConsoleMetrics(console=Console(file=io.StringIO(), force_terminal=False))
    metrics.close()
    metrics.record("other/number", 1.0, 7)
    assert metrics.line() == "step 7"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59, "59 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert sinks.format_duration(seconds) == text


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_every_log_line_names_its_rank(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    others = len(root_logger.handlers)
    sinks.configure_logging(0)
    sinks.configure_logging(3, worker=1)
    logging.getLogger("loaders.loader").warning("shard %s is short", "a.tar")
    captured = capsys.readouterr()
    assert captured.err.rstrip().endswith("rank 3 worker 1 WARNING loaders.loader: shard a.tar is short")
    assert captured.out == ""
    assert len(root_logger.handlers) == others + 1


def test_steps_trained_are_those_of_the_furthest_attempt_since_the_last_fresh_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert sinks.num_steps_trained(path) == 0
    spans = [(0, 18), (10, 12), (10, 11), (0, 3), (2, 5), (4, 4)]
    reached = []
    for first, last in spans:
        metrics = sinks.JsonlMetrics(path)
        for step in range(first, last + 1):
            metrics.record("trainer/loss", 1.0, step)
        metrics.close()
        reached.append(sinks.num_steps_trained(path))
    assert reached == [19, 19, 19, 4, 6, 6]


def test_an_evaluation_first_after_a_resume_is_no_step_of_that_start(tmp_path: Path) -> None:
    """A kill in the evaluation after step 0: the next start evaluates again, and may be killed again."""
    path = tmp_path / "metrics.jsonl"
    write(path, first=0, last=6)
    for _ in range(2):
        metrics = sinks.JsonlMetrics(path)
        metrics.record("evaluation/digits/loss", 0.5, 0)
        metrics.close()
        attempt = sinks.read_attempts(path)[-1]
        assert (attempt.first_step, attempt.last_step) == (1, 0)
        assert sinks.num_steps_trained(path) == 7
        assert sinks.read_metrics(path)["trainer/loss"][0].tolist() == [0, 1]
