"""``omni data check``: exit codes, what is printed, the deny-list, and what a run makes of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from loaders.index import index_shards
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.wire import build_tokenizer, training_stream
from omni_pipeline.cli.main import main
from omni_pipeline.core.config import load_config
from tests.support.shards import caption_members, write_tar

RUN_FILE = """
run = {{ dir = "{root}/run", steps = 1 }}
deny = [{deny}]
[[sources]]
name = "captions"
shards = "{root}/*.tar"
layout = {{ kind = "fields", fields = ["jpg|png", "txt"] }}
[order]
lanes = 1
packs_per_step = 1
seq_len = 160
[model]
size = "tiny"
"""


def run_check(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["omni", "data", "check", "--workers", "0", *arguments])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def damaged(root: Path) -> list[str]:
    """Write two shards with three samples that cannot be used; return their keys."""
    first, second = caption_members(4), caption_members(4, first=4)
    first["000001.jpg"] = b"no picture"
    del first["000002.txt"]
    second["000006.jpg"] = second["000006.jpg"][:-40]
    shards = [write_tar(root / "0.tar", first), write_tar(root / "1.tar", second)]
    index_shards([str(shard) for shard in shards])
    return ["000001", "000002", "000006"]


def test_a_clean_set_says_so_and_exits_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tar(tmp_path / "s.tar", caption_members(3))
    index_shards([str(path)])
    assert run_check(monkeypatch, str(path)) == 0
    assert capsys.readouterr().out == "1 shard: 3 samples, 6 members, 0.0 MB, headers only\nno problems\n"


def test_problems_exit_1_with_places_and_mends_in_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run_check(monkeypatch, "*.tar", "--decode", "--fix", "deny.txt", "--layout", "jpg,txt") == 1
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 110
    assert all(len(line) <= 80 for line in shown.splitlines() if line[:1] in "┃│┏┡└")
    assert shown.startswith("2 shards: 8 samples, 15 members, 0.0 MB, 12 members decoded\n┏")
    parts = shown.split("\n\n")[1:]
    assert parts[0] == (
        "PROBLEM 1 sample: lack a member of the layout\n"
        "  0.tar, 000002, byte 5120: no member 'txt'; it has jpg\n"
        "  mend: add the member, or leave the sample out with --fix"
    )
    assert parts[-1] == (
        "3 problems, 0 notes\n"
        "3 samples that cannot be used: deny.txt\n"
        '  to leave them out write into the run file: deny = ["deny.txt"]\n'
    )


def test_the_run_file_gives_shards_and_limits_and_its_stream_then_has_the_good_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = damaged(tmp_path)
    run_file, deny = tmp_path / "run.toml", tmp_path / "deny.txt"
    run_file.write_text(RUN_FILE.format(root=tmp_path, deny=""), encoding="utf-8")
    asked = ("--run", str(run_file), "--decode", "--fix", str(deny), "--json")
    assert run_check(monkeypatch, *asked) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["denied"], told["not_listed"], told["deny_list"]) == (3, 0, str(deny))
    run_file.write_text(RUN_FILE.format(root=tmp_path, deny=f'"{deny}"'), encoding="utf-8")
    config = load_config(RunConfig, run_file)
    source = training_stream(config, build_tokenizer(config)).sources[0]
    status = source.sizes(np.arange(len(source))).status
    keys = [source.identify(row)[1] for row in np.flatnonzero(status == 0).tolist()]
    assert keys == [f"{n:06d}" for n in range(8) if f"{n:06d}" not in bad]


def test_json_is_one_object_of_a_fixed_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tar(tmp_path / "s.tar", {"a.jpg": b""})
    assert run_check(monkeypatch, str(path), "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "version": 1,
        "shards": 1,
        "samples": 1,
        "members": 1,
        "bytes": 10240,
        "decoded": None,
        "problems": 1,
        "notes": 1,
        "kinds": [
            {
                "kind": "empty_member",
                "level": "problem",
                "count": 1,
                "of": "members",
                "title": "media of no bytes",
                "mend": "write the file again, or leave it out with --fix",
                "places": [{"shard": str(path), "member": "a.jpg", "byte": 512, "what": "member is empty"}],
            },
            {
                "kind": "no_index",
                "level": "note",
                "count": 1,
                "of": "shards",
                "title": "without an index",
                "mend": "run `omni data index` on these shards",
                "places": [{"shard": str(path), "member": None, "byte": None, "what": "shard has no index"}],
            },
        ],
        "deny_list": None,
        "denied": 0,
        "not_listed": 0,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name the SHARDS to check, or a run file with --run"),
        (("x.tar", "--layout", "txt", "--run", "r.toml"), "--layout and --run exclude each other"),
        (("none.tar",), "there is no such file: none.tar"),
        (("{root}/s.tar", "--layout", "jpgx"), "'jpgx' is no known kind of member"),
        (("{root}/s.tar", "--fix", "deny.jsonl"), "a deny-list must not be named .jsonl"),
        (("{root}/s.tar", "--fix", "{root}/mine.txt"), "was not written by `omni data check`"),
        (("{root}/s.tar", "--fix", "{root}/none/deny.txt"), "the deny-list cannot be written: No such file"),
        (("{root}/s.tar", "--run", "{root}/run.toml"), "no source of the run has the shard"),
    ],
)
def test_wrong_usage_exits_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    write_tar(tmp_path / "s.tar", {"a.txt": b"x"})
    (tmp_path / "mine.txt").write_text("a\n", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    write_tar(tmp_path / "sub" / "t.tar", {"a.txt": b"x"})
    run_file = RUN_FILE.format(root=tmp_path / "sub", deny="")
    (tmp_path / "run.toml").write_text(run_file, encoding="utf-8")
    assert run_check(monkeypatch, *(argument.format(root=tmp_path) for argument in arguments)) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text(encoding="utf-8") == "a\n"


def test_names_that_no_list_can_hold_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tar(tmp_path / "s.tar", {"a .jpg": b"", "b\n.jpg": b"", "#c.jpg": b""})
    deny = tmp_path / "deny.txt"
    for _ in range(2):  # a list of an earlier check may be written again
        assert run_check(monkeypatch, str(path), "--fix", str(deny)) == 1
        assert "2 samples more cannot be used, and no list can name them" in capsys.readouterr().out
    assert deny.read_text(encoding="utf-8").splitlines()[1:] == [
        "# member 'jpg': member is empty",
        f"{path}/#c",
    ]
    assert [item.name for item in tmp_path.iterdir() if ".tmp" in item.name] == []
