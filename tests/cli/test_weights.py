"""``omni weights``: what it prints, refuses, and loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.test_main import run_main
from tests.support.reference_files import write_thinker
from trainer.config import ModelConfig

CONFIG = ModelConfig(size="tiny")
KEPT = "audio_tower.audio_bos_eos_token.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinker(tmp_path_factory.mktemp("reference") / "hf", CONFIG)


def test_import_and_export_say_what_they_made(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inside, out = tmp_path / "in", tmp_path / "out"
    assert run_main(monkeypatch, "weights", "import", str(source), "--out", str(inside)) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{inside}: 200,160 parameters of vision, audio, llm (BF16, 0.00 GB)",
        "kept for export, in no forward: encoders.audio.audio_bos_eos_token.weight",
        f'start a run from it: [model] weights = "{inside}"',
    ]
    flags = ["--dtype", "fp32", "--max-shard-size", "0.2MB"]
    assert run_main(monkeypatch, "weights", "export", str(inside), "--out", str(out), *flags) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out}: Qwen2_5OmniThinkerForConditionalGeneration of {inside}, 0.00 GB in 5 files",
        "no tokenizer file: the model was trained on bytes, or give one with --like",
    ]
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        *(f"model-{number:05d}-of-00005.safetensors" for number in range(1, 6)),
        "model.safetensors.index.json",
    ]


def test_parts_that_are_not_written_are_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inside, out = tmp_path / "in", tmp_path / "out"
    assert run_main(monkeypatch, "weights", "import", str(source), "--out", str(inside)) == 0
    capsys.readouterr()
    assert run_main(monkeypatch, "weights", "export", str(inside), "--out", str(out), "--llm-only") == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        "left out, as Qwen2ForCausalLM has no such part: audio, vision"
    )
    assert not any("visual" in name for name in load_file(out / "model.safetensors"))


def test_json_says_the_same(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inside, out, like = tmp_path / "in", tmp_path / "out", tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text(json.dumps({"text_config": {}, "user_token_id": 11}))
    (like / "tokenizer.json").write_text("{}")
    assert run_main(monkeypatch, "weights", "import", str(source), "--out", str(inside), "--json") == 0
    assert json.loads(capsys.readouterr().out)["parts"] == ["vision", "audio", "llm"]
    flags = ["--like", str(like), "--json"]
    assert run_main(monkeypatch, "weights", "export", str(inside), "--out", str(out), *flags) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == ["config.json", "model.safetensors", "tokenizer.json"]
    settings = json.loads((out / "config.json").read_text())
    assert settings["user_token_id"] == 11
    assert settings["image_token_index"] == 259
    assert settings["text_config"]["hidden_size"] == CONFIG.llm.hidden


def test_config_show_says_what_comes_from_weights(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inside, run_file = tmp_path / "in", tmp_path / "run.toml"
    assert run_main(monkeypatch, "weights", "import", str(source), "--out", str(inside)) == 0
    run_file.write_text(
        f'run = {{ dir = "run", steps = 1 }}\norder = {{ lanes = 1, packs_per_step = 1, seq_len = 64 }}\n'
        f'[[sources]]\nname = "a"\nshards = "a.tar"\nlayout = {{ kind = "fields", fields = ["txt"] }}\n'
        f'[model]\nweights = "{inside}"\nllm = {{ layers = 2 }}\n'
    )
    capsys.readouterr()
    assert run_main(monkeypatch, "config", "show", str(run_file)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "model.llm.layers = 2  # file" in lines
    assert "model.llm.hidden = 64  # weights" in lines
    assert "optimizer.grad_clip = 1.0  # default" in lines
    assert run_main(monkeypatch, "config", "show", str(run_file), "--model.llm.layers", "3") == 2
    errors = capsys.readouterr().err
    assert errors.splitlines()[0] == "ConfigError: model.llm.layers is 3, the weights have 2"


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["import", "nowhere", "--out", "OUT"], 2, "there is no nowhere/config.json"),
        (["import", "SOURCE", "--out", "SOURCE"], 2, "--out SOURCE is there already"),
        (["export", "nowhere", "--out", "OUT"], 2, "nowhere holds no complete weights"),
        (["export", "SOURCE", "--out", "OUT", "--max-shard-size", "5XB"], 2, "'5XB' is no size"),
        (["export", "SOURCE", "--out", "OUT", "--dtype", "fp8"], 2, "'fp8' is not one of 'bf16', 'fp32'"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(
    flags: list[str],
    code: int,
    message: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"SOURCE": str(source), "OUT": str(tmp_path / "out")}
    assert run_main(monkeypatch, "weights", *(places.get(flag, flag) for flag in flags)) == code
    errors = capsys.readouterr().err
    assert message.replace("SOURCE", str(source)) in errors
    assert "Traceback" not in errors


def test_help_imports_no_torch() -> None:
    for name in ("import", "export"):
        code = f"import sys; sys.argv = ['omni', 'weights', {name!r}, '--help']\n"
        code += "from omni_pipeline.cli.main import main\n"
        code += "try:\n    main()\nexcept SystemExit:\n    sys.exit('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0
        assert f"Example: omni weights {name}" in done.stdout
