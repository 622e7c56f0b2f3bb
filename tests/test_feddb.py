"""FedDB against the worked numbers and invariants."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fallow import models
from fallow.data.holdings import table
from fallow.data.samples import Samples
from fallow.engine.eager import Eager
from fallow.engine.feed import Part, steps
from fallow.engine.keep import Keep
from fallow.engine.party import Job, Party
from fallow.engine.round import Federated
from fallow.engine.server import Server
from fallow.engine.simulation import Simulation
from fallow.engine.slot import Slot
from fallow.methods import feddb
from fallow.methods.base import Update, Updates
from fallow.methods.feddb import FedDB
from fallow.methods.parts.averaging import mean
from fallow.methods.parts.labelling import cuts, debiased, hard, mean_prediction, weak_logits
from fallow.methods.state import State
from fallow.recipes.reading import recipe
from fallow.runs import prepare
from fallow.runs.settings import resolve

CPU = torch.device("cpu")
SMALL = {
    "labels": "clients", "label_count": 60, "clients": 4, "unlabelled_ratio": 0.15, "rounds": 3, "epochs": 3, "norm": "bn",
    "slots": 1, "device": "cpu", "defaults": "paper",
}  # fmt: skip


def federated(tmp: Path, **keys: Any) -> Federated:
    method, options, source, federation = prepare(None, SMALL | {"method": "feddb"} | keys)
    simulation = Simulation(options, method(options, len(source.classes)), source, federation)
    return Federated(simulation, Eager(simulation), Keep(tmp, 1e9, simulation.kit.layouts(), CPU))


def rounds(f: Federated, n: int = 2) -> list[dict[str, Any]]:
    return [f.round(i) for i in range(n)]


def begun(f: Federated) -> tuple[Slot, Party, dict[str, np.ndarray]]:
    """Client 0 in a slot at the start of round 0, and what `begin` found."""
    slot = Slot(f.kit)
    slot.load({"model": f.server.model}, {}, 0.0)
    slot.lr["model"].fill_(0.03)
    party = Party(f.simulation.site(0), slot, Job(0, 0, {"model": f.server.model}))
    return slot, party, {k: v.numpy() for k, v in f.method.begin(party).items()}


def outcomes(f: Federated, number: int = 0) -> list[Any]:
    f.server.draw(number)
    f.server.sent = f.server.model
    return f.clients.train(f._requests())[0]


def parameters(f: Federated) -> torch.Tensor:
    return f.server.model.groups["parameters"]


def method(**keys: Any) -> FedDB:
    return FedDB(FedDB.Options(method="feddb", **keys), 3)


# -- the client ----------------------------------------------------------------------------------------------------------
def test_mean_prediction_over_a_round() -> None:
    means = [(0.7, 0.2, 0.1), (0.8, 0.1, 0.1), (0.5, 0.3, 0.2), (0.6, 0.3, 0.1), (0.4, 0.4, 0.2)]
    want = [(0.65, 0.25, 0.1), (0.725, 0.175, 0.1), (0.6125, 0.2375, 0.15), (0.60625, 0.26875, 0.125), (0.503125, 0.334375, 0.1625)]
    for padded in (False, True):
        s = SimpleNamespace(prior=torch.tensor([0.6, 0.3, 0.1]))
        for p, after in zip(means, want):
            z = torch.tensor(p).log().repeat(2, 1) + torch.tensor([[0.0], [5.0]])
            rows = None
            if padded:
                z, rows = torch.cat([z, torch.tensor([[9.0, 0, 0]])]), torch.tensor([True, True, False])
            s.model = lambda x, z=z, **_: z
            method().refresh(s, SimpleNamespace(u=SimpleNamespace(weak=torch.zeros(len(z), 1), rows=rows)))
            assert s.prior.tolist() == pytest.approx(after, abs=1e-6)


def test_gamma_is_what_the_old_mean_keeps() -> None:
    """15.3.1: p <- gamma p + (1 - gamma) p_e, by hand for gamma 0.9 and at the ends; it stays a distribution."""
    for gamma, want in ((0.9, (0.61, 0.29, 0.10)), (1.0, (0.6, 0.3, 0.1)), (0.0, (0.7, 0.2, 0.1))):
        s = SimpleNamespace(prior=torch.tensor([0.6, 0.3, 0.1]), model=lambda x, **_: torch.tensor([[0.7, 0.2, 0.1]]).log())
        method(app_u_momentum=gamma).refresh(s, SimpleNamespace(u=SimpleNamespace(weak=torch.zeros(1, 1), rows=None)))
        assert s.prior.tolist() == pytest.approx(want, abs=1e-6)
        assert float(s.prior.sum()) == pytest.approx(1, abs=1e-6)


PRIOR = torch.tensor([0.6, 0.3, 0.1])
TABLE = [  # p, debiased p, accepted
    ((0.90, 0.06, 0.04), (0.714286, 0.095238, 0.190476), False),
    ((0.97, 0.02, 0.01), (0.906542, 0.037383, 0.056075), False),
    ((0.995, 0.004, 0.001), (0.986125, 0.007929, 0.005946), True),
    ((0.05, 0.05, 0.90), (0.009009, 0.018018, 0.972973), True),
    ((0.30, 0.20, 0.50), (0.081081, 0.108108, 0.810811), False),
]


def test_debiased_labels() -> None:
    p = torch.tensor([row[0] for row in TABLE])
    z = debiased(p.log() + 3.0, PRIOR)
    assert torch.allclose(z.softmax(1), torch.tensor([row[1] for row in TABLE]), atol=1e-6)
    label, sure = hard(z, 0.95)
    assert sure.tolist() == [row[2] for row in TABLE]
    assert label[sure].tolist() == [0, 2]
    assert hard(p.log(), 0.95)[1].tolist() == [False, True, True, False, False]
    assert torch.allclose(debiased(p.log(), torch.full((3,), 1 / 3)).softmax(1), p, atol=1e-6)
    assert torch.allclose(debiased(p.log(), 7 * PRIOR).softmax(1), z.softmax(1), atol=1e-6)
    assert bool(torch.isfinite(debiased(p.log(), torch.tensor([0.7, 0.3, 0.0]))).all())


@pytest.mark.parametrize("debias", [True, False])
def test_a_round_begins_with_the_table(debias: bool) -> None:
    """From the start of a round: fifteen more samples make the APP-U of the table's five."""
    p = torch.tensor([row[0] for row in TABLE] + [((12 - 3.215) / 15, (6 - 0.334) / 15, (2 - 1.451) / 15)] * 15)
    party = SimpleNamespace(unlabelled=range(20), model=None, prior=torch.zeros(3), judge=lambda *_: None)
    party.predict = lambda net, samples, view, **_: p.log() + 3.0
    found = method(debias=debias).begin(party)
    assert party.prior.tolist() == pytest.approx(PRIOR.tolist(), abs=1e-6)
    accepted = [row[2] for row in TABLE] if debias else [False, True, True, False, False]
    assert found["sure"].tolist() == accepted + [False] * 15
    assert found["label"][found["sure"]].tolist() == ([0, 2] if debias else [0, 0])


def test_threshold_is_reached_by_equality() -> None:
    assert hard(torch.tensor([[0.0, 0.0]]), 0.5)[1].tolist() == [True]


@pytest.mark.parametrize("over", ["accepted", "all"])
def test_mean_prediction_is_that_of_the_net_before_the_step(tmp_path: Path, over: str) -> None:
    f = federated(tmp_path, threshold=0.12, epochs=1, app_u_over=over)
    slot, party, found = begun(f)
    plan = f.method.plan(party, found)
    b = next(iter(steps(party.site, plan, party.key("plan"), lambda *a: {}))).batch()
    part = b.u if over == "accepted" else b.every
    net = models.build("small-cnn", 10, 1, norm="bn", size=8)
    net.load_state_dict(f.server.model.tensors(), strict=False)
    rows = slice(None) if part.rows is None else part.rows
    if over == "all":
        assert len(part.weak[rows]) == len(party.unlabelled)
    with torch.no_grad():
        want = (party.prior + net.train()(part.weak[rows]).softmax(1).mean(0)) / 2
    before = slot.model.flat.groups["parameters"].clone()
    f.method.step(slot, b)
    assert torch.allclose(party.prior, want, atol=1e-6)
    assert not torch.equal(slot.model.flat.groups["parameters"], before)


def test_ratios_average_to_one() -> None:
    z = torch.from_numpy(np.random.default_rng(0).normal(size=(200, 5)))
    assert torch.allclose((z.softmax(1) / mean_prediction(z)).mean(0), torch.ones(5, dtype=torch.float64))
    assert torch.allclose(hard(torch.tensor([[2.0, 2.0, 0.0]]), 0.0)[0], torch.tensor([0]))  # ties: the lowest


def test_normaliser_of_the_unlabelled_loss() -> None:
    """N_u = 500, 50 accepted, the sum of their losses 100."""
    z = torch.zeros(50, 3)
    z[:, 0] = float(np.log(2 / (np.exp(2.0) - 1)))  # cross-entropy of class 0 is 2

    class Slot:
        model = SimpleNamespace(apart=lambda *parts, **_: parts)

        def descend(self, loss: torch.Tensor) -> None:
            self.loss = float(loss)

        def log(self, **_: Any) -> None: ...

    u = SimpleNamespace(strong=z, weak=z, rows=None, y=torch.zeros(50, dtype=torch.int64))
    for reduction, want in {"selected": 2.0, "all": 0.2}.items():
        s = Slot()
        method(reduction=reduction, average="mean").step(s, SimpleNamespace(x=Part(None), u=u, share=torch.tensor(50 / 500)))
        assert s.loss == pytest.approx(want, abs=1e-6)


def test_weight_of_the_unlabelled_loss() -> None:
    """L = L_s + lambda L_u (15.3.3), with 12.3's labelled batch (0.395495) and a strong batch of loss 2."""

    class Slot:
        model = SimpleNamespace(apart=lambda *parts, **_: parts)

        def descend(self, loss: torch.Tensor) -> None:
            self.loss = float(loss)

        def log(self, **_: Any) -> None: ...

    strong = torch.tensor([[float(np.log(2 / (np.exp(2.0) - 1))), 0, 0]] * 4)
    u = SimpleNamespace(strong=strong, weak=strong, rows=None, y=torch.zeros(4, dtype=torch.int64))
    x = Part({"labelled": torch.tensor([[1.0, 0, 0], [0, 2, 0]]), "y": torch.tensor([0, 1])})
    for weight, reduction, want in ((1.0, "selected", 2.395495), (0.5, "selected", 1.395495), (0.5, "all", 0.495495), (0.0, "all", 0.395495)):
        s = Slot()
        method(weight=weight, reduction=reduction, average="mean").step(s, SimpleNamespace(x=x, u=u, share=torch.tensor(0.1)))
        assert s.loss == pytest.approx(want, abs=2e-6)


def test_the_share_is_of_the_whole_unlabelled_set() -> None:
    """15.3.3: N_u = |U_m| = N_l + N_u (15.11.10); 50 of 500 are 0.1."""
    sure = np.arange(500) % 10 == 3
    party = SimpleNamespace(labelled=Samples.of(np.arange(40), np.zeros(40, np.int64)), unlabelled=Samples.of(np.arange(500)),
                            batch=None, epochs=5, steps=None, uneven=False)  # fmt: skip
    plan = method().plan(party, {"label": np.zeros(500, np.int64), "sure": sure})
    assert len(plan) == 5 and plan.segments[0].numbers["share"] == pytest.approx(0.1)
    assert plan.segments[0].streams["u"].samples.index.tolist() == np.flatnonzero(sure).tolist()


@pytest.mark.parametrize("size", [250, 100])
def test_the_pass_over_all_is_made_in_batches(tmp_path: Path, size: int) -> None:
    """Section 18 of methods: `app_u_over=all` passes like `begin`: stored order, batches of 250, batch statistics."""
    f = federated(tmp_path, threshold=0.12, epochs=1, app_u_over="all", clients=2, unlabelled_ratio=1.0, app_u_batch=size)
    slot, party, found = begun(f)
    party._predictions = 0  # the same views again
    assert torch.equal(party.prior, mean_prediction(party.predict(party.model, party.unlabelled, "weak", batch=size)))
    plan = f.method.plan(party, found)
    b = next(iter(steps(party.site, plan, party.key("plan"), lambda *a: {}))).batch()
    n = len(party.unlabelled)
    weak = b.every.weak if b.every.rows is None else b.every.weak[b.every.rows]
    assert n > 500 and len(weak) == n and b.every.index[:n].tolist() == list(range(n))
    net = models.build("small-cnn", 10, 1, norm="bn", size=8)
    net.load_state_dict(f.server.model.tensors(), strict=False)
    with torch.no_grad():
        means = [torch.cat([net.train()(x).softmax(1) for x in weak.split(each)]).mean(0) for each in (size, n)]
    start = party.prior.clone()
    f.method.step(slot, b)
    assert torch.allclose(party.prior, (start + means[0]) / 2, atol=1e-6)
    assert not torch.allclose(means[0], means[1], atol=1e-5)


@pytest.mark.parametrize("passes", ["apart", "joint"])
@pytest.mark.usefixtures("in_double")
def test_steps_equal_plain_torch(tmp_path: Path, passes: str) -> None:
    """15.3.3: labelled, accepted weak and accepted strong are batches of their own; clip 1, Nesterov, decay by torch."""
    f = federated(tmp_path, threshold=0.12, weight_decay=5e-4, clip=1.0, weight=0.7, passes=passes)
    slot, party, found = begun(f)
    assert 0 < found["sure"].mean() < 1
    made = [s.batch() for s in steps(party.site, f.method.plan(party, found), party.key("plan"), lambda *a: {})]
    assert len(made) == 3
    net = models.build("small-cnn", 10, 1, norm="bn", size=8)
    net.load_state_dict(f.server.model.tensors(), strict=False)
    sgd = torch.optim.SGD(net.train().parameters(), lr=0.03, momentum=0.9, nesterov=True, weight_decay=5e-4)
    prior = party.prior.clone()
    for b in made:
        x, u = (slice(None) if p.rows is None else p.rows for p in (b.x, b.u))
        assert sorted(b.u.index[u].tolist()) == np.flatnonzero(found["sure"]).tolist()
        assert torch.equal(b.u.y[u], torch.from_numpy(found["label"])[b.u.index[u]])
        with torch.no_grad():
            prior = 0.5 * prior + 0.5 * net(b.u.weak[u]).softmax(1).mean(0)
        if passes == "apart":
            zx, zu = net(b.x.labelled[x]), net(b.u.strong[u])
        else:
            zx, zu = net(torch.cat([b.x.labelled[x], b.u.strong[u]])).tensor_split([len(b.x.labelled[x])])
        loss = F.cross_entropy(zx, b.x.y[x]) + 0.7 * F.cross_entropy(zu, b.u.y[u])
        sgd.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        sgd.step()
        f.method.step(slot, b)
        assert torch.allclose(party.prior, prior, atol=1e-9) and float(party.prior.sum()) == pytest.approx(1, abs=1e-9)  # 15.11.1
    for name, p in net.named_parameters():
        assert torch.allclose(slot.model.weights[name], p, atol=1e-9), name


@pytest.mark.parametrize("chunk", [1000, 10])
@pytest.mark.usefixtures("in_double")
def test_a_step_in_pieces_equals_plain_torch(tmp_path: Path, chunk: int) -> None:
    """15.3.3: ceil(n/c) near-equal pieces, a BN batch each, weighed by size; one step. One piece is the whole step."""
    f = federated(tmp_path, threshold=0.12, weight_decay=5e-4, clip=1.0, weight=0.7, full_batch_chunk=chunk)
    slot, party, found = begun(f)
    plan = f.method.plan(party, found)
    made = [s.batch() for s in steps(party.site, plan, party.key("plan"), lambda *a: {})]
    n = int(found["sure"].sum())
    count = -(-n // chunk)
    large, few = divmod(n, count)
    sizes = [large + 1] * few + [large] * (count - few)
    assert len(sizes) == 1 if chunk == 1000 else len(sizes) > 2 and len(set(sizes)) == 2
    net = models.build("small-cnn", 10, 1, norm="bn", size=8)
    net.load_state_dict(f.server.model.tensors(), strict=False)
    sgd = torch.optim.SGD(net.train().parameters(), lr=0.03, momentum=0.9, nesterov=True, weight_decay=5e-4)
    prior = party.prior.clone()
    for b in made:
        assert b.u.rows is None and len(b.u.y) == n
        with torch.no_grad():
            prior = 0.5 * prior + 0.5 * net(b.u.weak).softmax(1).mean(0)
        x = slice(None) if b.x.rows is None else b.x.rows
        loss = F.cross_entropy(net(b.x.labelled[x]), b.x.y[x])
        for v, y in zip(b.u.strong.split(sizes), b.u.y.split(sizes)):
            loss = loss + 0.7 * F.cross_entropy(net(v), y, reduction="sum") / n
        sgd.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        sgd.step()
        plan.segments[0].step(slot, b)
        assert torch.allclose(party.prior, prior, atol=1e-9)
        assert slot.logs["loss"].tolist() == pytest.approx([loss.item(), 1], abs=1e-9)
        slot.logs["loss"].zero_()
    for name, p in net.named_parameters():
        assert torch.allclose(slot.model.weights[name], p, atol=1e-9), name


def test_the_released_index_alias(tmp_path: Path) -> None:
    """Trap T1, by hand: positions in the labelled set (class by class) are looked up in the unlabelled one (file order)."""
    f, g = (federated(tmp_path / str(how), labelled_as_unlabelled=how) for how in ("alias", True))
    labels, clients = f.simulation.labels, f.simulation.federation.clients
    own = np.concatenate([c.labelled for c in clients])
    rest, classes = np.setdiff1d(np.arange(len(labels)), own), np.sort(labels[own])
    seen: list[int] = []
    for c, d in zip(clients, g.simulation.federation.clients):
        n = len(c.labelled)
        assert np.array_equal(c.labelled, d.labelled) and np.array_equal(c.unlabelled[n:], d.unlabelled[n:])
        front = c.unlabelled[:n]
        assert np.isin(front, rest).all()
        places = np.searchsorted(rest, front)
        assert classes[places].tolist() == labels[c.labelled].tolist(), "each at a labelled sample's place"
        seen += places.tolist()
    assert sorted(seen) == list(range(len(own)))
    shown = table(f.simulation.federation, labels, [str(k) for k in range(10)]).rows
    for c, row in zip(clients, shown):  # both sides count: the labelled ones are not among the unlabelled
        counts = np.bincount(labels[np.concatenate([c.labelled, c.unlabelled])], minlength=10)
        assert row["share"] == pytest.approx(counts.max() / counts.sum(), abs=1e-4)
    rounds(f, 1)


def test_too_few_accepted_labels_are_left_aside(tmp_path: Path) -> None:
    for least, kept in ((1, True), (10**6, False)):
        f = federated(tmp_path / str(least), threshold=0.12, least_accepted=least)
        _, party, found = begun(f)
        assert found["sure"].any()
        assert ("u" in f.method.plan(party, found).segments[0].streams) == kept


def test_inference_batches() -> None:
    assert cuts(500, True) == [250, 250] and cuts(20, True) == [20]
    assert cuts(100, True, 20) == [20] * 5 and cuts(105, True, 20) == [20] * 4 + [25] and cuts(10, True, 1) == [1] * 10
    assert cuts(510, False) == [250, 250, 10] and cuts(510, True) == [250, 260] and cuts(532, True) == [250, 250, 32]


def test_shuffled_order_answers_in_stored_order(tmp_path: Path) -> None:
    f = federated(tmp_path, app_u_order="shuffled", unlabelled_ratio=1.0, clients=2)
    party = SimpleNamespace(
        unlabelled=Party(f.simulation.site(0), Slot(f.kit), Job(0, 0, {"model": f.server.model})).unlabelled,
        model=None, rng=lambda _: np.random.default_rng(1), seen=[],
    )  # fmt: skip

    def predict(net: Any, samples: Any, view: str, batch: int) -> torch.Tensor:
        party.seen.append(len(samples))
        return torch.from_numpy(samples.index)[:, None].float()

    party.predict = predict
    n = len(party.unlabelled)
    assert weak_logits(party, shuffled=True)[:, 0].tolist() == list(range(n))
    assert party.seen == cuts(n, True) and len(party.seen) > 1
    party.seen = []
    assert weak_logits(party, shuffled=True, size=100)[:, 0].tolist() == list(range(n)) and party.seen[:-1] == [100] * (len(party.seen) - 1)


# -- rounds --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("keys", [{}, {"app_u_over": "all"}, {"passes": "joint", "partition": "dirichlet-capped:5,min_size=1", "epochs": 1}])
@pytest.mark.usefixtures("in_double")
def test_filling_up_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]) -> None:
    runs = []
    for pad in (64, 1):
        monkeypatch.setattr(feddb, "PAD", pad)
        f = federated(tmp_path / str(pad), threshold=0.12, **keys)
        row = rounds(f, 1)[0]
        assert 0 < row["label_ratio"] < 1
        runs.append((parameters(f), torch.tensor(row["beta"]), torch.tensor(row["prior"])))
    for a, b in zip(*runs):
        assert torch.allclose(a, b, atol=1e-9)


@pytest.mark.usefixtures("in_double")
def test_without_debiasing_it_is_fixmatch(tmp_path: Path) -> None:
    """Labels once a round, whole sets, mean over the accepted: the same from FixMatch's file (group norm, tau 0)."""
    keys = {"norm": "gn", "threshold": 0.0, "weights": "uniform"}
    f = federated(tmp_path / "a", debias=False, average="mean", server_momentum=0.0, optimizer_state="reset", **keys)
    g = federated(tmp_path / "b", method="fixmatch", labeller="received", unlabelled_batch="full", reduction="selected",
                  labelled_as_unlabelled=True, **keys)  # fmt: skip
    for row, other in zip(rounds(f), rounds(g)):
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-9)
    assert torch.allclose(parameters(f), parameters(g), atol=1e-9)
    h = federated(tmp_path / "c", debias=True, average="mean", server_momentum=0.0, optimizer_state="reset", **keys)
    rounds(h)
    assert not torch.allclose(parameters(f), parameters(h), atol=1e-3)


def test_nothing_accepted_is_fedavg(tmp_path: Path) -> None:
    """15.11.8, bit for bit; and the mean prediction that is sent is the one of the start."""
    f = federated(tmp_path / "a", threshold=1.1, average="mean")
    g = federated(tmp_path / "b", method="fedavg", batch=64, labelled_as_unlabelled=True, weights="uniform",
                  statistics="batch", optimizer_state="keep", server_momentum=0.5)  # fmt: skip
    rounds(f), rounds(g)
    assert torch.equal(parameters(f), parameters(g))
    h = federated(tmp_path / "c", threshold=1.1, average="dma")
    party = Party(h.simulation.site(0), Slot(h.kit), Job(0, 0, {"model": h.server.model}))
    party.slot.load({"model": h.server.model}, {}, 0.0)
    h.method.begin(party)
    sent = next(o.update for o in outcomes(h) if o.party == 0)
    assert torch.equal(sent["prior"], party.prior)


def test_steps_and_priors(tmp_path: Path) -> None:
    """15.11.1, .9: as many steps as epochs where something is accepted; what is sent sums to 1."""
    f = federated(tmp_path, threshold=0.0, epochs=5)
    for o in outcomes(f):
        assert o.steps == 5
        assert float(o.update["prior"].sum()) == pytest.approx(1, abs=1e-5) and bool((o.update["prior"] >= 0).all())
    f = federated(tmp_path, threshold=1.1, epochs=5, label_count=400, clients=2)
    assert [o.steps for o in outcomes(f)] == [5 * -(-200 // 64)] * 2
    f = federated(tmp_path, threshold=1.1, epochs=5, label_count=400, clients=2, empty_mask="full-batch")
    assert [o.steps for o in outcomes(f)] == [5, 5]


def test_weak_pass_changes_no_number(tmp_path: Path) -> None:
    """15.11.12: the plain mean makes no weak pass; equal weights by DMA do."""
    f = federated(tmp_path / "a", threshold=0.0, average="mean")
    g = federated(tmp_path / "b", threshold=0.0, average="dma", dma_steps=0)
    up = [rounds(f)[-1]["bytes_up"], rounds(g)[-1]["bytes_up"]]
    assert torch.equal(parameters(f), parameters(g))
    assert up[1] - up[0] == 4 * 4 * 10  # 4 clients, 10 float32


def test_average(tmp_path: Path) -> None:
    """15.11.11: without server momentum the model is the weighted sum; the weights are logged and belong to the priors."""
    f = federated(tmp_path, threshold=0.0, server_momentum=0.0, dma="simplex", partition="dirichlet-capped:0.3,min_size=1")
    found = sorted(outcomes(f), key=lambda o: o.party)
    row = f.round(0)
    beta = torch.tensor(row["beta"], dtype=torch.float64)
    want = sum(b * o.update["model"].groups["parameters"].double() for b, o in zip(beta, found))
    assert torch.allclose(parameters(f).double(), want, atol=1e-7)
    P = torch.stack([o.update["prior"] for o in found]).double()
    assert torch.allclose(torch.tensor(row["prior"], dtype=torch.float64), P.T @ beta, atol=1e-6)
    assert row["residual"] == pytest.approx(float((P.T @ beta - 0.1).norm()), abs=1e-6)
    assert row["residual"] <= row["residual_uniform"]
    assert torch.equal(mean([found[0].update], weights=[0.3]).groups["parameters"], found[0].update["model"].groups["parameters"])


def test_server_momentum() -> None:
    net = torch.nn.Linear(1, 1, bias=False)

    def state(x: float) -> State:
        torch.nn.init.constant_(net.weight, x)
        return State.of(net)

    server = Server(SimpleNamespace(options=SimpleNamespace(server_lr=1.0, server_momentum=0.5)), None)  # type: ignore[arg-type]
    w, seen = 1.0, []
    for average in (0.8, 0.7, 0.7):
        server["model"] = server.sent = state(w)
        updates = Updates(Update(model=state(average), prior=torch.full((3,), 1 / 3)) for _ in range(2))
        method().merge(server, updates)
        w = float(server.model["weight"])
        seen.append(w)
    assert seen == pytest.approx([0.8, 0.6, 0.6])


def test_who_holds_what(tmp_path: Path) -> None:
    """15.11.10: a client's unlabelled set is its own unlabelled and labelled samples, labelled ones first."""
    f = federated(tmp_path, unlabelled_ratio=1.0, partition="dirichlet-capped:0.3,min_size=1").simulation.federation
    seen = np.concatenate([c.unlabelled for c in f.clients])
    assert len(np.unique(seen)) == len(seen)
    assert all(np.array_equal(c.unlabelled[: len(c.labelled)], c.labelled) for c in f.clients)


def test_labels_at_some_clients(tmp_path: Path) -> None:
    f = federated(tmp_path, labels="some", labelled_clients=2, threshold=0.0)
    assert rounds(f)[1]["clients"] == 4
    f = federated(tmp_path, labels="some", labelled_clients=2, threshold=1.1)
    idle = [o for o in outcomes(f) if not o.steps]
    assert len(idle) == 2 and all(torch.equal(o.update["model"].groups["parameters"], parameters(f)) for o in idle)


def test_its_defaults() -> None:
    """15.8, the options in one place, as far as a method sets them; recipes set the rest."""
    _, o = resolve({}, {"method": "feddb"})
    assert (o.debias, o.average, o.dma, o.dma_steps, o.dma_lr, o.dma_momentum, o.dma_ridge, o.dma_floor) == (True, "dma", "code", 100, 1.0, 0.0, 1e-8, 0.0)
    assert (o.app_u_momentum, o.app_u_over, o.app_u_order, o.reduction, o.weight, o.threshold) == (0.5, "accepted", "stored", "selected", 1.0, 0.95)
    assert (o.empty_mask, o.batch, o.optimizer_state, o.server_lr, o.server_momentum, o.weights) == ("minibatch64", "full", "keep", 1.0, 0.5, "uniform")
    assert (o.statistics, o.labelled_as_unlabelled, o.labeller) == ("batch", True, "received")
    assert (o.optimizer, o.lr, o.momentum, o.nesterov) == ("sgd", 0.03, 0.9, True)


def test_readings() -> None:
    _, o = resolve({}, {"method": "feddb", "reading": "paper"})
    assert (o.dma, o.app_u_over, o.reduction, o.empty_mask) == ("paper-loop", "all", "all", "full-batch")
    assert (o.optimizer_state, o.server_momentum, o.schedule, o.augment.strong) == ("reset", 0.0, "constant", "ra-fixmatch")
    _, o = resolve({}, {"method": "feddb", "reading": "released"})
    assert (o.dma, o.app_u_over, o.reduction, o.server_momentum, o.statistics) == ("code", "accepted", "selected", 0.5, "batch")
    assert o.labelled_as_unlabelled and o.batch == "full" and (o.schedule, o.augment.strong) == ("cosine", "ra-semifl")
    for number, setting, delta in (("2", "delta=0.3", 0.3), ("3", "delta=0.1", 0.1), ("4", "delta=0.1", 0.1)):
        for reading, split in (("recommended", f"dirichlet-capped:{delta},min_size=1"), ("paper", f"dirichlet-client:{delta}")):
            given = {"data": "svhn", "setting": setting, "method": "DPL and DMA" if number == "4" else "FedDB", "reading": reading}
            assert resolve(recipe(f"feddb/table{number}"), given)[1].partition == split
