from pathlib import Path

import pytest

from omni_pipeline.app.run_dir import Event, RunDir
from omni_pipeline.core.errors import ConfigError


def test_one_run_at_a_time_holds_the_folder(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run").make()
    held = run.lock()
    with pytest.raises(ConfigError, match="another run writes to"):
        RunDir(tmp_path / "run").lock()
    held.close()
    run.lock().close()


def test_events_survive_a_cut_line_and_a_bad_byte(tmp_path: Path) -> None:
    run = RunDir(tmp_path).make()
    run.add_event(Event(3, "resumed at step 3"))
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "te\n\xff\n')
    run.add_event(Event(5, "resumed at step 5"))
    assert [event.step for event in run.events()] == [3, 5]


def test_a_file_in_the_way_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        RunDir(tmp_path / "run").make()
