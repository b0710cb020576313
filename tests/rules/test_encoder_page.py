"""The page on attached encoders shows the example as it is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_python_block_of_the_page_stands_in_the_example() -> None:
    page = (ROOT / "docs" / "encoders.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / "depth" / "depth_encoder.py").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        assert block in example
