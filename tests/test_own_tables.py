"""A table of one's own in a file: read like a paper's, run by the same runner, printed as methods by settings."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from fallow.errors import UserError
from fallow.report.table import Table
from fallow.runs.folder import RunFolder
from fallow.tables.grids import Grids
from fallow.tables.lines import Line

MINE: dict[str, Any] = {
    "data": "digits", "clients": 4, "active": 2, "steps": 3, "batch": 8, "rounds": 2, "device": "cpu", "slots": 1, "seeds": 2,
    "rows": {"Labels only": {"method": "fedavg"}, "FixMatch 0.6": {"method": "fixmatch", "threshold": 0.6}},
    "cells": {"digits": {"100 labels": {"label_count": 100}, "200 labels": {"label_count": 200}}},
}  # fmt: skip


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(MINE, sort_keys=False))
    return path


def changed(path: Path, **keys: Any) -> str:
    path.write_text(yaml.safe_dump(MINE | keys, sort_keys=False))
    return str(path)


def test_a_table_of_ones_own(mine: Path, fallow_cli: Any) -> None:
    told = fallow_cli("table", "mine.yaml")
    assert told.code == 0, told.out + told.err
    names = [f"mine/digits-{labels}-labels--{row}/seed-{seed}" for labels in (100, 200) for row in ("labels-only", "fixmatch-0.6") for seed in (0, 1)]
    summaries = {name: json.loads((Path("runs") / name / "summary.json").read_text()) for name in names}
    cells = list(csv.DictReader(Path("runs/mine/table.csv").read_text().splitlines()))
    assert [(c["method"], c["setting"], c["n"]) for c in cells] == [
        (row, f"{labels} labels", "2") for labels in (100, 200) for row in ("Labels only", "FixMatch 0.6")
    ]
    first = [summaries[name]["last"] for name in names[:2]]
    assert float(cells[0]["mean"]) == pytest.approx(100 * sum(first) / 2, abs=1e-3)
    lines = told.out.splitlines()
    at = lines.index("mine.yaml: test accuracy in %, last round, mean ± std over n seeds")
    assert lines[at + 1].split("  ")[-1].strip() == "digits, 200 labels" and lines[at + 2].startswith("Labels only  ")
    assert any(line.startswith("less Labels only") for line in lines)
    assert "| Labels only |" in Path("runs/mine/table.md").read_text() and "published" not in Path("runs/mine/table.md").read_text()
    tex = Path("runs/mine/table.tex").read_text()
    assert r" & \multicolumn{2}{c}{digits} \\" in tex and r"method & 100 labels & 200 labels \\" in tex

    before = {p: p.stat().st_mtime_ns for p in Path("runs").rglob("metrics.jsonl")}
    again = fallow_cli("table", "mine.yaml", "--seeds", "1", "-o", "t.tex")
    assert again.out.count("(was finished)") == 4 and Path("t.tex").read_text().startswith("% mine.yaml: test accuracy")
    assert {p: p.stat().st_mtime_ns for p in Path("runs").rglob("metrics.jsonl")} == before
    assert fallow_cli("table", "mine.yaml", "--from", "runs", "--seeds", "1", "--format", "md").out == Path("runs/mine/table.md").read_text()
    other = fallow_cli("table", "mine.yaml", "other", "--only", "label_count=100", "--only", "method=Labels only", "--seeds", "1")
    assert other.code == 0 and RunFolder(Path("runs/other/digits-100-labels--labels-only/seed-0")).concluded() == "finished"


def test_another_key_in_the_file_is_another_run(mine: Path, fallow_cli: Any) -> None:
    only = ("--only", "label_count=100", "--only", "method=Labels only", "--seeds", "1")
    assert fallow_cli("table", str(mine), *only).code == 0
    changed(mine, lr=0.5)
    told = fallow_cli("table", str(mine), *only)
    assert told.code == 1 and "was run with other settings (lr=" in told.out


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"rows": {"A": {"method": "fedavg", "thresold": 1}}}, "mine.yaml, row A in cell digits, 100 labels: there is no key 'thresold'"),
        ({"rows": {"A": {"method": "fedavgg"}}}, "mine.yaml, row A in cell digits, 100 labels: there is no method 'fedavgg'; did you mean 'fedavg'?"),
        ({"cells": {"digits": {"x": {"clients": 0}}}}, "mine.yaml, row Labels only in cell digits, x: clients=0 is not allowed"),
        ({"rows": 3}, "mine.yaml has rows: 3; write rows:"),
        ({"rows": {}}, "mine.yaml has no rows, which a table has"),
        ({"cells": None}, "mine.yaml has no cells, which a table has"),
        ({"statistic": "median"}, "mine.yaml has statistic: median; write statistic: last or best."),
        ({"own": "Nobody"}, "mine.yaml: the table's recipe says own: Nobody"),
        ({"published": {"digits": {"300 labels": {"Labels only": 3}}}}, "figures of the cell digits, 300 labels, which it has not; did you mean 'digits, "),
        ({"published": {"digits": {"100 labels": {"Label only": 3}}}}, "a figure of the row Label only, which it has not; did you mean 'Labels only'"),
        ({"published": {"digits": {"100 labels": {"Labels only": "70"}}}}, "mine.yaml has published: {"),
        ({"published": {"digits": {"100 labels": {"Labels only": 7000}}}}, "mine.yaml has published: {"),
    ],
)  # fmt: skip
def test_mistakes_name_file_and_key(keys: dict[str, Any], said: str, mine: Path, fallow_cli: Any) -> None:
    changed(mine, **keys)
    assert said in fallow_cli("table", "mine.yaml").sentence
    assert not Path("runs").exists()


def test_no_file_and_no_table(fallow_cli: Any) -> None:
    assert "there is no file nosuch.yaml" in fallow_cli("table", "nosuch.yaml").sentence
    assert fallow_cli("table", "semifl").sentence.startswith("which table of semifl is meant; there are: table1, table2")


def test_published_figures_stand_beside(mine: Path) -> None:
    """60 and 62 against 63.5 with deviation 3."""
    grids = Grids(changed(mine, published={"digits": {"100 labels": {"Labels only": [63.5, 3], "FixMatch 0.6": 70}}}))
    assert [entry.figure and entry.figure.mean for entry in grids.entries] == [63.5, 70, None, None]
    shown = Table(grids, [Line(e, {Path(f"seed-{i}"): dict.fromkeys(("last", "best"), x / 100) for i, x in enumerate(v)}, "") for e, v in zip(grids.entries, ([60.0, 62.0], [], [80.0], [81.0]))])
    assert shown.rows()[0][3:7] == ("61.00 ± 1.00", "2", "63.50 ± 3.00", "-2.50 *")
    tex = shown.latex()
    assert r"Labels only & 61.00 $\pm$ 1.00 (n 2) [63.50 $\pm$ 3.00] & 80.00 (n 1) \\" in tex
    assert r"FixMatch 0.6 & [70.00] & \textbf{81.00 (n 1)} \\" in tex and "% In brackets: the published figure." in tex


def test_data_that_are_not_there_are_told_once(mine: Path, tmp_path: Path, fallow_cli: Any) -> None:
    changed(mine, data_dir=str(tmp_path), cells={"cifar10": {"a": {}}, "digits": {"b": {"label_count": 100}}})
    told = fallow_cli("table", "mine.yaml", "--seeds", "1")
    assert told.code == 1 and told.out.count(f"cifar10 is not in {tmp_path}") == 1 and "FixMatch 0.6" in told.out
    assert RunFolder(Path("runs/mine/digits-b--labels-only/seed-0")).concluded() == "finished"


def test_the_example_is_a_table() -> None:
    path = Path(__file__).parents[1] / "examples" / "own_table.yaml"
    grids = Grids(str(path))
    assert len(grids.entries) == 6 and grids.grid.seeds == 3
    with pytest.raises(UserError, match="nothing in the table agrees with data=svhn"):
        Grids(str(path), only=["data=svhn"])


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_table_that_is_told_to_end(jobs: str, tmp_path: Path) -> None:
    """Its runs write a checkpoint, whether they are made here or in processes of their own."""
    keys = "data: digits\nclients: 3\nsteps: 1\nrounds: 5000\ncheckpoint_every: 10000\nlabel_count: 60\n"
    (tmp_path / "t.yaml").write_text(keys + "rows: {A: {method: fedavg}, B: {method: fedprox, prox: 0.1}}\ncells: {digits: {few: {batch: 8}}}\n")
    words = [sys.executable, "-m", "fallow", "table", "t.yaml", "--seeds", "1", "--jobs", jobs]
    work = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = time.monotonic() + 180
    while not (begun := [p for p in tmp_path.rglob("metrics.jsonl") if p.read_bytes().count(b"\n") > 2]):
        assert time.monotonic() < end and work.poll() is None
        time.sleep(0.01)
    work.send_signal(signal.SIGTERM)
    said = work.communicate(timeout=180)[0]
    assert work.returncode == 143 and said.endswith("stopped; the same command goes on from the last checkpoints\n"), said
    assert RunFolder(begun[0].parent).committed() > 2
