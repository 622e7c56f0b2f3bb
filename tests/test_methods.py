"""What holds for every registered method: scenarios, resume, slots, hidden labels, bytes, capture."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, few_digits, rows, same, weights

import fallow
from fallow import machine
from fallow.data.federate import Federation, Holding
from fallow.data.readers.common import ImageSet
from fallow.engine import eager, party
from fallow.engine.kit import Kit
from fallow.engine.round import Federated
from fallow.engine.simulation import Simulation
from fallow.engine.strict import NotCapturable, guarded, relaxed, strict
from fallow.errors import UserError
from fallow.methods import REGISTERED, find
from fallow.methods.base import Method, Net
from fallow.methods.sparse import Sparse, encoded
from fallow.methods.state import State
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder

SCENARIOS = ("server", "clients", "some", "all")
METHODS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in REGISTERED]
DECLARED = [
    pytest.param(name, labels, marks=pytest.mark.xdist_group(name))
    for name in REGISTERED
    for labels in SCENARIOS
    if labels in find(name).scenarios
]
OUT: list[tempfile.TemporaryDirectory[str]] = []


def settings(name: str, labels: str, **keys: Any) -> dict[str, Any]:
    """Tiny ones under which every method uses some of its pseudo-labels."""
    known = find(name).Options.model_fields
    easy = {"threshold": 0.12, "entropy": 2.3, "tune_epochs": 2, "helper_every": 1} if name != "fedloke" else {"entropy": 2.3, "ramp_rounds": 1}
    chosen = {k: v for k, v in easy.items() if k in known}
    return TINY | {"method": name, "labels": labels, "norm": "bn"} | chosen | keys


def run_with(path: Path, name: str, labels: str, source: Any = None, **keys: Any) -> Run:
    method, options, found, federation = prepare(None, settings(name, labels, **keys))
    path.mkdir(parents=True, exist_ok=True)
    return Run(RunFolder(path), method, options, source or found, federation)


@functools.cache
def reference(name: str, labels: str) -> Path:
    """A run that went through in one slot."""
    OUT.append(tempfile.TemporaryDirectory(prefix="fallow-reference-"))  # removed at the end
    return fallow.run(out=OUT[-1].name, **settings(name, labels)).path


@pytest.fixture
def capturable(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts `begin` and every step under the modes of strict.py; making views is the engine's and stays outside."""
    made, view = party.run_step, Kit.view

    def step(slot: Any, step: Any) -> None:
        made(slot, dataclasses.replace(step, function=guarded(step.function)))

    def outside(self: Kit, *args: Any) -> torch.Tensor:
        with relaxed():
            return view(self, *args)

    def guard(method: type) -> None:
        monkeypatch.setattr(method, "begin", guarded(method.begin, copies=True))  # type: ignore[attr-defined]

    monkeypatch.setattr(eager, "run_step", step)
    monkeypatch.setattr(Kit, "view", outside)
    return guard


# -- scenarios, capture ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "labels"), DECLARED)
def test_runs_where_labels_may_be_and_could_be_captured(name: str, labels: str, tmp_path: Path, capturable: Any) -> None:
    method = find(name)
    if method.captured:
        capturable(method)
    result = fallow.run(out=tmp_path, **settings(name, labels))
    assert [r["round"] for r in result.metrics] == [1, 2]
    assert all(0 <= r["accuracy"] <= 1 and r["loss"] is not None for r in result.metrics)
    same(result.path, reference(name, labels))  # the modes change nothing


def test_a_step_may_log_a_plain_number(tmp_path: Path, capturable: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Method.supervised

    def logging(self: Method, s: Any, b: Any) -> None:
        plain(self, s, b)
        s.log(half=0.5)

    monkeypatch.setattr(Method, "supervised", logging)
    assert [r["half"] for r in fallow.run(out=tmp_path, **settings("fedavg", "clients")).metrics] == [0.5, 0.5]


@pytest.mark.parametrize("name", METHODS)
def test_says_why_where_labels_may_not_be(name: str, tmp_path: Path) -> None:
    for labels in set(SCENARIOS) - set(find(name).scenarios):
        with pytest.raises(UserError, match=f"{name} is not defined for labels={labels}; it works with labels="):
            fallow.run(out=tmp_path, **settings(name, labels))
    assert not list(tmp_path.iterdir())


def test_the_modes_refuse() -> None:
    x, chosen = torch.arange(4.0), torch.tensor([0, 2])
    refused = [
        lambda: x.sum().item(), lambda: bool(x.sum() > 0), lambda: float(x[0]), lambda: x.tolist(), lambda: x.numpy(),
        lambda: x[x > 1], lambda: x.nonzero(), lambda: x.masked_select(x > 1), lambda: torch.where(x > 1),
        lambda: x.clone().index_put_((x > 1,), x[:2]), lambda: x.unique(), lambda: torch.rand(2), lambda: torch.randn_like(x),
        lambda: torch.bernoulli(x / 4), lambda: torch.dropout(x, 0.5, True), lambda: torch.multinomial(x, 1),
        lambda: torch.randperm(3), lambda: x.clone().normal_(), lambda: torch.tensor(0.5), lambda: torch.as_tensor(0.5),
    ]  # fmt: skip
    for number, what in enumerate(refused):
        with pytest.raises(NotCapturable), strict():
            what()
            pytest.fail(f"number {number} passed")
    with strict():
        y = torch.where(x > 1, x, 0.0)[chosen].softmax(0).max(0)
        with relaxed():
            assert y.values.item() > 0.5


# -- the same bits -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "labels"), DECLARED)
def test_resumed_is_run_through(name: str, labels: str, tmp_path: Path) -> None:
    stopped = fallow.run(out=tmp_path, stop_after=1, **settings(name, labels))
    assert stopped.summary["status"] == "stopped" and len(stopped.metrics) == 1
    same(fallow.resume(stopped.path).path, reference(name, labels))


@pytest.mark.parametrize("name", METHODS)
def test_ten_slots_are_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 10)
    machine.pool.cache_clear()
    for labels in sorted(find(name).scenarios)[:2]:
        same(fallow.run(out=tmp_path, **settings(name, labels, slots=10)).path, reference(name, labels))


def test_fewer_slots_than_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots on a machine of four cores: the pool's other threads wait for a slot."""
    monkeypatch.setattr(machine, "cores", lambda: 4)
    machine.pool.cache_clear()
    keys = settings("fedavg", "clients", clients=6, active=6)
    same(fallow.run(out=tmp_path, **keys | {"slots": 2}).path, fallow.run(out=tmp_path, **keys).path)


@pytest.mark.parametrize("name", METHODS)
def test_kept_on_disk_is_kept_in_memory(name: str, tmp_path: Path) -> None:
    labels = sorted(find(name).scenarios)[0]
    one, other = (
        fallow.run(out=tmp_path, **settings(name, labels, optimizer_state="keep", rounds=3, active=3, keep_memory=memory)).path
        for memory in (1.0, 0.0)
    )
    same(one, other)


# -- merging -----------------------------------------------------------------------------------------------------------
def clients_work(f: Federated) -> tuple[list[Any], list[Any]]:
    f.server.draw(0)
    f.server["model"] = f.model()
    f.server.sent = f.server.model
    return f.clients.train(f._requests(), f._beside(f.o.server_turn if f.server_trains else ""))


@pytest.mark.parametrize("name", METHODS)
def test_equal_updates_merge_to_themselves(name: str, tmp_path: Path) -> None:
    labels = sorted(find(name).scenarios)[0]
    untuned = {"tune_epochs": 0} if name == "proxyfl" else {}  # it moves the mean of the classifiers
    f = run_with(tmp_path, name, labels, active=4, server_lr=1.0, server_momentum=0.0, optimizer_state="reset", **untuned).federated
    updates = f._updates(*clients_work(f))
    assert len(updates) > 1 and all(u.weight > 0 for u in updates)
    common = updates[-1].entries
    for u in updates:
        u.entries = {entry: sent.clone() for entry, sent in common.items()}
    f.method.merge(f.server, updates)
    states = {entry: sent.groups["parameters"] for entry, sent in common.items() if isinstance(sent, State) and "parameters" in sent}
    assert states and all(torch.equal(f.server[entry].groups["parameters"], sent) for entry, sent in states.items())


@pytest.mark.parametrize("name", METHODS)
def test_the_order_in_which_parties_work_does_not_matter(name: str, tmp_path: Path) -> None:
    labels = sorted(find(name).scenarios)[0]
    merged = []
    for backwards in (False, True):
        f = run_with(tmp_path / str(backwards), name, labels, active=4, optimizer_state="reset").federated
        replies, own = clients_work(f)
        f.method.merge(f.server, f._updates(replies[::-1] if backwards else replies, own))
        merged.append(f.server.model)
    assert all(torch.equal(merged[0].groups[g], merged[1].groups[g]) for g in merged[0].groups)


# -- hidden labels -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "labels"), DECLARED)
def test_hidden_labels_stay_hidden(name: str, labels: str, tmp_path: Path) -> None:
    _, _, source, federation = prepare(None, settings(name, labels))
    seen = {int(i) for holding in (federation.server, *federation.clients) for i in holding.labelled}
    hidden = torch.tensor(sorted(set(range(len(source.train.labels))) - seen), dtype=torch.int64)
    if not len(hidden):
        assert labels == "all"
        return
    truth = source.train.labels.clone()
    truth[hidden] = (truth[hidden] + 1 + torch.arange(len(hidden)) % 9) % 10  # every one of them wrong
    wrong = dataclasses.replace(source, train=ImageSet(source.train.images, truth, source.train.clients))
    path = run_with(tmp_path / "wrong", name, labels, source=wrong).go().path
    right = reference(name, labels)
    assert weights(path) == weights(right)
    measured = [{k for k in a if a[k] != b[k]} for a, b in zip(rows(path), rows(right))]
    assert all("label_accuracy" in k for changed in measured for k in changed), measured


# -- what stays and what travels ---------------------------------------------------------------------------------------
def leaves(thing: Any) -> list[torch.Tensor]:
    if isinstance(thing, State):
        return list(thing.tensors().values())
    if isinstance(thing, torch.Tensor):
        return [thing]
    return [t for v in (thing.values() if isinstance(thing, dict) else thing) for t in leaves(v)]


def nbytes(things: Any) -> int:
    """Of what would really be sent."""
    if isinstance(things, Sparse):
        assert things.old is not None
        return len(encoded(things, things.old))
    if isinstance(things, dict | list):
        return sum(nbytes(v) for v in (things.values() if isinstance(things, dict) else things))
    return sum(t.numel() * t.element_size() for t in leaves(things))


@pytest.mark.parametrize("name", METHODS)
def test_clients_that_take_no_part_stay_as_they_are(name: str, tmp_path: Path) -> None:
    for labels in sorted(find(name).scenarios)[:1]:
        f = run_with(tmp_path, name, labels, optimizer_state="keep", steps=1, rounds=4).federated
        watched = 0
        for number in range(4):
            before = {c: [t.clone() for t in leaves(f.keep.read(c))] for c in f.keep.version}
            f.round(number)
            for client in set(before) - {owner for c in f.server.active for owner in (c, f"pool-{c}")}:
                watched += 1
                after = leaves(f.keep.read(client))
                assert len(after) == len(before[client]) and all(map(torch.equal, before[client], after))
        assert watched or not f.keep.version


@pytest.mark.parametrize(("name", "labels"), DECLARED)
def test_bytes_are_those_of_what_travels(name: str, labels: str, tmp_path: Path) -> None:
    down: list[Any] = []
    up: list[Any] = []
    kind = find(name)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def down(self, server: Any, client: int) -> Any:
            down.append(super().down(server, client))
            return down[-1]

        def end(self, party: Any) -> Any:
            update = super().end(party)
            if update is not None and not party.is_server:
                up.append(dict(update.entries))
            return update

    at_work = run_with(tmp_path, name, labels, optimizer_state="reset")
    simulation = Simulation(at_work.options, Watched(at_work.options, 10), at_work.source, at_work.federation)
    f = Federated(simulation, eager.Eager(simulation), at_work.federated.keep)
    row = f.round(0)
    assert row["bytes_down"] == nbytes(down) > 0
    assert row["bytes_up"] == nbytes(up)
    personal = {n for n, thing in f.kit.held.items() if thing.keep}
    assert not any(personal & set(message) for message in down + up)


def test_travelling_optimisers_are_counted_apart(tmp_path: Path) -> None:
    metrics = fallow.run(out=tmp_path, **settings("fedavg", "clients", optimizer_state="travel", norm="none")).metrics
    model = metrics[0]["bytes_down"]
    assert [r["bytes_down"] for r in metrics] == [model, model]
    assert [r["optimizer_bytes_up"] for r in metrics] == [model, model]  # SGD: one momentum per parameter
    assert [r["optimizer_bytes_down"] for r in metrics] == [0, model]


# -- rule 1, declarations ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", METHODS)
def test_a_method_never_changes(name: str) -> None:
    kind = find(name)
    labels = sorted(kind.scenarios)[0]
    method = kind(prepare(None, settings(name, labels))[1], 10)
    with pytest.raises(AttributeError, match="never changes"):
        method.counter = 1
    held = method.holds()
    assert any(isinstance(thing, Net) and thing.train for thing in held.values())
    assert kind.__doc__ and kind.paper and kind.scenarios <= set(SCENARIOS)
    keeps = any(thing.keep for thing in held.values()) or method.o.optimizer_state == "keep"
    assert (kind.keeps != "-") == keeps
    for reading in kind.readings:
        assert reading in ("recommended", "paper", "released")
        prepare(None, settings(name, labels) | {"reading": reading})


# -- invariants of 6.15 ------------------------------------------------------------------------------------------------
def parameters(path: Path, name: str, labels: str = "clients", source: Any = None, **keys: Any) -> torch.Tensor:
    f = run_with(path, name, labels, source, **keys).federated
    for number in range(keys.get("rounds", 2)):
        f.round(number)
    return f.server.model.groups["parameters"]


def test_no_pull_is_fedavg(tmp_path: Path) -> None:
    plain = parameters(tmp_path, "fedavg")
    assert torch.equal(parameters(tmp_path, "fedprox", prox=0.0), plain)
    assert not torch.equal(parameters(tmp_path, "fedprox", prox=1.0), plain)


def test_the_first_step_feels_no_pull(tmp_path: Path) -> None:
    for name in ("fixmatch", "uda"):
        free, pulled = (parameters(tmp_path, name, steps=1, rounds=1, prox=mu) for mu in (0.0, 5.0))
        assert torch.equal(free, pulled)
    for mode in ("gradient", "decoupled"):
        more = parameters(tmp_path, "fixmatch", steps=2, rounds=1, prox=5.0, prox_mode=mode)
        assert not torch.equal(more, parameters(tmp_path, "fixmatch", steps=2, rounds=1))


@pytest.mark.parametrize("name", ["fixmatch", "uda"])
@pytest.mark.usefixtures("in_double")
def test_nothing_accepted_is_fedavg(name: str, tmp_path: Path) -> None:
    plain = parameters(tmp_path, "fedavg", norm="gn")
    for keys in ({"threshold": 2.0}, {"weight": 0.0}):
        other = parameters(tmp_path, name, norm="gn", weights="labelled", **keys)
        torch.testing.assert_close(other, plain, rtol=0, atol=1e-9)
    by_itself = parameters(tmp_path, name, weights="labelled", pseudo_label_mode="eval", threshold=2.0, weight=0.0, norm="none")
    torch.testing.assert_close(by_itself, parameters(tmp_path, "fedavg", norm="none"), rtol=0, atol=1e-9)


def test_the_server_beside_does_not_see_the_clients(tmp_path: Path) -> None:
    trained = []
    for active in (1, 4):
        f = run_with(tmp_path, "fixmatch", "server", active=active).federated
        outcome = clients_work(f)[1][0]
        assert outcome.update is not None
        trained.append(outcome.update["model"].groups["parameters"])
    assert torch.equal(*trained)


@pytest.mark.parametrize("name", ["fedavg", "fixmatch", "uda"])
def test_clients_without_data_change_nothing(name: str, tmp_path: Path) -> None:
    method, options, source, f = prepare(None, settings(name, "clients", clients=2, active=2))
    nobody = Holding(f.server.labelled, f.server.labelled)
    more = Federation(f.server, (*f.clients, nobody), f.dropped, (*f.names, "2"), f.spec)
    models = []
    for number, federation in ((2, f), (3, more)):
        o = options.model_copy(update={"clients": number, "active": number})
        at_work = Run(RunFolder(tmp_path), method, o, source, federation).federated
        row = at_work.round(0)
        assert row["clients"] == 2
        models.append(at_work.server.model.groups["parameters"])
    assert torch.equal(*models)


def test_supervised_without_unlabelled_data_is_fedavg(tmp_path: Path) -> None:
    count = len(few_digits().train.labels)
    keys = {"label_count": count, "label_balance": "random", "rounds": 1}
    assert torch.equal(parameters(tmp_path, "fedavg", "all", **keys), parameters(tmp_path, "fedavg", "clients", **keys))


def test_a_round_without_labels_changes_nothing(tmp_path: Path) -> None:
    at_work = run_with(tmp_path, "fedavg", "some", labelled_clients=1, active=1, rounds=8).federated
    held = [len(c.labelled) > 0 for c in at_work.simulation.federation.clients]
    for number in range(8):
        before = at_work.server.model.groups["parameters"].clone()
        row = at_work.round(number)
        client = at_work.server.active[0]
        assert torch.equal(before, at_work.server.model.groups["parameters"]) != held[client]
        assert row["clients"] == held[client] and (row["bytes_up"] > 0) == held[client]
