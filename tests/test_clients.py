"""The seam between the round and its clients: who does not reply is absent, and comes back with what he kept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY

from fallow.data.holdings import Holding
from fallow.engine.clients import Reply, Request
from fallow.engine.eager import Eager
from fallow.engine.kit import Declared, Kit
from fallow.engine.local import Local
from fallow.engine.party import Job, Outcome
from fallow.engine.round import Federated
from fallow.engine.site import Site, Sites
from fallow.methods import REGISTERED, find
from fallow.methods.base import Method, Net, Update, Value
from fallow.methods.parts.averaging import mean
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder


class Unreliable(Local):
    """Some clients never answer; what they did is not kept either."""

    absent: frozenset[int] = frozenset()

    def train(self, requests: Sequence[Request], here: Sequence[Job] = ()) -> tuple[list[Reply | None], list[Outcome]]:
        replies, own = super().train(requests, here)
        self._kept = {party: record for party, record in self._kept.items() if party not in self.absent}
        return [None if r is None or r.party in self.absent else r for r in replies], own

    def ask(self, question: str, requests: Iterable[Request], after: bool = False, **about: Any) -> list[Any]:
        asked = list(requests)
        answers = super().ask(question, asked, after, **about)
        return [None if r.party in self.absent else a for r, a in zip(asked, answers)]


def federated(path: Path, absent: set[int], **keys: Any) -> Federated:
    kind, options, source, federation = prepare(None, TINY | {"labels": "clients", "clients": 4, "active": 4, "label_count": 40} | keys)
    f = Run(RunFolder(path), kind, options, source, federation).federated
    f.clients = Unreliable(f.simulation, f.executor, f.keep)
    f.clients.absent = frozenset(absent)
    return f


def test_the_others_are_merged_as_if_the_absent_had_not_been_asked(tmp_path: Path) -> None:
    f = federated(tmp_path, {2}, method="fedavg", norm="gn")
    f.server.draw(0)
    there = [r.update for r in f.clients.train(f._requests())[0] if r is not None]
    for update in there:
        assert update is not None
        held = f.simulation.federation.clients[update.client]
        update.weight = float(len(set(held.labelled) | set(held.unlabelled)))
    row = f.round(0)
    assert row["clients"] == 3 and sorted(u.client for u in there) == [0, 1, 3]
    assert torch.equal(f.server.model.groups["parameters"], mean(sorted(there, key=lambda u: u.client)).groups["parameters"])


def test_a_round_without_any_reply_leaves_the_model(tmp_path: Path) -> None:
    f = federated(tmp_path, {0, 1, 2, 3}, method="fixmatch", measure="diversity,prior,labels,classes")
    before = f.server.model.clone()
    row = f.round(0)
    assert row["clients"] == 0 and row["loss"] is None and row["bytes_up"] == 0 and row["bytes_down"] > 0
    assert torch.equal(f.server.model.groups["parameters"], before.groups["parameters"])


class Visits(Method):
    """Counts at each client how often it took part, and sends the count up."""

    def holds(self) -> dict[str, Net | Value]:
        return {"model": Net(), "visits": Value(1, keep=True)}

    def begin(self, party: Any) -> dict[str, Any]:
        party.visits.add_(1)
        return {}

    def end(self, party: Any) -> Update | None:
        update = super().end(party)
        assert update is not None
        update["visits"] = party.visits
        return update


def test_who_was_absent_goes_on_with_what_he_kept(tmp_path: Path) -> None:
    f = federated(tmp_path, set(), method=f"{__file__}:Visits", norm="gn")
    for number, absent in enumerate([set(), {1}, set()]):
        f.clients.absent = frozenset(absent)  # type: ignore[attr-defined]
        f.round(number)
    assert [float(f.keep.read(client)["visits"]) for client in range(4)] == [3, 2, 3, 3]
    f.server.draw(3)
    replies = f.clients.train(f._requests())[0]
    sent = {r.party: float(r.update["visits"]) for r in replies if r is not None and r.update is not None}
    assert sent == {0: 4, 1: 3, 2: 4, 3: 4}


@pytest.mark.parametrize(("name", "average"), [
    (name, average) for name in REGISTERED for average in ("mean", "grouped", "dma") if average == "mean" or find(name).merge is Method.merge
])  # fmt: skip
def test_every_method_goes_on_without_a_client(name: str, average: str, tmp_path: Path) -> None:
    keys = {"method": name, "average": average, "optimizer_state": "travel", "norm": "gn"}
    f = federated(tmp_path, {1}, **keys)
    rows = [f.round(number) for number in range(2)]
    assert [row["clients"] for row in rows] == [3, 3]
    assert torch.isfinite(f.server.model.groups["parameters"]).all() and rows[1]["accuracy"] is not None


def test_statistics_come_from_those_who_answer(tmp_path: Path) -> None:
    """In exact arithmetic those of all samples of the others."""
    keys = {"method": "fedavg", "norm": "sbn", "sbn": "federated", "sbn_passes": "exact"}
    f = federated(tmp_path / "three", {3}, **keys)
    f.server.draw(0)
    found = f.model(f.kit.initial().only("parameters"))
    from fallow.engine import statistics

    rows = [f.simulation.site(client).rows for client in range(3)]
    net = f.kit.net()
    net.load(f.kit.initial().only("parameters"))
    norms = statistics.order(net, f.kit.blank(2))
    batches = [statistics.Batches(f.simulation.plain, r) for r in rows]
    with torch.no_grad():
        statistics.layerwise(net, norms, "exact", lambda a, b: [statistics.moments_between(net, norms, a, b, x) for x in batches])
    assert torch.allclose(found.groups["statistics"], net.flat.groups["statistics"], atol=1e-4, rtol=1e-4)
    assert find("fedavg") is type(f.method)


# -- late ones ---------------------------------------------------------------------------------------------------------
class Late(Local):
    """Client 1 needs two rounds: what it began in one comes in the next, in which it is asked nothing new."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.waiting: tuple[Reply, dict[str, Any]] | None = None

    def train(self, requests: Sequence[Request], here: Sequence[Job] = ()) -> tuple[list[Reply | None], list[Outcome]]:
        late, self.waiting = self.waiting, None
        replies, own = super().train([r for r in requests if late is None or r.party != 1], here)
        found = {r.party: r for r in replies if r is not None}
        if late is None:
            self.waiting = found.pop(1), self._kept.pop(1)
        else:
            found[1], self._kept[1] = late
        return [found.get(r.party) for r in requests], own


def test_a_method_may_weigh_late_updates_by_their_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As FedAsync does: the model moves towards each update, by half as much for each round that it is late."""
    seen: list[tuple[int, int, Any]] = []

    def merge(self: Method, server: Any, updates: Any) -> None:
        for u in updates:
            seen.append((u.client, server.round - u.round, u["model"]))
            server["model"] = server.model.lerp(u["model"], 0.5 * 0.5 ** (server.round - u.round))

    monkeypatch.setattr(find("fedavg"), "merge", merge)
    f = federated(tmp_path, set(), method="fedavg", norm="gn", clients=2, active=2)
    f.clients = Late(f.simulation, f.executor, f.keep)
    start = f.server.model.groups["parameters"].clone()
    assert [f.round(n)["clients"] for n in range(2)] == [1, 2]
    assert [(client, age) for client, age, _ in seen] == [(0, 0), (0, 0), (1, 1)]
    first, second, late = (u.groups["parameters"].double() for _, _, u in seen)
    after = (start.double() + first) / 2
    want = 0.75 * (after + second) / 2 + 0.25 * late
    torch.testing.assert_close(f.server.model.groups["parameters"].double(), want, rtol=0, atol=1e-6)


def test_what_a_late_client_keeps_takes_effect_with_its_update(tmp_path: Path) -> None:
    f = federated(tmp_path, set(), method="fedloke", norm="gn")
    f.clients = Late(f.simulation, f.executor, f.keep)
    f.round(0)
    assert sorted(f.keep.version) == [0, 2, 3]
    f.round(1)
    assert f.keep.version == {0: 2, 1: 2, 2: 2, 3: 2}


# -- a site ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["fixmatch", "semifl", "fedloke"])
def test_a_party_knows_its_own_images_and_what_is_declared(name: str, tmp_path: Path) -> None:
    """On a machine of its own, from nothing else, it comes to the bits that it comes to in a simulation."""
    f = federated(tmp_path, set(), method=name, labels="some", threshold=0.12) if name != "fedloke" else federated(tmp_path, set(), method=name)
    f.server.draw(0)
    request = next(r for r in f._requests() if r.party == f.server.active[0])
    want = next(r for r in f.clients.train([request])[0] if r is not None)
    o, held = f.o, f.simulation.federation.clients[request.party]
    rows = np.concatenate([held.labelled, held.unlabelled])
    own = Holding(np.arange(len(held.labelled)), np.arange(len(held.labelled), len(rows)))
    labels = np.where(np.arange(len(rows)) < len(held.labelled), f.simulation.labels[rows], -1)
    declared = Declared.read(json.loads(json.dumps(asdict(f.kit.declared))))
    assert declared == f.kit.declared
    kit = Kit(o, type(f.method)(o, declared.classes), declared)
    site = Site(kit, request.party, own, f.simulation.images[torch.from_numpy(rows)].clone(), labels)
    found = Eager(Sites(kit, {request.party: site})).run([Job(**vars(request))])[0]
    assert (found.steps, found.samples, found.lr) == (want.steps, want.samples, want.lr) and found.update is not None and want.update is not None
    assert torch.equal(found.update["model"].groups["parameters"], want.update["model"].groups["parameters"])
    assert found.logs.keys() == want.logs.keys() and torch.equal(found.logs["loss"], want.logs["loss"])
