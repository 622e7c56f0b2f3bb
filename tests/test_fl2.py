"""(FL)2: worked numbers, invariants, a client's round against a plain-torch loop, rounds in which the server is alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, rows, same

import fallow
from fallow import models
from fallow.engine.feed import Batch, Part
from fallow.methods.fl2 import FL2, shares
from fallow.methods.parts.sharpness import ascent
from fallow.methods.parts.thresholds import by_class
from fallow.recipes.reading import recipe
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder
from fallow.runs.settings import resolve


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def federated(path, **keys):
    kind, options, source, federation = prepare(None, TINY | {"method": "fl2", "labels": "server", "norm": "bn", "threshold": 0.12} | keys)
    path.mkdir(exist_ok=True)
    return Run(RunFolder(path), kind, options, source, federation).federated


@pytest.mark.parametrize("setting, alone", [("cifar10 labels=10 iid", 10), ("cifar100 labels=400 iid", 10), ("svhn labels=40 iid", 102), ("svhn labels=250 iid", 16)])
def test_the_papers_eight_hundred_rounds(setting, alone):
    """T = 800 of both; before them the code's server trains alone, floor(2048 / (5 floor(N_L / 10))) times on SVHN."""
    found = {r: resolve(recipe("fl2/table1"), {"setting": setting, "reading": r})[1] for r in ("released", "paper")}
    assert [(found[r].warmup_rounds, found[r].rounds, found[r].schedule) for r in found] == [(alone, 800 + alone, "constant"), (0, 800, "cosine")]


# -- Example A ---------------------------------------------------------------------------------------------------------------
Q = double([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8], [0.45, 0.12, 0.43], [0.97, 0.02, 0.01]])


def test_worked_thresholds():
    tau, mean = Q.amax(1).mean(), Q.mean(0)
    assert tau.item() == pytest.approx(0.67) and mean.tolist() == pytest.approx([0.4866666667, 0.2233333333, 0.29])
    cuts = by_class(tau, mean)
    assert cuts.tolist() == pytest.approx([0.67, 0.3074657534, 0.3992465753], abs=1e-10)
    confidence, label = Q.max(1)
    assert (confidence >= cuts[label]).tolist() == [True, False, True, True, False, True]
    assert shares(double([0.67, 0.5, 0.9])).tolist() == pytest.approx([0.3548387097, 0.5376344086, 0.1075268817], abs=1e-10)
    assert shares(double([1, 1])).tolist() == [0.5, 0.5] and shares(double([0.3, 0.3, 0.3])).tolist() == pytest.approx([1 / 3] * 3)


def test_one_sample_at_least_is_kept():
    """The likeliest of the most predicted class is above the mean of all or no sample differs."""
    g = torch.Generator().manual_seed(0)
    for scale in (0.0, 0.1, 1.0, 10.0):
        q = torch.randn(50, 7, generator=g, dtype=torch.float64).mul(scale).softmax(1)
        confidence, label = q.max(1)
        assert (confidence >= by_class(confidence.mean(), q.mean(0))[label] - 1e-12).any()


@pytest.mark.parametrize("alike", [1, 3, 7, 31, 250])
def test_of_samples_that_are_alike_all_are_kept(alike):
    """In float32, where the mean of equal numbers is not always that number."""
    rng = torch.Generator().manual_seed(alike)
    for _ in range(200):
        z = torch.randn(1, 7, generator=rng).repeat(alike, 1)
        party = SimpleNamespace(is_server=False, unlabelled=range(alike), model=None, tau=torch.zeros(1), predict=lambda *a, z=z, **k: z, judge=lambda *a: None)
        assert FL2(FL2.Options(), 7).begin(party)["kept"].all()


def test_a_client_with_labels_alone_is_as_sure_as_it_is_of_those():
    """Not unsure of everything, which would give it the largest share of all."""
    z = torch.randn(30, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    party = SimpleNamespace(is_server=False, unlabelled=range(0), labelled=range(30), model=None, tau=torch.zeros(1), predict=lambda net, data, view: z[: len(data)])
    assert FL2(FL2.Options(), 7).begin(party) == {}
    assert party.tau.item() == pytest.approx(z.softmax(1).amax(1).mean().item(), abs=1e-7)


# -- Example B: the step -------------------------------------------------------------------------------------------------------
class Bench:
    """A slot with a linear net, plain SGD at 0.1."""

    def __init__(self, weight, bias):
        self.weights = {"weight": double(weight).requires_grad_(), "bias": double(bias).requires_grad_()}
        self.model, self.calls = self, []

    def __call__(self, x, weights=None):
        w = weights or self.weights
        self.calls.append({n: t.detach() for n, t in w.items()})
        return x @ w["weight"].T + w["bias"]

    def gradient(self, loss, net, retain=False):
        self.up = loss.item(), dict(zip(self.weights, torch.autograd.grad(loss, list(self.weights.values()), retain_graph=retain)))
        return self.up[1]

    def descend(self, loss):
        grads = torch.autograd.grad(loss, list(self.weights.values()))
        self.norm = torch.cat([g.flatten() for g in grads]).norm().item()
        self.new = {n: (w - 0.1 * g).detach() for (n, w), g in zip(self.weights.items(), grads)}

    def log(self, **values):
        self.logged = {n: v.item() for n, v in values.items()}


X = double([[1, 0.5], [-0.5, 1], [0.2, -0.8]])
W, B = [[0.5, -0.2], [0.1, 0.3], [-0.4, 0.6]], [0.05, -0.1, 0]


def step(sure, **options):
    bench = Bench(W, B)
    part = Part({"strong": X, "y": torch.tensor([0, 1, 2]), "sure": torch.tensor(sure)})
    FL2(FL2.Options(**options), 3).step(bench, Batch({"x": Part(None), "u": part}, {}))
    return bench


def test_worked_step():
    bench = step([True, False, True])
    assert bench.up[0] == pytest.approx(1.1896125941, abs=1e-10)
    eps = {n: bench.calls[1][n] - bench.calls[0][n] for n in ("weight", "bias")}
    expected = [[-0.0125434700, -0.0031677891], [0.0004685179, -0.0005818465], [0.0015978038, 0.0289815844]]
    assert torch.allclose(eps["weight"], double(expected), atol=1e-10)
    assert torch.allclose(eps["bias"], double([-0.0058085273, 0.0613114558, -0.0555029285]), atol=1e-10)
    size = {"weight": double(W).abs() + 0.01, "bias": torch.ones(3, dtype=torch.float64)}
    assert torch.cat([(size[n] * bench.up[1][n]).flatten() for n in size]).norm().item() == pytest.approx(0.4832161404, abs=1e-10)
    assert bench.logged["consistency"] == pytest.approx(0.0006910838, abs=1e-10)
    assert bench.logged["loss"] == pytest.approx(1.2099467734 + 0.0006910838, abs=1e-9)
    assert bench.norm == pytest.approx(0.6267269570, abs=1e-9)
    new = [[0.5186166112, -0.1822648024], [0.0748608947, 0.3258915333], [-0.3934775060, 0.5563732691]]
    assert torch.allclose(bench.new["weight"], double(new), atol=1e-9)
    assert torch.allclose(bench.new["bias"], double([0.0467477624, -0.0972108942, 0.0004631318]), atol=1e-9)


def test_nobody_sure_and_no_way_up():
    plain = F.cross_entropy(X @ double(W).T + double(B), torch.tensor([0, 1, 2])).item()
    assert step([False] * 3).logged == {"loss": plain, "consistency": 0}
    assert step([True] * 3, rho=0.0).logged == {"loss": pytest.approx(plain, abs=1e-15), "consistency": pytest.approx(0, abs=1e-15)}
    some, all_ = step([True, False, True]), step([True, False, True], consistency="sum")
    assert all_.logged["consistency"] > 3 * some.logged["consistency"], "Eq. 13: every sample, and no mean"


def test_scales_of_layers_do_not_matter():
    """Without the floor, a layer times a and the next by it leave the norm of the way up as it is."""
    def norm(a):
        first, second = (a * double(W)).requires_grad_(), (double(W).T / a).requires_grad_()
        w = {"first.weight": first, "second.weight": second}
        loss = F.cross_entropy((X @ first.T).relu() @ second.T, torch.tensor([0, 1, 1]))
        moved = ascent(w, dict(zip(w, torch.autograd.grad(loss, list(w.values())))), 0.1, 0.0)
        return [(moved[n] - w[n]).detach() / w[n].detach() for n in w]

    assert all(torch.allclose(x, y, atol=1e-12) for x, y in zip(norm(1.0), norm(7.0)))


# -- a client's round in plain torch ----------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("in_double")
def test_a_client_in_plain_torch(tmp_path, monkeypatch):
    f = federated(tmp_path, clients=1, active=1, lr=0.0625, statistics="batch", server_turn="beside", server_momentum=0.0, batch=64)
    seen, step = [], FL2.step
    monkeypatch.setattr(FL2, "step", lambda self, s, b: (seen.append((b.u.strong, b.u.y, b.u.sure)), step(self, s, b))[1])
    sent = []
    end = FL2.end
    monkeypatch.setattr(FL2, "end", lambda self, party: sent.append(end(self, party)) or sent[-1])
    net = models.build("small-cnn", 10, 1, "bn", 8)
    net.load_state_dict(f.kit.initial().tensors())
    f.round(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0625, momentum=0.9, nesterov=True)
    names = [n for n, _ in net.named_parameters()]
    for x, y, sure in seen:
        z = net(x)
        values = dict(net.named_parameters())
        first = (F.cross_entropy(z, y, reduction="none") * sure).sum() / max(1, int(sure.sum()))
        up = dict(zip(names, torch.autograd.grad(first, list(values.values()), retain_graph=True)))
        T = {n: p.detach().abs() + 0.01 if "weight" in n else torch.ones_like(p) for n, p in values.items()}
        total = sum(((T[n] * up[n]) ** 2).sum() for n in names).sqrt()
        near = torch.func.functional_call(net, {n: p + 0.1 * T[n] ** 2 * up[n] / (total + 1e-16) for n, p in values.items()}, (x,))
        divergence = F.kl_div(near.log_softmax(1), z.detach().softmax(1), reduction="none").sum(1)
        optimizer.zero_grad()
        (F.cross_entropy(z, y) + (divergence * sure).sum() / len(x)).backward()
        optimizer.step()
    assert len(seen) == 2 and any(s.sum() > 0 for _, _, s in seen)
    client = next(u for u in sent if u.client == 0)
    for n, p in net.named_parameters():
        assert torch.allclose(client["model"][n], p, rtol=1e-9, atol=1e-11), n


# -- rounds in which the server is alone ----------------------------------------------------------------------------------------
def test_the_server_trains_alone_first(tmp_path):
    keys = TINY | {"method": "fl2", "labels": "server", "norm": "bn", "rounds": 4, "threshold": 0.12, "warmup_rounds": 2}
    through = fallow.run(out=tmp_path, **keys)
    assert [r["clients"] for r in rows(through.path)] == [0, 0, 2, 2]
    assert [r["bytes_up"] > 0 for r in rows(through.path)] == [False, False, True, True]
    stopped = fallow.run(out=tmp_path, stop_after=1, **keys)
    same(fallow.resume(stopped.path).path, through.path)


def test_clients_with_labels_train_alone_first(tmp_path):
    """Those of them that are drawn, in the order drawn, whatever the optimiser's state does."""
    keys = {"method": "fedavg", "labels": "some", "labelled_clients": 3, "clients": 6, "active": 2, "rounds": 3, "warmup_rounds": 1, "optimizer_state": "travel"}
    kind, options, source, federation = prepare(None, TINY | keys)
    f = Run(RunFolder(tmp_path), kind, options, source, federation).federated
    labelled = {i for i, c in enumerate(federation.clients) if len(c.labelled)}
    f.round(0)
    assert len(f.server.active) == 2 and set(f.server.active) <= labelled and len(labelled) == 3
    f.round(1)
    assert len(f.server.active) == 2
    one = TINY | keys | {"labelled_clients": 1, "label_count": 10, "rounds": 2}
    assert fallow.run(out=tmp_path, **one).metrics[0]["clients"] == 1


def test_unsure_clients_weigh_more(tmp_path):
    f = federated(tmp_path, server_turn="beside", server_momentum=0.0)
    f.server.draw(0)
    f.server["model"] = f.model()
    f.server.sent = f.server.model
    replies, _ = f.clients.train(f._requests(), [])
    updates = f._updates(replies, [])
    expected = shares(torch.cat([u["tau"] for u in updates]))
    FL2.merge(f.method, f.server, updates)
    by_hand = sum(w * u["model"].groups["parameters"].double() for w, u in zip(expected.tolist(), updates))
    assert torch.allclose(f.server.model.groups["parameters"].double(), by_hand, atol=1e-7)
    assert np.isclose(sum(expected.tolist()), 1)


def test_a_server_beside_the_clients_keeps_its_share(tmp_path):
    f = federated(tmp_path, server_turn="beside", server_momentum=0.0)
    f.server.draw(0)
    f.server["model"] = f.model()
    f.server.sent = f.server.model
    updates = f._updates(*f.clients.train(f._requests(), f._beside("beside")))
    own, *others = updates
    assert own is updates.server and "tau" not in own and len(others) == 2
    expected = [1 / 3, *(2 / 3 * shares(torch.cat([u["tau"] for u in others]))).tolist()]
    by_hand = sum(w * u["model"].groups["parameters"].double() for w, u in zip(expected, updates))
    FL2.merge(f.method, f.server, updates)
    assert torch.allclose(f.server.model.groups["parameters"].double(), by_hand, atol=1e-7)
