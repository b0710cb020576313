"""A rebuilt step is bit for bit what the loader of that rank hands out, wherever it is rebuilt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from loaders.index import index_shards
from loaders.quarantine import read_quarantine
from omni_pipeline.app.rebuild import rebuild, table_of, write_arrays
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.run_dir import RunDir
from omni_pipeline.app.sinks import num_steps_trained
from omni_pipeline.core.batch import IGNORE_LABEL, Batch
from omni_pipeline.core.errors import ConfigError
from tests.support.loading import content
from tests.support.run_folder import config_of, load_steps, loader_of
from tests.support.runs import make_run
from tests.support.shards import caption_members, image_bytes, write_tar
from trainer.checkpoint_files import path_of, read_loader_state

BROKEN = "000005"


def write_captions(root: Path, picture: bytes) -> None:
    members = {**caption_members(16), f"{BROKEN}.jpg": picture}
    index_shards([str(write_tar(root / "captions-000000.tar", members))])


def make_broken_run(root: Path) -> Path:
    """A run with one picture that cannot be decoded, though its header can be read."""
    run_file = make_run(root)
    whole = image_bytes(84, 56, pixels=np.random.default_rng(0).integers(0, 255, (56, 84, 3), "u1"))
    write_captions(root, whole[: len(whole) // 2])
    return run_file


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_broken_run(tmp_path_factory.mktemp("rebuild"))


def config_in(folder: Path, run_file: Path, *flags: str) -> RunConfig:
    return config_of(run_file, "--run.dir", str(folder), "--loader.max_bad_fraction", "1", *flags)


def trained(batch: Batch) -> list[object]:
    """All that training reads; the state after the batch is no part of it."""
    return content(batch)[:-1]


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [(1, ()), (2, ()), (4, ()), (2, ("--order.bucketing", "{boundaries = [16, 32]}"))],
)
def test_every_rank_gets_the_same_bits_again_from_the_start_and_from_a_checkpoint(
    run_file: Path, tmp_path: Path, world_size: int, flags: tuple[str, ...]
) -> None:
    config = config_in(tmp_path / "run", run_file, *flags)
    steps = load_steps(config, 6, world_size=world_size, checkpoints=(3,))
    # Without metrics no step counts as trained, so each rank meets the failures by itself, as at first.
    folder = RunDir(config.run.dir)
    folder.metrics_path.unlink()
    before = folder.quarantine_path.read_bytes()
    for step in (0, 2, 3, 5):
        for rank in range(world_size):
            found = rebuild(config, step=step, rank=rank, world_size=world_size)
            assert str(found.start) == ("step 0" if step < 3 else "the checkpoint at step 3")
            assert trained(found.batch) == trained(steps[step][rank])
            assert {record.sample_id for record in found.failures} == found.batch.failed
    assert folder.quarantine_path.read_bytes() == before
    assert any(batch.failed for batches in steps for batch in batches)


def test_a_failure_of_a_trained_step_is_repeated_on_another_world_size_though_the_picture_is_mended(
    tmp_path: Path,
) -> None:
    run_file = make_broken_run(tmp_path)
    config = config_in(tmp_path / "run", run_file)
    load_steps(config, 8, checkpoints=(1,))
    write_captions(tmp_path, image_bytes(84, 56, seed=4))
    folder = RunDir(config.run.dir)
    assert any(1 <= record.step < 8 for record in read_quarantine(folder.quarantine_path))
    state = read_loader_state(path_of(folder.checkpoints, 1))
    num_repeated = 0
    for rank in range(2):
        with loader_of(config, rank=rank, world_size=2) as loader:
            loader.load_state_dict(state, honour_until=num_steps_trained(folder.metrics_path))
            for step in range(1, 8):
                found = rebuild(config, step=step, rank=rank, world_size=2)
                assert trained(found.batch) == trained(next(loader))
                assert not found.failures
                num_repeated += len(found.repeated)
                for microbatch in found.batch.microbatches:
                    for span in microbatch.spans:
                        if span.id in found.repeated:
                            assert set(microbatch.labels[span.start : span.end]) == {IGNORE_LABEL}
    assert num_repeated >= 1


def test_the_file_is_read_by_numpy_without_pickle_and_holds_what_the_table_says(
    run_file: Path, tmp_path: Path
) -> None:
    config = config_in(tmp_path / "run", run_file)
    found = rebuild(config, step=1, rank=1, world_size=2)
    arrays = found.arrays()
    write_arrays(tmp_path / "step.npz", arrays)
    with np.load(tmp_path / "step.npz", allow_pickle=False) as file:
        loaded = {name: file[name] for name in file.files}
    assert table_of(loaded) == table_of(arrays)
    microbatches = found.batch.microbatches
    assert {name.partition("/")[0] for name in loaded} == {str(item.index) for item in microbatches}
    for item in microbatches:
        assert loaded[f"{item.index}/tokens"].tobytes() == item.tokens.tobytes()
        assert loaded[f"{item.index}/vision/values"].tobytes() == item.inputs["vision"].values.tobytes()
        assert loaded[f"{item.index}/samples"].tolist() == [f"{s.id.source}/{s.key}" for s in item.spans]
        assert loaded[f"{item.index}/reshard/take_rows"].tolist() == item.reshard.take_rows.tolist()
        for number, hop in enumerate(item.reshard.hops):
            send_rows = loaded[f"{item.index}/reshard/hop{number}/send_rows"]
            assert send_rows.tolist() == hop.send_rows.tolist()
    assert set(found.arrays(0)) == {name for name in arrays if name.startswith("0/")}


def test_what_is_not_there_is_a_clear_error(run_file: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path / "run", run_file)
    with pytest.raises(ConfigError, match="there is no rank 2: a run on 2 has ranks 0 to 1"):
        rebuild(config, step=0, rank=2, world_size=2)
    found = rebuild(config, step=0, rank=0, world_size=2)
    with pytest.raises(ConfigError, match="there is no microbatch 9: the step has 2"):
        found.arrays(9)
    with pytest.raises(ConfigError, match="No such file or directory"):
        write_arrays(tmp_path / "none" / "step.npz", found.arrays())
    assert not list(tmp_path.glob(".*tmp"))


def test_rebuilding_needs_no_torch(run_file: Path, tmp_path: Path) -> None:
    arguments = ["omni", "plan", str(run_file), "--run.dir", str(tmp_path), "--rebuild", "1"]
    code = f"import sys; sys.argv = {arguments!r}\nfrom omni_pipeline.cli.main import main\n"
    code += "try:\n    main()\nexcept SystemExit as end:\n    sys.exit(end.code or 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "0/tokens" in done.stdout
