"""The report's page in a real browser: charts, switches, tooltips, themes, a phone, and a run that goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser as chromium
import pytest
from browser import Browser
from conftest import HERE, TINY
from test_page import fabricated, row, watching

import fallow
from fallow.report import page
from fallow.runs.folder import RunFolder

pytestmark = [
    pytest.mark.skipif(chromium.MISSING is not None, reason=chromium.MISSING or ""),
    pytest.mark.xdist_group("browser"),
]
COLOURS = ["#0072b2", "#d55e00"]
CHART = "const card = [...document.querySelectorAll('.card')].find((c) => c.querySelector('h3')?.textContent === arguments[0]);"
PIXELS = CHART + """
const canvas = card.querySelector("canvas"), hex = arguments[1];
const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
copy.drawImage(canvas, 0, 0);
const {data} = copy.getImageData(0, 0, canvas.width, canvas.height);
const want = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
let found = 0;
for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200 && want.every((w, c) => Math.abs(w - data[i + c]) < 12)) found++;
return found;
"""
SHOWN = "return [...document.querySelectorAll('section:not([hidden]) h2')].map((h) => h.textContent)"


@pytest.fixture(scope="module")
def open_browser() -> Iterator[Browser]:
    with chromium.browser() as found:
        found.size(1280, 900)
        yield found


@pytest.fixture
def seen(open_browser: Browser) -> Iterator[Browser]:
    """The browser; afterwards the console has no complaint, and nothing but files and loopback was asked for."""
    open_browser.scheme("light")
    open_browser.size(1280, 900)
    open_browser.complaints(), open_browser.requests()
    yield open_browser
    assert open_browser.complaints() == []
    asked = open_browser.requests()
    assert asked and [a for a in asked if not re.match(r"file://|data:|about:|http://127\.0\.0\.1:", a)] == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of two methods."""
    out = tmp_path_factory.mktemp("runs")
    for method, lr in (("fedavg", 0.02), ("fixmatch", 0.1)):  # apart from each other
        for seed in (0, 1):
            keys = {"method": method, "labels": "clients", "seed": seed, "rounds": 3, "lr": lr}
            fallow.run(out=out, name=f"{method}-{seed}", **TINY | keys)
    return out


def opened(seen: Browser, tmp_path: Path, *paths: Path) -> Path:
    file, _ = page.write(list(paths), tmp_path / "report.html")
    seen.open(file.as_uri())
    return file


def pixels(seen: Browser, title: str, colour: str) -> int:
    """How much of a chart has a colour."""
    return seen.js(PIXELS, title, colour)


def test_charts_are_drawn_and_runs_switched(seen: Browser, runs: Path, tmp_path: Path) -> None:
    opened(seen, tmp_path, runs)
    for title in ("Test accuracy in %", "Test loss", "Training loss", "Seconds over rounds"):
        assert all(pixels(seen, title, colour) > 100 for colour in COLOURS), title
    assert pixels(seen, "Pseudo-labelled", COLOURS[0]) == 0 < pixels(seen, "Pseudo-labelled", COLOURS[1])  # FedAvg gives none
    assert seen.js("return document.querySelectorAll('svg circle').length") > 40  # who holds what
    seen.click("#chips .chip:nth-child(1) button")
    assert pixels(seen, "Test accuracy in %", COLOURS[0]) == 0 < pixels(seen, "Test accuracy in %", COLOURS[1])
    assert seen.js("return document.querySelector('#chips button').getAttribute('aria-pressed')") == "false"
    seen.click("#chips .chip:nth-child(1) button")
    assert pixels(seen, "Test accuracy in %", COLOURS[0]) > 100
    seen.click("#legend .choice button:nth-child(2)")  # each run
    lines = pixels(seen, "Test loss", COLOURS[0])
    seen.click("#chips .chip:nth-child(1) .more")
    seen.click("#members-0 input")
    assert 0 < pixels(seen, "Test loss", COLOURS[0]) < lines
    assert seen.js("return document.querySelector('#chips .more').textContent") == "1/2"


def test_values_under_the_mouse_are_those_of_the_runs(seen: Browser, runs: Path, tmp_path: Path) -> None:
    opened(seen, tmp_path, runs)
    told = ""
    for x in (0.9, 0.999) * 20:  # a page that is still being laid out may lose a mouse that rests
        seen.hover("section:not([hidden]) .card.full .u-over", x=x)
        told = seen.js("const t = document.getElementById('tip'); return t.hidden ? '' : t.innerText")
        if x == 0.999 and told:
            break
        time.sleep(0.1)
    assert "round 3" in told
    assert seen.js("return document.querySelector('.card.full .plot').getAttribute('aria-label')").startswith("Test accuracy in % over rounds. fedavg: ")
    for method in ("fedavg", "fixmatch"):
        last = [json.loads((runs / f"{method}-{s}" / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"] for s in (0, 1)]
        assert f"{100 * sum(last) / 2:.2f} % ± {50 * abs(last[0] - last[1]):.2f}, n 2" in told.replace("\n", " "), told


def test_arrow_keys_walk_over_rounds(seen: Browser, runs: Path, tmp_path: Path) -> None:
    opened(seen, tmp_path, runs)
    press = "document.querySelector('.card.full .plot').dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0]}))"
    for key, round in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        seen.js(press, key)
        seen.wait("return document.querySelector('#tip:not([hidden]) b')?.textContent === arguments[0]", f"round {round}", seconds=10)


def test_light_and_dark(seen: Browser, runs: Path, tmp_path: Path) -> None:
    seen.scheme("dark")
    opened(seen, tmp_path, runs)
    ground = "return getComputedStyle(document.body).backgroundColor"
    dark = seen.js(ground)
    assert pixels(seen, "Test accuracy in %", "#4aa8f0") > 100 and pixels(seen, "Test accuracy in %", COLOURS[0]) == 0
    seen.click("#theme")
    assert seen.js(ground) != dark and pixels(seen, "Test accuracy in %", COLOURS[0]) > 100
    seen.js("localStorage.clear()")


def test_a_phone(seen: Browser, runs: Path, tmp_path: Path) -> None:
    seen.size(360, 780, phone=True)
    opened(seen, tmp_path, runs)
    assert seen.js("const s = [...document.querySelectorAll('section select')].filter((e) => e.options.length); s.forEach((e) => e.options[0].text = 'x'.repeat(80)); return s.length") >= 2
    assert seen.js("return document.documentElement.scrollWidth") == 360
    assert seen.js("return Math.max(...[...document.querySelectorAll('.card')].map((c) => c.getBoundingClientRect().right))") <= 360
    assert pixels(seen, "Test accuracy in %", COLOURS[0]) > 100


def test_the_card_of_a_result_fits_a_phone(seen: Browser, runs: Path, tmp_path: Path) -> None:
    """In a notebook; its curve was wider."""
    file = tmp_path / "card.html"
    file.write_text(f'<meta name="viewport" content="width=device-width">{fallow.load(runs / "fedavg-0")._repr_html_()}', encoding="utf-8")
    seen.size(360, 780, phone=True)
    seen.open(file.as_uri())
    assert seen.js("return document.querySelector('svg').getBoundingClientRect().width") > 300
    assert seen.js("return document.documentElement.scrollWidth") == 360


def test_long_names_are_not_cut(seen: Browser, tmp_path: Path) -> None:
    """Every column of every table is seen, and what stands at a line's end ends before the chart does."""
    for name, lr in (("W" * 40, 0.1), ("a-name-of-many-words-and-more", 0.05)):
        fabricated(tmp_path / name, [row(n, 0.1 * n) for n in range(1, 6)], method=f"./{name}.py:{name}", lr=lr, momentum=lr / 2, weight_decay=lr)
    opened(seen, tmp_path, *(tmp_path / name for name in ("W" * 40, "a-name-of-many-words-and-more")))
    wide = seen.js("return [...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.innerText.slice(0, 40))")
    assert wide == []
    ink = seen.js(CHART + """
        const canvas = card.querySelector("canvas"), copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
        copy.drawImage(canvas, 0, 0);
        const side = (x, wide) => copy.getImageData(x, 0, wide, canvas.height).data.filter((v, i) => i % 4 === 3 && v > 0).length;
        return [side(canvas.width - 3, 3), side(canvas.width - 60, 50)];""", "Test accuracy in %")
    assert ink[0] == 0 < ink[1]


def test_panels_without_data_are_left_out(seen: Browser, tmp_path: Path) -> None:
    bare = fabricated(tmp_path / "x<b></script>'\"&", [row(1), row(2)], method="<img src=x>")
    opened(seen, tmp_path, bare)
    assert seen.js(SHOWN) == ["Results", "Accuracy over rounds", "Bytes and seconds", "Settings", "Runs"]
    assert seen.js("return document.getElementById('title').textContent") == "<img src=x> on digits"
    more = {
        "class_accuracy": [0.5, 1.0], "prior_js": {"appu": 0.1, "appu_local": 0.2}, "diversity": {"update/users/l2": 1.5}, "R": 0.5, "label_accuracy_local": 0.5,
    }  # fmt: skip
    opened(seen, tmp_path, fabricated(tmp_path / "measured", [row(1), row(2, **more)]))
    assert {"Pseudo-labels", "Classes", "Prior bias", "Gradient diversity"} <= set(seen.js(SHOWN))
    for title in ("APP-U", "Diversity", "Right by who labels"):
        assert pixels(seen, title, COLOURS[0]) > 5, title
    assert "0.500" in seen.js(f"{CHART} return card.textContent", "Skew R")
    assert seen.js(f"{CHART} return card.querySelectorAll('circle').length", "Accuracy by class") == 2


def test_a_page_before_the_first_round(seen: Browser, runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    for name in ("config.yaml", "federation.npz"):
        shutil.copy(runs / "fedavg-0" / name, path)
    (path / "metrics.jsonl").write_text("")
    with watching(path) as server:
        seen.open(server.address)
        assert "waiting for round 1" in seen.js("return document.getElementById('live').textContent")
        assert "Federation" in seen.js(SHOWN) and "Accuracy over rounds" not in seen.js(SHOWN)
        RunFolder(path).append(row(1))
        seen.wait("return document.getElementById('live').textContent.includes('round 1 of 3')")
        assert "Accuracy over rounds" in seen.js(SHOWN)
        seen.open("about:blank")


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_the_page_of_a_run_gains_rounds(seen: Browser, tmp_path: Path) -> None:
    """`fallow run` and `fallow watch` as a user starts them; then the run is stopped, and its metrics are cut."""
    words = ["run", "demo", "method=fedavg", "rounds=100000", "clients=3", "steps=1", "checkpoint_every=1000", "--name", "long", "--quiet"]
    start = lambda *words: subprocess.Popen(
        [sys.executable, "-m", "fallow", *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    running, path = start(*words), tmp_path / "runs" / "long"
    watcher: Any = None
    try:
        end = time.monotonic() + 120
        while not (path / "metrics.jsonl").is_file():
            assert running.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        watcher = start("watch", "long")
        told = watcher.stdout.readline()
        seen.open(re.search(r"http://127\.0\.0\.1:\d+", told)[0])  # type: ignore[index]
        seen.js("window.same = true")
        count = "return +document.getElementById('rounds').textContent.match(/round ([\\d,]+)/)[1].replace(/,/g, '')"
        first = seen.js(count)
        later = seen.wait(f"const n = (() => {{ {count} }})(); return n > arguments[0] + 2 && n", first)
        drawn = seen.js("return Math.max(...[...document.querySelectorAll('tbody td')].map((c) => +c.textContent.match(/^([\\d,]+) of 100000$/)?.[1].replace(/,/g, '') || 0))")
        assert drawn >= later > first and pixels(seen, "Test accuracy in %", COLOURS[0]) > 100
        running.send_signal(signal.SIGINT)
        running.wait(60)
        seen.wait("return document.getElementById('live').textContent.includes('interrupted')")
        (path / "manifest.json").unlink()
        RunFolder(path).cut(2)  # what a resume from an older checkpoint does
        seen.wait("return document.getElementById('live').textContent.includes('round 2 of')")
        assert seen.js("return window.same") is True  # never loaded again
        seen.open("about:blank")
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(30) == 0 and watcher.stderr.read() == ""
    finally:
        for process in (running, watcher):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


def test_columns_named_as_javascript_names_its_own(seen: Browser, tmp_path: Path) -> None:
    names = ["constructor", "__proto__", "toString", "hasOwnProperty", "valueOf"]
    odd = fabricated(tmp_path / "odd", [row(n, **json.loads(json.dumps(dict.fromkeys(names, n / 2)))) for n in (1, 2, 3)])
    other = fabricated(tmp_path / "other", [row(n) for n in (1, 2)], method="fedavg")
    opened(seen, tmp_path, odd, other)
    section = "const s = [...document.querySelectorAll('section:not([hidden])')].find((s) => s.querySelector('h2').textContent === 'What the method logs');"
    titles = seen.js(section + "return [...s.querySelectorAll('.card:not([hidden]) h3')].map((h) => h.textContent)")
    assert sorted(titles) == sorted(names)
    for name in names:
        assert pixels(seen, name, COLOURS[0]) > 0 and pixels(seen, name, COLOURS[1]) == 0


TABLE = """
const section = [...document.querySelectorAll("section:not([hidden])")].find((s) => s.querySelector("h2").textContent === "Scores");
return [...section.querySelectorAll("tr")].find((r) => r.textContent.startsWith(arguments[0])).innerText;
"""
MATRIX = CHART + "return [...card.querySelectorAll('text.cell')].map((t) => +t.textContent)"


def test_scores_are_drawn(seen: Browser, runs: Path, tmp_path: Path) -> None:
    """Confusions of the chosen group, its runs together; calibration, classes and a table."""
    runs = Path(shutil.copytree(runs, tmp_path / "validated"))
    for path in runs.iterdir():
        (path / "manifest.json").unlink()
        summary = json.loads((path / "summary.json").read_text())
        summary["scores"]["validation"] = summary["scores"]["test"]
        summary["validation"] = {"best": 0.5, "best_round": 1, "test": {"accuracy": 0.4}}
        (path / "summary.json").write_text(json.dumps(summary))
    opened(seen, tmp_path, runs)
    assert "Scores" in seen.js(SHOWN)
    assert "test there" in seen.js(TABLE, "runs")
    assert seen.js("return [...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.innerText.slice(0, 40))") == []
    for method in ("fedavg", "fixmatch"):
        found = [json.loads((runs / f"{method}-{s}" / "summary.json").read_text())["scores"]["test"] for s in (0, 1)]
        counts = [[sum(cells) for cells in zip(*rows)] for rows in zip(*(f["confusion"] for f in found))]
        shares = [n / sum(row) for row in counts for n in row]
        seen.js(CHART + "const s = card.querySelector('select'); s.value = arguments[1]; s.dispatchEvent(new Event('change'))", "Who is taken for whom", method)
        assert seen.js(MATRIX, "Who is taken for whom") == [int(100 * s + 0.5) for s in shares if s >= 0.005]
        f1 = seen.js(TABLE, method)
        assert f"{sum(f['macro_f1'] for f in found) / 2:.3f}" in f1
    assert seen.js(CHART + "return card.querySelectorAll('circle').length", "Calibration") > 4
    assert "Accuracy by class" in seen.js("return [...document.querySelectorAll('.card:not([hidden]) h3')].map((h) => h.textContent)")
    seen.size(390, 844, phone=True)
    opened(seen, tmp_path, runs)
    assert seen.js("return document.documentElement.scrollWidth") == 390
