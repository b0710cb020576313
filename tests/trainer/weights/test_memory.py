"""Memory stays near one block on the way in, near the largest parameter on the way out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from tests.support.reference_files import write_thinker
from trainer.checkpoint_files import STATE_NAME, TENSORS_NAME, publish, seal
from trainer.config import ModelConfig
from trainer.model.omni import build_model
from trainer.weights.safetensors_file import BLOCK_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# First a tiny model, since code that is first used is loaded then.
MEASURE = """
import json, sys
from pathlib import Path
from trainer.weights.exporter import ExportSettings, export_weights
from trainer.weights.folder import open_weights
from trainer.weights.importer import import_weights

def in_status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def grown(action):
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is used now
    before = in_status("VmRSS")
    action()
    return in_status("VmHWM") - before

root = Path(sys.argv[1])
settings = ExportSettings(dtype=None, max_shard_bytes=10**9, like=None, llm_only=False, special={})

def take(source, out):
    import_weights(root / source, root / out, progress=lambda done, total: None)

def give(source, out):
    export_weights(open_weights(root / source), root / out, settings, progress=lambda done, total: None)

take("tiny", "tiny-in")
give("tiny-in", "tiny-out")
found = {
    "import": grown(lambda: take("hf", "in")),
    "export": grown(lambda: give("in", "out")),
    "export of a run": grown(lambda: give("run", "out-of-run")),
}
print(json.dumps(found))
"""
CONFIG = ModelConfig.model_validate(
    {
        "size": "tiny",
        "llm": {
            "layers": 12,
            "hidden": 1024,
            "intermediate": 4096,
            "head_dim": 256,
            "rope_sections": [32, 48, 48],
            "vocab_size": 20_000,
        },
    }
)
SLACK_BYTES = 40 * 2**20  # lists of tensors, and what the allocator keeps


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    hf = write_thinker(tmp_path / "hf", CONFIG)
    write_thinker(tmp_path / "tiny", ModelConfig(size="tiny"))
    model_bytes = (hf / "model.safetensors").stat().st_size
    draft = tmp_path / "draft"
    draft.mkdir()
    model = build_model(CONFIG).to(torch.bfloat16)
    largest_bytes = max(parameter.nbytes for parameter in model.parameters())
    # One rank without shards: every parameter is stored in one piece.
    save_tensors({"model": model.state_dict()}, checkpoint_id=draft / TENSORS_NAME, no_dist=True)
    seal(draft, {STATE_NAME: {"identity": {"model": CONFIG.model_dump(mode="json")}}})
    publish(draft, tmp_path / "run")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout)
    bounds = {
        "import": 2 * BLOCK_BYTES,
        "export": largest_bytes + 2 * BLOCK_BYTES,
        "export of a run": 2 * largest_bytes + BLOCK_BYTES,
    }
    for what, bound in bounds.items():
        assert grown[what] < bound + SLACK_BYTES < model_bytes / 2, (what, grown, bound, model_bytes)
