"""The page shows what stands against runs: in its data, in a browser, and while a run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import browser as chromium
import pytest
from browser import Browser
from test_page import embedded, fabricated, row

from fallow.report import page, payload
from fallow.report.watch import Watch
from fallow.runs.warned import FILE

STUCK = {"kind": "chance", "since": 1, "sentence": "it stands at 10.0 % <b>", "remedy": "try <i>more</i> steps"}
OTHER = {"kind": "one-class", "since": 2, "sentence": "all of one class", "remedy": "raise threshold"}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two seeds of one method, of which the same is said, and one of another that learns."""
    for name, warnings, more in (("a", [STUCK], {"seed": 0}), ("b", [STUCK, OTHER], {"seed": 1}), ("c", [], {"method": "uda"})):
        path = fabricated(tmp_path / "runs" / name, [row(1), row(2)], **more)
        (path / "summary.json").write_text(json.dumps({"status": "finished", "rounds": 2, "warnings": warnings}))
    return tmp_path / "runs"


def test_the_pages_data_have_them(runs: Path, tmp_path: Path) -> None:
    file, _ = page.write([runs], tmp_path / "page.html")
    told = [r["warnings"] for r in embedded(file.read_text())["runs"]]
    assert [[w["kind"] for w in warnings] for warnings in told] == [["chance"], ["chance", "one-class"], []]


def test_while_a_run_goes_on_its_file_is_asked(tmp_path: Path) -> None:
    path = fabricated(tmp_path / "run", [row(1)])
    assert payload.payload([path])["runs"][0]["warnings"] == []
    with Watch([path]) as watch:
        before = watch.state()
        (path / FILE).write_text(json.dumps([STUCK]))
        assert watch.state() != before
        assert [w["sentence"] for w in watch.data()["runs"][0]["warnings"]] == [STUCK["sentence"]]


@pytest.fixture(scope="module")
def open_browser() -> Iterator[Browser]:
    with chromium.browser() as found:
        yield found


@pytest.mark.skipif(chromium.MISSING is not None, reason=chromium.MISSING or "")
@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_shows_them(open_browser: Browser, runs: Path, tmp_path: Path, width: int) -> None:
    file, _ = page.write([runs], tmp_path / "page.html")
    open_browser.size(width, 900)
    open_browser.open(file.as_uri())
    shown = open_browser.js("return [...document.querySelectorAll('.warnings li')].map((li) => li.innerText.replaceAll('\\u00a0', ' ').split('\\n').filter(Boolean))")
    assert shown == [
        ["fixmatch seeds 0, 1", "It stands at 10.0 % <b>.", "What to try: try <i>more</i> steps."],
        ["fixmatch seed 1", "All of one class.", "What to try: raise threshold."],
    ]
    assert open_browser.js("return document.documentElement.scrollWidth <= innerWidth")
    assert open_browser.js("return document.querySelector('section:not([hidden]) h2').textContent") == "Warnings"
    open_browser.click("#chips .chip:nth-child(1) button")  # what is switched off says nothing
    assert open_browser.js("return [...document.querySelectorAll('section:not([hidden]) h2')].map((h) => h.textContent)")[0] == "Results"
    assert open_browser.complaints() == []
