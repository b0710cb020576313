"""The built wheel holds the four packages, their data files, and nothing else at top level."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_built_wheel_has_exactly_four_top_level_packages(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=110)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"balancer", "loaders", "omni_pipeline", "trainer"}
    for page in ("report_template.html", "page_macros.html", "page_style.css", "page_script.js"):
        assert f"omni_pipeline/app/{page}" in names
    assert "omni_pipeline/app/demo/media/LICENSES.md" in names
