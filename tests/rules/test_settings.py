"""Every setting has its line in docs/settings.md, and the shipped schema is that of the code."""

from pathlib import Path

from omni_pipeline.app.settings_page import schema_text, settings_page

DOCS = Path(__file__).parents[2] / "docs"
MEND = "run `make docs`"


def test_the_settings_page_is_that_of_the_code() -> None:
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == settings_page(), MEND


def test_the_schema_is_that_of_the_code() -> None:
    assert (DOCS / "run.schema.json").read_text(encoding="utf-8") == schema_text(), MEND


def test_every_setting_has_a_meaning() -> None:
    rows = [line for line in settings_page().splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert [row for row in rows if row.endswith("|  |")] == []
