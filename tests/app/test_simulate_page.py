"""The page of the simulated workloads stands alone and says where memory ends."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

from omni_pipeline.app.simulate_page import figures_of, render, write_page
from tests.app.papers import paper


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    path = write_page(paper(), tmp_path / "new")
    page = path.read_text(encoding="utf-8")
    assert path.name == "simulate.html"
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page)
    assert page.count('<svg class="chart"') == 2 * 4
    opened: list[str] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "link"):
                opened.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    Tags().feed(page)
    assert opened == []


def test_the_page_shows_speed_ups_beside_the_published_and_memory_that_ends() -> None:
    page = render(paper())
    assert "published 1.54x" in page
    assert "published 2.01x" in page
    # Stage 0 at 1:9, 1 + 1 / 20; at 9:1 it does not fit, and would be 1.45 times slower.
    assert '<td class="num">1.05x</td>' in page
    assert page.count(">out of memory<") == 2
    assert 'title="1.45x if it had memory enough"' in page
    # The best of the published ones that fits: bubble filling at 9:1, 1 + 3 * 9 / 20.
    assert "<b>2.35x</b><small>best, against bubble filling at 9:1" in page


def test_a_line_of_throughput_ends_where_memory_does() -> None:
    sweep = paper(("A",))
    throughput = figures_of(sweep, sweep.workloads[0])[0].chart
    assert throughput is not None
    by_name = {series["name"]: series for series in throughput.data["series"]}
    assert by_name["stage 0"]["x"] == [10, 30, 50, 70]
    assert by_name["multiplexed"]["x"] == [10, 30, 50, 70, 90]
    assert by_name["multiplexed"]["text"] == ["1M"] * 5


def test_speed_ups_are_none_without_memory_and_best_ignores_them() -> None:
    sweep = paper(("A",))
    last = sweep.points[-1]
    assert last.speedup("stage0") is None
    assert math.isclose(last.speedup_with_memory("stage0"), 1.45)
    content = sweep.to_dict()
    assert content["speedup"]["A"]["9:1"]["stage0"] is None
    assert math.isclose(content["speedup"]["A"]["1:9"]["stage0"], 1.05)
    assert content["best"]["A"]["baseline"] == "bubble_filling"
    assert content["best"]["A"]["published"] == 1.54
    assert math.isclose(content["ablation"]["A"]["1:9"]["no_multiplexing"], 1 / 1.25 - 1)
