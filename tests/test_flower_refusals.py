"""What the server refuses of a node, in an in-process grid: each time the node is named with the reason, and the round is as without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, rows, weights

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fallow[flower]')")

from flower_grid import SMALL, Deployed, simulated
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fallow import UserError
from fallow.engine.clients import Reply, Samples
from fallow.engine.kit import Declared, Kit
from fallow.engine.statistics import moments_between, order
from fallow.flower import checks
from fallow.flower.answers import Answers, large
from fallow.flower.checks import Refused
from fallow.flower.messages import _digest
from fallow.methods import find
from fallow.methods.base import Update
from fallow.methods.state import State
from fallow.runs import prepare


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("reference"), **TINY | SMALL | {"rounds": 3})


def federation(tmp_path: Path) -> Deployed:
    return Deployed(tmp_path / "federation", TINY | SMALL | {"rounds": 3})


def altering(node: int, change: Callable[[dict[str, Any], dict[str, np.ndarray]], None], after: int = 1) -> Callable[[Message, Message], Message]:
    """Changes what a node answers to its trainings, from the one with this number on."""
    seen = {"trainings": 0}

    def altered(order: Message, reply: Message) -> Message:
        if order.metadata.message_type != "train" or order.metadata.dst_node_id != 2**63 + 11 + 7 * node:
            return reply
        seen["trainings"] += 1
        if seen["trainings"] < after:
            return reply
        head = json.loads(str(reply.content.config_records["fallow"]["head"]))
        arrays = {k: a.numpy().copy() for k, a in reply.content.array_records["arrays"].items()}
        change(head, arrays)
        head["sha256"] = {k: _digest(a) for k, a in arrays.items()}
        records = RecordDict({"fallow": ConfigRecord({"about": "", "head": json.dumps(head)}), "arrays": ArrayRecord({k: Array(a) for k, a in arrays.items()})})
        return Message(records, reply_to=order)

    return altered


def _all(value: float) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    def change(head: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        arrays["float32"][...] = arrays["float32"] * value if np.isfinite(value) else value

    return change


def _leaf(head: dict[str, Any], name: str, value: Any) -> None:
    for entry in head["tree"]["dict"]:
        if entry[0] == name:
            entry[1] = {"value": value}


def _replying(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    """Puts something else in the place of a part of the reply."""

    def change(head: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        reply = next(entry[1] for entry in head["tree"]["dict"] if entry[0] == "reply")
        next(entry for entry in reply["dict"] if entry[0] == name)[1] = value

    return change


def _reply(head: dict[str, Any]) -> dict[str, Any]:
    reply = next(entry[1] for entry in head["tree"]["dict"] if entry[0] == "reply")
    return {name: shape for name, shape in reply["dict"]}


def _logging(name: str) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    """Gives what is logged the name of a column of the server's."""

    def change(head: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        next(entry for entry in _reply(head)["logs"]["dict"] if entry[0] == "loss")[0] = name

    return change


def _of_many(head: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """A verdict that is no single one."""
    path = _reply(head)["finite"]["tensor"]
    arrays["bool"] = np.ones(3, bool)
    head["tensors"][path] = ["bool", [3], 0]


def _shorter(head: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    for place in head["tensors"].values():
        place[1] = [n - 1 for n in place[1][:1]] + place[1][1:]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_all(float("nan")), "NaN or infinite"),
        (_all(float("inf")), "NaN or infinite"),
        (_all(1e6), "times as long as the median one (update_norm_limit=100)"),
        (_shorter, "its parameters of the net 'model' are"),
        (lambda h, a: a.update(float32=a["float32"].astype(np.float16)), "of another type"),
        (lambda h, a: h.update(version=2), "speaks version 2 of the protocol"),
        (lambda h, a: _leaf(h, "run", "00"), "its answer is of another run"),
        (lambda h, a: _leaf(h, "client", 2), "it answers as client 2"),
        (lambda h, a: _leaf(h, "round", 0), "its answer is of round 1"),
        (lambda h, a: _leaf(h, "versions", {"torch": "1.0"}), "it has torch 1.0, and the server"),
        (lambda h, a: h.update(tree={"value": 3}), "no message of this protocol"),
        (lambda h, a: _leaf(h, "seconds", float("nan")), "no message of this protocol"),
        (_replying("steps", {"value": 10**300}), "no message of this protocol"),
        (_replying("lr", {"value": "much"}), "no message of this protocol"),
        (_replying("optimizers", {"list": []}), "no message of this protocol"),
        (_replying("update", {"dict": []}), "its model is missing, where the others' is a State of"),
        (_logging("accuracy"), "no message of this protocol"),
        (_logging("label/counts"), "no message of this protocol"),
        (_logging("label/levels"), "no message of this protocol"),
        (_replying("samples", {"dict": [["labelled", {"value": 9}], ["all", {"value": 10**7}]]}), "it tells of 10000000 samples, 9 of them with labels, and had"),
        (_of_many, "no message of this protocol"),
        (lambda h, a: _leaf(h, "refused", None) or h["tree"]["dict"].append(["refused", {"list": [{"value": "\x1b[2J" + "x" * 9999}]}]), " [2J" + "x" * 496),
    ],
)  # fmt: skip
def test_an_update_that_is_none_is_left_out_and_both_sides_are_told(change: Any, why: str, tmp_path: Path, reference: Path, capsys: Any) -> None:
    there, told = federation(tmp_path), list[str]()
    there.grid.altered = altering(1, change, after=2)
    run = there.begin(reference)
    there.go(run, told.append)
    assert [row["clients"] for row in rows(run)] == [3, 2, 2]
    assert [t.partition(":")[0] for t in told] == ["round 2", "round 3"] and all("client 1 is left out" in t and why in t for t in told), told
    assert capsys.readouterr().err.count("what this node answered is left out") == 2


def test_what_is_left_out_is_as_if_the_node_had_not_been_there(tmp_path: Path, reference: Path) -> None:
    ends = []
    for name, alter in (("nan", {"altered": altering(1, _all(float("nan")))}), ("gone", {"fault": lambda m: "dead" if m.metadata.dst_node_id == 2**63 + 18 and m.metadata.message_type == "train" else None})):
        there = federation(tmp_path / name)
        vars(there.grid).update(alter)
        run = there.begin(reference)
        there.go(run)
        ends.append(weights(run))
    assert ends[0] == ends[1]


def test_two_nodes_of_one_client_and_nodes_of_another_version(tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    there, told = federation(tmp_path), list[str]()
    there.grid.folders[5] = there.grid.folders[2**63 + 11]  # node 5 says it is client 0, too
    there.grid.live.add(5)
    run = there.begin(reference)
    there.go(run, told.append)
    assert len(told) == 1 and "it says it is client 0, as another node does" in told[0]
    assert "the server says: this node is refused: it says it is client 0" in capsys.readouterr().err
    assert weights(run) == weights(reference)
    there.grid.live.remove(5)
    monkeypatch.setattr("fallow.flower.workplace.versions", lambda: {"torch": "1.0"})
    told.clear()
    with pytest.raises(UserError, match=r"0 of 3 nodes came .*; node \d+ is refused: this node has torch 1.0, and the server"):
        there.go(there.begin(reference, node_timeout=0.1), told.append)
    assert len(told) == 3 and "this node has torch 1.0, and the server" in told[0]
    assert "refused: this node has torch 1.0, and the server" in capsys.readouterr().err


def test_a_node_that_does_not_say_who_it_is_does_not_hold_up_every_round(tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = federation(tmp_path)
    there.grid.live.add(5)
    there.grid.fault = lambda m: "drop" if m.metadata.dst_node_id == 5 else None
    monkeypatch.setattr("fallow.flower.roster.WHO", 0.3)
    run = there.begin(reference)
    there.go(run)
    assert weights(run) == weights(reference) and there.grid.kinds.count(("query.who", 5)) == 1


def test_a_node_whose_first_answer_is_lost_on_its_way_is_asked_again(tmp_path: Path, reference: Path) -> None:
    """Its worker was killed, or it took too long on a busy machine: that is no refusal."""
    there, told, lost = federation(tmp_path), list[str](), list[int]()

    def fault(message: Message) -> str | None:
        node = message.metadata.dst_node_id
        if message.metadata.message_type != "query.who" or node != 2**63 + 18 or len(lost) == 2:
            return None
        lost.append(node)
        return "dead"

    there.grid.fault = fault
    run = there.begin(reference)
    there.go(run, told.append)
    assert told == [f"node {2**63 + 18} has not said who it is: it has gone offline"] and len(lost) == 2
    assert weights(run) == weights(reference)


def _replayed() -> Callable[[Message, Message], Message]:
    """Client 1 sends in round 2 what it sent in round 1, bit for bit."""
    kept: list[Message] = []

    def altered(order: Message, reply: Message) -> Message:
        if order.metadata.message_type != "train" or order.metadata.dst_node_id != 2**63 + 18:
            return reply
        kept.append(reply)
        return Message(kept[0].content, reply_to=order) if len(kept) == 2 else reply

    return altered


def test_an_update_of_an_earlier_round_is_left_out_and_named(tmp_path: Path, reference: Path) -> None:
    there, told = federation(tmp_path), list[str]()
    there.grid.altered = _replayed()
    run = there.begin(reference)
    there.go(run, told.append)
    assert told == ["round 2: client 1 is left out: its answer is of round 1"] and [row["clients"] for row in rows(run)] == [3, 2, 3]


# -- shapes ------------------------------------------------------------------------------------------------------------
def _reply_of(client: int, shape: int) -> Reply:
    return Reply(client, 1, Update({"prior": torch.zeros(shape)}), Samples(1, 1), {}, {}, torch.tensor(True))


def test_of_two_shapes_that_of_most_counts_and_without_a_majority_none() -> None:
    assert checks.odd({c: _reply_of(c, 3 if c == 2 else 10) for c in range(3)}) == {2: "its prior is [3] torch.float32, where the others' is [10] torch.float32"}
    both = checks.odd({0: _reply_of(0, 10), 1: _reply_of(1, 3)})
    assert both[0] == "its prior is [10] torch.float32, and no shape is that of most (client 0: [10] torch.float32; client 1: [3] torch.float32)"
    assert both.keys() == {0, 1} and checks.odd({0: _reply_of(0, 10), 1: _reply_of(1, 10)}) == {}


@pytest.mark.parametrize(
    ("name", "length", "kind", "fits"),
    [("loss", 2, torch.float64, True), ("loss", 3, torch.float64, False), ("label/counts", 16, torch.int64, True), ("label/counts", 2, torch.int64, False),
     ("label/counts", 16, torch.float64, False), ("label/levels", 20, torch.int64, True), ("label/levels", 16, torch.int64, False),
     ("validation/counts", 16, torch.int64, False), ("seconds", 2, torch.float64, False)],
)  # fmt: skip
def test_logs_become_columns_of_their_own_or_are_none(name: str, length: int, kind: torch.dtype, fits: bool) -> None:
    assert checks._is_log(name, torch.ones(length, dtype=kind), 10) == fits


# -- answers to questions ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def answers() -> Answers:
    """Of a net with two batch norm layers, whose images are 8x8."""
    _, options, source, federation = prepare(None, TINY | {"method": "fedavg", "model": "small-cnn", "norm": "sbn"})
    return Answers(Kit(options, find("fedavg").algorithm(options)(options, 10), Declared.of(options, source, federation)))


def _moments(answers: Answers, images: int) -> dict[int, Any]:
    """What a node with so many images would answer."""
    return {layer: [images * area, torch.zeros(channels).double(), torch.full([channels], images * area).double()] for layer, (area, channels) in enumerate(answers._layers)}


def test_the_server_knows_how_many_values_a_layer_has_for_an_image(answers: Answers) -> None:
    with torch.no_grad():
        net, images = answers.kit.net(), torch.rand(5, 1, 8, 8)
        found = moments_between(net, order(net, answers.kit.blank(2)), 0, len(answers._layers), [images])
    assert {layer: (n, len(mean)) for layer, (n, mean, _) in found.items()} == {layer: (5 * area, channels) for layer, (area, channels) in enumerate(answers._layers)}
    about = {"done": 0, "end": len(found)}
    assert answers.checked("moments", found, about, 5) is found and answers.checked("moments", None, about, 5) is None


def _count(value: Any) -> Callable[[dict[int, Any]], None]:
    return lambda found: found[0].__setitem__(0, value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_count(0), "not of the form"), (_count(-64), "not of the form"), (_count(65), "not of the form"), (_count(64.0), "not of the form"), (_count(True), "not of the form"),
        (_count(64 * 10**9), r"its statistics are of 1000000000 samples, and it has 5"),
        (lambda f: f[0].__setitem__(1, torch.zeros(3).double()), "not of the form"),
        (lambda f: f[0].__setitem__(1, f[0][1] + torch.inf), "not of the form"),
        (lambda f: f[0].__setitem__(1, f[0][1] * torch.nan), "NaN"),
        (lambda f: f[0].__setitem__(2, -f[0][2]), "not of the form"),
        (lambda f: f.pop(0), "not of the form"),
        (lambda f: f.__setitem__(99, f[0]), "not of the form"),
        (lambda f: f.__setitem__(0, "no"), "not of the form"),
    ],
)  # fmt: skip
def test_moments_that_are_none_are_refused(change: Any, why: str, answers: Answers) -> None:
    found = _moments(answers, 5)
    change(found)
    with pytest.raises(Refused, match=f"its (answer about its moments|statistics).*{why}|{why}"):
        answers.checked("moments", found, {"done": 0, "end": len(answers._layers)}, 5)


def test_other_answers_that_are_none_are_refused(answers: Answers) -> None:
    state, even = answers.kit.fresh("model", 0), torch.full((10,), 0.1)
    gradient = State(state.layout, {"parameters": state.groups["parameters"]})
    right: list[tuple[str, Any, dict[str, Any]]] = [("gradient", gradient, {}), ("mean_prediction", even, {}), ("label_accuracies", [0.5, 1.0], {"nets": ["a", "b"]})]
    for question, answer, about in right:
        assert answers.checked(question, answer, about, 5) is answer
    wrong: list[tuple[str, Any]] = [("gradient", x) for x in (state, even, 3, State(state.layout, {"parameters": gradient.groups["parameters"] * torch.nan}))]
    wrong += [("mean_prediction", x) for x in (torch.full((9,), 1 / 9), 2 * even, -even, even * torch.nan, "no", torch.zeros(10))]
    wrong += [("label_accuracies", x) for x in ([0.5], [0.5, 2.0], [0.5, torch.nan], [0.5, "x"], 0.5)]
    for question, answer in wrong:
        with pytest.raises(Refused):
            answers.checked(question, answer, {"nets": ["a", "b"]} if question == "label_accuracies" else {}, 5)


def test_statistics_a_million_times_as_large_as_the_others_are_left_out(answers: Answers) -> None:
    found = {party: _moments(answers, 5) for party in (-1, 0, 1)}
    assert large(found, 100.0) == {}
    found[1][1][1] += 1e6
    assert large(found, 100.0) == {1: "its statistics are 1e+06 times as large as the median ones (update_norm_limit=100)"} and large(found, None) == {}


def test_moments_that_a_node_makes_up_leave_static_batch_norm_as_it_is_without_that_node(tmp_path: Path) -> None:
    keys = TINY | {"clients": 3, "active": 3, "steps": 1, "rounds": 1, "method": "semifl", "labels": "server", "norm": "sbn", "sbn": "federated", "threshold": 0.1}
    reference, ends, words = simulated(tmp_path, **keys), [], []
    for count in (10**9, None):
        there, told = Deployed(tmp_path / f"federation-{count}", keys), list[str]()
        there.grid.altered = partial(_lying, count)
        run = there.begin(reference)
        there.go(run, told.append)
        ends.append(weights(run))
        words.append(told)
    assert ends[0] == ends[1] != weights(reference)
    assert words[0] and all("client 1 is left out: its statistics are of 66000000000 samples, and it has 66" in t for t in words[0])


def _lying(count: int | None, order: Message, reply: Message) -> Message:
    """Client 1 tells of so many images in each answer, or has none."""
    if order.metadata.message_type != "query.ask" or order.metadata.dst_node_id != 2**63 + 18:
        return reply
    told = reply.content.config_records["fallow"]
    head = json.loads(str(told["head"]))
    answer = next(entry for entry in head["tree"]["dict"] if entry[0] == "answer")
    if count is None:
        answer[1] = {"value": None}
    else:
        for _, (moments,) in ((layer, found.values()) for layer, found in answer[1]["dict"]):
            moments[0]["value"] *= count
    told["head"] = json.dumps(head)
    return reply
