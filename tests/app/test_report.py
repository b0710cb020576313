"""The report is one safe, self-contained page, whatever the run left behind."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from omni_pipeline.app.data_end import data_end
from omni_pipeline.app.report import held_out_table, key_numbers, source_table, used_up, write_report
from omni_pipeline.app.report_figures import figures
from omni_pipeline.app.report_gallery import gallery_from_plan
from omni_pipeline.app.report_run import load_run, marks_of, replays_of
from omni_pipeline.app.run_dir import Event, RunDir
from omni_pipeline.app.sinks import JsonlMetrics
from omni_pipeline.app.worst_steps import SampleName, WorstSteps
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.sample import SampleId
from tests.app import synthetic_run, test_profile
from trainer.step_causes import HeavySample, PartCause, StepCause

VOID = {"meta", "link", "img", "br", "input"}
SECTIONS = (
    "key-numbers",
    "loss",
    "speed",
    "balance",
    "data",
    "optimizer",
    "held-out",
    "quarantine",
    "gallery",
)
EVIL = '<script>alert("x")</script><img src=x onerror=alert(1)>'


class Page(HTMLParser):
    """Collects tags, ids and resource addresses; fails on a tag that is closed wrongly."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in VOID:
            self._open.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("src", "href", "poster", "srcset", "data") and value:
                self.addresses.append(value)
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run_dir = tmp_path_factory.mktemp("run")
    synthetic_run.write_run(run_dir)
    store = synthetic_run.Store()
    gallery = gallery_from_plan(synthetic_run.mixed_plan(store), store.read, max_packs=2)
    out = write_report(
        run_dir,
        run_dir / "deep" / "report.html",
        gallery=gallery,
        events=synthetic_run.EVENTS,
        summary=synthetic_run.SUMMARY,
    )
    return out.read_text(encoding="utf-8")


def minimal_run(run_dir: Path, values: dict[str, float] | None = None, *, steps: int = 1) -> Path:
    metrics = JsonlMetrics(run_dir / "metrics.jsonl")
    for step in range(steps):
        for name, value in (values or {"trainer/loss": 1.0}).items():
            metrics.record(name, value, step)
    metrics.close()
    return run_dir


def test_a_full_run_has_every_section_and_chart(full_page: str) -> None:
    page = Page(full_page)
    assert [name for name in SECTIONS if name not in page.ids] == []
    assert page.tags["figure"] == 11
    assert "not recorded" not in page.text
    assert "rank 1 killed (SIGKILL), step 258" in page.text
    assert "resumed at step 240" in page.text
    assert "19 steps were computed again and each loss is the same bit for bit" in page.text
    assert "JPEG is cut: 40 bytes are missing at the end" in page.text
    assert page.tags["audio"] >= 2
    assert page.tags["video"] >= 2


def test_the_page_asks_for_nothing_from_outside(full_page: str) -> None:
    page = Page(full_page)
    assert {address.split(":")[0].split("#")[0] for address in page.addresses} == {"data", ""}
    assert re.findall(r"https?://|//[a-z]+\.|@import|url\(", full_page) == []
    assert page.handlers == []


def test_the_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    synthetic_run.write_run(tmp_path, steps=4000, kill=2600, resume=2500)
    out = write_report(tmp_path, tmp_path / "report.html")
    assert out.stat().st_size < 1_500_000
    assert len(full_series(out.read_text(encoding="utf-8"))[0]["x"]) <= 360


def full_series(text: str) -> list[dict[str, list[float]]]:
    blocks = re.findall(r'<script type="application/json">(.*?)</script>', text)
    return [series for block in blocks for series in json.loads(block)["series"]]


def test_one_step_and_one_metric_are_enough(tmp_path: Path) -> None:
    out = write_report(minimal_run(tmp_path), tmp_path / "report.html", summary=None)
    page = Page(out.read_text(encoding="utf-8"))
    assert [name for name in SECTIONS if name not in page.ids] == []
    assert "no sample was put aside" in page.text
    assert "no held-out set was evaluated in this run" in page.text
    assert "no packs were kept for this page" in page.text
    assert page.text.count("not recorded in this run") == 8


@pytest.mark.parametrize("value", [float("nan"), 0.0, -3.0, 1e30, 5e-9])
def test_odd_numbers_break_nothing(tmp_path: Path, value: float) -> None:
    names = ("trainer/loss", "trainer/step_s", "loader/wait_s", "loader/tokens/a", "loader/samples/a")
    minimal_run(tmp_path, dict.fromkeys(names, value), steps=3)
    out = write_report(tmp_path, tmp_path / "report.html")
    text = out.read_text(encoding="utf-8")
    Page(text)
    assert not re.search(r'"[^"]*\b(nan|inf)\b', "".join(re.findall(r"<svg.*?</svg>", text)))


def test_all_text_of_the_run_is_escaped(tmp_path: Path) -> None:
    minimal_run(
        tmp_path, {"trainer/loss": 1.0, f"loader/tokens/{EVIL}": 2.0, f"evaluation/{EVIL}/accuracy": 1}
    )
    record = synthetic_run.quarantine_record(0, reason=EVIL, key=EVIL)
    (tmp_path / "quarantine.jsonl").write_text(json.dumps(record) + "\n")
    store = synthetic_run.Store()
    plan = synthetic_run.mixed_plan(store, num_packs=1, texts=lambda _: EVIL)
    out = write_report(
        tmp_path,
        tmp_path / "report.html",
        gallery=gallery_from_plan(plan, store.read, max_packs=1),
        events=[Event(step=0, text=EVIL)],
        summary={"title": EVIL, EVIL: EVIL},
    )
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert "alert(" not in text.replace("alert(&#34;x&#34;)", "").replace("=alert(1)&gt;", "").replace(
        'alert(\\"x\\")', ""
    ).replace("=alert(1)\\u003e", "")
    assert page.handlers == []
    assert page.tags["script"] == 1 + text.count('<script type="application/json">')
    assert page.text.count(EVIL) >= 8


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_without_metrics_is_a_config_error(tmp_path: Path, *, made: bool) -> None:
    run_dir = tmp_path / "run"
    if made:
        run_dir.mkdir()
    with pytest.raises(ConfigError) as caught:
        write_report(run_dir, tmp_path / "report.html")
    where = f"\n  where: {run_dir / 'metrics.jsonl'}" if made else ""
    what = f"{run_dir} has no metrics to report" if made else f"there is no folder {run_dir}"
    assert str(caught.value) == f"{what}{where}\n  fix:   give the run.dir of a run that has trained a step"
    assert not (tmp_path / "report.html").exists()


def test_an_empty_metrics_file_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="has no metrics to report"):
        load_run(tmp_path)


def test_losses_that_do_not_join_are_shown_with_their_difference(tmp_path: Path) -> None:
    for first, last, offset in ((0, 6, 0.0), (4, 9, 0.25)):
        metrics = JsonlMetrics(tmp_path / "metrics.jsonl")
        for step in range(first, last):
            metrics.record("trainer/loss", 5 - step + offset, step)
        metrics.close()
    (replay,) = replays_of(load_run(tmp_path).attempts, "trainer/loss")
    assert replay.steps.tolist() == [4, 5]
    assert (replay.num_repeated, replay.largest_difference) == (2, 0.25)
    text = write_report(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "2 steps were computed again and the losses differ by at most 2.5e-01" in text
    assert "resumed at step 4" in text


def test_a_resume_is_marked_once(tmp_path: Path) -> None:
    synthetic_run.write_run(tmp_path, steps=30, kill=20, resume=16)
    attempts = load_run(tmp_path).attempts
    assert [mark.label for mark in marks_of([], attempts)] == ["resumed at step 16"]
    told = [Event(step=20, text="rank 0 killed"), Event(step=16, text="resumed from checkpoint 16")]
    marks = marks_of(told, attempts)
    assert [(mark.label, mark.kind) for mark in marks] == [
        ("rank 0 killed, step 20", "fault"),
        ("resumed from checkpoint 16, step 16", "resume"),
    ]


def test_key_numbers_are_computed_from_the_metrics(tmp_path: Path) -> None:
    values = {
        "trainer/loss": 2.0,
        "trainer/tokens": 1000.0,
        "trainer/labels": 300.0,
        "trainer/tokens_per_s": 500.0,
        "trainer/step_s": 2.0,
        "loader/wait_s": 0.1,
        "loader/pack_fill": 0.96,
        "balancer/encoder_imbalance_before": 1.8,
        "balancer/encoder_imbalance_after": 1.1,
    }
    minimal_run(tmp_path, values, steps=4)
    found = {key.label: key.value for key in key_numbers(load_run(tmp_path))}
    assert found == {
        "Steps": "4",
        "Loss": "2.000 → 2.000",
        "Tokens": "4,000",
        "Tokens/s, median": "500",
        "Waiting for data": "5.0%",
        "Encoder imbalance": "1.80 → 1.10",
        "Pack fill": "96%",
        "Quarantined": "0",
    }


def test_padding_of_a_bucketed_run_is_a_key_number_and_a_line(tmp_path: Path) -> None:
    minimal_run(tmp_path, {"loader/pack_fill": 0.7, "loader/padding": 0.25}, steps=4)
    run = load_run(tmp_path)
    (key,) = [key for key in key_numbers(run) if key.label == "Pack fill"]
    assert (key.value, key.note) == ("70%", "25% of the positions are padding")
    figure = figures(run, [])["fill"]
    assert figure is not None
    assert figure.chart is not None
    assert "padding" in figure.note
    assert "padding" in str(figure.chart)


def test_measured_imbalance_and_stages_are_drawn_where_they_were_measured(tmp_path: Path) -> None:
    test_profile.write_run(tmp_path)
    drawn = figures(load_run(tmp_path), [])
    names = {}
    for place in ("stages", "encoder", "llm"):
        figure = drawn[place]
        assert figure is not None
        assert figure.chart is not None
        names[place] = [name for name, _, _ in figure.chart.legend]
        assert ("own work" in figure.note) == (place == "encoder")
    assert names["stages"][:3] == ["wait for data", "agree on the step", "encoders"]
    assert names["encoder"] == ["before", "after", "measured"]
    assert names["llm"] == ["before", "after"]


def test_the_page_names_the_samples_of_the_worst_steps(tmp_path: Path) -> None:
    minimal_run(tmp_path)
    assert "no worst steps were kept" in Page(write_report(tmp_path, tmp_path / "a.html").read_text()).text
    sample = HeavySample(SampleId("captions", 0, 5), 1, units=1600, modelled_s=0.5, num_ranks=2)
    part = PartCause("encoder", 2.0, 1.5, 1.4, 3, 1, 0.7, 0.4, (sample,))
    path = RunDir(tmp_path).worst_steps_path
    worst = WorstSteps(path, first_step=0, name_of=lambda item: SampleName(item, EVIL, "c.tar"))
    worst.see(StepCause(8, 2.5, 0.1, 1.0, (part,)))
    text = write_report(tmp_path, tmp_path / "b.html").read_text()
    page = Page(text)
    assert page.handlers == []
    assert f"captions/{EVIL} (c.tar row 5): 1,600 units, split over 2 ranks" in page.text
    assert "rank 3 worked 700 ms in microbatch 1" in page.text
    assert "2,500" in page.words


def test_sources_are_summed_and_sorted_by_tokens(tmp_path: Path) -> None:
    minimal_run(tmp_path, {"loader/tokens/a": 10.0, "loader/samples/a": 2, "loader/tokens/b": 30.0}, steps=2)
    rows = source_table(load_run(tmp_path))
    assert [(row["name"], row["tokens"], row["samples"], row["share"]) for row in rows] == [
        ("b", 60.0, 0.0, 0.75),
        ("a", 20.0, 4.0, 0.25),
    ]


ENDING = {
    "loader/samples/talks": 5.0,
    "loader/left/talks": 3.0,
    "loader/samples/prose": 9.0,
    "loader/empty_packs": 1.0,
    "loader/empty_positions": 64.0,
}


def test_the_page_tells_what_was_left_where_the_data_ended(tmp_path: Path) -> None:
    minimal_run(tmp_path, {**ENDING, "loader/tokens/talks": 30.0, "loader/tokens/prose": 9.0}, steps=4)
    run = load_run(tmp_path)
    assert str(data_end(run.metrics)) == (
        "samples of talks 20 seen, 3 left; 4 packs (256 positions) stayed empty"
    )
    assert [(row["name"], row["left"]) for row in source_table(run)] == [("talks", 3), ("prose", None)]
    assert used_up(run, []) == "3 samples are left; 4 packs (256 positions) stayed empty."
    ended = Event(step=4, text="the data ended at step 4")
    told = "The data ended at step 4: 3 samples were left over; 4 packs (256 positions) stayed empty."
    assert used_up(run, [ended]) == told
    page = Page(write_report(tmp_path, tmp_path / "report.html", events=[ended]).read_text())
    assert told in page.text
    assert "no end" in page.text


def test_the_page_of_an_endless_run_tells_of_no_end(tmp_path: Path) -> None:
    minimal_run(
        tmp_path, {"loader/samples/talks": 5.0, "loader/tokens/talks": 30.0, "loader/empty_packs": 0.0}
    )
    run = load_run(tmp_path)
    assert data_end(run.metrics) is None
    assert used_up(run, []) == ""
    assert "stayed empty" not in Page(write_report(tmp_path, tmp_path / "report.html").read_text()).text


def test_samples_that_were_left_out_are_told_by_source(tmp_path: Path) -> None:
    values = {"loader/tokens/talks": 30.0, "loader/tokens/prose": 9.0, "loader/filtered/talks": 2.0}
    minimal_run(tmp_path, {**values, "loader/dropped/prose": 0.0}, steps=3)
    rows = {row["name"]: (row["filtered"], row["dropped"]) for row in source_table(load_run(tmp_path))}
    assert rows == {"talks": (6.0, 0.0), "prose": (0.0, 0.0)}
    words = Page(write_report(tmp_path, tmp_path / "report.html").read_text()).words
    assert "filtered" in words
    assert "dropped" not in words


def test_held_out_samples_that_were_not_seen_are_told_with_their_reason(tmp_path: Path) -> None:
    counts = {"seen": 1200.0, "failed": 1.0, "dropped": 0.0, "filtered": 7.0}
    minimal_run(tmp_path, {f"evaluation/held/{name}": count for name, count in counts.items()})
    (row,) = held_out_table(load_run(tmp_path), {})
    assert row.samples == "1,200 seen, 1 failed, 7 filtered"


def test_held_out_sets_are_joined_with_their_swapped_twins(tmp_path: Path) -> None:
    values = {
        "evaluation/held-out-shapes/accuracy": 0.9,
        "evaluation/held-out-shapes/loss": 0.2,
        "evaluation/swapped-shapes/accuracy": 0.1,
        "evaluation/extra/accuracy": 0.5,
    }
    minimal_run(tmp_path, values)
    extra, shapes = held_out_table(load_run(tmp_path), {"chance": {"shapes": 0.125}})
    assert (extra.name, extra.true, extra.swapped, extra.chance) == ("extra", 0.5, None, None)
    assert (shapes.true, shapes.swapped, shapes.chance, shapes.loss) == (0.9, 0.1, 0.125, 0.2)


def test_a_sample_that_fails_twice_counts_once(tmp_path: Path) -> None:
    minimal_run(tmp_path)
    lines = [json.dumps(synthetic_run.quarantine_record(index)) for index in (0, 1, 0)]
    (tmp_path / "quarantine.jsonl").write_text("\n".join(lines) + "\n")
    assert len(load_run(tmp_path).quarantine) == 2


def test_wait_shares_use_the_steps_that_both_metrics_have(tmp_path: Path) -> None:
    metrics = JsonlMetrics(tmp_path / "metrics.jsonl")
    metrics.record("loader/wait_s", 1.0, 0)
    metrics.record("loader/wait_s", 1.0, 1)
    metrics.record("trainer/step_s", 4.0, 1)
    metrics.record("trainer/step_s", 0.0, 2)
    metrics.record("loader/wait_s", 1.0, 2)
    metrics.close()
    steps, shares = load_run(tmp_path).wait_shares
    assert steps.tolist() == [1, 2]
    assert shares[0] == 0.25
    assert np.isnan(shares[1])
