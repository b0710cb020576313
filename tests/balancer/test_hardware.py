"""Hardware profiles: shipped ones load, wrong ones say so, the efficiency curve is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from balancer.hardware import HardwareProfile, efficiency_curve, known_hardware, load_hardware, save_hardware
from omni_pipeline.core.errors import ConfigError
from tests.support.hardware import flat_hardware


def with_curve(*points: tuple[float, float]) -> HardwareProfile:
    """Return a machine of 1000 operations/s with this efficiency curve."""
    data = flat_hardware(flops_per_s=1000).model_dump()
    return HardwareProfile.model_validate({**data, "efficiency": points})


@pytest.mark.parametrize("name", ["cpu", "h100", "h200"])
def test_shipped_profiles_load_and_bear_their_name(name: str) -> None:
    assert name in known_hardware()
    assert load_hardware(name).name == name


def test_the_data_sheets_are_those_of_the_makers() -> None:
    one, two = load_hardware("h100"), load_hardware("h200")
    assert (one.flops_per_s, one.hbm_bytes_per_s, one.memory_bytes) == (989e12, 3.35e12, 80e9)
    assert (two.flops_per_s, two.hbm_bytes_per_s, two.memory_bytes) == (989e12, 4.8e12, 141e9)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    profile = load_hardware("h100").model_copy(update={"name": 'here "and" there'})
    path = tmp_path / "mine.toml"
    save_hardware(path, profile, comment="Measured.")
    assert load_hardware(str(path)) == profile
    assert path.read_text().startswith("# Measured.\n")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        load_hardware("h300")
    assert str(caught.value) == (
        "balance.hardware: there is no profile 'h300'\n"
        "  fix:   known profiles: cpu, h100, h200; or give the path of a TOML file"
    )


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file '.*mine\.toml'"):
        load_hardware(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [("name = ", "cannot read"), ('name = "x"\nspeed = 1', "unknown setting 'speed'"), ("\0", "cannot read")],
)
def test_wrong_content_says_so(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_hardware(str(path))


def test_efficiency_is_linear_in_the_logarithm_and_flat_outside() -> None:
    machine = with_curve((64, 0.25), (256, 0.5), (1024, 0.75))
    found = [machine.attained(tokens) for tokens in (1, 64, 128, 192, 256, 512, 1024, 10**9)]
    assert found == [250, 250, 375, 437.5, 500, 625, 750, 750]
    assert machine.best_flops_per_s == 750


@given(st.integers(1, 40_000))
def test_more_tokens_never_take_less_time(tokens: int) -> None:
    machine = load_hardware("h100")
    assert (tokens + 1) / machine.attained(tokens + 1) >= tokens / machine.attained(tokens)


@given(
    st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0.001, 1.5)), min_size=1, unique_by=lambda p: p[0])
)
def test_any_measurement_gives_a_curve_that_a_profile_takes(measured: list[tuple[int, float]]) -> None:
    measured.sort()
    curve = with_curve(*efficiency_curve(measured)).efficiency
    assert [tokens for tokens, _ in curve] == [tokens for tokens, _ in measured]
    # Points are only raised, and never above the largest measurement.
    top = min(1.0, max(fraction for _, fraction in measured))
    for (_, fraction), (_, found) in zip(measured, curve, strict=True):
        assert min(1.0, fraction) <= found <= top


def test_a_curve_that_was_measured_well_stays_as_it_is() -> None:
    assert efficiency_curve([(64, 0.25), (128, 0.5), (512, 0.75)]) == ((64, 0.25), (128, 0.5), (512, 0.75))
    assert efficiency_curve([(64, 0.1), (128, 0.5), (256, 0.4)]) == ((64, 0.25), (128, 0.5), (256, 0.5))


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (((0, 0.5),), "is not"),
        (((1, 1.5),), "is not"),
        (((1, 0.5), (2, 0.4)), "falls"),
        (((2, 0.5), (2, 0.6)), "turns back"),
        (((64, 0.1), (128, 0.21)), "faster than tokens"),
        ((), "at least 1"),
    ],
)
def test_a_wrong_curve_is_refused(points: tuple[tuple[float, float], ...], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        with_curve(*points)
