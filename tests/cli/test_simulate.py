"""``omni simulate``: a run's own packs, the published workloads, and one clear error for each mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from balancer.simulator.compare import STRATEGY_NAMES
from omni_pipeline.app.simulate_words import NAMES
from tests.cli.test_main import run_main
from tests.support.runs import make_run, omni

RUN_FILE = "RUN_FILE"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def test_a_run_is_simulated_under_every_strategy(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["simulate", str(run_file), "--ranks", "4", "--hardware", "cpu", "--steps", "2", "--json"]
    assert run_main(monkeypatch, *arguments) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert list(result["results"]) == list(STRATEGY_NAMES)
    assert (result["ranks"], result["num_replicas"], result["steps"]) == (4, 4, 2)
    assert result["hardware"] == "cpu"
    assert sum(result["mixture"].values()) == pytest.approx(1)
    assert set(result["mixture"]) == {"captions", "talks", "clips"}
    ours = result["results"]["multiplexed"]
    assert ours["step_s"] > 0
    assert ours["tokens_per_s"] == pytest.approx(result["num_tokens"] / ours["step_s"])
    for name, speedup in result["speedup"].items():
        assert speedup == pytest.approx(result["results"][name]["step_s"] / ours["step_s"])
    assert printed.err == ""


def test_a_mixture_leaves_only_the_named_sources(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["simulate", str(run_file), "--mixture", "talks=1", "--strategy", "multiplexed", "--json"]
    assert run_main(monkeypatch, *arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["mixture"] == {"talks": 1.0}
    assert list(result["results"]) == ["multiplexed"]
    assert result["speedup"] == {}


def test_a_layout_is_that_of_the_flags_and_empty_places_are_told(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "simulate",
        str(run_file),
        "--ranks",
        "32",
        "--tp",
        "2",
        "--pp",
        "2",
        "--ranks-per-node",
        "4",
    ]
    assert run_main(monkeypatch, *arguments, "--strategy", "multiplexed", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [result[name] for name in ("tp", "cp", "pp", "num_replicas", "ranks_per_node")] == [2, 1, 2, 8, 4]
    # 4 packs on 8 replicas.
    assert result["notes"][-1].startswith("4 of 8 (replica, microbatch) places run empty")


def test_a_strategy_that_the_ranks_do_not_divide_for_is_left_out_unless_named(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["simulate", str(run_file), "--ranks", "2", "--tp", "2", "--json"]
    assert run_main(monkeypatch, *arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["results"]) == [name for name in STRATEGY_NAMES if name != "disaggregated"]
    reason = "2 ranks cannot be split into encoders and replicas of 2"
    assert f"{NAMES['disaggregated']} left out: {reason}" in result["notes"]
    assert run_main(monkeypatch, *arguments, "--strategy", "disaggregated") == 2
    assert reason in capsys.readouterr().err


def test_a_large_run_is_simulated_our_way_only_unless_asked_otherwise(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("omni_pipeline.app.simulate.ALL_UP_TO_RANKS", 8)
    for flags, names in (([], ["multiplexed"]), (["--strategy", "stage0"], ["stage0"])):
        assert run_main(monkeypatch, "simulate", str(run_file), "--ranks", "16", "--json", *flags) == 0
        result = json.loads(capsys.readouterr().out)
        assert list(result["results"]) == names
        assert any("name others by --strategy" in note for note in result["notes"]) == (not flags)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (["--balance.enabled", "false"], "balance.enabled = false: nothing is balanced"),
        (["--balance.lssp.kind", "off"], "balance.lssp.kind = 'off': no segment is shared"),
        (["--balance.lssp.kind", "auto"], ""),
    ],
)
def test_what_the_run_has_switched_off_is_told(
    flags: list[str],
    note: str,
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["simulate", str(run_file), "--ranks", "2", "--strategy", "multiplexed", "--json", *flags]
    assert run_main(monkeypatch, *arguments) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [text for text in notes if text.startswith("balance.")] == [
        text for text in notes if note and text.startswith(note)
    ]
    assert bool(notes) == bool(note)


def test_tables_fit_80_columns(run_file: Path) -> None:
    done = omni("simulate", str(run_file), "--ranks", "8", "--steps", "1", COLUMNS="80", TERM="dumb")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines) <= 80
    for name in STRATEGY_NAMES:
        assert sum(line.startswith(f"{NAMES[name]} ") for line in lines) == 1, name
    assert any(line.startswith("encoding on demand buys ") for line in lines)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either RUN_FILE or --paper"),
        ([RUN_FILE, "--paper"], "give either RUN_FILE or --paper"),
        ([RUN_FILE, "--workload", "A"], "--workload goes with --paper"),
        (["--paper", "--ranks", "8"], "--ranks goes without --paper"),
        (["--paper", "--workload", "E"], "there is no workload 'E'"),
        (["--paper", "--hardware", "h1000"], "there is no profile 'h1000'"),
        ([RUN_FILE, "--hardware", "h1000"], "there is no profile 'h1000'"),
        ([RUN_FILE, "--strategy", "multiplex"], "did you mean 'multiplexed'?"),
        ([RUN_FILE, "--ranks", "8", "--tp", "3"], "not a multiple of tp x cp x pp = 3"),
        ([RUN_FILE, "--ranks", "12"], "12 ranks do not divide into nodes of 8"),
        ([RUN_FILE, "--mixture", "caption=1"], "did you mean 'captions'?"),
        ([RUN_FILE, "--ranks", "0"], "--ranks"),
        ([RUN_FILE, "--order.lane", "4"], "unknown setting 'order.lane'"),
    ],
)
def test_a_mistake_is_one_clear_error_and_exit_2(
    arguments: list[str],
    message: str,
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [str(run_file) if word == RUN_FILE else word for word in arguments]
    assert run_main(monkeypatch, "simulate", *given) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors


def test_help_and_simulation_import_no_torch(run_file: Path) -> None:
    for arguments in (["simulate", "--help"], ["simulate", str(run_file), "--steps", "1"]):
        code = f"import sys; sys.argv = ['omni', *{arguments!r}]\nfrom omni_pipeline.cli.main import main\n"
        code += "try:\n    main()\nexcept SystemExit as end:\n"
        code += "    sys.exit(100 if 'torch' in sys.modules else end.code)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_published_workloads_give_speed_ups_and_a_page(tmp_path: Path) -> None:
    arguments = ("simulate", "--paper", "--workload", "A", "--out", str(tmp_path / "page"), "--json")
    done = omni(*arguments, timeout_s=380)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert list(result["speedup"]) == ["A"]
    assert list(result["speedup"]["A"]) == ["1:9", "3:7", "5:5", "7:3", "9:1"]
    for mixture, speedups in result["speedup"]["A"].items():
        assert list(speedups) == ["stage0", "disaggregated", "bubble_filling", "static"]
        for name, speedup in speedups.items():
            found = result["results"]["A"][mixture]
            expected = found[name]["step_s"] / found["multiplexed"]["step_s"]
            assert speedup is None if found[name]["out_of_memory"] else speedup == pytest.approx(expected)
    assert result["best"]["A"]["published"] == 1.54
    assert (tmp_path / "page" / "simulate.html").is_file()
