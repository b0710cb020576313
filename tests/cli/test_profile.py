"""``omni profile``: what it prints, on which width, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loaders.index import index_shards
from omni_pipeline.app.run_dir import RunDir
from omni_pipeline.app.worst_steps import WorstSteps, read_worst_steps
from omni_pipeline.core.sample import SampleId
from tests.app import test_profile
from tests.app.test_worst_steps import name_of
from tests.cli.test_main import run_main
from tests.support.run_folder import config_of
from tests.support.runs import make_run, omni
from tests.support.shards import caption_members, image_bytes, write_tar
from trainer.step_causes import HeavySample, PartCause, StepCause


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    test_profile.write_run(tmp_path / "run")
    sample = HeavySample(SampleId("captions", 0, 5), 1, units=1600, modelled_s=0.5, num_ranks=2)
    part = PartCause("encoder", 2.0, 1.5, 1.4, 3, 1, 0.7, 0.4, (sample,))
    worst = WorstSteps(RunDir(tmp_path / "run").worst_steps_path, first_step=0, name_of=name_of)
    for step in range(11):
        worst.see(StepCause(step, 1.0 + step, 0.1, 0.2, (part,)))
    return tmp_path / "run"


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal_and_cut_nothing(
    run_dir: Path, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run_main(monkeypatch, "profile", str(run_dir)) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith(("\u2502", "\u2503"))]
    assert len(table) > 20
    assert max(map(len, table)) <= columns
    assert not [line for line in table if "\u2026" in line]


def test_stages_balance_and_worst_steps_are_told(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run_main(monkeypatch, "profile", str(run_dir)) == 0
    shown = capsys.readouterr().out
    for told in (
        "11 steps on 4 ranks, 1 start; 500 tokens/s; MFU 30.0 % of 989 TFLOP/s per rank (h100)",
        "the first step of each start left out",
        "data stall 20.0 % of the step; padding 25.0 %, packs 90.0 % full",
        "planning, beside the step: p50 20 ms, p99 40 ms, 2.00 % of the step",
        "outside of steps (checkpoints, evaluation): 8.3 % of the time",
        "encoders: rank 3 worked 700 ms in microbatch 1, the mean is 400;",
        "imbalance 2.00 -> 1.50, measured 1.40",
        "captions/key-5 (a.tar row 5): 1,600 units, split over 2 ranks, modelled 500 ms",
    ):
        assert told in shown
    assert run_main(monkeypatch, "profile", str(run_dir), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mfu"] == pytest.approx(0.3)
    assert found["worst"][0]["step"] == 10


def test_a_run_file_names_the_folder_and_the_machine(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = make_run(run_dir.parent)
    asked = ("profile", str(run_file), "--balance.hardware", "h200", "--json")
    assert run_main(monkeypatch, *asked) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["hardware"], found["run"]) == ("h200", str(config_of(run_file).run.dir))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "there is no run nowhere"),
        (("RUN", "--balance.hardware", "h100"), "flags change a run file, and RUN is a folder"),
        (("EMPTY",), "EMPTY has no metrics to report"),
        (("NOTOML",), "not valid TOML"),
    ],
)
def test_wrong_input_is_one_clear_error_and_exit_2(
    run_dir: Path,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"RUN": run_dir, "EMPTY": run_dir.parent / "empty", "NOTOML": run_dir / "metrics.jsonl"}
    places["EMPTY"].mkdir()
    for word, path in places.items():
        arguments = tuple(str(path) if item == word else item for item in arguments)
        message = message.replace(word, str(path))
    assert run_main(monkeypatch, "profile", *arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors


def test_it_imports_no_torch(run_dir: Path) -> None:
    code = f"import sys; sys.argv = ['omni', 'profile', {str(run_dir)!r}]\n"
    code += "from omni_pipeline.cli.main import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_worst_step_of_a_run_names_the_huge_picture_in_it(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    members = caption_members(16)
    members["000005.jpg"] = image_bytes(560, 560, seed=5)
    index_shards([str(write_tar(tmp_path / "captions-000000.tar", members))])
    flags = ("--model.sizes.vision.max_pixels", "313600", "--order.seq_len", "480", "--run.steps", "10")
    flags = (*flags, "--balance.lssp.kind", "off")  # one rank has the picture
    done = omni("train", str(run_file), "--nproc", "2", *flags, timeout_s=180)
    assert done.returncode == 0, done.stderr
    told = omni("profile", str(run_file), *flags, "--json")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert found["num_ranks"] == 2
    assert {row["kind"] for row in found["balance"]} == {"before", "after", "measured"}
    assert sum(row["share"] for row in found["stages"]) == pytest.approx(1.0)
    by_loss = max(
        read_worst_steps(tmp_path / "run" / "worst_steps.jsonl"), key=lambda item: item.cause.modelled_loss_s
    )
    (encoder,) = [part for part in by_loss.cause.parts if part.part == "encoder"]
    heaviest = encoder.samples[0]
    assert (heaviest.units, by_loss.name_of(heaviest.id).key) == (1600, "000005")
    # The rank that has it is the one that worked longest, and the page says so too.
    assert encoder.own_s > encoder.mean_s
    page = (tmp_path / "run" / "report.html").read_text()
    assert "captions/000005 (captions-000000.tar row 5): 1,600 units" in page
