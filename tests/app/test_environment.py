import pytest

from omni_pipeline.app.environment import Environment
from omni_pipeline.core.errors import ConfigError


def test_a_process_without_a_world_size_is_no_rank() -> None:
    assert Environment.read({"RANK": "1"}) is None


def test_torchrun_tells_the_place() -> None:
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert Environment.read(variables) == Environment(5, 8, 1, 4)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "x", "RANK": "0"}, "WORLD_SIZE is 'x'"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2, WORLD_SIZE 2"),
    ],
)
def test_a_wrong_variable_is_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Environment.read(variables)
