"""What cannot be imported or exported is refused in words that say what, where, and what to do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from omni_pipeline.core.errors import ConfigError, DataError, OmniError
from tests.support.ranks import run_ranks
from tests.trainer.weights.conftest import config_of
from tests.trainer.weights.trained import refused_start
from trainer.weights import importer
from trainer.weights.exporter import ExportSettings, export_weights
from trainer.weights.folder import open_weights
from trainer.weights.importer import import_weights
from trainer.weights.reference_config import describe, thinker_settings

AS_STORED = ExportSettings(dtype=None, max_shard_bytes=10**9, like=None, llm_only=False, special={})
HEAD, TABLE, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"


def quiet(done: int, total: int) -> None:
    """Show no progress."""


@pytest.fixture
def source(reference_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A thinker in one file, to be damaged."""
    return Path(shutil.copytree(reference_folder("bf16"), tmp_path / "source"))


def refused(source: Path, kind: type[OmniError] = DataError) -> str:
    """Return the message of a refused import, which leaves nothing behind."""
    out = source.parent / "out"
    with pytest.raises(kind) as caught:
        import_weights(source, out, progress=quiet)
    assert [path.name for path in source.parent.iterdir() if "out" in path.name] == []
    return str(caught.value).replace(str(source), "SOURCE")


def change(source: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, source / "model.safetensors")


def test_all_tensors_that_do_not_fit_are_named_in_one_error(source: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for layer in range(2):
            for name in ("gate", "up", "down"):
                del tensors[f"model.layers.{layer}.mlp.{name}_proj.weight"]
        tensors["model.layers.7.extra"] = torch.ones(1)
        tensors[NORM] = torch.ones(65)
        tensors[HEAD] = tensors[HEAD].to(torch.int8)

    change(source, edit)
    assert refused(source) == (
        "6 missing tensors (model.layers.0.mlp.down_proj.weight, model.layers.0.mlp.gate_proj.weight, "
        "model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.down_proj.weight, ...)\n"
        "1 unexpected tensor (model.layers.7.extra)\n"
        f"1 tensor of another shape ({NORM} [65], wanted [64])\n"
        f"1 tensor not of F64, F32, F16, BF16 ({HEAD} I8)\n"
        "  where: SOURCE\n"
        "  fix:   give weights of the model that config.json describes"
    )


def test_a_head_that_is_said_to_be_tied_and_differs_is_refused(source: Path) -> None:
    settings = json.loads((source / "config.json").read_text())
    settings["tie_word_embeddings"] = True
    (source / "config.json").write_text(json.dumps(settings))
    assert refused(source).startswith(f"{HEAD} differs from {TABLE}, and tie_word_embeddings is true\n")
    change(source, lambda tensors: tensors.update({HEAD: tensors[TABLE].clone()}))
    import_weights(source, source.parent / "equal", progress=quiet)


def test_a_truncated_file_is_named_with_the_tensor_and_the_byte(source: Path) -> None:
    path = source / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    assert refused(source) == (
        f"visual.patch_embed.proj.weight ends at byte {size}, the file has {size - 1}\n"
        "  where: SOURCE/model.safetensors\n"
        "  fix:   fetch the file again: it is damaged or incomplete"
    )


def test_a_file_that_ends_while_it_is_read_leaves_nothing_behind(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = source / "model.safetensors"
    blocks = importer._blocks

    def cut_after_listing(*arguments: Any) -> Any:
        os.truncate(path, path.stat().st_size // 2)
        return blocks(*arguments)

    monkeypatch.setattr(importer, "_blocks", cut_after_listing)
    message = refused(source)
    assert message.startswith("SOURCE/model.safetensors ends ")
    assert message.endswith(" bytes early\n  fix:   fetch the file again: it is damaged or incomplete")


def test_weights_that_lack_a_parameter_are_neither_exported_nor_trained_on(
    source: Path, tmp_path: Path
) -> None:
    imported = tmp_path / "imported"
    import_weights(source, imported, progress=quiet)
    text = (imported / "model.json").read_text()
    llm = text.index('"llm": {')
    (imported / "model.json").write_text(text[:llm] + text[llm:].replace('"layers": 2', '"layers": 3', 1))
    with pytest.raises(DataError) as caught:
        export_weights(open_weights(imported), tmp_path / "exported", AS_STORED, progress=quiet)
    assert str(caught.value) == (
        "there is no parameter llm.layers.2.input_layernorm.weight\n"
        f"  where: {imported / 'tensors'}\n"
        "  fix:   export an earlier checkpoint, or import the weights again"
    )
    (message,) = run_ranks(1, refused_start, args=(imported,))
    names = ("input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.q_proj.bias")
    missing = "; ".join(f"llm.layers.2.{name} is missing" for name in names)
    assert message.startswith(f"the weights do not fit the model: {missing}; ")
    assert message.endswith(
        f"; and 8 more\n  where: {imported}\n"
        "  fix:   take weights of this model, or leave out the settings of [model] beside weights"
    )


@pytest.mark.parametrize("content", [b"", b"\x10", b"\xff" * 64, (4).to_bytes(8, "little") + b"[1]x"])
def test_a_file_that_is_no_container_is_refused(content: bytes, source: Path) -> None:
    (source / "model.safetensors").write_bytes(content)
    assert "\n  where: SOURCE/model.safetensors\n" in refused(source)


def test_a_missing_file_of_the_index_is_named(
    reference_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    source = Path(shutil.copytree(reference_folder("fp32"), tmp_path / "source"))
    gone = sorted(source.glob("*.safetensors"))[1]
    gone.unlink()
    assert refused(source) == (
        f"1 file ({gone.name}) of the index is missing\n"
        "  where: SOURCE/model.safetensors.index.json\n"
        "  fix:   fetch the folder again, all files of it"
    )


def test_an_index_cannot_name_files_elsewhere(source: Path) -> None:
    index = {"weight_map": {NORM: "../secret.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refused(source).startswith("the index names '../secret.safetensors', which is no file beside it\n")


def test_a_folder_without_safetensors_is_refused(source: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert refused(source) == (
        "there is neither model.safetensors nor model.safetensors.index.json\n"
        "  where: SOURCE\n"
        "  fix:   give a folder as `save_pretrained` writes it; other formats are not read"
    )


def test_settings_that_the_model_does_not_have_are_named_with_both_values(source: Path) -> None:
    settings = json.loads((source / "config.json").read_text())
    text = settings["text_config"]
    text |= {"hidden_act": "gelu", "use_sliding_window": True}
    text["rope_parameters"]["rope_type"] = "yarn"
    settings["vision_config"]["out_hidden_size"] = 5
    settings["position_id_per_seconds"] = 13
    (source / "config.json").write_text(json.dumps(settings))
    assert refused(source, ConfigError) == (
        "position_id_per_seconds is 13, this model has 25\n"
        "text_config.hidden_act is 'gelu', this model has 'silu'\n"
        "text_config.use_sliding_window is True, this model has False\n"
        "text_config.rope_parameters.rope_type is 'yarn', this model has 'default'\n"
        "vision_config.out_hidden_size is 5, text_config.hidden_size 64\n"
        "  where: SOURCE/config.json\n"
        "  fix:   these weights need a model that does this"
    )


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ('{"model_type": "llama"}', "model_type is 'llama'; known are qwen2_5_omni, qwen2_5_omni_thinker, "),
        ('{"model_type": "qwen3_moe"}', "num_hidden_layers is not given"),
        ("[]", "SOURCE/config.json is no JSON object"),
        ("{", "cannot read SOURCE/config.json: "),
        (None, "there is no SOURCE/config.json"),
    ],
)
def test_a_folder_of_another_model_is_refused(content: str | None, what: str, source: Path) -> None:
    (source / "config.json").unlink()
    if content is not None:
        (source / "config.json").write_text(content)
    assert refused(source, ConfigError).startswith(what)


def test_rotary_settings_of_earlier_versions_are_read() -> None:
    config = config_of()
    new = thinker_settings(config, like={}, special={}, dtype="bfloat16")
    old = json.loads(json.dumps(new))
    rope = old["text_config"].pop("rope_parameters")
    old["text_config"] |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"mrope_section": rope["mrope_section"], "type": "mrope"},
    }
    del old["vision_config"]["rope_parameters"]
    assert describe(old, where="") == describe(new, where="")
    assert describe(new, where="").model["llm"]["rope_theta"] == config.llm.rope_theta


def test_a_folder_that_is_taken_is_refused_both_ways(
    source: Path, reference_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    import_weights(source, taken, progress=quiet)  # an empty folder is as good as none
    message = f"--out {taken} is there already\n  fix:   give a new folder, or remove that one"
    with pytest.raises(ConfigError) as caught:
        import_weights(source, taken, progress=quiet)
    assert str(caught.value) == message
    with pytest.raises(ConfigError) as caught:
        export_weights(open_weights(taken), taken, AS_STORED, progress=quiet)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["nowhere", "source"])
def test_a_folder_without_weights_of_ours_is_refused(name: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_weights(tmp_path / name)
    assert str(caught.value) == (
        f"{tmp_path / name} holds no complete weights"
        + (": there is no such folder" if name == "nowhere" else "")
        + "\n  fix:   give a folder of `omni weights import`, a checkpoint, or the folder of a run with one"
    )


def test_incomplete_weights_are_refused(source: Path, tmp_path: Path) -> None:
    import_weights(source, tmp_path / "imported", progress=quiet)
    shard = next((tmp_path / "imported" / "tensors").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="holds no complete weights"):
        open_weights(tmp_path / "imported")


@pytest.mark.parametrize(
    ("llm", "why"),
    [
        ({"qk_norm": True}, "llm.qk_norm is True, a thinker has False"),
        ({"head_dim": 32, "rope_sections": [4, 6, 6]}, "llm.heads x llm.head_dim is 128, a thinker has 64"),
        ({"experts": {"count": 2, "top_k": 1}}, "llm.experts is given, a thinker has None"),
    ],
)
def test_a_model_that_no_thinker_is_says_why(llm: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        thinker_settings(config_of(**llm), like={}, special={}, dtype="float32")
    assert str(caught.value) == (
        f"the reference has no thinker like this: {why}\n"
        "  fix:   export the language model alone with --llm-only, if the reference has that"
    )
