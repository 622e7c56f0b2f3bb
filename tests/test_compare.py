"""Runs as a table of methods by settings: numbers by hand, what makes rows and columns, what is left out, how it is written."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fallow.config import dump
from fallow.errors import UserError
from fallow.report import paired, payload, series, written
from fallow.report.comparison import Comparison, Entry, compared
from fallow.runs import finding
from fallow.runs.settings import resolve

LABELS = {"data": "digits", "label_count": 100, "clients": 5}


def run(path: Path, last: float | None, seed: int = 0, status: str = "finished", rounds: int = 2, **keys: Any) -> Path:
    """A thinned result."""
    _, options = resolve({}, LABELS | {"seed": seed, "rounds": 2} | keys)
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(dump(options))
    rows = [{"round": n, "accuracy": last, "label_ratio": None, "seconds": {"round": 1.0}} for n in range(1, rounds + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "status": status, "last": last, "best": last, "best_round": rounds, "rounds": rounds, "seconds": 2.0, "seconds_per_round": 1.0, "seed": seed,
        "method": options.method, "data": options.data, "classes": 10, "channels": 1, "size": 8, "fingerprint": "", "config_hash": "", "versions": {},
        "macro_f1": None if last is None else last / 2, "test_loss": 0.5, "sites": {"berlin": 0.25}, "scores": {"auroc": 0.75, "sites": {"bonn": 0.5}},
    }  # fmt: skip
    (path / "summary.json").write_text(json.dumps(summary))
    return path


VALUES = {  # (method, labels) -> last by seed
    ("fedavg", 40): (0.50, 0.52, 0.54), ("fedavg", 100): (0.60, 0.62, 0.61),
    ("fixmatch", 40): (0.58, 0.57, 0.62), ("fixmatch", 100): (0.61, 0.63, 0.62),
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two methods, two numbers of labels, three seeds."""
    for (method, labels), accuracies in VALUES.items():
        for seed, last in enumerate(accuracies):
            run(tmp_path / "runs" / f"{method}-{labels}" / f"seed-{seed}", last, seed, method=method, label_count=labels)
    return tmp_path / "runs"


# -- the numbers ---------------------------------------------------------------------------------------------------------
def test_methods_by_settings(place: Path) -> None:
    """50, 52, 54 have mean 52 and, over n, deviation sqrt(8/3)."""
    c = compared([place])
    assert c.rows == ["FedAvg", "FixMatch"] and c.columns == [("label_count=40",), ("label_count=100",)]
    first = c.cells[0, 0]
    assert first.mean == pytest.approx(52) and first.std == pytest.approx(math.sqrt(8 / 3)) and first.n == 3
    assert first.error == pytest.approx(2 / math.sqrt(3))  # deviation over n - 1 is 2
    assert c.caption() == "Test accuracy after the last round in %, mean ± standard deviation over 3 seeds"
    assert str(first) == "52.00 ± 1.63"


def test_the_best_and_what_is_within_its_standard_error(place: Path) -> None:
    """40 labels: 59 against 52, the best's error is 2.65 / sqrt(3) = 1.53. 100 labels: 62 and 61, error 1 / sqrt(3) = 0.58."""
    assert compared([place]).best() == {(1, 0), (1, 1)}
    run(place / "uda-100", 0.615, 0, method="uda", label_count=100)  # within 0.58 of 62
    assert compared([place]).best() == {(1, 0), (1, 1), (2, 1)}
    assert compared([place], "test_loss").best() == {(0, 0), (1, 0), (0, 1), (1, 1), (2, 1)}  # all are 0.5


def test_of_losses_the_least_is_the_best(place: Path) -> None:
    summary = place / "fedavg-40/seed-0/summary.json"
    for path in (place / "fedavg-40").glob("*/summary.json"):
        path.write_text(path.read_text().replace('"test_loss": 0.5', '"test_loss": 0.4'))
    c = compared([place], "test_loss")
    assert c.best() >= {(0, 0)} and (1, 0) not in c.best() and not c.share
    assert c.cells[0, 0].mean == pytest.approx(0.4) and summary.exists()


def test_any_number_of_the_summary(place: Path) -> None:
    assert compared([place], "macro_f1").cells[0, 0].mean == pytest.approx(26)
    assert compared([place], "sites.berlin").cells[0, 0].mean == pytest.approx(25)
    assert compared([place], "auroc").cells[0, 0].mean == pytest.approx(75) and compared([place], "sites.bonn").cells[0, 0].mean == pytest.approx(50)
    assert compared([place], "seconds").cells[0, 0].mean == pytest.approx(2)
    with pytest.raises(UserError, match="no summary has a number 'macro_f2'; did you mean 'macro_f1'"):
        compared([place], "macro_f2")


def test_differences_are_paired_by_seed(place: Path) -> None:
    """FixMatch less FedAvg at 40 labels: 8, 5, 8 points; mean 7, deviation sqrt(3), t = 7 with 2 degrees of freedom."""
    c = compared([place])
    found = c.differences()
    assert set(found) == {(1, 0), (1, 1)} and c.rows[c.against] == "FedAvg"
    assert found[1, 0].mean == pytest.approx(7) and found[1, 0].n == 3
    assert found[1, 0].p == pytest.approx(1 - 7 / math.sqrt(7**2 + 2))  # Student's distribution with 2 degrees, in closed form
    assert found[1, 1].p is None  # 1, 1, 1: nothing is known of their spread
    assert str(found[1, 0]) == "+7.00 (p 0.020)"
    assert compared([place], against="FixMatch").differences()[0, 0].mean == pytest.approx(-7)
    with pytest.raises(UserError, match="no row 'FedAvgg' to compare with"):
        compared([place], against="FedAvgg")


@pytest.mark.parametrize("n", [3, 5, 7, 21, 30])
def test_p_values_are_scipys(n: int) -> None:
    gaps = np.random.default_rng(n).normal(0.4, 1, n)
    if 6 <= n <= 20:
        wanted = stats.permutation_test((gaps,), np.sum, permutation_type="samples", n_resamples=np.inf).pvalue
    else:
        wanted = stats.ttest_1samp(gaps, 0).pvalue
    assert paired.p_value(gaps) == pytest.approx(wanted, rel=1e-9)


def test_p_values_by_hand() -> None:
    """Six differences of one sign: of 64 ways to turn signs two are as far from 0. One small one of the other sign: four."""
    assert paired.p_value(np.array([1.0, 2, 3, 4, 5, 6])) == 2 / 64
    assert paired.p_value(np.array([-1.0, 2, 3, 4, 5, 6])) == 4 / 64
    assert paired.p_value(np.zeros(6)) == 1
    assert paired.p_value(np.array([1.0, 2])) is None and paired.p_value(np.full(4, 0.3)) is None
    assert paired.difference({0: 1.0}, {1: 2.0}) is None
    only = paired.difference({0: 1.0, 1: 5.0}, {1: 2.0, 2: 9.0})
    assert only is not None and (only.mean, only.n, only.p) == (3.0, 1, None)


# -- rows and columns ----------------------------------------------------------------------------------------------------
def heads(*paths: Path, **how: Any) -> tuple[list[str], list[tuple[str, ...]]]:
    c = compared(paths, **how)
    return c.rows, c.columns


def test_what_differs_decides(tmp_path: Path) -> None:
    a = run(tmp_path / "a", 0.5, method="fixmatch", lr=0.1)
    b = run(tmp_path / "b", 0.5, method="fixmatch", lr=0.01)
    c = run(tmp_path / "c", 0.5, method="fixmatch", lr=0.1, partition="dirichlet-capped:0.3")
    d = run(tmp_path / "d", 0.5, method="fixmatch", lr=0.1, model="resnet-9")
    assert heads(a) == (["FixMatch"], [("digits",)])
    assert heads(a, b) == (["lr=0.1", "lr=0.01"], [("digits",)])
    assert heads(a, b, c) == (["lr=0.1", "lr=0.01"], [("partition=dirichlet-capped:0.3",), ("partition=iid",)])
    assert heads(a, d) == (["FixMatch"], [("model=resnet-9",), ("model=small-cnn",)])
    assert heads(a, c, rows=["partition"]) == (["partition=iid", "partition=dirichlet-capped:0.3"], [("digits",)])
    assert heads(a, b, columns=["lr"]) == (["FixMatch"], [("lr=0.01",), ("lr=0.1",)])
    with pytest.raises(UserError, match="no run has a key 'partitio'; did you mean 'partition'"):
        heads(a, c, rows=["partitio"])
    with pytest.raises(UserError, match="lr cannot tell rows and columns apart at once"):
        heads(a, b, rows=["lr"], columns=["lr"])


def test_what_each_method_has_of_its_own_makes_no_rows(tmp_path: Path) -> None:
    a = run(tmp_path / "a", 0.5, method="fixmatch", lr=0.1, steps=20)
    b = run(tmp_path / "b", 0.5, method="fedavg", lr=0.05, steps=10)
    c = compared([a, b])
    assert c.rows == ["FixMatch", "FedAvg"] and len(c.columns) == 1
    assert any("lr" in note and "steps" in note and note.startswith("These keys differ as well: ") for note in c.notes)
    one, other = (run(tmp_path / f"t{t}", 0.5, method="fixmatch", lr=0.1, steps=20, threshold=t) for t in (0.6, 0.8))
    assert compared([one, other, b]).rows == ["FixMatch threshold=0.6", "FixMatch threshold=0.8", "FedAvg"]


def test_steps_that_are_fitted_to_each_split_make_no_rows(tmp_path: Path) -> None:
    """Other steps with other seeds are one cell, which is told; with the same seed they are two."""
    for seed, steps in enumerate((24, 25, 24)):
        run(tmp_path / f"a{seed}", 0.5 + seed / 100, seed, method="fixmatch", steps=steps, partition="dirichlet-capped:0.3")
    run(tmp_path / "b", 0.6, 0, method="fedavg", steps=25, partition="dirichlet-capped:0.3")
    c = compared([tmp_path])
    assert c.rows == ["FixMatch", "FedAvg"] and c.cells[0, 0].n == 3 and c.cells[0, 0].mean == pytest.approx(51)
    assert "The seeds of a cell differ in steps (24, 25), fitted to the split of each." in c.notes
    assert [len(group.runs) for group in series.groups([tmp_path])] == [3, 1]
    page = payload.payload(finding.found([tmp_path]))
    assert len(page["groups"]) == 2 and [one["group"] for one in page["runs"]] == [0, 0, 0, 1]
    run(tmp_path / "c", 0.6, 0, method="fixmatch", steps=60, partition="dirichlet-capped:0.3")
    assert len(compared([tmp_path]).rows) > 2


# -- what counts -----------------------------------------------------------------------------------------------------------
def test_the_same_seed_counts_once_and_what_is_not_finished_does_not(place: Path) -> None:
    shutil.copytree(place / "fedavg-40/seed-0", place / "again")
    run(place / "z-other", 0.9, 1, method="fedavg", label_count=40)  # the same settings and seed, another result
    run(place / "dead", 0.1, 3, "failed", 1, method="fedavg", label_count=40)
    run(place / "cut", 0.1, 4, "interrupted", 1, method="fedavg", label_count=40)
    (run(place / "going", 0.1, 5, method="fedavg", label_count=40) / "summary.json").unlink()
    bad = run(place / "bad", 0.1, 6, method="fedavg", label_count=40)
    (bad / "config.yaml").write_text("method: [")
    c = compared([place])
    assert c.cells[0, 0].n == 3 and c.cells[0, 0].mean == pytest.approx(52)
    said = " ".join(c.notes)
    assert f"The same settings and seed again count once: {place}/fedavg-40/seed-0 (as {place}/again)." in said
    assert f"with another result; the first counts: {place}/z-other (unlike {place}/fedavg-40/seed-1)." in said
    for name in ("dead (failed, round 1 of 2)", "cut (interrupted, round 1 of 2)", "going (running, round 2 of 2)"):
        assert f"{place}/{name}" in said
    assert f"Left out: {bad}/config.yaml is not valid YAML" in said


def test_report_and_figure_take_means_over_the_same_runs(place: Path) -> None:
    shutil.copytree(place / "fedavg-40/seed-0", place / "again")
    run(place / "cut", 0.1, 4, "interrupted", 1, method="fedavg", label_count=40)
    alone = run(place / "only", 0.1, 4, "interrupted", 1, method="uda", label_count=40)
    bad = run(place / "bad", 0.1, 6, method="fedavg", label_count=40)
    (bad / "config.yaml").write_text("method: [")
    told: list[str] = []
    groups = series.groups([place / "fedavg-40", place / "again", place / "cut", bad], tell=told.append)
    assert [len(group.runs) for group in groups] == [3] and series.curve(groups[0], "accuracy").mean[-1] == pytest.approx(0.52)
    assert [text.partition(":")[0] for text in told] == ["Left out", "Left out, not finished", "The same settings and seed again count once"]
    assert [len(group.runs) for group in series.groups([alone])] == [1]  # where none is finished, what there is
    page = payload.payload(finding.found([place]))
    aside = {Path(one["path"]).name for one in page["runs"] if one["aside"]}
    assert aside == {"seed-0", "cut"} and sum(one["aside"] for one in page["runs"]) == 2  # a method's only run is shown
    assert "again" in page["notes"][-1] and str(bad) in page["notes"][0]


def test_the_page_watched_shows_what_goes_on(place: Path) -> None:
    (run(place / "going", 0.1, 5, method="fedavg", label_count=40) / "summary.json").unlink()
    for live in (False, True):
        page = payload.payload(finding.found([place]), live=live)
        assert [Path(one["path"]).name for one in page["runs"] if one["aside"]] == ([] if live else ["going"])


def test_runs_that_lack_the_number_are_named(place: Path) -> None:
    path = place / "fedavg-40/seed-2/summary.json"
    path.write_text(path.read_text().replace('"macro_f1"', '"other"'))
    c = compared([place], "macro_f1")
    assert c.cells[0, 0].n == 2 and f"{path.parent} without macro_f1, left out." in c.notes
    assert c.shown((0, 0)).endswith(" (n 2)") and c.shown((1, 0)).endswith(" (n 3)")


def test_nothing_is_finished(tmp_path: Path) -> None:
    path = run(tmp_path / "a", 0.5, status="failed")
    with pytest.raises(UserError, match=f"none of these runs is finished, {path} for one; go on with it by `fallow resume {path}`"):
        compared([tmp_path])


# -- how it is written -----------------------------------------------------------------------------------------------------
def test_markdown(place: Path) -> None:
    text = written.markdown(compared([place]))
    assert "|  | label\\_count=40 | label\\_count=100 |\n| --- | ---: | ---: |\n| FedAvg | 52.00 ± 1.63 | 61.00 ± 0.82 |\n" in text
    assert "| FixMatch | **59.00 ± 2.16** | **62.00 ± 0.82** |\n" in text
    assert "| FixMatch | +7.00 (p 0.020) | +1.00 |" in text and "Differences are to FedAvg" in text


def test_csv_has_a_line_for_each_cell(place: Path) -> None:
    lines = list(csv.DictReader(written.table(compared([place])).splitlines()))
    assert len(lines) == 4
    assert lines[2] == {
        "row": "FixMatch", "column": "label_count=40", "statistic": "last", "mean": "59.0000", "std": "2.1602", "n": "3", "seeds": "0 1 2", "best": "true",
        "difference": "7.0000", "p": lines[2]["p"],
    }  # fmt: skip
    assert float(lines[2]["p"]) == pytest.approx(1 - 7 / math.sqrt(51), rel=1e-5)


def balanced(text: str) -> bool:
    depth = 0
    for mark in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if mark == "{" else -1
        assert depth >= 0
    return depth == 0


def test_latex(place: Path) -> None:
    for data in ("mnist", "svhn"):
        run(place / data, 0.7, data=data, method="fedavg", label_count=40)
    run(place / "svhn-100", 0.7, data="svhn", method="fedavg", label_count=100)
    text = written.latex(compared([place]))
    body = [line for line in text.splitlines() if not line.startswith("%")]
    assert body[:2] == [r"\begin{tabular}{lrrrrr}", r"\toprule"] and body[-2:] == [r"\bottomrule", r"\end{tabular}"] and r"\midrule" in body
    assert body[2] == r" & \multicolumn{2}{c}{digits} & \multicolumn{1}{c}{mnist} & \multicolumn{2}{c}{svhn} \\"
    assert body[3] == r"\cmidrule(lr){2-3}\cmidrule(lr){4-4}\cmidrule(lr){5-6}"
    assert body[4] == r"method & label\_count=40 & label\_count=100 & label\_count=40 & label\_count=40 & label\_count=100 \\"
    assert body[6].startswith(r"FedAvg & 52.00 $\pm$ 1.63 (n 3) & 61.00 $\pm$ 0.82 (n 3) & 70.00 (n 1) &")
    assert r"FixMatch & \textbf{59.00 $\pm$ 2.16 (n 3)} & \textbf{62.00 $\pm$ 0.82 (n 3)} &  &  &  \\" in body
    rows = [line for line in body if line.endswith(r"\\") and "multicolumn" not in line]
    assert all(line.count("&") == 5 for line in rows) and balanced("\n".join(body))


def test_latex_escapes_names() -> None:
    assert written.tex("a_b & 50% #1 $x {y} ~ ^ \\ <z>\n|") == (
        r"a\_b \& 50\% \#1 \$x \{y\} \textasciitilde{} \textasciicircum{} \textbackslash{} \textless{}z\textgreater{} \textbar{}"
    )


def test_a_row_that_begins_with_a_bracket_is_no_argument_of_the_line_above() -> None:
    """LaTeX takes a bracket or a star after a line's end for its argument, on the next line too."""
    names = ["a", "[b]", "*c"]
    c = Comparison("last", True, names, [("digits",)], {(i, 0): Entry({0: 50.0 + i}) for i in range(3)})
    body = [line for line in written.latex(c).splitlines() if line.endswith(r"\\")]
    assert [line.split(" & ")[0] for line in body[1:]] == ["a", "{}[b]", "{}*c"]


def test_the_command(place: Path, fallow_cli: Any) -> None:
    told = fallow_cli("compare", str(place))
    assert told.code == 0 and "FixMatch  59.00 ± 2.16 *" in told.out and "Marked * is the best" in told.out
    for suffix in ("md", "csv", "tex"):
        assert fallow_cli("compare", str(place), "-o", f"t.{suffix}").code == 0
        assert fallow_cli("compare", str(place), "-o", f"t.{suffix}").code == 0  # its own file is replaced
        printed = fallow_cli("compare", str(place), "--format", suffix)
        assert printed.out == Path(f"t.{suffix}").read_text()
    Path("mine.md").write_text("mine")
    assert fallow_cli("compare", str(place), "-o", "mine.md").sentence.startswith("mine.md is there and was not made by `fallow compare`")
    assert fallow_cli("compare", str(place), "-o", "t.doc").sentence.startswith("a table cannot be written as 't.doc'; end the name in .md, .csv or .tex")
    assert fallow_cli("compare", str(place), "--format", "xls").sentence.startswith("there is no format 'xls'; choose one with --format: md, csv, tex")


def test_of_two_runs_the_one_that_cannot_be_read_is_named(place: Path, fallow_cli: Any) -> None:
    good, damaged = place / "fedavg-40" / "seed-0", place / "fixmatch-40" / "seed-0"
    (damaged / "metrics.jsonl").write_text("{\n")
    told = fallow_cli("compare", str(good), str(damaged))
    assert told.code == 0 and "Left out: " in told.out + told.err and "metrics.jsonl" in told.out + told.err
