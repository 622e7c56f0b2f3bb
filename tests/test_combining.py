"""Parts that every method honours or refuses: labeller, debias, average."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TINY, rows, same, weights

import fallow
from fallow import draws
from fallow.engine import feed
from fallow.engine.party import SERVER, Job, Party, begin_calls
from fallow.engine.round import Federated
from fallow.engine.slot import Slot
from fallow.errors import UserError
from fallow.methods import REGISTERED, find
from fallow.methods.base import Method
from fallow.methods.parts import dma, labelling
from fallow.methods.parts.averaged import Averaged
from fallow.methods.parts.averaging import mean
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder
from fallow.runs.settings import resolve

EASY = {"threshold": 0.12, "entropy": 2.3, "lambda_l2": 1.0}


def keys_of(name: str, **keys: Any) -> dict[str, Any]:
    known = find(name).Options.model_fields
    return TINY | {"method": name, "norm": "bn", "active": 3} | {k: v for k, v in EASY.items() if k in known} | keys


def federated(path: Path, name: str, **keys: Any) -> Federated:
    method, options, source, federation = prepare(None, keys_of(name, **keys))
    path.mkdir(parents=True, exist_ok=True)
    return Run(RunFolder(path), method, options, source, federation).federated


def parameters(state: Any) -> torch.Tensor:
    return state.groups["parameters"].double()


# -- every method ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("average", ["grouped", "dma"])
@pytest.mark.parametrize("name", REGISTERED)
def test_every_method_takes_every_average(name: str, average: str, tmp_path: Path) -> None:
    keys = keys_of(name, average=average)
    if find(name).merge is not Method.merge and not (issubclass(find(name), Averaged) and not find(name).Options().weight_ema):  # type: ignore[attr-defined]
        with pytest.raises(UserError, match=f"{name} (merges updates in its own way|tests an average of the weights).* so average={average} has no place"):
            prepare(None, keys)
        return
    stopped = fallow.run(out=tmp_path, stop_after=1, **keys)
    resumed, through = fallow.resume(stopped.path), fallow.run(out=tmp_path, **keys)
    same(resumed.path, through.path)
    for row in rows(through.path):
        assert row["clients"] == 3
        assert row["bytes_up"] - row["bytes_down"] == (3 * 4 * 10 if average == "dma" else 0), "ten float32 of each client"
        assert average == "grouped" or sum(row["beta"]) == pytest.approx(1)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("fedavg", {"labeller": "received"}, "makes no pseudo-labels, so labeller=received"),
    ("fedprox", {"debias": True}, "makes no pseudo-labels, so debias=true has no place"),
    ("fedloke", {"labeller": "current"}, "two models that label for each other"),
    ("fedloke", {"debias": True}, "two models that label for each other"),
    ("feddure", {"labeller": "local-ema"}, "its regulators judge the labels"),
    ("feddure", {"debias": True}, "its regulators judge the labels"),
    ("feddb", {"labeller": "current"}, "labels once a round .* use labeller=received"),
    ("fedavg", {"labels": "server", "average": "grouped"}, "trains the server alone"),
    ("fedavg", {"labels": "all", "average": "dma"}, "no client has any; use average=mean"),
    ("fixmatch", {"unlabelled_ratio": 0, "average": "dma"}, "no client has any"),
    ("fixmatch", {"average": "grouped", "groups": 9}, "groups=9 for 2 active clients"),
    ("semifl", {"average": "grouped", "weights": "half"}, "weights=half has no meaning inside a group"),
    ("fixmatch", {"labels": "server", "average": "grouped", "server_replicas": "per-group", "server_turn": "after"}, "the server is in no group"),
    ("fixmatch", {"app_u_source": "running"}, "use it with debias=true labeller=current"),
    ("fixmatch", {"app_u_source": "running", "debias": True, "labeller": "received"}, "use it with debias=true labeller=current"),
    ("feddb", {"app_u_source": "running"}, "labels once a round .* so app_u_source=running has no place"),
    ("fedavg", {"app_u_source": "running"}, "so app_u_source=running has no place; leave app_u_source out"),
    ("semifl", {"labels": "server", "server_turn": "beside", "average": "grouped", "server_replicas": "per-group", "average_base": "trained"},
     "average_base=trained .* use one of the two"),
    ("feddb", {"full_batch_chunk": 32, "passes": "joint"}, "use one of the two"),
    ("uda", {"average": "grouped", "group_assignment": "fixed"}, "group_assignment=fixed with 2 of 4"),
]


@pytest.mark.parametrize(("name", "keys", "words"), REFUSED)
def test_what_makes_no_sense_is_refused(name: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve({}, TINY | {"method": name} | keys)


@pytest.mark.parametrize("name", REGISTERED)
def test_labellers_that_are_honoured_run(name: str, tmp_path: Path) -> None:
    found, threshold = set(), {"threshold": 0.0} if "threshold" in find(name).Options.model_fields else {}
    for labeller in sorted(find(name).labellers):
        for debias in (False, True):
            keys = keys_of(name, labeller=labeller, debias=debias, labeller_decay=0.5, lr=0.2, **threshold)
            found.add(weights(fallow.run(out=tmp_path, **keys).path))
    assert len(found) == 2 * len(find(name).labellers), "each makes a difference"


@pytest.mark.parametrize(("name", "threshold"), [("semifl", 0.0), ("semifl", 1.1), ("fixmatch", 0.0), ("uda", 0.0), ("fedrgd", 0.0)])
def test_a_kept_labeller_by_hand(name: str, threshold: float, tmp_path: Path) -> None:
    """One client, one step a round: v <- d v + (1 - d) w after each step; v <- mu v + (1 - mu) w_received at a round's start."""
    keys = {"labels": "clients", "clients": 1, "active": 1, "steps": 1, "rounds": 2, "norm": "gn", "threshold": threshold}
    keys |= {"labeller": "local-ema", "labeller_ema": 0.2, "labeller_decay": 0.6, "lr": 0.2, "server_momentum": 0.0, "groups": 1}
    f = federated(tmp_path, name, **keys)
    v = received = parameters(f.kit.initial())
    for number in range(2):
        f.round(number)
        w = parameters(f.server.model)
        assert not torch.equal(w, received)
        v = 0.6 * (0.2 * v + 0.8 * received) + 0.4 * w
        torch.testing.assert_close(parameters(f.keep.read(0)["labeller"]), v, atol=1e-6, rtol=0)
        received = w


def test_a_method_with_a_merge_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from fallow import Method\n"
        "class Own(Method):\n    def merge(self, server, updates):\n        server['model'] = updates[0]['model']\n"
        "class Mute(Method):\n    def end(self, party):\n        from fallow.methods.base import Update\n        return Update(model=party.model.state)\n"
    )
    with pytest.raises(UserError, match="merges updates in its own way, so average=dma"):
        resolve({}, TINY | {"method": f"{file}:Own", "average": "dma"})
    with pytest.raises(UserError, match=r"have no `prior`.*super"):
        fallow.run(out=tmp_path, **TINY | {"method": f"{file}:Mute", "average": "dma"})


# -- debias ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("gamma", [0.5, 0.2, 0.0])
@pytest.mark.parametrize("batch", ["full", 64])
def test_a_prior_that_follows_its_batches(gamma: float, batch: int | str, tmp_path: Path) -> None:
    """15.5: over a pass it keeps gamma of itself. A net that stands still (lr ~ 0) predicts what it predicted at the start."""
    keys = {"app_u_source": "running", "app_u_momentum": gamma, "debias": True, "lr": 1e-30, "norm": "gn", "average": "dma"}
    f = federated(tmp_path, "fixmatch", unlabelled_batch=batch, epochs=1, batch=16, **keys)
    f.server.draw(0)
    for outcome in f.clients.train(f._requests())[0]:
        assert outcome.update is not None
        n = len(f.simulation.federation.clients[outcome.party].unlabelled)
        slot = Slot(f.kit)
        party = Party(f.simulation.site(outcome.party), slot, Job(outcome.party, 0, {"model": f.server.model}))
        slot.load({"model": f.server.model}, {}, 0.0)
        begin_calls(slot, party.key("begin"))
        found = f.method.begin(party)
        prior, log_decay_per_sample = party.prior.double(), 0.0
        for step in feed.steps(party.site, f.method.plan(party, found), party.key("plan"), lambda *a: {}):
            u = step.batch().u
            with torch.no_grad():
                p = party.model(u.weak, stats="running").softmax(1).double().mean(0)
            log_decay_per_sample = gamma ** (len(u.weak) / n)
            prior = log_decay_per_sample * prior + (1 - log_decay_per_sample) * p
        torch.testing.assert_close(outcome.update["prior"].double(), prior, atol=1e-5, rtol=0)
        assert batch != "full" or log_decay_per_sample == pytest.approx(gamma)


def test_a_batch_is_served_by_the_prior_before_it() -> None:
    """And rows that were filled in do not move it: (1/2)^(2/4) of (0.8, 0.2) stays, the rest is the mean of two samples."""
    z = torch.tensor([[0.6, 0.4], [0.1, 0.9], [0.99, 0.01]], dtype=torch.float64).log()
    u = SimpleNamespace(rows=torch.tensor([True, True, False]))
    s = SimpleNamespace(prior=torch.tensor([0.8, 0.2], dtype=torch.float64), log_decay_per_sample=torch.tensor([math.log(0.5) / 4], dtype=torch.float64))
    o = SimpleNamespace(labeller="current", debias=True, app_u_source="running")
    p = labelling.logits(o, s, u, z).softmax(1)
    assert p[0].tolist() == pytest.approx([0.75 / 2.75, 2 / 2.75])  # 0.6 / 0.8 to 0.4 / 0.2
    keep = 0.5**0.5
    assert s.prior.tolist() == pytest.approx([keep * 0.8 + (1 - keep) * 0.35, keep * 0.2 + (1 - keep) * 0.65])


# -- grouped -----------------------------------------------------------------------------------------------------------
def test_semifl_debiased_in_groups(tmp_path: Path) -> None:
    """The issue's recipe. Clients get their group's model; the groups' mean is the model, server momentum or not."""
    f = federated(tmp_path, "semifl", debias=True, average="grouped", groups=2, active=4, rounds=3)
    assert f.o.server_momentum == 0.5
    before = f.server.model
    for number in range(3):
        f.server.draw(number)
        held = list(f.server["groups"])
        got = [f.method.down(f.server, c)["model"] for c in f.server.active]
        assert [next(i for i, g in enumerate(held) if g is m) for m in got] == [0, 0, 1, 1]
        f.round(number)
        torch.testing.assert_close(parameters(f.server.model), parameters(mean(f.server["groups"])), atol=1e-6, rtol=0)
        assert not torch.equal(*(parameters(g) for g in f.server["groups"]))
    assert not torch.equal(parameters(before), parameters(f.server.model))


def test_groups_with_momentum_by_hand(tmp_path: Path) -> None:
    """w = w_sent - (d + 0.5 buffer), d = w_sent - w_avg; each group's model is moved by as much as w_avg is."""
    f = federated(tmp_path, "fedavg", average="grouped", groups=2, active=4, server_momentum=0.5, weights="uniform")
    buffer, sent = torch.zeros(()), parameters(f.server.model)
    for number in range(2):
        f.server.draw(number)
        f.server.sent = f.server.model
        found = {o.party: parameters(o.update["model"]) for o in f.clients.train(f._requests())[0] if o.update}
        halves = [f.server.active[:2], f.server.active[2:]]
        f.round(number)
        groups = [sum(found[c] for c in half) / 2 for half in halves]
        average = sum(groups) / 2
        buffer = 0.5 * buffer + sent - average
        sent = sent - buffer
        torch.testing.assert_close(parameters(f.server.model), sent, atol=1e-6, rtol=0)
        for ours, group in zip(f.server["groups"], groups):
            torch.testing.assert_close(parameters(ours), group + sent - average, atol=1e-6, rtol=0)


def test_after_the_clients_groups_only_weigh(tmp_path: Path) -> None:
    f = federated(tmp_path, "semifl", labels="server", average="grouped", groups=2)
    f.round(0)
    assert "groups" not in f.server and f.method.down(f.server, 0)["model"] is f.server.model


# -- dma ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["fixmatch", "fedavg"])
def test_priors_are_those_of_the_received_model(name: str, tmp_path: Path) -> None:
    """FixMatch measures before its steps, FedAvg, which labels nothing, after them: of the same model."""
    f = federated(tmp_path, name, average="dma", norm="gn")
    f.server.draw(0)
    requests = f._requests()
    net, w = f.kit.net(), f.simulation
    net.load(f.server.model)
    for outcome in f.clients.train(requests)[0]:
        u = w.federation.clients[outcome.party].unlabelled
        keys = draws.bits(w.kit.key("party", 0, outcome.party, "predict", "weak", 1), torch.arange(len(u)))
        with torch.no_grad():
            want = net(w.site(outcome.party).view("weak", u, keys), stats="running").softmax(1).mean(0)
        torch.testing.assert_close(outcome.update["prior"], want, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("weights", "share"), [("uniform", 1 / 4), ("half", 1 / 2)])
def test_a_server_beside_keeps_its_share(weights: str, share: float, tmp_path: Path) -> None:
    f = federated(tmp_path, "fixmatch", labels="server", average="dma", dma="simplex", weights=weights, partition="dirichlet-capped:0.3,min_size=1")
    f.server.draw(0)
    replies, own = f.clients.train(f._requests(), f._beside("beside"))
    assert [o.party for o in own] == [SERVER] and "prior" not in own[0].update
    beta = dma.simplex(torch.stack([r.update["prior"] for r in sorted(replies, key=lambda r: r.party)]).double())
    row = f.round(0)
    assert row["beta"] == pytest.approx(beta.tolist(), abs=1e-6) and max(beta) > 0.35
    shares = [share, *((1 - share) * beta).tolist()]
    want = sum(a * parameters(o.update["model"]) for a, o in zip(shares, [*own, *sorted(replies, key=lambda r: r.party)]))
    torch.testing.assert_close(parameters(f.server.model), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("keys", [{"labels": "all"}, {"labels": "clients", "objective": "supervised"}])
def test_debiasing_needs_something_to_label(keys: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="leaves nothing to label, so debias=true has no place; leave debias out"):
        resolve({}, {"method": "fedrgd", "debias": True} | keys)
