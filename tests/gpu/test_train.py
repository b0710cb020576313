"""A whole run on a CUDA device; the same code as on a CPU, so the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.runs import losses, make_run, omni

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_on_a_gpu_has_the_losses_of_a_cpu(precision: str, tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    on_cpu = omni("train", str(run_file), "--run.dir", str(tmp_path / "cpu"), CUDA_VISIBLE_DEVICES="")
    assert on_cpu.returncode == 0, on_cpu.stderr
    on_gpu = omni("train", str(run_file), "--run.dir", str(tmp_path / "gpu"), "--run.precision", precision)
    assert on_gpu.returncode == 0, on_gpu.stderr
    tolerance = 1e-3 if precision == "fp32" else 3e-2
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=tolerance)
