"""Deployed runs in an in-process grid: the bits of simulated ones, and what becomes of a node that fails."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HERE, TINY, rows, weights

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fallow[flower]')")

from flower_grid import SMALL, Deployed, simulated
from flwr.app import Message
from PIL import Image

import fallow
from fallow import UserError
from fallow.engine.keep import Keep
from fallow.flower import deployed, running, share, traffic
from fallow.flower.exchange import to_records
from fallow.flower.messages import Unreadable, packed, unpacked
from fallow.flower.nodes import Nodes
from fallow.flower.parcel import Parcel
from fallow.flower.records import Records
from fallow.flower.terms import Terms
from fallow.methods.state import State
from fallow.report.payload import payload
from fallow.runs import Run
from fallow.runs.nodes import nodes

HIDDEN = ("label_accuracy", "label_accuracy_all", "R")  # what only a simulation knows: true labels of unlabelled samples, and everyone's classes
FOUNDING: dict[str, dict[str, Any]] = {
    "fixmatch": {"active": 2},
    "semifl": {"labels": "server", "norm": "sbn", "sbn": "federated", "threshold": 0.1, "active": 2},
    "fedrgd": {"labels": "server", "average": "grouped", "groups": 2, "optimizer_state": "travel", "clients": 4, "active": 4},
    "fedloke": {},
    "feddure": {},
    "feddb": {"measure": "prior,diversity"},
    "fedmatch": {"keep_between": "sparse", "helper_every": 1},
}


def told_by_both(path: Path) -> list[dict[str, Any]]:
    found = [{k: v for k, v in row.items() if not k.endswith(HIDDEN)} for row in rows(path)]
    for row in found:
        for name in (k for k in row if k.startswith("prior_js")):
            row[name] = {k: v for k, v in row[name].items() if not k.startswith("labels")}
    return found


def journal(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "nodes.jsonl").read_text().splitlines()]


# -- the same bits -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", FOUNDING)
def test_a_deployed_run_has_the_bits_of_the_simulated_one(method: str, tmp_path: Path) -> None:
    keys = TINY | {"clients": 3, "active": 3, "steps": 1} | FOUNDING[method] | {"method": method}
    there, told = Deployed(tmp_path / "federation", keys), list[str]()
    path, reference = there.go(there.begin(simulated(tmp_path, **keys)), told.append).path, tmp_path / "simulated"
    assert told == []
    assert weights(path) == weights(reference)
    assert told_by_both(path) == told_by_both(reference)
    assert all(row["clients"] for row in rows(path)) and all(sum(row["bytes_up"].values()) > 100_000 for row in journal(path))
    assert ("query.ask" in {kind for kind, _ in there.grid.kinds}) == (method in ("semifl", "feddb"))


def test_a_method_of_one_s_own_lies_in_each_node_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(HERE.parent / "examples" / "my_method.py", tmp_path)
    keys = TINY | {"clients": 2, "active": 2, "method": "./my_method.py:MyMethod"}
    reference, there, told = simulated(tmp_path, **keys), Deployed(tmp_path / "federation", keys), list[str]()
    for client in range(2):
        shutil.copy(tmp_path / "my_method.py", there.root / f"node-{client}")
    assert weights(there.go(there.begin(reference)).path) == weights(reference)
    with (there.root / "node-1" / "my_method.py").open("a") as file:
        file.write("# another one\n")
    run = there.begin(reference, node_timeout=0.1)
    with pytest.raises(UserError, match=r"1 of 2 nodes came"):
        there.go(run, told.append)
    assert len(told) == 1 and "this node has another method ./my_method.py:MyMethod than the server" in told[0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rounds of a method whose clients keep a net."""
    return simulated(tmp_path_factory.mktemp("reference"), **TINY | SMALL | {"rounds": 3})


def federation(tmp_path: Path) -> Deployed:
    return Deployed(tmp_path / "federation", TINY | SMALL | {"rounds": 3})


def in_round(number: int, node: int, what: str) -> Callable[[Message], str | None]:
    """A fault of the node with this place among the nodes, in this round (from 1), once."""
    seen = {"rounds": 0}

    def fault(message: Message) -> str | None:
        if message.metadata.message_type != "train" or message.metadata.dst_node_id != 2**63 + 11 + 7 * node:
            return None
        seen["rounds"] += 1
        return what if seen["rounds"] == number else None

    return fault


# -- faults ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("what", "why"), [("drop", "did not answer within"), ("half", "did not answer within"), ("dead", "gone offline")])
def test_a_node_that_fails_is_absent_named_and_comes_back(what: str, why: str, tmp_path: Path, reference: Path) -> None:
    there, told = federation(tmp_path), list[str]()
    there.grid.fault = in_round(2, 1, what)
    run = there.begin(reference, round_timeout=15)  # idle, so that a busy machine is no fault of the other nodes
    there.go(run, told.append)
    assert len(told) == 1 and told[0].startswith("round 2: client 1 is left out") and why in told[0]
    assert [row["clients"] for row in rows(run)] == [3, 2, 3]
    assert [sorted(row["absent"]) for row in journal(run)] == [[], ["1"], []]
    kept = {c: Records(there.root / f"node-{c}" / "state" / _run(run) / str(c), {}, "cpu").rounds() for c in range(3)}
    assert kept == {0: [1, 2, 3], 1: [1, 3], 2: [1, 2, 3]}  # client 1 went on from what it kept after round 1


def _run(path: Path) -> str:
    return json.loads((path / "order.json").read_text())["run"]


def test_a_slow_node_is_waited_for(tmp_path: Path, reference: Path) -> None:
    there = federation(tmp_path)
    there.grid.fault = in_round(1, 0, "slow:5")
    run = there.begin(reference)
    there.go(run)
    assert weights(run) == weights(reference)


def test_too_few_replies_are_asked_for_again_and_then_end_the_run(tmp_path: Path, reference: Path) -> None:
    there = federation(tmp_path)
    there.grid.fault = in_round(1, 2, "dead")
    run = there.begin(reference, min_replies=3)
    there.go(run)
    assert weights(run) == weights(reference)  # the second try had the same message
    there.grid.fault = lambda m: "dead" if m.metadata.message_type == "train" else None
    with pytest.raises(UserError, match=r"round 1 has 0 replies, fewer than 3 \(min_replies\), after 2 tries"):
        there.go(there.begin(reference, min_replies=3, round_retries=1))


def test_a_killed_node_that_comes_back_is_waited_for(tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all must reply: it is gone for some looks, and asked again as soon as it is there."""
    there, looks = federation(tmp_path), {"left": 0}
    kill, usual = in_round(2, 2, "dead"), there.grid.get_node_ids

    def fault(message: Message) -> str | None:
        what = kill(message)
        looks["left"] = 5 if what else looks["left"]
        return what

    def online() -> list[int]:
        looks["left"] -= 1
        return [n for n in usual() if looks["left"] < 0 or n != 2**63 + 25]

    monkeypatch.setattr("fallow.flower.nodes.LOOK", 0.001)
    monkeypatch.setattr(there.grid, "get_node_ids", online)
    there.grid.fault = fault
    run = there.begin(reference, min_replies=3, round_retries=1)
    there.go(run)
    assert weights(run) == weights(reference)


class Died(BaseException):
    """As by a kill: nobody can do anything about it any more."""


def test_of_more_clients_than_a_round_needs_the_first_count(tmp_path: Path) -> None:
    keys = TINY | SMALL | {"clients": 4, "active": 2}
    there, told = Deployed(tmp_path / "federation", keys), list[str]()
    run = there.begin(simulated(tmp_path, **keys), over_select=1)
    there.go(run, told.append)
    assert [row["clients"] for row in rows(run)] == [2, 2]
    assert [len(row["asked"]) for row in journal(run)] == [3, 3] and len(told) == 2 and all("others were sooner" in t for t in told)


def test_terms_say_how_many_replies_a_round_needs() -> None:
    assert [Terms(min_replies=n).least(4) for n in (1, 3, 9, 0.5, 0.6)] == [1, 3, 4, 2, 3]
    assert Terms.parted({"round_timeout": 5, "lr": 0.1}) == (Terms(round_timeout=5), {"lr": 0.1})
    with pytest.raises(UserError, match="round_timeout=soon is not allowed"):
        Terms.parted({"round_timeout": "soon"})


def test_the_page_has_the_terms_and_their_defaults() -> None:
    text = (HERE.parent / "docs" / "deploy.md").read_text()
    printed = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", text, re.MULTILINE))
    assert printed == {name: f"{field.default:g}" for name, field in Terms.model_fields.items()}


def test_a_server_that_dies_goes_on_from_its_checkpoint(tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes have kept what they made in round 2, and no checkpoint has it."""
    there, usual = federation(tmp_path), Run.commit

    def commit(self: Run) -> None:
        if self.done == 2:
            raise Died
        usual(self)

    run = there.begin(reference)
    monkeypatch.setattr(Run, "commit", commit)
    with pytest.raises(Died):
        there.go(run)
    monkeypatch.undo()
    there.go(run)
    assert weights(run) == weights(reference) and told_by_both(run) == told_by_both(reference)


def test_fewer_checkpoints_need_older_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server goes back three rounds: nodes have the records of the last two, and that of the checkpoint."""
    keys = TINY | SMALL | {"rounds": 6, "checkpoint_every": 2}
    reference, there, usual = simulated(tmp_path, **keys), Deployed(tmp_path / "federation", keys), Nodes.train

    def train(self: Nodes, requests: Any, here: Any = ()) -> Any:
        if requests[0].round == 5:
            raise Died
        return usual(self, requests, here)

    run = there.begin(reference)
    there.go(run, stop_after=2)
    monkeypatch.setattr(Nodes, "train", train)
    monkeypatch.setattr(Run, "commit", lambda self: None)
    with pytest.raises(Died):
        there.go(run)
    monkeypatch.undo()
    there.go(run)
    assert weights(run) == weights(reference)


@pytest.mark.parametrize(
    ("keys", "why"),
    [({"norm": "sbn"}, "sbn=cumulative reads the clients' images"), ({"validation": 0.2}, "labels that lie on nodes"), ({"clients": 5}, "has 3 nodes")],
)  # fmt: skip
def test_settings_that_need_data_of_nodes_are_refused(keys: dict[str, Any], why: str, tmp_path: Path, reference: Path) -> None:
    there = federation(tmp_path)
    run = deployed.begin(tmp_path, "run", str(reference), keys, {}, there.root / "server" / "server.yaml", 3)
    with pytest.raises(UserError, match=why):
        there.go(run)
    assert json.loads((run / "ended.json").read_text())["ok"] is False


class Up:
    """Stands for a federation that is up: a run that is submitted is carried out at once, in this process."""

    def __init__(self, there: Deployed, status: str):
        self.there, self.status, self.folder, self.clients, self.processes = there, status, there.root, there.clients, self

    def alive(self, _: str) -> bool:
        return True

    def submit(self, folder: Path) -> str:
        assert not (folder / "ended.json").exists()  # else the end of an earlier try would be taken for this one's
        with suppress(UserError):
            self.there.go(folder, lambda _: None)
        return "7"

    def runs(self, number: str) -> list[dict[str, Any]]:
        return [{"status": self.status, "status-details": "no more"}]


def test_the_command_tells_rounds_and_absences_and_ends_as_the_run_does(tmp_path: Path, reference: Path) -> None:
    there, told = federation(tmp_path), list[str]()
    there.grid.fault = in_round(2, 1, "dead")
    run = running.begin(Up(there, "finished:completed"), str(reference), {"min_replies": 2}, "one")  # type: ignore[arg-type]
    running.go(Up(there, "finished:completed"), run, told.append)  # type: ignore[arg-type]
    assert [t.partition("  ")[0] for t in told] == ["round 1", "round 2", "round 2: client 1 is left out: it has gone offline", "round 3"]
    with pytest.raises(UserError, match="the run ended as finished:failed"):
        running.go(Up(there, "finished:failed"), running.begin(Up(there, ""), str(reference), {}, "two"), told.append)  # type: ignore[arg-type]
    there.grid.fault = lambda m: "dead" if m.metadata.message_type == "train" else None
    run = running.begin(Up(there, "finished:failed"), str(reference), {"round_retries": 0}, "three")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="round 1 has 0 replies"):
        running.go(Up(there, "finished:failed"), run, told.append)  # type: ignore[arg-type]
    there.grid.fault = lambda _: None
    running.with_terms(run, {"round_retries": 2})
    running.go(Up(there, "finished:completed"), run, told.append)  # type: ignore[arg-type]
    assert weights(run) == weights(reference)
    with pytest.raises(UserError, match="lr cannot be changed on resume"):
        running.with_terms(run, {"lr": 0.1})


def test_a_server_s_process_that_has_died_is_told_before_flower_knows(tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, usual = federation(tmp_path), Run.commit

    def commit(self: Run) -> None:
        if self.done == 2:
            raise Died
        usual(self)

    class Deadly(Up):
        def submit(self, folder: Path) -> str:
            with suppress(Died):
                return super().submit(folder)
            return "7"

    monkeypatch.setattr(Run, "commit", commit)
    monkeypatch.setattr("fallow.flower.running.SILENT", 0.1)
    up: Any = Deadly(there, "running")
    with pytest.raises(UserError, match=r"the server's process has died.*--resume one"):
        running.go(up, running.begin(up, str(reference), {}, "one"), lambda _: None)


# -- what travels ------------------------------------------------------------------------------------------------------
def test_trees_of_every_type_travel_unchanged() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = State.of(net)
    shared = torch.randn(4)
    kinds = [torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
    tree = {"model": state, "parts": [state.only("parameters"), shared, shared], "n": 2**63 + 5, "none": None, "x": 0.1, "empty": torch.zeros(0, 3)}
    tree |= {str(k): torch.tensor([[0.0, 1.0], [3.0, -0.0]]).to(k) for k in kinds} | {3: {"scalar": torch.tensor(2.5)}}
    parcel = packed(tree, {"model": state.layout})
    assert len(parcel.arrays["float32"]) == sum(map(len, (state.groups["parameters"], state.groups["statistics"], shared))) + 4 + 1
    found = unpacked(parcel, {"model": state.layout})
    assert list(found) == list(tree) and found["n"] == 2**63 + 5 and found["none"] is None and found["x"] == 0.1
    for k in kinds:
        assert found[str(k)].dtype == k and torch.equal(found[str(k)], tree[str(k)])
    assert all(torch.equal(found["model"].groups[g], t) for g, t in state.groups.items())
    assert torch.equal(found["parts"][2], shared) and found[3]["scalar"].shape == () and found["empty"].shape == (0, 3)
    broken = Parcel(parcel.head, parcel.arrays | {"float32": parcel.arrays["float32"] + 1})
    with pytest.raises(Unreadable, match="not those that were sent"):
        unpacked(broken, {"model": state.layout})


def test_a_damaged_record_and_one_that_is_gone_are_told(tmp_path: Path) -> None:
    records = Records(tmp_path / "r", {}, "cpu")
    records.write({"a": torch.arange(3)}, 1, [])
    records.write({"a": torch.arange(4)}, 2, [1])
    records.write({"a": torch.arange(5)}, 3, [2])
    assert records.rounds() == [2, 3] and len(records.read(3)["a"]) == 5 and records.read(0) == {}
    records.write({"a": torch.arange(4)}, 2, [1])  # by one that hung in round 2 while another process did round 3
    assert records.rounds() == [2, 3]
    with pytest.raises(UserError, match="no longer has what its client kept after round 1"):
        records.read(1)
    file = next((tmp_path / "r").glob("3-*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="after round 3 is damaged"):
        records.read(3)


def test_commits_say_which_records_are_needed(tmp_path: Path) -> None:
    keep = Keep(tmp_path, 0.0, {}, torch.device("cpu"))
    for round in range(1, 4):
        keep.version[0] = round
        keep.commit()
    assert keep.committed == [{0: 2}, {0: 3}]


@pytest.mark.parametrize("method", ["fedloke", "feddb"])
def test_the_list_of_what_travels_has_the_bytes_of_the_messages(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against what Flower is given, by the arrays' own lengths."""
    heard: dict[tuple[str, str], int] = {}
    usual = traffic.items

    def items(way: str, kind: str, parcel: Parcel) -> list[traffic.Item]:
        made = usual(way, kind, parcel)
        records = to_records(parcel)
        arrays = sum(a.numpy().nbytes for a in records.array_records["arrays"].values())
        texts = sum(len(str(t).encode()) for t in records.config_records["fallow"].values())
        place = way, made[0].kind
        heard[place] = max(heard.get(place, 0), arrays + texts)
        assert sum(i.bytes for i in made if i.type != "text") == arrays
        return made

    monkeypatch.setattr(traffic, "items", items)
    found = traffic.overheard(method, TINY | {"clients": 3, "active": 3, "measure": "diversity,prior,labels"})
    for place, size in heard.items():
        assert sum(i.bytes for i in found if (i.way, i.kind) == place) == size
    kinds = {i.kind for i in found}
    assert {"train", "who", "gradient", "mean_prediction", "label_accuracies"} <= kinds
    up = {i.name for i in found if (i.way, i.kind) == ("up", "train")}
    assert "reply.update.model.parameters" in up and ("reply.update.prior" in up) == (method == "feddb")
    assert not any("personal" in i.name or "local" in i.name for i in found if "logs" not in i.name)  # what is kept stays
    assert all(i.discloses for i in found)


# -- a party's own data ------------------------------------------------------------------------------------------------
def _pictures(folder: Path, tones: list[int]) -> None:
    folder.mkdir(parents=True)
    for k, tone in enumerate(tones):
        Image.fromarray(np.full((8, 8), tone, np.uint8)).save(folder / f"{k}.png")


def test_a_server_s_arrays_may_be_a_test_set_alone(tmp_path: Path) -> None:
    np.savez(tmp_path / "test.npz", test_images=np.zeros((4, 8, 8), np.uint8), test_labels=np.arange(4), classes=np.array(list("abcd")))
    (tmp_path / "server.yaml").write_text("data: test.npz\n")
    found = share.read(tmp_path / "server.yaml")
    assert found.test is not None and (len(found.test), len(found.images), found.counts) == (4, 0, {"labelled": 0, "unlabelled": 0})


def test_a_node_s_folder_needs_neither_labels_nor_all_classes(tmp_path: Path) -> None:
    _pictures(tmp_path / "photos" / "dog", [10, 20])
    _pictures(tmp_path / "photos" / "unlabelled", [30, 40, 50])
    (tmp_path / "node.yaml").write_text("client: 1\ndata: photos\n")
    found = share.named(share.read(tmp_path / "node.yaml"), ("cat", "dog"), "clients")
    assert found.counts == {"labelled": 2, "unlabelled": 3} and found.labels.tolist() == [1, 1, -1, -1, -1]
    assert [int(t) for t in found.images[:, 0, 0, 0]] == [10, 20, 30, 40, 50]
    at_server = share.named(share.read(tmp_path / "node.yaml"), ("cat", "dog"), "server")
    assert at_server.counts == {"labelled": 0, "unlabelled": 5}
    with pytest.raises(UserError, match="has a class 'dog' that the federation has not"):
        share.named(share.read(tmp_path / "node.yaml"), ("cat", "bird"), "clients")
    _pictures(tmp_path / "plain", [1, 2])
    (tmp_path / "node.yaml").write_text("client: 1\ndata: plain\n")
    assert share.read(tmp_path / "node.yaml", size=16, fit="resize", channels=3).images.shape == (2, 3, 16, 16)
    assert share.read(tmp_path / "node.yaml").counts == {"labelled": 0, "unlabelled": 2}


def test_what_is_wrong_with_a_node_s_data_stays_on_the_node(tmp_path: Path, reference: Path, capsys: Any) -> None:
    there, told = federation(tmp_path), list[str]()
    _pictures(there.root / "node-1" / "patients" / "jane-doe", [1, 2])
    (there.root / "node-1" / "node.yaml").write_text("client: 1\ndata: patients\n")
    with pytest.raises(UserError, match="2 of 3 nodes came"):
        there.go(there.begin(reference, node_timeout=0.1), told.append)
    assert len(told) == 1 and told[0].endswith("is refused: its data do not fit the run; its own log says why")
    assert "'jane-doe'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("client: one\ndata: x.npz", "has client: one"),
        ("clint: 1", "has a key clint; did you mean 'client'"),
        ("client: 1\ndata: 3", "has data: 3"),
        ("client: 1\ndata: none.npz", "there is no file"),
        ("client: 1\ndata: none", "there is no data set, folder or file|there are no images"),
    ],
)  # fmt: skip
def test_a_node_s_yaml_that_says_nothing_ends_in_a_sentence(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text(text)
    with pytest.raises(UserError, match=why):
        share.read(tmp_path / "node.yaml")


def test_a_row_for_each_node_and_a_repeated_round_counts_once(tmp_path: Path, reference: Path) -> None:
    there = federation(tmp_path)
    there.grid.fault = in_round(2, 1, "dead")
    run = there.begin(reference)
    there.go(run)
    found = nodes(run)
    assert [(n["client"], n["rounds"], n["absent"], n["online"]) for n in found] == [(0, 3, 0, True), (1, 2, 1, True), (2, 3, 0, True)]
    assert found[1]["why"] == "it has gone offline" and all(n["seconds"] > 0 and n["bytes_up"] > 0 for n in found)
    with (run / "nodes.jsonl").open("a") as file:
        file.write((run / "nodes.jsonl").read_text().splitlines()[2] + "\n" + '{"round": 4, "as')
    assert [n["rounds"] for n in nodes(run)] == [3, 2, 3]
    assert nodes(reference) == []
    with pytest.raises(UserError, match="has its clients on nodes"):
        fallow.resume(run, rounds=5)
    assert [n["client"] for n in payload([run])["runs"][0]["nodes"]] == [0, 1, 2]
