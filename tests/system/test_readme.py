"""The commands of the README work as pasted, in a folder that is laid out like a clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pasted_commands() -> list[str]:
    """Return the shell blocks of the README but those that call make, which set up or test."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return [block for block in blocks if not block.startswith("make")]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_commands_of_the_readme_work_as_pasted(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "omni_pipeline").symlink_to(ROOT / "omni_pipeline")  # the manifest names its media
    bin_folder = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    commands = pasted_commands()
    assert len(commands) == 4
    for block in commands:
        done = subprocess.run(
            ["bash", "-e", "-c", block],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "runs" / "own" / "report.html").exists()
    assert sorted(path.name for path in (tmp_path / "runs/own/checkpoints").iterdir())[-1] == "step-00000030"
