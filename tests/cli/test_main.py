"""Exit codes, messages and start-up of the command line, in this process where that is enough."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omni_pipeline.app.model_counts import model_counts
from omni_pipeline.cli.main import main
from tests.support.runs import make_run


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["omni", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_help_is_quick_and_imports_no_torch() -> None:
    code = "import sys; sys.argv = ['omni', '--help']\nfrom omni_pipeline.cli.main import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    sys.exit('torch' in sys.modules)"
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
        )
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0
        assert "Commands:" in done.stdout
    assert min(seconds) < 0.3


COMMANDS = ["config", "data", "demo", "plan", "profile", "report", "simulate", "train", "weights"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, command, "--help") == 0
    assert f"Example: omni {command}" in capsys.readouterr().out


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optimizer.lrr", "1"], "unknown setting 'optimizer.lrr'; did you mean 'lr'?"),
        (["--run.steps", "0"], "setting 'run.steps': Input should be greater than or equal to 1, got 0"),
        (["--sources.0.shards", "none-*.tar"], "none-*.tar"),
        (["--order.packs_per_step", "6"], "no multiple of order.lanes"),
        (["--balance.group", "2", "--nproc", "3"], "3 replicas do not divide into groups of 2"),
        (["--llm.parallel.dp_shard", "2", "--nproc", "3"], "'llm.parallel.dp_shard': 2 does not divide"),
        (["--sources.0.layout", '{kind="fields", fields=["webp"]}'], "webp"),
        (["--model.llm.vocab_size", "100"], "the tokenizer has 264 tokens, the model 100"),
        (["--tokenizer.path", "none.json"], "none.json"),
        (
            ["--sources", '[{name="a", shards="SHARDS", layout={kind="fields", fields=["jpg|png"]}}]'],
            "no source has text that is trained on",
        ),
        (["--order.seq_len", "4"], "order.seq_len"),
    ],
)
def test_a_wrong_setting_is_one_clear_error_and_exit_2(
    flags: list[str],
    message: str,
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [flag.replace("SHARDS", f"{run_file.parent}/captions-*.tar") for flag in flags]
    assert run_main(monkeypatch, "train", str(run_file), *flags) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "fix:" in errors
    assert "Traceback" not in errors


def test_a_missing_run_file_and_an_unknown_command_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "train", "none.toml") == 2
    assert "there is no file none.toml" in capsys.readouterr().err
    assert run_main(monkeypatch, "trian") == 2
    assert run_main(monkeypatch, "report", "nowhere") == 2
    assert "there is no folder nowhere" in capsys.readouterr().err


def test_a_source_without_samples_is_an_error(
    tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from loaders.index import index_shards
    from tests.support.shards import write_tar

    shard = write_tar(tmp_path / "empty.tar", {})
    index_shards([str(shard)])
    assert run_main(monkeypatch, "train", str(run_file), "--sources.0.shards", str(shard)) == 2
    assert "captions" in capsys.readouterr().err


def test_config_show_names_the_origin_of_each_value(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "config", "show", str(run_file), "--optimizer.eps", "1e-7") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "optimizer.eps = 1e-07  # flag" in lines
    assert "optimizer.lr = 0.001  # file" in lines
    assert "optimizer.grad_clip = 1.0  # default" in lines


def test_flags_into_lists_keep_their_origin(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "config", "show", str(run_file), "--sources.0.weight", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "sources.0.weight = 2.0  # flag" in lines
    assert "sources.1.weight = 0.3  # file" in lines


def test_config_show_counts_parameters_and_operations(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model.size", "7b", "--order.seq_len", "8192"]
    assert run_main(monkeypatch, "config", "show", str(run_file), *flags) == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["llm", "7,615,616,512", "7.616"] in rows
    assert ["total", "8,931,806,720", "8.932"] in rows
    assert ["forward of the LLM, per token of a text of 8192 tokens", "15.78 GFLOP"] in rows
    assert not any("active" in row[0] for row in rows if row)


def test_config_show_as_json_is_the_settings_and_one_entry_more(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from omni_pipeline.app.run_config import RunConfig

    flags = ["--model.llm.experts.count", "16"]
    assert run_main(monkeypatch, "config", "show", str(run_file), "--json", *flags) == 0
    shown = json.loads(capsys.readouterr().out)
    counts = shown.pop("counts")
    config = RunConfig.model_validate(shown)
    assert counts == json.loads(json.dumps(model_counts(config).to_dict()))
    assert 0 < counts["active"] < counts["total"] == sum(counts["parameters"].values())


def test_examples_in_the_help_name_files_that_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).parents[2]
    commands = [name for name in COMMANDS if name != "data"]
    text = ""
    for name in commands:
        run_main(monkeypatch, name, "--help")
        text += capsys.readouterr().out
    named = set(re.findall(r"examples/[\w/.-]+", text))
    assert named
    assert [name for name in named if not (root / name).exists()] == []


@pytest.mark.parametrize("command", ["train", "demo", "report"])
def test_a_file_where_a_folder_should_be_is_a_config_error(
    command: str,
    tmp_path: Path,
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    arguments = {
        "train": ["train", str(run_file), "--run.dir", str(blocked)],
        "demo": ["demo", "--out", str(blocked)],
        "report": ["report", str(blocked)],
    }
    assert run_main(monkeypatch, *arguments[command]) == 2
    assert "fix:" in capsys.readouterr().err
