"""What messages and docstrings tell people to type exists."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import click

from omni_pipeline.cli.main import COMMANDS, PACKAGES

ROOT = Path(__file__).parents[2]
_NAMED = re.compile(r"\bomni ([a-z]+)(?: ([a-z]+))?((?: --[a-z-]+)*)")


def named_commands(text: str) -> list[str]:
    """The commands that ``text`` names and that do not exist."""
    wrong = []
    for match in _NAMED.finditer(text):
        name, below, options = match.groups()
        if name not in COMMANDS:
            wrong.append(match[0])
            continue
        command = importlib.import_module(COMMANDS[name][0]).command
        if isinstance(command, click.Group) and below is not None:
            if below not in command.commands:
                wrong.append(match[0])
                continue
            command = command.commands[below]
        known = {option for parameter in command.params for option in parameter.opts}
        wrong.extend(f"{match[0]}: {option}" for option in options.split() if option not in known)
    return wrong


def test_every_command_that_a_string_names_exists() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {found}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for found in named_commands(node.value)
    ]
    assert wrong == []


def test_the_rule_sees_commands_sub_commands_and_options_that_do_not_exist() -> None:
    assert named_commands("see `omni data mend`, or `omni view X`") == ["omni data mend", "omni view"]
    assert named_commands("`omni data index --swiftly x`") == ["omni data index --swiftly: --swiftly"]
    assert named_commands("`omni data index --force x`; ``omni data``: shards; omni train run.toml") == []
