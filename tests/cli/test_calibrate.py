"""``omni profile --calibrate``: what it measures is what the next command uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omni_pipeline.app.costs import cost_model
from tests.cli.test_main import run_main
from tests.support.run_folder import config_of
from tests.support.runs import make_run, omni

SECONDS = "6"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("calibrate"))


def test_the_settings_that_it_tells_are_read_by_the_run(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "here"
    asked = ("profile", str(run_file), "--calibrate", "--seconds", SECONDS, "--out", str(out))
    assert run_main(monkeypatch, *asked, "--json") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found = json.loads(captured.out)
    assert found["settings"] == {
        "balance.hardware": str(out / "hardware.toml"),
        "balance.costs": str(out / "costs.json"),
    }
    flags = [word for name, value in found["settings"].items() for word in (f"--{name}", value)]
    model = cost_model(config_of(run_file, *flags))
    assert set(model.fits) == set(found["costs"]["fits"]) == {"vision", "audio", "llm"}
    assert model.hardware.flops_per_s == found["hardware"]["flops_per_s"]
    assert run_main(monkeypatch, "plan", str(run_file), "--step", "2", *flags) == 0


def test_rates_fits_and_settings_fit_the_terminal(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_main(monkeypatch, "profile", str(run_file), "--calibrate", "--seconds", SECONDS) == 0
    shown = capsys.readouterr().out
    table = [line for line in shown.splitlines() if line.startswith(("\u2502", "\u2503"))]
    assert max(map(len, table)) <= 80
    for told in ("GFLOP/s", "vision", "audio", "llm", "worst of vision: ", "put into the run file:"):
        assert told in shown
    folder = config_of(run_file).run.dir / "calibration"
    settings = shown[shown.index("[balance]") :].splitlines()[1:]
    assert settings == [f'hardware = "{folder}/hardware.toml"', f'costs = "{folder}/costs.json"']


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("RUN", "--nproc", "2"), "--nproc goes with --calibrate"),
        (("RUN", "--out", "x"), "--out goes with --calibrate"),
        (("FOLDER", "--calibrate"), "FOLDER is a folder"),
        (("RUN", "--calibrate", "--out", "RUN"), "cannot make the folder RUN"),
        (("RUN", "--calibrate", "--seconds", "0"), "0.0 is not in the range"),
        (("RUN", "--calibrate", "--nproc", "2", "--balance.hardware", "h900"), "there is no profile 'h900'"),
        (("RUN", "--calibrate", "--modell", "tiny"), "unknown setting 'modell'"),
        (("none.toml", "--calibrate"), "there is no file none.toml"),
    ],
)
def test_wrong_input_is_one_clear_error_and_exit_2(
    run_file: Path,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"RUN": str(run_file), "FOLDER": str(run_file.parent)}
    asked = [places.get(word, word) for word in arguments]
    for word, path in places.items():
        message = message.replace(word, path)
    assert run_main(monkeypatch, "profile", *asked) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_two_ranks_measure_their_links_and_one_of_them_tells(run_file: Path, tmp_path: Path) -> None:
    asked = ("--calibrate", "--nproc", "2", "--seconds", SECONDS, "--out", str(tmp_path), "--json")
    done = omni("profile", str(run_file), *asked)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["links"]) == {"all_to_all", "all_gather", "reduce_scatter"}
    assert found["hardware"]["ranks_per_node"] == 2
