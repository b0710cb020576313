"""TOML file + flags -> one validated, frozen pydantic model, with errors in this project's form.

A flag is a TOML assignment: ``--optimizer.lr 1e-3`` is ``optimizer.lr = 1e-3``; ``--sources.0.weight 2``
reaches into a list. File and flags are merged as plain data, then validated once. Precedence: flag, file,
default.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from omni_pipeline.core.errors import ConfigError

ModelT = TypeVar("ModelT", bound=BaseModel)
SETTINGS_FIX = "see docs/settings.md, or `omni config show FILE`"


def load_config(model: type[ModelT], path: Path, flags: Sequence[str] = ()) -> ModelT:
    """Read ``path``, apply ``flags`` (``--a.b value`` or ``--a.b=value``) and validate.

    Raises:
        ConfigError: The file is missing or no TOML, a flag is malformed, or a setting is wrong.
    """
    return validate(model, merge_flags(read_toml(path), flags), where=str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        ConfigError: Missing, unreadable, or not TOML (with line and column).
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}", fix="give the path of a run file (TOML)") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", fix="give the path of a run file (TOML)") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"not valid TOML: {error}", where=str(path), fix="mend the line named above"
        ) from error


def merge_flags(data: dict[str, Any], flags: Sequence[str]) -> dict[str, Any]:
    """Return ``data`` with the assignments of ``flags`` made in it.

    Raises:
        ConfigError: A flag without a name or value, or one that reaches into something that is no table.
    """
    merged: dict[str, Any] = _copy(data)
    for name, text in assignments(flags):
        _assign(merged, name, _parse_value(text))
    return merged


def assignments(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, value as text) of each flag.

    Raises:
        ConfigError: A flag without a name or value.
    """
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or len(flag) == 2:
            raise ConfigError(f"unexpected argument {flag!r}", fix="write settings as --section.key value")
        name, equals, text = flag[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"flag --{name} has no value", fix=f"write --{name} VALUE")
            text = rest.pop(0)
        yield name, text


def validate(model: type[ModelT], data: dict[str, Any], *, where: str, fix: str = SETTINGS_FIX) -> ModelT:
    """Return ``model`` made of ``data``; ``fix`` is what to tell a reader of its errors.

    Raises:
        ConfigError: Every wrong setting, one per line, with the nearest known name for unknown ones.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [_describe(model, item) for item in error.errors()]
        raise ConfigError("\n".join(lines), where=where, fix=fix) from error


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def _parse_value(text: str) -> Any:
    """Return the TOML value where it is one (number, boolean, array, table), else the bare string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _assign(data: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.split(".")
    here: Any = data
    for depth, key in enumerate([*parents, last]):
        is_last = depth == len(parents)
        if isinstance(here, list):
            if not key.isdigit() or int(key) >= len(here):
                raise ConfigError(
                    f"flag --{name}: {key!r} is no place in a list of {len(here)}", fix="count from 0"
                )
            if is_last:
                here[int(key)] = value
            else:
                here = here[int(key)]
        elif isinstance(here, dict):
            if is_last:
                here[key] = value
            else:
                here = here.setdefault(key, {})
        else:
            raise ConfigError(
                f"flag --{name} reaches into {'.'.join(parents[:depth])!r}, which is a plain value",
                fix="set the value itself",
            )


def _describe(model: type[BaseModel], item: Any) -> str:
    setting = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(item["loc"][-1]), _names_beside(model, item["loc"]), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"unknown setting {setting!r}{hint}"
    if item["type"] == "missing":
        return f"setting {setting!r} is required"
    message = str(item["msg"]).removeprefix("Value error, ")
    prefix = f"setting {setting!r}: " if setting else ""
    if isinstance(item["input"], str | int | float | bool):
        return f"{prefix}{message}, got {item['input']!r}"
    return f"{prefix}{message}"


def _names_beside(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Names allowed where an unknown one stood: all field names of every model reachable at that depth."""
    here: list[type[BaseModel]] = [model]
    for part in location[:-1]:
        here = [
            nested
            for parent in here
            for name, field in parent.model_fields.items()
            if isinstance(part, int) or name == part or part not in parent.model_fields
            for nested in _models_in(field.annotation)
        ] or here
    return sorted({name for parent in here for name in parent.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in getattr(annotation, "__args__", ()) for found in _models_in(inner)]
