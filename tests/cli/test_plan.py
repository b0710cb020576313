"""``omni plan``: what it prints, on which width, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.order import Order
from omni_pipeline.app.data_end import DATA_ENDED
from omni_pipeline.app.run_dir import Event, RunDir
from omni_pipeline.cli.progress import ProgressBar
from tests.cli.test_main import run_main
from tests.support.run_folder import config_of, load_steps, write_metrics
from tests.support.runs import make_run


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_file = make_run(tmp_path_factory.mktemp("plan"))
    load_steps(config_of(run_file), 5, world_size=2, checkpoints=(4,))
    return run_file


class Plan:
    """Runs ``omni plan`` on one run file."""

    def __init__(
        self, run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.run_file, self.monkeypatch, self.capsys = run_file, monkeypatch, capsys

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Standard output of a call that ends with 0, standard error of one that does not."""
        assert run_main(self.monkeypatch, "plan", str(self.run_file), *arguments) == code
        captured = self.capsys.readouterr()
        assert code or not captured.err
        assert "Traceback" not in captured.err
        return captured.err if code else captured.out

    def json(self, *arguments: str) -> dict[str, Any]:
        found = json.loads(self("--json", *arguments))
        assert isinstance(found, dict)
        return found


@pytest.fixture
def plan(run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    return Plan(run_file, monkeypatch, capsys)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "arguments",
    [
        ("--step", "7", "--ranks", "2"),
        ("--sample", "000003", "--ranks", "2"),
        ("--rebuild", "7", "--ranks", "2", "--rank", "1"),
    ],
)
def test_tables_fit_the_terminal_and_cut_nothing(
    plan: Plan, arguments: tuple[str, ...], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = plan(*arguments).splitlines()
    table = [line for line in lines if line.startswith(("\u2502", "\u2503"))]
    assert table
    assert max(map(len, table)) <= columns
    assert not [line for line in table if "\u2026" in line]


def test_a_step_shows_provenance_and_where_it_was_followed_from(plan: Plan) -> None:
    shown = plan("--step", "7", "--ranks", "2")
    found = plan.json("--step", "7", "--ranks", "2")
    assert "step 7 on 2 ranks in 1 group, followed from the checkpoint at step 4" in shown
    (group,) = found["groups"]
    assert group["digest"] in shown
    assert found["followed_from"] == {"step": 4, "checkpoint": True}
    assert len(group["packs"]) == 4
    for pack in group["packs"]:
        assert f"{pack['lane']}:{pack['number']}" in shown
        assert pack["llm_s"] > 0 <= pack["encoder_s"]
        for sample in pack["samples"]:
            assert f"{sample['source']}/{sample['key']}" in shown
            assert f"{sample['shard'].rpartition('/')[2]} row {sample['row']}" in shown
    assert [row["microbatch"] for row in group["travel"]] == list(range(group["num_microbatches"]))
    for row, kind in zip(group["travel"], group["exchanges"], strict=True):
        assert row["kind"] == kind
        assert 0 <= row["num_moved"] <= row["num_rows"]
        assert (row["node_bytes"] > 0, row["network_bytes"]) == (row["num_moved"] > 0, 0)
    assert "exchange of embedding rows" in shown
    assert [row["name"] for row in found["sources"]] == ["captions", "clips", "talks"]
    assert "a plan cannot know which samples fail to decode" in shown


def test_long_segments_are_counted_and_show_the_rows_of_each_rank(plan: Plan) -> None:
    flags = ("--step", "7", "--ranks", "2")
    fixed = ("--balance.lssp.kind", "fixed", "--balance.lssp.min_rows", "2")
    (group,) = plan.json(*flags, *fixed)["groups"]
    media = group["media"]
    num_long = sum(len(item["ranks"]) > 1 for item in media)
    assert group["num_long"] == num_long > 0
    shown = plan(*flags, *fixed)
    assert f"{len(media)} media segments ({num_long} long)" in shown
    first, second = media[0]["shares"]
    assert f"@ 0: {first} + 1: {second}" in " ".join(shown.split())
    assert [row["num_long"] for row in group["encoding"]] == [num_long] * 2
    assert plan.json(*flags, "--balance.lssp.kind", "off")["groups"][0]["num_long"] == 0


def test_all_groups_are_shown_and_the_end_of_the_run_is_noted(plan: Plan) -> None:
    flags = ("--step", "12", "--ranks", "4", "--balance.group", "2")
    found = plan.json(*flags, "--all-groups")
    assert [group["group"] for group in found["groups"]] == [0, 1]
    assert plan.json(*flags, "--group", "1")["groups"] == [found["groups"][1]]
    assert "note: the run ends before step 12: run.steps = 12" in plan(*flags)


def test_ranks_of_a_node_decide_the_groups(plan: Plan) -> None:
    flags = ("--ranks", "4", "--balance.group", "node")
    assert plan.json(*flags)["num_groups"] == 1
    assert plan.json(*flags, "--ranks-per-node", "2")["num_groups"] == 2


def test_a_sample_is_shown_with_all_its_visits(plan: Plan) -> None:
    shown = plan("--sample", "clips/000003")
    found = plan.json("--sample", "clips/000003", "--ranks", "2")
    (sample,) = found["samples"]
    assert "clips/000003: clips-000000.tar row 3" in shown
    assert "run of 12 steps, 5 trained" in shown
    for visit in sample["visits"]:
        assert f"{visit['lane']}:{visit['pack']}" in shown
        assert visit["place"]["ranks"] == [visit["place"]["replica"]]
    assert {visit["state"] for visit in sample["visits"]} == {"trained", "ahead"}


def test_visits_after_the_data_ended_are_shown_as_not_reached(
    run_file: Path, tmp_path: Path, plan: Plan
) -> None:
    flags = "--run.dir", str(tmp_path), "--order.epochs", "2"
    config = config_of(run_file, *flags)
    write_metrics(config, 1)
    folder = RunDir(tmp_path)
    folder.write_settings(config.model_dump(mode="json"))
    folder.add_event(Event(1, f"{DATA_ENDED} at step 1"))
    shown = plan("--sample", "clips/000003", *flags)
    assert "not reached: the data ended at step 1" in shown
    assert "ahead" not in shown


def test_arrays_are_written_where_asked(plan: Plan, tmp_path: Path) -> None:
    out = tmp_path / "step.npz"
    asked = ("--rebuild", "7", "--ranks", "2", "--rank", "1", "--microbatch", "1")
    found = plan.json(*asked, "--out", str(out))
    with np.load(out, allow_pickle=False) as file:
        assert {row["name"]: tuple(row["shape"]) for row in found["arrays"]} == {
            name: file[name].shape for name in file.files
        }
    assert all(row["digest"] in plan(*asked) for row in found["arrays"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step", "-1"), "-1 is not in the range x>=0"),
        (("--step", "1", "--sample", "a"), "--step and --sample are two questions"),
        (("--rank", "1"), "--rank goes with --rebuild, not with --step"),
        (("--group", "0", "--all-groups"), "exclude each other"),
        (("--ranks", "2", "--group", "1"), "there is no group 1: 2 ranks make 1"),
        (("--ranks", "4", "--ranks-per-node", "3"), "4 ranks do not divide into nodes of 3"),
        (("--rebuild", "1", "--rank", "1"), "there is no rank 1: a run on 1 has rank 0 only"),
        (("--rebuild", "1", "--microbatch", "4"), "there is no microbatch 4: the step has 4"),
        (("--sample", "captions/0003"), "no sample has the key '0003'"),
    ],
)
def test_wrong_questions_are_one_clear_error_and_exit_2(
    plan: Plan, arguments: tuple[str, ...], message: str
) -> None:
    assert message in plan(*arguments, code=2)


def test_ctrl_c_ends_with_130(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(order: Order, step: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Order, "next_entries", interrupted)
    assert plan("--step", "3", code=130).endswith("interrupted\n")


@pytest.mark.parametrize("after_s", [0.0, 1000.0])
def test_progress_shows_on_a_terminal_once_it_takes_long_and_never_on_a_pipe(
    after_s: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for forced in ("", "1"):
        monkeypatch.setenv("FORCE_COLOR", forced)
        with ProgressBar("following", after_s=after_s) as progress:
            progress(1, 2)
        assert ("following" in capsys.readouterr().err) == bool(forced and not after_s)
