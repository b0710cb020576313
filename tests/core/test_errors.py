import pickle

import pytest

from omni_pipeline.core import errors


def all_errors() -> list[type[errors.OmniError]]:
    found = [errors.OmniError]
    for kind in found:
        found.extend(kind.__subclasses__())
    return found


@pytest.mark.parametrize("kind", all_errors())
def test_every_error_survives_pickling(kind: type[errors.OmniError]) -> None:
    error = kind("what", where="here", fix="so")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error) == "what\n  where: here\n  fix:   so"


def test_wrong_settings_and_states_exit_2_all_else_1() -> None:
    codes = {kind.__name__: kind.exit_code for kind in all_errors()}
    assert {name for name, code in codes.items() if code == 2} == {"ConfigError", "StateMismatchError"}
