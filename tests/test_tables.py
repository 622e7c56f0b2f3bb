"""A paper's table: a grid that survives kills and failures, read back without running, beside published figures."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fallow
from bench import collect as bench_collect
from fallow import runs
from fallow.cli import app
from fallow.errors import UserError
from fallow.names import recipes
from fallow.report.table import Table
from fallow.runs import settings
from fallow.tables.grids import Grids
from fallow.tables.lines import Line, collect, read
from fallow.tables.published import of_table
from fallow.tables.running import run
from fallow.tables.thinning import thin

SMALL = [
    "data=digits",
    "defaults=paper",
    "clients=5",
    "active=2",
    "epochs=1",
    "model=small-cnn",
    "norm=gn",
    "server_batch=50",
    "batch=50",
    "checkpoint_every=1",
]
ONLY = [
    "data=cifar10",
    "method=SemiFL",
    "label_count=250",
    "partition=iid",
    "partition=shards:2",
    "partition=dirichlet-capped:0.3",
]


def flags(name, pairs):
    return [word for pair in pairs for word in (name, pair)]


def command(out, *more, rounds=2, only=ONLY, seeds=1):
    given = [*SMALL, f"rounds={rounds}"]
    words = [
        "table",
        "semifl",
        "1",
        *flags("--only", only),
        *flags("--set", given),
        "--seeds",
        str(seeds),
        "--out",
        str(out),
        *more,
    ]
    return [sys.executable, "-m", "fallow", *words]


def grids(only=ONLY, rounds=2):
    return Grids("semifl", "1", only, [*SMALL, f"rounds={rounds}"])


def seen(out):
    return {
        p: (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(out.rglob("*")) if p.is_file() and p.name != ".lock"
    }


def wait_for(condition, process, seconds=120):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end and process.poll() is None
        time.sleep(0.005)


def test_a_grid_killed_in_the_middle_and_run_again(tmp_path, monkeypatch):
    place, rounds = tmp_path / "semifl/table1", 8
    first, second, third = (place / e.cell.slug / "seed-0" for e in grids().entries)
    work = subprocess.Popen(command(tmp_path, rounds=rounds), stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_for(
            lambda: (second / "metrics.jsonl").is_file() and (second / "metrics.jsonl").read_text().count("\n") > 2,
            work,
        )
        os.kill(work.pid, signal.SIGKILL)
    finally:
        work.kill()
        work.wait()
    done = seen(first)
    assert json.loads((first / "summary.json").read_text())["status"] == "finished"
    assert not (second / "summary.json").exists() and not (third / "config.yaml").exists()

    again = CliRunner().invoke(app, command(tmp_path, rounds=rounds)[3:], catch_exceptions=False)
    assert again.exit_code == 0
    assert seen(first) == done  # not touched
    said = {line.split(", SemiFL, seed 0: ")[0]: line for line in again.stdout.splitlines() if ", seed 0: " in line}
    assert [("(was finished)" in t, "(resumed)" in t) for t in said.values()] == [
        (True, False),
        (False, True),
        (False, False),
    ]
    for path in (first, second, third):
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        assert [r["round"] for r in rows] == list(range(1, rounds + 1))
    lines = list(csv.DictReader((place / "table.csv").open()))
    assert [line["n"] for line in lines] == ["1"] * 3 and all(line["mean"] and line["published"] for line in lines)

    # `--from` prints the same, runs nothing and writes nothing
    before = seen(tmp_path)
    words = ["table", "semifl", "1", *flags("--only", ONLY), *flags("--set", [*SMALL, f"rounds={rounds}"])]
    monkeypatch.setattr(runs, "run", None)
    monkeypatch.setattr(runs, "resume", None)
    read = CliRunner().invoke(app, [*words, "--from", str(tmp_path)], catch_exceptions=False)
    shown = again.stdout[again.stdout.index("semifl/table1:") :].splitlines()[:-1]
    assert read.stdout.splitlines() == shown and seen(tmp_path) == before


def test_a_cell_that_fails_is_told_and_the_rest_goes_on(tmp_path):
    only = ["data=cifar10", "method=SemiFL", "setting=labels=4000 iid", "setting=labels=250 iid"]  # digits has no 4000
    told = []
    grid = grids(only)
    failures = run(grid, tmp_path, seeds=1, tell=told.append)
    assert [(f.entry.cell.setting, f.seed) for f in failures] == [("labels=4000 iid", 0)]
    assert len(told) == 2 and "seed 0: failed: 4000 labels" in told[1]
    small, large = read(grid, tmp_path, 1, failures)
    assert len(small.runs) == 1 and not large.runs and "failed" in large.note
    assert "failed" in Table(grid, [small, large]).markdown()


def test_runs_at_a_time_in_processes_of_their_own(tmp_path):
    grid = grids(["data=cifar10", "method=SemiFL", "partition=iid"])
    [failure] = run(grid, tmp_path, seeds=1, jobs=2, tell=lambda _: None)
    assert failure.entry.cell.setting == "labels=4000 iid" and failure.why.startswith("4000 labels are asked for")
    small, large = read(grid, tmp_path, 1, [failure])
    assert len(small.runs) == 1 and not large.runs


def test_the_exit_code_says_that_something_failed(tmp_path):
    words = command(tmp_path, only=["data=cifar10", "method=SemiFL", "setting=labels=4000 iid"])[3:]
    got = CliRunner().invoke(app, words)
    assert (
        got.exit_code == 1 and "labels=4000 iid, SemiFL, seed 0: failed" in got.stdout and "Traceback" not in got.output
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Two seeds of one cell."""
    out = tmp_path_factory.mktemp("runs")
    grid = grids(["data=cifar10", "method=SemiFL", "setting=labels=250 iid"], rounds=1)
    assert not run(grid, out, seeds=2, tell=lambda _: None)
    return grid, out


def test_other_settings_in_the_same_folder_are_not_taken_for_these(ran):
    _, out = ran
    other = Grids("semifl", "1", ["setting=cifar10 labels=250 iid", "method=SemiFL"], [*SMALL, "rounds=1", "lr=0.5"])
    before = seen(out)
    failures = run(other, out, seeds=1, tell=lambda _: None)
    assert len(failures) == 1 and "other settings (lr=0.03)" in failures[0].why and seen(out) == before
    assert not read(other, out, 1, failures)[0].runs
    [line] = read(other, out)  # read only: shown, with what is different
    assert len(line.runs) == 2 and line.note == "lr=0.03"


def test_a_folder_that_was_made_and_no_more_is_begun_again(tmp_path):
    grid = grids(["setting=cifar10 labels=250 iid", "method=SemiFL"], rounds=1)
    (tmp_path / "semifl/table1/cifar10-labels-250-iid/seed-0").mkdir(parents=True)
    assert not run(grid, tmp_path, seeds=1, tell=lambda _: None)
    assert [p.name for p in (tmp_path / "semifl/table1/cifar10-labels-250-iid").iterdir()] == ["seed-0"]


def test_collected_results_give_the_same_table(ran, tmp_path):
    grid, out = ran
    copied = collect(grid, out, tmp_path)
    assert [p.relative_to(tmp_path).as_posix() for p in copied] == [
        f"semifl/table1/cifar10-labels-250-iid/seed-{n}" for n in (0, 1)
    ]
    assert {p.name for p in copied[0].iterdir()} == {"config.yaml", "metrics.jsonl", "summary.json"}
    a, b = (Table(grid, read(grid, place)) for place in (out, tmp_path))
    assert a.markdown() == b.markdown() and a.csv() == b.csv() and a.latex() == b.latex()
    assert settings.stored(copied[0] / "config.yaml")[1].data_dir is None


def test_runs_from_anywhere_find_their_place(ran, tmp_path, monkeypatch, capsys):
    grid, _ = ran
    path = fallow.run(
        grid.recipe, out=tmp_path / "runs", name="x", setting="cifar10 labels=250 iid", seed=3, **grid.given
    ).path
    words = [
        "collect",
        "semifl",
        "1",
        str(path),
        "--to",
        str(tmp_path / "results"),
        "--only",
        "data=cifar10",
        *flags("--set", [*SMALL, "rounds=1"]),
    ]
    monkeypatch.setattr(sys, "argv", words)
    bench_collect.main()
    assert (tmp_path / "results/semifl/table1/cifar10-labels-250-iid/seed-3/summary.json").is_file()
    assert "differs" not in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", words[:-2])  # without rounds=1
    bench_collect.main()
    assert "(differs: rounds=1)" in capsys.readouterr().out


def test_thinned_metrics_keep_first_best_and_last(ran, tmp_path):
    _, out = ran
    source = next(out.rglob("seed-0"))
    run = tmp_path / "run"
    run.mkdir()
    for rounds, every, tested in ((200, 1, 200), (201, 1, 200), (1000, 1, 200), (600, 5, 120), (2000, 5, 199)):
        best = rounds - 3 if every == 1 else rounds - 10
        (run / "config.yaml").write_bytes((source / "config.yaml").read_bytes())
        (run / "metrics.jsonl").write_text(
            "".join(
                json.dumps({"round": r, "accuracy": None if r % every else 0.5 + 0.1 * (r == best)}) + "\n"
                for r in range(1, rounds + 1)
            )
        )
        (run / "summary.json").write_text(
            json.dumps({"status": "finished", "last": 0.5, "best": 0.6, "best_round": best})
        )
        target = thin(run, tmp_path / "thin")
        rows = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]
        found = [r["round"] for r in rows]
        assert len(found) == 200 and {1, best, rounds} <= set(found) and found == sorted(set(found))
        assert sum(r["accuracy"] is not None for r in rows) == tested
        assert max(b - a for a, b in pairwise(found)) <= 2 * -(-rounds // 200)
        kept = json.loads((target / "summary.json").read_text())
        assert kept.pop("mean_last_30") == pytest.approx(0.5 + 0.1 / (30 / every))  # one of 30, or of 6, is 0.6
        assert kept == json.loads((run / "summary.json").read_text())
    (run / "summary.json").unlink()
    with pytest.raises(UserError, match="has not ended"):
        thin(run, tmp_path / "none")


# -- what is printed ---------------------------------------------------------------------------------------------------
def lines_of(grid, *values):
    runs = [{Path(f"seed-{i}"): {"last": x / 100, "best": x / 100 + 0.01} for i, x in enumerate(v)} for v in values]
    return [Line(e, r, e.missing or "") for e, r in zip(grid.entries, runs, strict=True)]


def test_figures_are_marked_within_one_std():
    grid = Grids(
        "feddure", "1", ["data=cifar10", "setting=iid,iid", "method=FedDure", "method=FedAvg*", "method=FedMatch"]
    )
    shown = Table(grid, lines_of(grid, [46.0, 47.0, 47.2], [], [67.46]))
    avg, match, dure = shown.rows()
    assert avg == ("cifar10", "iid,iid", "FedAvg*", "46.73 ± 0.52", "3", "45.68 ± 1.14", "+1.05 *", "47.73 ± 0.52", "")
    assert match[3:] == ("", "", "51.52 ± 0.50", "", "", "not run")
    assert dure[3:7] == ("67.46", "1", "67.69 ± 0.23", "-0.23 *")
    assert shown.title()[3] == "ours (last)" and shown.title()[7] == "best"
    assert "| cifar10 | iid,iid | FedAvg\\* | 46.73 ± 0.52 | 3 |" in shown.markdown()
    tex = shown.latex()  # methods by settings, the published figure in brackets
    assert "\\begin{tabular}{lr}\n\\toprule\n & \\multicolumn{1}{c}{cifar10} \\\\\n" in tex and r"method & iid,iid \\" in tex
    assert r"FedAvg* & 46.73 $\pm$ 0.52 (n 3) [45.68 $\pm$ 1.14] \\" in tex and r"FedMatch & [51.52 $\pm$ 0.50] \\" in tex
    assert r"FedDure & \textbf{67.46 (n 1)} [67.69 $\pm$ 0.23] \\" in tex and "| FedDure | **67.46 (n 1)** [67.69 ± 0.23] |" in shown.markdown()
    row = next(csv.DictReader(shown.csv().splitlines()))
    assert (row["mean"], row["std"], row["n"], row["difference"], row["within_std"]) == (
        "46.7333",
        "0.5249",
        "3",
        "1.0533",
        "true",
    )
    assert (row["last"], row["best"], row["statistic"]) == ("46.7333", "47.7333", "last")


def test_our_std_counts_where_none_is_printed():
    grid = Grids("fedrgd", "II", ["method=FedRGD", "labels=server", "partition=iid"])
    assert of_table("fedrgd", "II")["cifar10", "labels-at-server iid", "FedRGD"].std is None
    near, far, single = (Table(grid, lines_of(grid, v)).rows()[0][6] for v in ([62.0, 64.0], [62.0, 62.4], [63.3]))
    assert (near, far, single) == ("-0.32 *", "-1.12", "-0.02")
    assert (
        "63.32" in Table(grid, lines_of(grid, [])).rows()[0][5]
        and Table(grid, lines_of(grid, [])).rows()[0][8] == "not run"
    )


def test_latex_escapes():
    grid = Grids("fedloke", "1", ["data=cifar10", "label_ratio=0.05", "method=FedLoKe"])
    assert r"labels=5\% alpha=0.5" in Table(grid, lines_of(grid, [77.0])).latex()


@pytest.mark.parametrize(
    "words, said",
    [
        (["nobody", "1"], "no paper 'nobody'"),
        (["semifl", "9"], "no recipe for its table 9; there are: table1, table2"),
        (["semifl", "1", "--only", "data=mnist"], "nothing in the table agrees with data=mnist"),
        (["semifl", "1", "--only", "cifar10"], "is not key=value"),
        (["semifl", "1", "--set", "method=feddb"], "cannot be set for a whole table"),
    ],
)
def test_mistakes_are_told(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    got = CliRunner().invoke(app, ["table", *words])
    assert isinstance(got.exception, UserError) and said in str(got.exception)
    assert list(tmp_path.iterdir()) == []


def test_recipes_are_listed():
    from fallow.listing import rows

    listed = {name: about for name, about, *_ in rows("recipes")[1:]}
    assert all(name in listed and listed[name] for name in recipes())
    assert re.search("Table 1", listed["semifl/table1"])


def test_results_layout():
    own, other = Grids(
        "feddure", "1", ["data=cifar10", "setting=iid,dir", "method=FedDure", "method=FedAvg+Fixmatch"]
    ).entries[::-1]
    assert own.folder == Path("feddure/table1/cifar10-iid-dir")
    assert other.folder == Path("feddure/table1/cifar10-iid-dir--fedavg-fixmatch")


def test_a_data_set_that_is_not_there_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    grids = Grids("feddure", "1", ["data=cifar10"], [f"data_dir={tmp_path}"])
    failures = run(grids, tmp_path / "runs", seeds=2, tell=told.append)
    assert len(told) == 1 and told[0].startswith(f"cifar10 is not in {tmp_path}") and told[0].endswith("Its runs are left out.")
    assert len(failures) == 2 * sum(not e.missing for e in grids.entries)


def test_a_row_that_refuses_a_key_fails_alone(tmp_path: Path) -> None:
    told: list[str] = []
    given = ["data=digits", "weight=0.5", "rounds=1", "clients=10", "active=2", "label_per_class=1", "model=small-cnn", "norm=bn"]
    grids = Grids("feddure", "1", ["setting=iid,iid", "method=FedAvg*", "method=FedAvg+Fixmatch"], given)
    failures = run(grids, tmp_path / "runs", seeds=1, tell=told.append)
    assert {f.entry.row for f in failures} == {"FedAvg*"} and "no key 'weight'" in failures[0].why
