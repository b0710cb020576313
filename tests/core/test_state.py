import pytest

from omni_pipeline.core.errors import StateMismatchError
from omni_pipeline.core.seeding import generator
from omni_pipeline.core.state import check_head


def test_a_state_of_another_run_is_refused_with_both_values() -> None:
    state = {"version": 1, "identity": {"seed": 1, "lanes": 8}}
    check_head(state, version=1, identity={"seed": 1, "lanes": 8}, where="x")
    with pytest.raises(StateMismatchError, match="'lanes' was 8 when saved, is 4"):
        check_head(state, version=1, identity={"seed": 1, "lanes": 4}, where="x")
    nested = {"version": 1, "identity": {"model": {"llm": {"layers": 2, "width": 64}}}}
    with pytest.raises(StateMismatchError, match=r"'model.llm.layers' was 2 when saved, is not set here"):
        check_head(nested, version=1, identity={"model": {"llm": {"width": 64}}}, where="x")
    with pytest.raises(StateMismatchError, match="version 1, this program reads 2"):
        check_head(state, version=2, identity={"seed": 1, "lanes": 8}, where="x")


def test_generators_depend_on_seed_purpose_and_place_only() -> None:
    draws = {
        (seed, purpose, place): int(generator(seed, purpose, place).integers(1 << 60))
        for seed in (0, 1)
        for purpose in ("a", "b")
        for place in (0, 1)
    }
    assert len(set(draws.values())) == 8
    assert draws[0, "a", 1] == int(generator(0, "a", 1).integers(1 << 60))
