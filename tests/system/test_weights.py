"""Real runs that start from weights: they begin with them, continue with their own, and give them back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.ranks import run_ranks
from tests.support.reference_files import write_thinker
from tests.support.runs import be_rank, make_run, omni
from trainer.config import ModelConfig
from trainer.weights.exporter import ExportSettings, export_weights
from trainer.weights.folder import open_weights
from trainer.weights.importer import import_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

AS_STORED = ExportSettings(dtype=None, max_shard_bytes=10**9, like=None, llm_only=False, special={})


def quiet(done: int, total: int) -> None:
    """Show no progress."""


def assert_close_files(one: Path, other: Path) -> None:
    given, back = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert given.keys() == back.keys()
    for name, tensor in given.items():
        torch.testing.assert_close(back[name].float(), tensor.float(), rtol=0, atol=1e-20)


def test_a_run_starts_from_weights_and_then_continues_with_its_own(tmp_path: Path) -> None:
    source, imported = write_thinker(tmp_path / "hf", ModelConfig(size="tiny")), tmp_path / "imported"
    import_weights(source, imported, progress=quiet)
    run_file = make_run(tmp_path, steps=1)
    # Steps too small to change any number but zero.
    flags = ["--model.weights", str(imported), "--optimizer.lr", "1e-30", "--optimizer.weight_decay", "0"]
    run_ranks(2, be_rank, args=(run_file, 2, flags))
    export_weights(open_weights(tmp_path / "run"), tmp_path / "first", AS_STORED, progress=quiet)
    assert_close_files(source, tmp_path / "first")

    shutil.rmtree(imported)
    other = write_thinker(tmp_path / "other", ModelConfig(size="tiny"), seed=6)
    import_weights(other, imported, progress=quiet)
    run_ranks(1, be_rank, args=(run_file, 1, [*flags, "--run.steps", "2"]))
    weights = open_weights(tmp_path / "run")
    assert weights.path.name == "step-00000002"
    export_weights(weights, tmp_path / "second", AS_STORED, progress=quiet)
    assert_close_files(source, tmp_path / "second")


def test_a_number_that_is_not_finite_in_imported_weights_ends_the_run_before_a_step(tmp_path: Path) -> None:
    source = write_thinker(tmp_path / "hf", ModelConfig(size="tiny"))
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][95, 3] = torch.nan
    tensors["visual.merger.mlp.2.weight"].zero_()
    save_file(tensors, source / "model.safetensors")
    imported = tmp_path / "imported"
    import_weights(source, imported, progress=quiet)
    done = omni("train", str(make_run(tmp_path)), "--nproc", "2", "--model.weights", str(imported))
    assert done.returncode == 1
    assert (
        "DataError: parameters cannot be trained on; not finite: llm.layers.1.mlp.up_proj.weight; "
        "all zero: encoders.vision.merger.mlp.2.weight\n"
        f"  where: {imported}\n"
        "  fix:   take other weights, or import them again from a sound folder\n"
    ) in done.stderr
    assert done.stderr.count("DataError") == 1
    assert "Traceback" not in done.stderr
    assert "step 0" not in done.stdout + done.stderr


def test_a_run_takes_the_tokenizer_of_its_weights(tmp_path: Path) -> None:
    from omni_pipeline.app.run_config import RunConfig
    from omni_pipeline.core.config import load_config

    source = write_thinker(tmp_path / "hf", ModelConfig(size="tiny"))
    (source / "tokenizer.json").write_text("{}")
    import_weights(source, tmp_path / "imported", progress=quiet)
    run_file = make_run(tmp_path)
    flags = ["--model.weights", str(tmp_path / "imported")]
    taken = load_config(RunConfig, run_file, flags).tokenizer.path
    assert taken == tmp_path / "imported" / "reference" / "tokenizer.json"
    assert taken.is_file()
    own = load_config(RunConfig, run_file, [*flags, "--tokenizer.path", "own.json"])
    assert own.tokenizer.path == Path("own.json")
