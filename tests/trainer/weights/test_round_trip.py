"""In and out again: the same tensors bit by bit, settings that the library reads, the same logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.ranks import run_ranks
from tests.support.reference_library import transformers
from tests.trainer.weights.trained import train_a_step
from trainer.weights import importer
from trainer.weights.exporter import Exported, ExportSettings, export_weights
from trainer.weights.folder import open_weights
from trainer.weights.importer import import_weights

Folder = Callable[[str], Path]
KEPT = "audio_tower.audio_bos_eos_token.weight"
AS_STORED = ExportSettings(dtype=None, max_shard_bytes=10**9, like=None, llm_only=False, special={})


def quiet(done: int, total: int) -> None:
    """Show no progress."""


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_equal_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


def round_trip(source: Path, root: Path, settings: ExportSettings = AS_STORED) -> Exported:
    import_weights(source, root / "imported", progress=quiet)
    return export_weights(open_weights(root / "imported"), root / "exported", settings, progress=quiet)


@pytest.mark.parametrize("name", ["bf16", "fp32", "tied", "qwen2", "qwen3", "qwen3_moe"])
def test_a_round_trip_gives_the_same_tensors_and_settings(
    name: str, reference_folder: Folder, tmp_path: Path
) -> None:
    source = reference_folder(name)
    done = round_trip(source, tmp_path)
    assert_equal_tensors(tensors_of(source), tensors_of(tmp_path / "exported"))
    settings = [json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "exported")]
    assert settings[0] == settings[1]
    assert done.class_name == settings[0]["architectures"][0]
    assert done.made == ()
    assert (tmp_path / "exported" / "tokenizer_config.json").read_text() == '{"model_max_length": 32768}'
    assert (tmp_path / "exported" / "generation_config.json").exists()
    assert not (tmp_path / "imported" / "tokenizer_config.json").exists()


@pytest.mark.parametrize("name", ["fp32", "qwen3_moe"])
def test_a_round_trip_in_many_small_blocks_is_exact_too(
    name: str, reference_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer, "BLOCK_BYTES", 1000)
    round_trip(reference_folder(name), tmp_path)
    assert_equal_tensors(tensors_of(reference_folder(name)), tensors_of(tmp_path / "exported"))


def test_files_are_cut_at_the_largest_size_and_the_index_says_where_tensors_are(
    reference_folder: Folder, tmp_path: Path
) -> None:
    settings = ExportSettings(
        dtype=torch.bfloat16, max_shard_bytes=60_000, like=None, llm_only=False, special={}
    )
    done = round_trip(reference_folder("fp32"), tmp_path, settings)
    index = json.loads((tmp_path / "exported" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "exported").glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    wanted = tensors_of(reference_folder("fp32"))
    for path in files:
        assert path.stat().st_size < 60_000 + 10_000 or len(load_file(path)) == 1
        for name, tensor in load_file(path).items():
            assert index["weight_map"].pop(name) == path.name
            assert torch.equal(tensor, wanted.pop(name).to(torch.bfloat16))
    assert index["weight_map"] == wanted == {}
    assert index["metadata"]["total_size"] == done.num_bytes
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_published_whole_model_gives_its_thinker_and_the_rest_is_left_out(
    reference_folder: Folder, tmp_path: Path
) -> None:
    thinker = reference_folder("bf16")
    inner = tensors_of(thinker)
    whole = {f"thinker.{name}": tensor for name, tensor in inner.items()}
    whole |= {"talker.model.norm.weight": torch.ones(3), "token2wav.x": torch.ones(2)}
    (tmp_path / "whole").mkdir()
    save_file(whole, tmp_path / "whole" / "model.safetensors")
    settings = json.loads((thinker / "config.json").read_text())
    (tmp_path / "whole" / "config.json").write_text(
        json.dumps({"model_type": "qwen2_5_omni", "thinker_config": settings, "talker_config": {}})
    )
    done = import_weights(tmp_path / "whole", tmp_path / "imported", progress=quiet)
    assert done.left_out == ("talker.model.norm.weight", "token2wav.x")
    assert done.kept == ("encoders.audio.audio_bos_eos_token.weight",)
    export_weights(open_weights(tmp_path / "imported"), tmp_path / "exported", AS_STORED, progress=quiet)
    assert_equal_tensors(inner, tensors_of(tmp_path / "exported"))
    assert json.loads((tmp_path / "exported" / "config.json").read_text()) == settings


@pytest.mark.parametrize("name", ["bf16", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_a_trained_model_gives_the_same_logits_after_from_pretrained(
    name: str, reference_folder: Folder, tmp_path: Path
) -> None:
    source = reference_folder(name)
    import_weights(source, tmp_path / "imported", progress=quiet)
    tokens = torch.randint(0, 256, (24,), generator=torch.Generator().manual_seed(0))
    arguments = [tmp_path / "imported", tmp_path / "run", tokens]
    trained = run_ranks(2, train_a_step, args=arguments)[0]
    done = export_weights(
        open_weights(tmp_path / "run"),
        tmp_path / "exported",
        ExportSettings(dtype=None, max_shard_bytes=10**9, like=None, llm_only=name != "bf16", special={}),
        progress=quiet,
    )
    kind = getattr(transformers, done.class_name)
    model, told = kind.from_pretrained(tmp_path / "exported", dtype=torch.float32, output_loading_info=True)
    assert not any(told.values()), told
    with torch.no_grad():
        theirs = model(tokens.unsqueeze(0)).logits[0]
    torch.testing.assert_close(theirs, trained, atol=2e-5, rtol=1e-4)
    untrained = kind.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        first = untrained(tokens.unsqueeze(0)).logits[0]
    assert (first - theirs).abs().max() > 0.01
    exported, given = tensors_of(tmp_path / "exported"), tensors_of(source)
    assert exported.keys() == given.keys()
    assert all(tensor.dtype == torch.float32 for name, tensor in exported.items() if name != KEPT)
