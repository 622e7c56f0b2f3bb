"""What the report's page is made of: runs, groups, names, published figures, the server of `fallow watch`."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import TINY

import fallow
from fallow.data.holdings import ClassCounts, Federation, Holding
from fallow.report import naming, page, payload, reading
from fallow.report.watch import Watch
from fallow.runs import finding
from fallow.runs.folder import RunFolder
from fallow.tables.cells import places
from fallow.tables.grids import Grids
from fallow.trees import read_yaml


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    out = tmp_path_factory.mktemp("made")
    return fallow.run(out=out, **TINY | {"method": "fixmatch", "labels": "clients"}).path


def fabricated(path: Path, rows: list[dict[str, Any]], **config: Any) -> Path:
    """A run folder of the given rows, without a summary."""
    path.mkdir(parents=True)
    keys = {"version": 1, "method": "fixmatch", "data": "digits", "seed": 0, "rounds": 5, **config}
    (path / "config.yaml").write_text(yaml.safe_dump(keys, sort_keys=False))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(round: int, accuracy: float | None = 0.5, **more: Any) -> dict[str, Any]:
    return {"round": round, "accuracy": accuracy, "seconds": {"clients": 1.0, "round": 2.0}, **more}


def embedded(text: str) -> dict[str, Any]:
    return json.loads(text.split('id="data">')[1].split("</script>")[0])


# -- which runs --------------------------------------------------------------------------------------------------------
def test_folders_stand_for_the_runs_below_them(made: Path, tmp_path: Path) -> None:
    one, two = (fabricated(tmp_path / "all" / name, []) for name in ("b", "a/seed-0"))
    (tmp_path / "all" / "notes").mkdir()
    fabricated(one / "keep" / "inside", [])
    assert finding.found([tmp_path / "all"]) == [two, one]
    assert finding.found([one, tmp_path / "all", one]) == [one, two]


@pytest.mark.parametrize("what", ["nothing", "file.txt", "empty"])
def test_what_is_no_run(what: str, tmp_path: Path, fallow_cli: Any) -> None:
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    for command in ("report", "watch"):
        sentence = fallow_cli(command, str(tmp_path / what)).sentence
        assert sentence == f"there is no run at {tmp_path / what}; give the folder of a run, such as runs/NAME."


def test_the_command_writes_one_file(made: Path, tmp_path: Path, fallow_cli: Any) -> None:
    told = fallow_cli("report", str(made), "-o", "here.html")
    assert told.code == 0 and told.out.startswith("page of 1 run: here.html"), told.err
    assert [p.name for p in tmp_path.iterdir()] == ["here.html"]
    assert embedded((tmp_path / "here.html").read_text())["runs"][0]["done"] == 2
    assert fallow_cli("report", str(made), "-o", "no/where.html").sentence.endswith("choose another file with -o.")
    assert fallow_cli("report", str(made), "-o", str(tmp_path)).sentence.endswith("name a file with -o.")


def test_a_damaged_file_is_told(tmp_path: Path, fallow_cli: Any) -> None:
    path = fabricated(tmp_path / "run", [row(1), row(2)])
    (path / "metrics.jsonl").write_text('{"round": 1}\n{"rou\n{"round": 3}\n')
    assert "line 2" in fallow_cli("report", str(path)).sentence
    (path / "metrics.jsonl").write_text('{"round": 1}\n3\n')
    assert "has a line that is no round" in fallow_cli("report", str(path)).sentence
    (path / "metrics.jsonl").write_text('{"round": 1}\n{"rou')  # being written
    assert fallow_cli("report", str(path)).code == 0


# -- what it says ------------------------------------------------------------------------------------------------------
def test_runs_that_differ_only_in_seed_are_one_group(tmp_path: Path) -> None:
    keys = {"threshold": 0.9, "device": "cpu"}
    fabricated(tmp_path / "a", [row(1)], **keys)
    fabricated(tmp_path / "b", [row(1)], **keys | {"seed": 1, "device": "cuda"})
    fabricated(tmp_path / "c", [row(1)], **keys | {"threshold": 0.5})
    fabricated(tmp_path / "d", [row(1)], method="./mine.py:Mine")
    data = payload.payload(finding.found([tmp_path]))
    assert [g["name"] for g in data["groups"]] == ["fixmatch threshold=0.9", "fixmatch threshold=0.5", "Mine"]
    assert [r["group"] for r in data["runs"]] == [0, 0, 1, 2]


def test_numbers_of_a_run(tmp_path: Path) -> None:
    rows = [
        row(1, 0.25, class_accuracy=[0.0, 0.5], prior_js={"bias": 0.125}),
        row(2, 0.75, test_loss=float("nan")),
        row(3, None, R=float("inf")),
        row(4, 0.5, note="text", beta=[1.0]),
    ]
    run = payload.payload([fabricated(tmp_path / "run", rows)])["runs"][0]
    assert (run["last"], run["best"], run["best_round"], run["done"], run["seconds"]) == (0.5, 0.75, 2, 4, 8.0)
    assert run["columns"] == {
        "round": [1, 2, 3, 4], "accuracy": [0.25, 0.75, None, 0.5], "seconds.clients": [1.0] * 4, "seconds.round": [2.0] * 4,
        "prior_js.bias": [0.125, None, None, None],
    }  # fmt: skip
    assert run["vectors"] == {"class_accuracy": {"round": [1], "values": [[0.0, 0.5]]}}


def test_long_runs_are_thinned_alike() -> None:
    kept = [[r["round"] for r in payload.thinned([{"round": i + 1} for i in range(n)], 100)] for n in (100, 250, 251)]
    assert kept[0] == list(range(1, 101))
    assert kept[1] == [*range(3, 250, 3), 250] and kept[2] == [*range(3, 251, 3), 251]


def test_status_is_that_of_the_last_round(tmp_path: Path) -> None:
    path = fabricated(tmp_path / "run", [row(1), row(2)])
    assert reading.Run.at(path).status == "running"
    (path / "summary.json").write_text(json.dumps({"status": "stopped", "rounds": 2}))
    assert reading.Run.at(path).status == "stopped"
    RunFolder(path).append(row(3))  # resumed
    assert reading.Run.at(path).status == "running"


def test_nothing_in_a_name_leaves_its_place(tmp_path: Path) -> None:
    evil = "x</script><script>alert(1)</script><!--&"
    path = fabricated(tmp_path / "run", [row(1)], data=evil, method=f"{evil}.py:{{{{script}}}}<b>")
    text = page.page(payload.payload([path]))
    assert "alert(1)</script>" not in text and "<b>" not in text.split("<body>")[1].split("<script")[0]
    assert embedded(text)["groups"][0]["config"]["data"] == evil
    assert text.count("<script") == 3


# -- published figures -------------------------------------------------------------------------------------------------
def of_cell(path: Path, paper: str, *only: str, seed: int = 0, **changed: Any) -> Path:
    """A run with the settings of a cell of the paper's first table, in its own method."""
    grids = Grids(paper, "1", only)
    entry = next(e for e in grids.entries if e.own)
    return fabricated(path, [row(1)], **grids.expected(entry, seed) | changed)


def test_runs_of_a_table_stand_beside_its_figures(tmp_path: Path) -> None:
    semifl = "data=cifar10", "setting=labels=4000 iid"
    paths = [of_cell(tmp_path / str(seed), "semifl", *semifl, seed=seed) for seed in (0, 1)]
    feddure = of_cell(tmp_path / "f", "feddure", "data=cifar10", "setting=iid,iid", eval_every=10)
    data = payload.payload([*paths, feddure])
    assert [g["name"] for g in data["groups"]] == ["SemiFL", "FedDure"]
    figures = [(p["paper"], p["table"], p["setting"], p["mean"], p["statistic"], p["other"]) for r in data["runs"] for p in r["published"]]
    assert figures.count(("semifl", "1", "labels=4000 iid", 93.1, "best", "")) == 2
    assert figures.count(("feddure", "1", "iid,iid", 67.69, "last", "eval_every=10")) == 1
    assert data["federations"] == []


def test_where_a_run_lies_says_of_which_cell_it_is(tmp_path: Path) -> None:
    changed = {"batch": 3, "rounds": 2}
    paths = (tmp_path / "feddure" / "table1" / "cifar10-iid-iid" / "seed-0", tmp_path / "elsewhere")
    inside, outside = (of_cell(p, "feddure", "data=cifar10", "setting=iid,iid", **changed) for p in paths)
    found = payload.payload([inside])["runs"][0]["published"]
    assert [(p["mean"], p["other"]) for p in found] == [(67.69, "rounds=2, batch=3")]
    assert payload.payload([outside])["runs"][0]["published"] == []


# -- the federation ----------------------------------------------------------------------------------------------------
def test_everyones_classes_are_stored(tmp_path: Path) -> None:
    ints = lambda *values: np.array(values, np.int64)
    clients = (Holding(ints(0), ints(1, 2)), Holding(ints(), ints(3, 5)))
    federation = Federation(Holding(ints(4), ints()), clients, ints(), ("a", "b"), {})
    federation.save(tmp_path / "f.npz", ints(0, 1, 1, -1, 0, 1), ["cat", "dog"])
    held, fingerprint = ClassCounts.load(tmp_path / "f.npz")
    assert fingerprint == federation.fingerprint == Federation.load(tmp_path / "f.npz").fingerprint
    assert held.classes == ("cat", "dog", "unknown") and held.server.tolist() == [1, 0, 0]
    assert held.labelled.tolist() == [[1, 0, 0], [0, 0, 0]] and held.unlabelled.tolist() == [[0, 2, 0], [0, 1, 1]]
    federation.save(tmp_path / "g.npz")
    held, _ = ClassCounts.load(tmp_path / "g.npz")
    assert held.classes == ("samples",) and held.unlabelled.tolist() == [[2], [2]] and held.server.tolist() == [1]


def test_a_run_stores_its_classes(made: Path) -> None:
    told = payload.federation(made)
    assert told is not None and told["classes"] == [str(k) for k in range(10)] and len(told["clients"]) == 4
    assert told["totals"] == {"labelled": 40, "unlabelled": 200} and np.sum(told["labelled"]) == 40
    assert np.sum(told["labelled"], 0).tolist() == [4] * 10  # balanced over classes


# -- the server --------------------------------------------------------------------------------------------------------
@contextmanager
def watching(path: Path) -> Iterator[Watch]:
    with Watch([path]) as server:
        thread = threading.Thread(target=server.server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.server.shutdown()
            thread.join()


def ask(server: Watch, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server.server_port, timeout=30)
    connection.request("GET", path, headers={"Host": f"{host}:{server.server.server_port}"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_server_has_news_when_files_change(tmp_path: Path) -> None:
    path = fabricated(tmp_path / "run", [])
    with watching(tmp_path) as server:
        assert server.server.server_address[0] == "127.0.0.1"
        first = embedded(ask(server, "/")[1])
        assert first["live"] is True and first["runs"][0]["done"] == 0
        assert ask(server, f"/runs.json?have={first['state']}") == (204, "")
        for rounds in (1, 2, 3):
            RunFolder(path).append(row(rounds))
        second = json.loads(ask(server, f"/runs.json?have={first['state']}")[1])
        assert second["runs"][0]["done"] == 3 and second["state"] != first["state"]
        RunFolder(path).cut(1)
        third = json.loads(ask(server, f"/runs.json?have={second['state']}")[1])
        assert third["runs"][0]["columns"]["round"] == [1]
        assert len(third["runs"]) == 1
        fabricated(tmp_path / "later", [row(1)])
        assert len(json.loads(ask(server, f"/runs.json?have={third['state']}")[1])["runs"]) == 2
        (path / "metrics.jsonl").write_text("?\n?\n")
        fourth = json.loads(ask(server, "/runs.json")[1])  # the other run is shown all the same
        assert len(fourth["runs"]) == 1 and "is damaged" in fourth["notes"][0]
        (tmp_path / "later" / "metrics.jsonl").write_text("?\n?\n")
        assert "is damaged" in json.loads(ask(server, "/runs.json")[1])["error"] and ask(server, "/")[0] == 500
        assert ask(server, "/etc/passwd")[0] == 404
        assert ask(server, "/", host="elsewhere.example")[0] == 403


def test_a_busy_port(made: Path, fallow_cli: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sentence = fallow_cli("watch", str(made), "--port", str(port)).sentence
    assert sentence == f"port {port} is taken; choose another with --port, or leave it out for a free one."


def test_runs_of_a_papers_cell_are_named_by_it() -> None:
    """Also where a key differs; but not where the data do."""
    results = Path(__file__).parents[1] / "results"
    paths = [results / "feddure/table1/cifar10-iid-iid/seed-0", results / "readings/reset/fedrgd/table2/cifar10-labels-at-client-iid/seed-0"]
    configs = [read_yaml(p / "config.yaml") for p in paths]
    assert naming.named(configs, [places(c, p) for c, p in zip(configs, paths)]) == ["FedDure", "FedRGD (varied)"]
    configs[1]["data"] = "digits"
    assert naming.named(configs, [places(c, p) for c, p in zip(configs, paths)])[1].startswith("fedrgd digits")
