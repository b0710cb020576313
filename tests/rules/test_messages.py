"""House rules on source text that no linter knows."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("omni_pipeline", "loaders", "balancer", "trainer")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def parsed() -> Iterator[tuple[Path, ast.Module]]:
    for path in FILES:
        yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def test_every_raise_has_one_message_string() -> None:
    """A comma between two strings makes a tuple of the message."""
    wrong = [
        f"{path}:{node.lineno}"
        for path, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
        and node.exc.func.id.endswith("Error")
        and len(node.exc.args) > 1
        and all(isinstance(arg, ast.Constant | ast.JoinedStr) for arg in node.exc.args[:2])
    ]
    assert wrong == []


def test_no_module_is_over_500_lines() -> None:
    long = {str(path.relative_to(ROOT)): n for path in FILES if (n := path.read_text().count("\n")) > 500}
    assert long == {}


def test_no_function_is_over_80_lines() -> None:
    long = [
        f"{path}:{node.name}"
        for path, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > 80
    ]
    assert long == []


def test_every_module_and_public_class_or_function_has_a_docstring() -> None:
    missing = []
    for path, tree in parsed():
        if ast.get_docstring(tree) is None:
            missing.append(str(path))
        for node in tree.body:
            public = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
            if public and ast.get_docstring(node) is None:  # type: ignore[arg-type]
                missing.append(f"{path}:{node.name}")  # type: ignore[attr-defined]
    assert missing == []


@pytest.mark.parametrize("name", ["utils", "helpers", "misc", "common"])
def test_no_module_is_a_drawer_for_everything(name: str) -> None:
    assert [str(path) for path in FILES if path.stem == name] == []
