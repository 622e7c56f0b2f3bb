"""Supervised references: HeteroFL's row, DataSharing, EASGD and OverlapSGD against worked numbers and plain torch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from plain import close, descend, federated, mean_of, net_of, sgd, watched, weights_of
from torch import nn

from fallow import models
from fallow.data.federate import Spec, measured
from fallow.data.sharing import federate_with_shared
from fallow.engine.server import Server
from fallow.errors import UserError
from fallow.methods import find
from fallow.methods.base import Update, Updates
from fallow.methods.heterofl import mean_of_owners
from fallow.methods.parts.heads import last_layer
from fallow.methods.state import State
from fallow.models.heads import head_of
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder
from fallow.runs.settings import resolve

ALL = {"labels": "all", "label_count": None, "active": 4}


def numbered(x: float) -> State:
    """A model with one parameter."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, x)
    return State.of(net)


def value(state: State) -> float:
    return float(state["weight"])


class Own:
    """A client's own model of one parameter."""

    def __init__(self, x: float):
        self.state = numbered(x)

    def load(self, state: State) -> None:
        self.state = State(self.state.layout, self.state.groups | state.groups)


class Exchange:
    """Clients and a server that only exchange: no data, no steps."""

    def __init__(self, name: str, xs: list[float], z: float = 0.0, **keys: Any):
        kind = find(name)
        self.o = kind.Options(method=name, clients=len(xs), **keys)
        self.method = kind(self.o, 3)
        self.server = Server(SimpleNamespace(options=self.o), None)  # type: ignore[arg-type]
        self.server["model"] = numbered(z)
        self.own = [Own(x) for x in xs]

    def exchange(self, drifts: list[float] | None = None, here: list[int] | None = None) -> None:
        """Local steps that move each client's model by so much, then one exchange of those who are here."""
        self.server.sent = self.server.model
        updates = Updates()
        for k in range(len(self.own)) if here is None else here:
            own = self.own[k]
            own.load(numbered(value(own.state) + (drifts[k] if drifts else 0.0)))
            update = self.method.end(SimpleNamespace(personal=own, received={"model": self.server.model}, made=1))
            assert update is not None
            update.client = k
            updates.append(update)
        self.method.merge(self.server, updates)
        self.server.round += 1

    @property
    def x(self) -> list[float]:
        return [value(own.state) for own in self.own]

    @property
    def z(self) -> float:
        return value(self.server.model)


# -- EASGD, OverlapSGD: the exchange -------------------------------------------------------------------------------------
@pytest.mark.usefixtures("in_double")
def test_elastic_exchange() -> None:
    """a = 0.25, x = (1, 2), z = 0: (0.75, 1.5) and 0.75, then (0.75, 1.3125) and 0.9375; each exchange keeps the sum."""
    e = Exchange("easgd", [1.0, 2.0], server_lr=0.5)
    for x, z in (([0.75, 1.5], 0.75), ([0.75, 1.3125], 0.9375)):
        e.exchange()
        assert e.x == pytest.approx(x, abs=1e-12) and e.z == pytest.approx(z, abs=1e-12)
        assert sum(e.x) + e.z == pytest.approx(3.0, abs=1e-12)


@pytest.mark.usefixtures("in_double")
def test_elastic_exchange_of_some() -> None:
    """Who is not there keeps x_k; the sum over those there and the centre stays, whatever b is."""
    e = Exchange("easgd", [1.0, 2.0, 5.0], server_lr=0.9)
    e.exchange(here=[0, 2])
    assert e.x[1] == 2.0 and sum(e.x) + e.z == pytest.approx(8.0, abs=1e-12)
    assert e.x[0] == pytest.approx(0.7) and e.z == pytest.approx(0.3 * 6)


@pytest.mark.usefixtures("in_double")
def test_elastic_at_rest() -> None:
    """b = 1 and all x_k equal z is a fixed point; nearly no b, and the centre stays where it is."""
    e = Exchange("easgd", [3.0, 3.0], z=3.0, server_lr=1.0)
    e.exchange()
    assert e.x == [3.0, 3.0] and e.z == 3.0
    e = Exchange("easgd", [1.0, 2.0], server_lr=1e-12)
    e.exchange()
    assert e.x == pytest.approx([1.0, 2.0], abs=1e-11) and e.z == pytest.approx(0.0, abs=1e-11)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize(("scale", "last"), [("constant", 1.214), ("lr", 0.9242)])
def test_overlapped_exchange(scale: str, last: float) -> None:
    """alpha 0.6, beta 0.7, x = (1, 2), z = 0, then drifts; in the released form with learning rates 1.6, 1.6, 0.16."""
    e = Exchange("overlapsgd", [1.0, 2.0], anchor_momentum_scale=scale)
    rates = {0: 1.6, 1: 1.6, 2: 0.16}
    e.server.rate = lambda round=None: rates[e.server.round if round is None else round]  # type: ignore[method-assign]
    wanted = [([0.4, 0.8], 0.6), ([0.48, 0.8], 1.06), ([0.908, 0.876], last)]
    for drifts, (x, z) in zip(([0, 0], [-0.1, 0.3], [0.2, -0.2]), wanted):
        e.exchange(drifts)
        assert e.x == pytest.approx(x, abs=1e-12) and e.z == pytest.approx(z, abs=1e-12)


@pytest.mark.usefixtures("in_double")
def test_overlapped_extremes() -> None:
    """Full pull without momentum: everything is the old anchor. No pull: the anchor is the mean of free models."""
    e = Exchange("overlapsgd", [1.0, 2.0], z=7.0, pullback=1.0, server_momentum=0.0)
    e.exchange()
    assert e.x == [7.0, 7.0] and e.z == 7.0
    e = Exchange("overlapsgd", [1.0, 2.0], z=7.0, pullback=0.0, server_momentum=0.0)
    e.exchange()
    assert e.x == [1.0, 2.0] and e.z == 1.5


@pytest.mark.usefixtures("in_double")
def test_what_is_tested_of_overlapping_clients(tmp_path: Path) -> None:
    """The mean of the clients' models after their pull, or the anchor: the clients' own models are the same."""
    ways = [federated(tmp_path / way, "overlapsgd", **ALL, norm="gn", lr=0.125, rounds=3, evaluate=way) for way in ("anchor", "local-mean")]
    for number in range(3):
        for f in ways:
            f.round(number)
        anchored, other = (f.server for f in ways)
        close(other["anchor"], dict(anchored.model.tensors()))
        close(other.model, {n: sum(ways[0].keep.read(k)["personal"][n] for k in range(4)) / 4 for n in anchored.model.tensors()})


def test_the_servers_rate_is_the_schedules() -> None:
    o = SimpleNamespace(lr=0.4, schedule="cosine", steps=3, rounds=8)
    server = Server(SimpleNamespace(options=o), None)  # type: ignore[arg-type]
    server.round = 2
    assert server.rate() == pytest.approx(0.2 * (1 + math.cos(math.pi / 4)))
    assert server.rate(4) == pytest.approx(0.2)


# -- EASGD, OverlapSGD: rounds against plain torch -----------------------------------------------------------------------
@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("name", ["easgd", "overlapsgd"])
def test_rounds_of_own_models(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds: own models and own momenta go on, Nesterov SGD with decay 1e-4, then the exchange by its formulas."""
    seen = watched(monkeypatch, name, "supervised")
    f = federated(tmp_path, name, **ALL, norm="gn", lr=0.125, rounds=3)
    z = {n: t.clone() for n, t in f.server.model.tensors().items()}
    v = {n: torch.zeros_like(t) for n, t in z.items()}
    nets = [net_of(f.server.model) for _ in range(4)]
    optimizers = [sgd(net, 0.125, 1e-4) for net in nets]
    for number in range(3):
        seen.clear()
        f.round(number)
        for k, net in enumerate(nets):
            assert len(seen[k]) == 2
            for b in seen[k]:
                descend(optimizers[k], F.cross_entropy(net(b.x.labelled), b.x.y))
        pull = 0.9 / 4 if name == "easgd" else 0.6
        old = [weights_of(net) for net in nets]
        with torch.no_grad():
            for net in nets:
                for n, p in net.named_parameters():
                    p.sub_(pull * (p - z[n]))
        if name == "easgd":
            z = {n: z[n] + pull * sum(w[n] - z[n] for w in old) for n in z}
        else:
            average = mean_of([weights_of(net) for net in nets])
            v = {n: 0.7 * v[n] + average[n] - z[n] for n in z}
            z = {n: z[n] + v[n] for n in z}
        close(f.server.model, z)
        for k, net in enumerate(nets):
            close(f.keep.read(k)["personal"], weights_of(net))


@pytest.mark.parametrize("name", ["easgd", "overlapsgd"])
def test_who_comes_late_has_the_first_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """x_k = z at the run's start, and who takes no part keeps x_k: not the centre as it is by then."""
    kind, starts = find(name), list[Any]()
    made = kind.plan

    def plan(self: Any, party: Any, found: Any) -> Any:
        starts.append((party.round, party.id, party.personal.state.groups["parameters"].clone()))
        return made(self, party, found)

    monkeypatch.setattr(kind, "plan", plan)
    f = federated(tmp_path, name, **ALL | {"active": 1}, norm="gn", rounds=6)
    first, seen = f.server.model.groups["parameters"].clone(), set[int]()
    for number in range(6):
        f.round(number)
    for _, client, x in starts:
        assert torch.equal(x, first) == (client not in seen)
        seen.add(client)
    assert len(seen) > 1


@pytest.mark.usefixtures("in_double")
def test_statistics_of_those_who_are_there() -> None:
    """statistics=average: the centre's are the mean of the participants', also where one of the active ones sends nothing."""
    kind = find("easgd")
    o = kind.Options(method="easgd", clients=2, statistics="average", server_lr=0.5)
    server = Server(SimpleNamespace(options=o), None)  # type: ignore[arg-type]
    net = nn.BatchNorm1d(1)
    server["model"] = State.of(net)
    server.sent = server.model
    net.running_mean.fill_(4.0)  # type: ignore[union-attr, operator]
    net.weight.data.fill_(3.0)
    kind(o, 3).merge(server, Updates([Update(model=State.of(net))]))
    assert float(server.model["running_mean"]) == 4.0 and float(server.model["weight"]) == pytest.approx(1 + 0.25 * 2)


def are_statistics_of(state: State, f: Any) -> None:
    """Those that plain torch makes for these weights over the whole training set, in batches of 250."""
    net = net_of(state, "bn")
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.reset_running_stats()
            m.momentum = None
    images = f.simulation.plain(np.arange(len(f.simulation.labels)))
    with torch.no_grad():
        for batch in images.split(250):
            net(batch)
    for name, buffer in net.named_buffers():
        if buffer.is_floating_point():
            torch.testing.assert_close(state[name], buffer, rtol=0, atol=1e-9)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("name", ["easgd", "overlapsgd"])
def test_the_centre_is_tested_with_statistics_of_its_own(name: str, tmp_path: Path) -> None:
    """Not with those that were made for an earlier one."""
    f = federated(tmp_path, name, **ALL, norm="bn", lr=0.125, rounds=2)
    for number in range(2):
        f.round(number)
        are_statistics_of(f.server.model, f)


@pytest.mark.usefixtures("in_double")
def test_an_anchor_after_a_first_rate_of_nothing() -> None:
    """A warm-up's first rate is 0: nothing has moved the anchor, and there is nothing to scale."""
    e = Exchange("overlapsgd", [1.0, 2.0], anchor_momentum_scale="lr", schedule="constant,warmup=2", lr=0.5)
    e.exchange()
    e.exchange()
    assert e.x == pytest.approx([0.52, 0.68], abs=1e-12) and e.z == pytest.approx(0.6 + 0.7 * 0.6, abs=1e-12)


# -- HeteroFL's row --------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("in_double")
def test_server_momentum_over_rounds() -> None:
    """w = 1, client means 0.8, 0.7, 0.7: 0.8, 0.6, 0.6."""
    o = find("heterofl").Options(method="heterofl", clients=2)
    method, server = find("heterofl")(o, 3), Server(SimpleNamespace(options=o), None)  # type: ignore[arg-type]
    server["model"] = numbered(1.0)
    for clients, wanted in (([0.7, 0.9], 0.8), ([0.7, 0.7], 0.6), ([0.65, 0.75], 0.6)):
        server.sent = server.model
        updates = Updates(Update(model=numbered(x)) for x in clients)
        for k, u in enumerate(updates):
            u.client, u.weight = k, 1.0
        method.merge(server, updates)
        assert value(server.model) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.usefixtures("in_double")
def test_rounds_of_the_heterofl_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds with batch norm: kept momenta, a clipped gradient, uniform mean, server momentum 0.5; then statistics made
    over the whole training set in batches of 250, which two tests make alike."""
    seen = watched(monkeypatch, "heterofl", "supervised")
    keys: dict[str, Any] = {"norm": "bn", "lr": 0.03125, "weight_decay": 5e-4, "clip": 1.0, "partition": "dirichlet-capped:0.3,min_size=5"}
    f = federated(tmp_path, "heterofl", **ALL, **keys)
    w = {n: t.clone() for n, t in f.server.model.only("parameters").tensors().items()}
    buffer: dict[str, torch.Tensor] = {}
    nets = [net_of(f.server.model, "bn") for _ in range(4)]
    optimizers = [sgd(net, 0.03125, 5e-4) for net in nets]
    for number in range(2):
        seen.clear()
        f.round(number)
        for k, net in enumerate(nets):
            net.load_state_dict(w, strict=False)
            for b in seen[k]:
                optimizers[k].zero_grad()
                F.cross_entropy(net(b.x.labelled), b.x.y).backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizers[k].step()
        average = mean_of([weights_of(net) for net in nets])
        delta = {n: w[n] - average[n] for n in w}
        buffer = {n: 0.5 * buffer[n] + delta[n] for n in w} if buffer else delta
        w = {n: w[n] - buffer[n] for n in w}
        close(f.server.model, w)
    made = f.model(f.server.model.only("parameters"))
    are_statistics_of(made, f)
    assert torch.equal(made.groups["statistics"], f.server.model.groups["statistics"])


@pytest.mark.usefixtures("in_double")
def test_masked_loss() -> None:
    """Logits of classes that a client does not own count as 0: ln(e^2 + e^0 + e^0) - 2 for logits (2, 5, 7) and class 0."""
    kind = find("heterofl")
    s = SimpleNamespace(model=lambda x: x, own=torch.tensor([1.0, 0, 0]), descend=lambda loss: losses.append(float(loss)), log=lambda **_: None)
    losses: list[float] = []
    b = SimpleNamespace(x=SimpleNamespace(labelled=torch.tensor([[2.0, 5, 7]]), y=torch.tensor([0])))
    for masked in (True, False):
        kind(kind.Options(method="heterofl", masked_ce=masked), 3).supervised(s, b)
    assert losses == pytest.approx([math.log(math.e**2 + 2) - 2, math.log(math.e**2 + math.e**5 + math.e**7) - 2], abs=1e-12)


def test_rows_of_the_last_layer_by_their_owners() -> None:
    """Two clients of three classes: (A owns 0, 1; B owns 1): A's row, the mean, and what was there."""
    rows = torch.tensor([[[1.0, 2], [3, 4], [5, 6]], [[7.0, 8], [9, 10], [11, 12]]])
    owned = torch.tensor([[True, True, False], [False, True, False]])
    old = torch.full((3, 2), -1.0)
    assert mean_of_owners(rows, owned, old).tolist() == [[1, 2], [6, 7], [-1, -1]]
    assert mean_of_owners(rows[:, :, 0], owned, old[:, 0]).tolist() == [1, 6, -1]
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    assert last_layer(head_of(net), dict(net.named_parameters())) == ["1.weight", "1.bias"]
    names = dict(models.build("resnet9", 3, 3).named_parameters())
    assert last_layer(head_of(models.build("resnet9", 3, 3)), names) == ["linear.weight", "linear.bias"]


def test_a_client_counts_for_its_own_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five clients of two classes each, three of them there: a class's row is its owner's, or what it was."""
    kind, sent = find("heterofl"), dict[int, Any]()
    made = kind.end

    def end(self: Any, party: Any) -> Any:
        update = made(self, party)
        sent[party.id] = update["model"].clone()
        return update

    monkeypatch.setattr(kind, "end", end)
    keys: dict[str, Any] = {"clients": 5, "active": 3, "partition": "shards:2", "reading": "released", "norm": "gn", "rounds": 1}
    f = federated(tmp_path, "heterofl", **ALL | keys)
    before = f.server.model.clone()
    f.round(0)
    owner = {int(c): k for k, client in enumerate(f.simulation.federation.clients) for c in f.simulation.labels[client.labelled]}
    assert len(sent) == 3
    for c in range(10):
        row = sent.get(owner[c], before)["head.weight"][c]
        assert torch.equal(f.server.model["head.weight"][c], row) and (c in [k for k in owner if owner[k] in sent]) != torch.equal(row, before["head.weight"][c])
    several = torch.stack([state["conv1.weight"] for state in sent.values()]).double().mean(0).float()
    torch.testing.assert_close(f.server.model["conv1.weight"], several, rtol=0, atol=1e-7)


# -- DataSharing -------------------------------------------------------------------------------------------------------------
def test_the_shared_set_is_nobodys_else() -> None:
    """10,000 of 50,000 for beta 0.25, a tenth of each class; a client of one class has R = s / (s + alpha beta |D|)."""
    labels = np.arange(50_000) % 10
    f = federate_with_shared(labels, 10, Spec(labels="all", clients=10, partition="shards:1"), 0.25, 1.0)
    shared = f.server.labelled
    assert np.bincount(labels[shared]).tolist() == [1000] * 10
    own = [np.setdiff1d(c.labelled, shared) for c in f.clients]
    assert [len(c.labelled) for c in f.clients] == [14_000] * 10 and all(set(shared) <= set(c.labelled) for c in f.clients)
    everything = np.concatenate([shared, *own])
    assert len(everything) == len(set(everything.tolist())) == 50_000
    assert all(len(set(labels[part])) == 1 for part in own)
    assert measured(f.counts(labels, 10)["labelled"]) == pytest.approx(4000 / 14_000, abs=1e-12)


def test_each_client_draws_its_share_for_itself() -> None:
    labels = np.arange(1000) % 10
    f = federate_with_shared(labels, 10, Spec(labels="all", clients=4), 0.25, 0.5)
    drawn = [np.intersect1d(c.labelled, f.server.labelled) for c in f.clients]
    assert [len(d) for d in drawn] == [100] * 4 and len({tuple(d) for d in drawn}) == 4
    none = federate_with_shared(labels, 10, Spec(labels="all", clients=4), 0.25, 0.0)
    assert [len(c.labelled) for c in none.clients] == [200] * 4
    assert f.fingerprint == federate_with_shared(labels, 10, Spec(labels="all", clients=4), 0.25, 0.5).fingerprint


def test_a_shared_set_that_cannot_be_even_is_refused() -> None:
    with pytest.raises(UserError, match="class 1 has 2; lower share_beta"):
        federate_with_shared(np.array([0] * 50 + [1] * 2), 2, Spec(labels="all", clients=2), 0.5, 1.0)


@pytest.mark.parametrize("nothing", [{"share_beta": 0.0}, {"share_alpha": 0.0, "share_warmup": False}])
def test_nothing_shared_is_fedavg(nothing: dict[str, Any], tmp_path: Path) -> None:
    f = federated(tmp_path / "a", "datasharing", **ALL, **nothing)
    method, options, source, federation = prepare(None, TINY | {"method": "fedavg"} | ALL)
    if "share_alpha" in nothing:  # the same clients, without the set that nobody gets
        federation = replace(f.simulation.federation, server=federation.server)
    plain = Run(RunFolder(tmp_path), method, options, source, federation).federated
    for g in (f, plain):
        for number in range(2):
            g.round(number)
    assert torch.equal(f.server.model.groups["parameters"], plain.server.model.groups["parameters"])


@pytest.mark.usefixtures("in_double")
def test_rounds_with_a_shared_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's warm-up on the shared set, once; then FedAvg whose weights count what was received."""
    seen = watched(monkeypatch, "datasharing", "supervised")
    keys: dict[str, Any] = {"partition": "dirichlet-capped:0.3,min_size=5", "norm": "gn", "lr": 0.0625, "share_beta": 0.3, "server_epochs": 2}
    f = federated(tmp_path, "datasharing", **ALL, **keys)
    net = net_of(f.server.model)
    for number in range(2):
        seen.clear()
        f.round(number)
        assert (-1 in seen) == (number == 0)
        optimizer = sgd(net, 0.0625)
        for b in seen.pop(-1, []):
            descend(optimizer, F.cross_entropy(net(b.x.labelled), b.x.y))
        middle, trained = {k: v.clone() for k, v in net.state_dict().items()}, []
        for k in sorted(seen):
            net.load_state_dict(middle)
            optimizer = sgd(net, 0.0625)
            for b in seen[k]:
                descend(optimizer, F.cross_entropy(net(b.x.labelled), b.x.y))
            trained.append(weights_of(net))
        sizes = [len(c.labelled) for c in f.simulation.federation.clients]
        assert len(set(sizes)) > 1
        w = {n: sum(s * t[n] for s, t in zip(sizes, trained)) / sum(sizes) for n in trained[0]}
        net.load_state_dict(w)
        close(f.server.model, w)


# -- what is refused -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"method": "easgd", "prox": 0.1}, "has a pull of its own, so prox=0.1 has no place"),
        ({"method": "easgd", "server_lr": 9.6}, "past the clients' mean; use server_lr=1 or less"),
        ({"method": "overlapsgd", "average": "grouped"}, "merges updates in its own way"),
        ({"method": "easgd", "debias": True}, "makes no pseudo-labels, so debias=true has no place"),
        ({"method": "heterofl", "labels": "server", "label_count": 20}, "not defined for labels=server; it works with labels=all, clients, some"),
        ({"method": "datasharing", "server_turn": "after"}, "trains before the first round only"),
    ],
)
def test_what_makes_no_sense(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve({}, keys)
