"""What may be imported by what, beyond the import-linter contracts."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH_FREE = [
    "omni_pipeline.cli.main",
    "omni_pipeline.app.run_config",
    "omni_pipeline.app.launch",
    "loaders.decode.segment",
    "loaders.worker_main",
    "loaders.order",
    "balancer.planner",
    "trainer.config",
    "trainer.counts",
]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_imports_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_every_test_folder_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_wheel_lists_exactly_the_four_packages() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(packages) == ["balancer", "loaders", "omni_pipeline", "trainer"]
    assert all((ROOT / package / "py.typed").exists() for package in packages)
