"""``--mixture name=0.7,other=0.3``: a run's sources at other shares."""

from __future__ import annotations

import difflib
import math

from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.core.errors import ConfigError

FORM = "write --mixture NAME=SHARE,NAME=SHARE, shares being numbers above 0"


def with_mixture(config: RunConfig, text: str) -> RunConfig:
    """Return ``config`` with the named sources at these constant shares, and no other source.

    Groups of sources no longer count: the shares are those of the whole mixture.

    Raises:
        ConfigError: Not of the form, a share that is no number above 0, or an unknown source.
    """
    shares = _parse(text)
    names = [source.name for source in config.sources]
    for name in shares:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the sources are {', '.join(names)}"
            raise ConfigError(f"--mixture names source {name!r}, which the run does not have", fix=hint)
    sources = [
        source.model_copy(update={"weight": shares[source.name], "group": None})
        for source in config.sources
        if source.name in shares
    ]
    return config.model_copy(update={"sources": sources, "groups": {}})


def _parse(text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (word.strip() for word in part.partition("="))
        try:
            share = float(number)
        except ValueError:
            share = math.nan
        if not (name and equals and math.isfinite(share) and share > 0):
            raise ConfigError(f"--mixture has {part.strip()!r}", fix=FORM)
        if name in shares:
            raise ConfigError(f"--mixture names source {name!r} twice", fix=FORM)
        shares[name] = share
    return shares
