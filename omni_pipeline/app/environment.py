"""Who this process is in the run: the variables that torchrun (or ``app.launch``) sets. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from omni_pipeline.core.errors import ConfigError


@dataclass(frozen=True)
class Environment:
    """The place of one rank."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment | None:
        """Return the place of this process, or None if nobody made it a rank (no WORLD_SIZE).

        Raises:
            ConfigError: A variable is missing, no number, or out of range.
        """
        values = os.environ if variables is None else variables
        if "WORLD_SIZE" not in values:
            return None
        world_size = _number(values, "WORLD_SIZE", minimum=1)
        place = cls(
            rank=_number(values, "RANK"),
            world_size=world_size,
            local_rank=_number(values, "LOCAL_RANK", default=0),
            local_world_size=_number(values, "LOCAL_WORLD_SIZE", default=world_size, minimum=1),
        )
        if place.rank >= world_size:
            raise ConfigError(f"RANK is {place.rank}, WORLD_SIZE {world_size}", fix="count ranks from 0")
        return place


def _number(values: Mapping[str, str], name: str, *, default: int | None = None, minimum: int = 0) -> int:
    text = values.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit() or int(text) < minimum:
        found = "is not set" if text is None else f"is {text!r}"
        raise ConfigError(
            f"WORLD_SIZE is set, so this process is a rank, but {name} {found}",
            fix="start it with torchrun, or unset WORLD_SIZE and use --nproc",
        )
    return int(text)
