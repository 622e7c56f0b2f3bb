"""ProxyFL: worked numbers, invariants, gradients by autograd, and a round against a plain-torch loop."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import HERE, TINY

import fallow
from fallow import models
from fallow.errors import UserError
from fallow.methods.parts.proxies import contrast, gradient, nearest, tuned, unit
from fallow.methods.proxyfl import ProxyFL
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder
from fallow.runs.settings import resolve


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def method(K=3, **options):
    return ProxyFL(ProxyFL.Options(**options), K)


def federated(path, **keys):
    kind, options, source, federation = prepare(None, TINY | {"method": "proxyfl", "norm": "bn", "threshold": 0.12} | ({} if keys.get("method") == "sage" else {"tune_epochs": 2}) | keys)
    path.mkdir(exist_ok=True)
    return Run(RunFolder(path), kind, options, source, federation).federated


# -- Example A: GPT --------------------------------------------------------------------------------------------------------
SENT = double([[[1, 0], [0, 1], [-1, -0.5]], [[0.6, 0.4], [-0.2, 1.2], [-0.8, -1]]])


def test_worked_tuning():
    mean = SENT.mean(0)
    assert torch.allclose(mean, double([[0.8, 0.2], [-0.1, 1.1], [-0.9, -0.75]]), atol=1e-12)
    assert sorted(nearest(mean).tolist()) == pytest.approx([1.2727922061, 1.2727922061, 1.9474342094], abs=1e-10)
    m, c = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 2])
    margin = nearest(mean).max().item()
    loss, g = gradient(SENT, mean, m, c, margin, "client")
    assert loss.item() == pytest.approx(1.3865647157, abs=1e-10)
    assert gradient(SENT, mean, m, c, 0.0, "client")[0].item() == pytest.approx(0.3592631156, abs=1e-10)
    expected = [[0.8020547446, 0.1988382765], [-0.0994624405, 1.1001141152], [-0.9002020107, -0.7516010115]]
    assert torch.allclose(mean - 0.005 * g, double(expected), atol=1e-10)
    every = torch.arange(6) // 3, torch.arange(6) % 3
    assert 6 * gradient(SENT, mean, *every, 0.0, "client")[0].item() == pytest.approx(2.2942731358, abs=1e-9)
    assert 6 * gradient(SENT, mean, *every, 0.0, "server")[0].item() == pytest.approx(2.2973322792, abs=1e-9)


@pytest.mark.parametrize("anchor", ["client", "server"])
def test_the_gradient_is_autograds(anchor):
    g = torch.Generator().manual_seed(3)
    sent, start = torch.randn(3, 4, 5, generator=g, dtype=torch.float64), torch.randn(4, 5, generator=g, dtype=torch.float64, requires_grad=True)
    m, c = torch.tensor([2, 0, 0, 1, 2]), torch.tensor([3, 3, 0, 1, 3])
    loss = 0.0
    for i, k in zip(m.tolist(), c.tolist()):
        d = torch.stack([(start[j] - sent[i, k] if anchor == "client" else start[k] - sent[i, j]).norm() for j in range(4)])
        d = d + 0.7 * F.one_hot(torch.tensor(k), 4).double()
        loss = loss + F.cross_entropy(-d[None], torch.tensor([k])) / 5
    by_hand = gradient(sent, start.detach(), m, c, 0.7, anchor)
    assert by_hand[0].item() == pytest.approx(loss.item(), abs=1e-12)
    assert torch.allclose(by_hand[1], torch.autograd.grad(loss, start)[0], atol=1e-12)


def test_invariants_of_tuning():
    rng = lambda: np.random.default_rng(5)
    start = SENT.mean(0)
    plain = tuned(SENT, start, rng(), 3, 0.1, 4, 100.0, "client")
    assert not torch.allclose(plain, start)
    assert torch.equal(tuned(SENT, start, rng(), 0, 0.1, 4, 100.0, "client"), start)
    shift = tuned(SENT + 3, start + 3, rng(), 3, 0.1, 4, 100.0, "client")
    turn = double([[0.6, -0.8], [0.8, 0.6]])
    assert torch.allclose(shift - 3, plain, atol=1e-12) and torch.allclose(tuned(SENT @ turn, start @ turn, rng(), 3, 0.1, 4, 100.0, "client"), plain @ turn, atol=1e-12)
    on_it = torch.stack([start, start])
    assert torch.isfinite(gradient(on_it, start, torch.tensor([0]), torch.tensor([1]), 0.0, "client")[1]).all(), "where a distance is 0"
    assert torch.isfinite(tuned(SENT[:, :1], start[:1], rng(), 2, 0.1, 4, 100.0, "client")).all(), "one class has no neighbour"


# -- Example B: ICPL -------------------------------------------------------------------------------------------------------
V = double([[1, 0.2], [0.8, 0.6], [0.5, 1], [0.1, 1], [0.9, 0.4]])
OMEGA = double([[1, 0], [0, 1], [-0.6, -0.8]])
P = double([[0.97, 0.02, 0.01], [0.5, 0.45, 0.05], [0.1, 0.85, 0.05], [0.02, 0.96, 0.02], [0.45, 0.3, 0.25]])
PRIOR, SURE = double([0.4, 0.35, 0.25]), [True, False, False, True, False]


def test_worked_contrast():
    sure = torch.tensor(SURE)[:, None]
    likeliest = F.one_hot(P.argmax(1), 3).double()
    classes, weights = torch.where(sure, likeliest > 0, P > PRIOR), torch.where(sure, likeliest, P * (P > PRIOR))
    assert [set(r.nonzero().flatten().tolist()) for r in classes] == [{0}, {0, 1}, {1}, {1}, {0}]
    v = unit(V)
    assert (v @ OMEGA.T * weights).sum(1)[1:].tolist() == pytest.approx([0.67, 0.7602631123, 0.9950371902, 0.4112151969], abs=1e-10)
    each = contrast(v, OMEGA, classes, weights)[1:]
    assert each.tolist() == pytest.approx([0, 1.0562663933, 0.7428758869, 1.2589734931], abs=1e-10)
    assert each.mean().item() == pytest.approx(0.7645289433, abs=1e-10)


def test_dissimilar_rows_are_no_negatives():
    v = double([[1, 0], [-1, 0], [0, 1]])
    assert contrast(v, OMEGA, torch.eye(3, dtype=torch.bool), torch.eye(3, dtype=torch.float64)).tolist() == [0, 0, 0]


def test_what_is_as_sure_as_the_threshold():
    """The code's >=; the paper's row of the table prints >."""
    even = double([0.5, 0.75, 0.25])
    assert method(threshold=0.5).passes(even).tolist() == [True, True, False]
    assert method(threshold=0.5, sure="received").passes(even).tolist() == [False, True, False]


# -- Example C: the prior ----------------------------------------------------------------------------------------------------
def test_worked_prior():
    counts, old = double([[10, 5, 5], [2, 14, 4]]), double([1 / 3] * 3)
    assert method().prior(old, counts).tolist() == pytest.approx([0.333, 0.33475, 0.33225], abs=1e-12)
    assert method(prior_from="clients", prior_ema=0.0).prior(old, counts).tolist() == pytest.approx([0.3, 0.475, 0.225], abs=1e-12)
    assert torch.equal(method().prior(old, torch.zeros(2, 3)), old) and torch.equal(method(prior_from="clients").prior(old, torch.zeros(2, 3)), old)
    lying = method(prior_ema=0.0).prior(old, double([[-5, 1, 1]]))
    assert lying.tolist() == [0, 0.5, 0.5], "no class is counted below 0"


# -- a round in plain torch ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reading, tau", [("recommended", 0.17), ("paper", 0.1036)])
@pytest.mark.usefixtures("in_double")
def test_a_round_in_plain_torch(reading, tau, tmp_path, monkeypatch):
    """One client's steps and the merge with torch's modules, loops over rows, SGD and autograd."""
    f = federated(tmp_path, reading=reading, clients=1, active=1, lr=0.0625, batch=6, unlabelled_batch=8, threshold=tau)
    seen, step = [], ProxyFL.step
    monkeypatch.setattr(ProxyFL, "step", lambda self, s, b: (seen.append((b.x.labelled, b.x.y, b.u.weak, b.u.strong, b.counted.item())), step(self, s, b))[1])
    net, teacher = (models.build("small-cnn", 10, 1, "bn", 8) for _ in range(2))
    for one in (net, teacher.eval()):
        one.load_state_dict(f.kit.initial().tensors())
    own, paper = reading == "recommended", reading == "paper"
    first, second = torch.nn.Linear(128, 128), torch.nn.Linear(128, 128, bias=False)
    if own:
        w = f.kit.initial("heads").tensors()
        first.load_state_dict({"weight": w["features.weight"], "bias": w["features.bias"]})
        second.load_state_dict({"weight": w["proxies.weight"]})
    f.round(0)
    trained = [*net.parameters(), *first.parameters(), *second.parameters()] if own else list(net.parameters())
    optimizer, counts = torch.optim.SGD(trained, lr=0.0625, momentum=0.9, weight_decay=1e-4), torch.zeros(10)
    for x, y, weak, strong, counted in seen:
        h = net.features(torch.cat([x, weak, strong]))
        zx, zw, zs = net.head(h).split([6, 8, 8])
        px, pu, local = teacher(x).softmax(1).detach(), teacher(weak).softmax(1).detach(), zw.softmax(1).detach()
        used = [pu[i].max() >= tau or (own and local[i].max() >= tau) for i in range(8)]
        loss = F.cross_entropy(zx, y)
        for i in range(8):
            if used[i]:
                loss = loss - (zs[i].softmax(0) + 1e-10).log()[pu[i].argmax()] / 8
        v = F.normalize(first(h) if own else h, dim=1)
        omega = F.normalize(second(net.head.weight) if own else net.head.weight, dim=1)
        classes, pull = [], []
        for i in range(22):
            p, sure = (px[i], px[i].max() >= tau) if i < 6 else (pu[(i - 6) % 8], used[(i - 6) % 8])
            if i < 6 and paper:
                p, sure = F.one_hot(y[i], 10).double(), True
            could = {int(p.argmax())} if sure else {k for k in range(10) if p[k] > (1 / 10)}
            weigh = local[(i - 6) % 8] if paper and i >= 6 else p
            classes.append(could)
            pull.append(sum((1.0 if sure else weigh[k]) * omega[k] for k in could))
        terms = []
        for i in range(6, 22):
            pos = (v[i] * pull[i]).sum()
            negatives = [s for s in ((v[i] * v[j]).sum() for j in range(22) if not classes[i] & classes[j]) if s >= 1e-6]
            terms.append(-(pos.exp() / (pos.exp() + sum(s.exp() for s in negatives))).log())
        if own:
            loss = loss + sum(terms) / 16
        else:
            for kind in (True, False):
                mine = [t for i, t in enumerate(terms) if bool(used[i % 8]) is kind]
                loss = loss + (sum(mine) / len(mine) if mine else 0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counts += counted * (F.one_hot(y, 10).sum(0) + sum((F.one_hot(pu[i].argmax(), 10) for i in range(8) if used[i]), torch.zeros(10)))
    assert len(seen) == 2 and 0 < sum(map(bool, used)) < 8
    expected = dict(net.state_dict())
    rows = expected["head.weight"].clone()
    m = min(max(min((rows[a] - rows[b]).norm().item() for b in range(10) if b != a) for a in range(10)), 0.0 if paper else 100.0)
    omega, rng = rows.clone().requires_grad_(), f.server.rng("tune")
    for _ in range(2):
        order = rng.permutation(10)
        for c in (order[i : i + 4] for i in range(0, 10, 4)):
            d = torch.stack([torch.stack([(omega[j] - rows[k] if own else omega[k] - rows[j]).norm() + m * (j == k) for j in range(10)]) for k in c])
            g = torch.autograd.grad(F.cross_entropy(-d, torch.from_numpy(c)), omega)[0]
            omega = (omega - 0.005 * torch.nan_to_num(g)).detach().requires_grad_()
    expected["head.weight"] = omega.detach()
    for name, value in f.server.model.tensors().items():
        assert torch.allclose(value, expected[name], rtol=1e-8, atol=1e-10), name
    share = counts / counts.sum()
    assert torch.allclose(f.server["prior"], 0.99 * torch.full((10,), 0.1) + 0.01 * share if own else share, atol=1e-7)
    if own:
        assert torch.allclose(f.server["heads"]["proxies.weight"], second.weight, atol=1e-10)


def test_without_contrast_and_tuning_it_is_sage_that_trusts_the_received_model(tmp_path):
    """The same views and batches; the two smoothed targets differ by 1e-6 of the mass."""
    found = []
    for name, keys in (("proxyfl", {"proxy_weight": 0.0, "tune_epochs": 0, "heads": False}), ("sage", {"kappa": 1e9})):
        f = federated(tmp_path / name, method=name, rounds=1, norm="gn", **keys)
        f.round(0)
        found.append(f)
    one, other = (g.server.model.groups["parameters"] for g in found)
    assert torch.allclose(one, other, atol=1e-5) and not torch.allclose(one, found[0].kit.initial().groups["parameters"], atol=1e-3)
    prior = found[0].server["prior"]
    assert prior.sum().item() == pytest.approx(1, abs=1e-6) and prior.min() > 0


def test_without_contrast_nothing_used_is_no_step(tmp_path):
    """Where there are no labels either: as FixMatch by the received model, which it then is."""
    keys = {"labels": "some", "labelled_clients": 1, "label_count": 10, "active": 4, "threshold": 1.1, "rounds": 1, "norm": "gn"}
    for weight in (0.0, 1.0):
        f = federated(tmp_path / str(weight), proxy_weight=weight, tune_epochs=0, **keys)
        f.server.draw(0)
        sent = f.server.model.groups["parameters"].clone()
        for u in f._updates(*f.clients.train(f._requests())):
            still = not weight and not len(f.simulation.federation.clients[u.client].labelled)
            assert torch.equal(u["model"].groups["parameters"], sent) is still


def test_what_travels(tmp_path):
    """The heads are in the traffic, not in the model that is tested and saved."""
    result = fallow.run(out=tmp_path, **TINY | {"method": "proxyfl", "norm": "bn", "tune_epochs": 1, "rounds": 1})
    row, plain = result.metrics[0], fallow.run(out=tmp_path, **TINY | {"method": "sage", "norm": "bn", "rounds": 1}).metrics[0]
    more = 2 * 4 * (128 * 128 + 128 + 128 * 128)
    assert row["bytes_up"] - plain["bytes_up"] == row["bytes_down"] - plain["bytes_down"] == more + 2 * 4 * 10
    assert {n for n, _ in result.model().named_parameters()} == {n for n, _ in models.build("small-cnn", 10, 1).named_parameters()}


def test_parameters_of_the_papers_net():
    heads = 256 * 256 + 256 + 256 * 256
    with torch.device("meta"):
        plain = [sum(p.numel() for p in models.build("resnet8", K, 3).parameters()) for K in (10, 100)]
    assert [n + heads for n in plain] == [1_358_922, 1_382_052]


def test_features_and_logits_of_one_call(tmp_path):
    f = federated(tmp_path)
    for name in ("resnet8", "resnet9", "resnet18", "wrn-28-2", "small-cnn"):
        net = models.build(name, 4, 3).eval()
        z, h = net(torch.randn(2, 3, 16, 16), features=True)
        assert torch.equal(z, net.head(h)) and z.shape == (2, 4)
    net = f.kit.net()
    x = torch.randn(6, 1, 8, 8)
    (z, none, last), (h, absent, _) = net.together_with_features(x[:4], None, x[4:], stats="running")
    assert none is absent is None and torch.equal(torch.cat([z, last]), net(x, stats="running")) and h.shape == (4, 128)
    assert net.head == f.server.head == "head.weight"


def test_a_model_without_features_is_told(tmp_path):
    keys = TINY | {"method": "proxyfl", "model": f"{HERE / 'linear.py'}:Linear"}
    with pytest.raises(UserError, match="Linear has no linear layer called head"):
        fallow.run(out=tmp_path, **keys)
    with pytest.raises(UserError, match="wants the features that Linear makes its logits of"):
        fallow.run(out=tmp_path, **keys | {"heads": False})
    with pytest.raises(UserError, match="proxyfl draws batches of a set size"):
        resolve({}, TINY | {"method": "proxyfl", "unlabelled_batch": "full"})


def test_the_last_epoch_is_counted():
    from test_sage import Worker

    plan = method(10).plan(Worker(250, 2500), {})
    counted = np.concatenate([s.numbers["counted"] for s in plan.segments])
    assert counted.tolist() == [0] * 76 + [1] * 19
    assert np.concatenate([s.numbers["counted"] for s in method(10).plan(Worker(250, 2500, steps=7), {}).segments]).tolist() == [1] * 7
    assert math.isclose(sum(len(s) for s in plan.segments), 95)
