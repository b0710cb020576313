"""``docs/settings.md`` and ``docs/run.schema.json``, made from ``RunConfig``: every setting has its line.

``python -m omni_pipeline.app.settings_page docs`` writes both; a rule test compares them with the code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omni_pipeline.app.run_config import RunConfig

HEAD = """\
# Settings of a run file

Made from the code by `make docs`. A flag is an assignment into the file: `--optimizer.lr 1e-4`,
`--sources.0.weight 2`. Precedence: flag, file, default. `omni config show FILE` prints all values and where
each comes from. `run.schema.json` beside this page lets editors complete and check a run file.

For `model`, a default that is shown as *by size* is that of the preset `model.size`, or the number of
`model.weights` if that is set.

| setting | type | default | meaning |
|---|---|---|---|
"""


def settings_page() -> str:
    """Return the page."""
    schema = RunConfig.model_json_schema()
    return HEAD + "".join(
        f"| `{name}` | {kind} | {default} | {text} |\n" for name, kind, default, text in _rows(schema)
    )


def schema_text() -> str:
    """Return the JSON Schema of a run file."""
    return json.dumps(RunConfig.model_json_schema(), indent=1) + "\n"


def main() -> None:
    """Write both files into the folder that is named on the command line."""
    folder = Path(sys.argv[1])
    (folder / "settings.md").write_text(settings_page(), encoding="utf-8")
    (folder / "run.schema.json").write_text(schema_text(), encoding="utf-8")


def _rows(schema: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    definitions = schema["$defs"]

    def walk(node: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, str, str]]:
        required = node.get("required", [])
        for name, item in node.get("properties", {}).items():
            place = f"{prefix}{name}"
            nested, suffix = _nested(item, definitions)
            if nested is not None and nested.get("properties"):
                yield from walk(nested, f"{place}{suffix}.")
                continue
            default = "required" if name in required else _default(item, place)
            text = item.get("description", "").replace("|", "\\|")
            yield place, _kind(item, definitions), default, text
            for choice in item.get("anyOf", []):
                if "$ref" in choice:
                    yield from walk(definitions[choice["$ref"].rpartition("/")[2]], f"{place}.")

    yield from walk(schema, "")


def _nested(item: dict[str, Any], definitions: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Return the table that a field holds, and how its place is written."""
    if "$ref" in item:
        return definitions[item["$ref"].rpartition("/")[2]], ""
    if item.get("type") == "array" and isinstance(item.get("items"), dict):
        return _nested(item["items"], definitions)[0], ".N"
    if item.get("type") == "object" and isinstance(item.get("additionalProperties"), dict):
        return _nested(item["additionalProperties"], definitions)[0], ".NAME"
    return None, ""


def _kind(item: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "enum" in item or "const" in item:
        return ", ".join(f"`{value}`" for value in item.get("enum", [item.get("const")]))
    if "anyOf" in item:
        return " or ".join(_kind(choice, definitions) for choice in item["anyOf"])
    if isinstance(item.get("additionalProperties"), dict):
        return f"table of {_kind(item['additionalProperties'], definitions)}"
    if item.get("type") == "array":
        inner = item.get("items") or {}
        return f"list of {_kind(inner, definitions)}" if inner else "list"
    return str(item.get("format") or item.get("type") or "table")


def _default(item: dict[str, Any], place: str) -> str:
    if place.startswith("model.") and place not in ("model.size", "model.weights"):
        return "*by size*"
    value = item.get("default")
    return "" if value is None else f"`{json.dumps(value)}`"


if __name__ == "__main__":
    main()
