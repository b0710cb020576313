"""What a machine can do, as data: rates, latencies and memory of one rank.

Profiles are TOML files. Some are shipped (``known_hardware``): data-sheet figures of machines, with what is
assumed said beside it; ``omni profile --calibrate`` writes one of the machine it runs on. Costs must be the
same float on every rank, so the efficiency curve is read with exact operations only: no library logarithm.
"""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from omni_pipeline.core.config import validate
from omni_pipeline.core.errors import ConfigError

PROFILES = Path(__file__).parent / "hardware_profiles"
ROUNDING = 1 + 1e-9
FIX = "see docs/costs.md for what a hardware profile holds"


class HardwareProfile(BaseModel):
    """The rates of one rank (one GPU, or one core) and of what joins ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="What people call the machine.")
    ranks_per_node: int = Field(ge=1, description="Ranks joined by the fast links.")
    memory_bytes: float = Field(gt=0, description="Memory of one rank.")
    flops_per_s: float = Field(gt=0, description="Peak of one rank, dense, in the run's precision.")
    hbm_bytes_per_s: float = Field(gt=0, description="Memory bandwidth of one rank.")
    node_bytes_per_s: float = Field(gt=0, description="Inside a node, per rank and direction.")
    node_latency_s: float = Field(ge=0, description="One message or collective inside a node.")
    network_bytes_per_s: float = Field(gt=0, description="Between nodes, per rank and direction.")
    network_latency_s: float = Field(ge=0, description="One message or collective between nodes.")
    kernel_s: float = Field(0.0, ge=0, description="Start of one kernel.")
    efficiency: tuple[tuple[float, float], ...] = Field(
        ((1.0, 1.0),),
        min_length=1,
        description="(tokens in one kernel, attained fraction of the peak), rising.",
    )

    @model_validator(mode="after")
    def _check_curve(self) -> Self:
        for tokens, fraction in self.efficiency:
            if tokens < 1 or not 0 < fraction <= 1:
                raise ValueError(
                    f"efficiency point ({tokens}, {fraction}) is not (>= 1 token, 0 < fraction <= 1)"
                )
        for (few, low), (many, high) in itertools.pairwise(self.efficiency):
            if not few < many or high < low:
                raise ValueError(f"efficiency falls or turns back between {few} and {many} tokens")
            if high - low > low * (_log2(many) - _log2(few)) * ROUNDING:
                # More tokens would take less time, and plans would add work to save time.
                raise ValueError(f"efficiency rises faster than tokens between {few} and {many} tokens")
        return self

    def attained(self, num_tokens: int) -> float:
        """Return the operations per second of kernels over ``num_tokens`` tokens.

        Linear in the (piecewise linear) logarithm between the points of ``efficiency``, flat outside.
        """
        points = self.efficiency
        if num_tokens <= points[0][0]:
            return self.flops_per_s * points[0][1]
        for (few, low), (many, high) in itertools.pairwise(points):
            if num_tokens < many:
                place = (_log2(num_tokens) - _log2(few)) / (_log2(many) - _log2(few))
                return self.flops_per_s * (low + (high - low) * place)
        return self.best_flops_per_s

    @property
    def best_flops_per_s(self) -> float:
        """Operations per second of the largest kernels."""
        return self.flops_per_s * self.efficiency[-1][1]


def efficiency_curve(measured: Sequence[tuple[int, float]]) -> tuple[tuple[float, float], ...]:
    """Return a curve that ``HardwareProfile`` takes, close to what was measured.

    Measurements scatter. A point below one of fewer tokens is raised to it, and one that lies so low that
    more tokens would take less time is raised as far as needed.

    Args:
        measured: (tokens, attained fraction of the peak), tokens rising, fractions above 0.
    """
    curve: list[tuple[float, float]] = []
    for tokens, fraction in measured:
        curve.append((float(tokens), min(1.0, max(fraction, curve[-1][1] if curve else 0.0))))
    for index in range(len(curve) - 2, -1, -1):
        (few, low), (many, high) = curve[index], curve[index + 1]
        curve[index] = (few, max(low, high / (1 + _log2(many) - _log2(few))))
    return tuple(curve)


def known_hardware() -> list[str]:
    """Return the names of the shipped profiles."""
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def load_hardware(name: str) -> HardwareProfile:
    """Return a profile by the name of a shipped one, or by path (with a slash, or ending in .toml).

    Raises:
        ConfigError: No such profile or file, or its content is wrong.
    """
    is_path = "/" in name or name.endswith(".toml")
    path = Path(name) if is_path else PROFILES / f"{name}.toml"
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"balance.hardware: there is no {'file' if is_path else 'profile'} {name!r}",
            fix=f"known profiles: {', '.join(known_hardware())}; or give the path of a TOML file",
        ) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"balance.hardware: cannot read {path}: {error}", fix=FIX) from error
    return validate(HardwareProfile, data, where=str(path), fix=FIX)


def save_hardware(path: Path, profile: HardwareProfile, *, comment: str) -> None:
    """Write ``profile`` as TOML under a one-line ``comment``; ``path`` appears whole or not at all."""
    values = profile.model_dump(mode="json")
    # JSON's strings, numbers and lists are TOML's.
    lines = [f"# {comment}", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    partial = path.with_name(path.name + ".partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(path)


def _log2(value: float) -> float:
    """A logarithm that is exact at powers of two and linear between: the same bits on every machine."""
    fraction, exponent = math.frexp(value)
    return exponent + 2 * fraction - 2
