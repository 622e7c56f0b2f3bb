"""FedDure: a toy case, its second-order term in a second way, the released loop, what must not change."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jvp

import fallow
from fallow import models
from fallow.data.samples import Samples
from fallow.engine.feed import Batch, Part
from fallow.engine.nets import NetHandle
from fallow.engine.slot import Slot
from fallow.methods.feddure import FedDure, FReg
from fallow.methods.feddure_released import multiplier
from fallow.methods.parts.batching import matched, paired
from fallow.recipes.grid import Grid
from fallow.recipes.reading import recipe
from fallow.runs import Run, make_federation, prepare
from fallow.runs.folder import RunFolder
from fallow.runs.settings import resolve

torch.set_num_threads(1)  # as the engine does; a busy machine makes more of them slow


def feddure(options, classes):
    """The method that these settings choose: the paper's, or the released one."""
    return FedDure.algorithm(options)(options, classes)

# -- a slot in float64 that lets one look on ---------------------------------------------------------------------------


class Exact(NetHandle):
    """The engine's net without its float32, remembering its calls."""

    def __init__(self, module):
        super().__init__(module, torch.device("cpu"))
        self.flat = self.flat.map(lambda t: t.double() if t.is_floating_point() else t)
        self._bind()
        self.seen = []

    def __call__(self, x, weights=None, stats="update", rows=None, parts=None):
        self.modes.stats, self.modes.rows, self.modes.parts = stats, rows, parts
        z = self.module(x) if weights is None else functional_call(self.module, dict(weights), (x,))
        self.seen.append(SimpleNamespace(x=x, weights=weights, stats=stats, z=z))
        return z


class Watched(Slot):
    """Remembers each loss and gradient, and the gradient with respect to virtual weights."""

    def gradient(self, loss, net, create_graph=False):
        self.virtual, self.g = loss.detach(), super().gradient(loss, net, create_graph)
        return self.g

    def descend(self, loss, *nets, when=None, retain=False):
        name, net = self.name_of(nets[0]), nets[0]
        self.losses[name], before = loss.detach(), net.flat.groups["parameters"].clone()
        virtual = [c for n in self.nets.values() for c in n.seen if c.weights is not None]
        if name == "freg":
            minus = virtual[-1].weights
            self.v = dict(zip(minus, torch.autograd.grad(loss, list(minus.values()), retain_graph=True)))
        super().descend(loss, *nets, when=when, retain=retain)
        rate = self.lr[name] if self.lr[name] else 1.0
        self.moved[name] = (before - net.flat.groups["parameters"]) / rate  # the gradient, if the step is plain SGD


def bench(classes, modules, lr=0.1, freg_lr=0.05, **options):
    o = dict(optimizer="sgd", momentum=0.0, virtual_lr=0.1) | options
    method = feddure(FedDure.Options(**o), classes)
    held = method.holds()
    nets = iter([Exact(copy.deepcopy(modules[n])) for n in held])
    s = Watched(SimpleNamespace(options=method.o, device=torch.device("cpu"), classes=method.classes, held=held, net=lambda _: next(nets)))
    s.losses, s.moved, s.v, s.g = {}, {}, None, None
    for name in s.nets:
        with torch.no_grad():
            for k, p in s.nets[name].weights.items():
                p.copy_(dict(modules[name].named_parameters())[k])
        s.lr[name] = torch.tensor(freg_lr if name == "freg" else lr, dtype=torch.float64)
    return method, s


def batch(x=None, y=None, weak=None, strong=None, **numbers):
    xs = Part({"labelled": x, "y": y}) if x is not None else Part(None)
    us = Part({"weak": weak, "strong": strong}) if weak is not None else Part(None)
    return Batch({"x": xs, "u": us}, {k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()})


def by_name(s, name, flat=None):
    net = s.nets[name]
    flat = net.flat.groups["parameters"] if flat is None else flat
    return {e.name: e.view(flat) for e in net.layout.entries if e.group == "parameters"}


def plain(s, flat, name="model"):
    """A flat tensor without the gaps between its entries."""
    return torch.cat([t.reshape(-1) for t in by_name(s, name, flat).values()])


def close(got, expected, tolerance=2e-12):
    got, expected = got.detach(), torch.as_tensor(expected, dtype=torch.float64)
    assert got.shape == expected.shape and float((got - expected).abs().max()) < tolerance, (got, expected)


def mean_of(s, name):
    total, count = s.logs[name]
    return total / count


# -- the toy case ------------------------------------------------------------------------------------------------------
D = torch.float64
X, Y = torch.tensor([[1, 0.5], [-0.5, 1]], dtype=D), torch.tensor([0, 2])
WEAK = torch.tensor([[0.8, -0.2], [0.1, 1.2], [-1, 0.3]], dtype=D)
STRONG = torch.tensor([[1, -0.6], [0.4, 0.9], [-1.2, 0]], dtype=D)
TOY = batch(X, Y, WEAK, STRONG)


def linear(weight, bias):
    net = nn.Linear(len(weight[0]), len(weight)).double()
    net.weight.data, net.bias.data = torch.tensor(weight, dtype=D), torch.tensor(bias, dtype=D)
    return net


def toy_modules():
    freg = FReg(3, 2).double()
    freg.inner = linear([[0.5, -0.4, 0.3], [-0.2, 0.6, 0.1]], [0.1, -0.05])
    freg.outer = linear([[0.7, -0.8]], [0.2])
    phi = linear([[0.3, -0.2], [0.1, 0.4], [-0.5, 0.2]], [0, 0.1, -0.1])
    theta = linear([[0.2, 0.1], [-0.3, 0.5], [0.4, -0.1]], [0.05, -0.05, 0])
    return {"model": theta, "creg": phi, "freg": freg}


def toy(batch=TOY, modules=None, lr=0.1, **options):
    method, s = bench(3, modules or toy_modules(), lr, **options)
    (method.step if method.o.loop == "regulators" else method.main)(s, batch)
    return s


def test_toy_case():
    s = toy()
    a, minus, _, _ = s.creg.seen
    close(a.z, [[0.42, -0.04, -0.72], [-0.06, 0.5, -0.12], [-0.36, -0.02, 0.5]])
    l = -a.z.log_softmax(1)[torch.arange(3), torch.tensor([2, 1, 1])]
    close(l, [1.808394683180, 0.746286682842, 1.221949640132])
    close(s.freg.seen[0].z, [0.585841413073, 0.530198905097, 0.564010106200])
    close(s.virtual, 0.7147682750067622, 1e-15)
    close(s.g["weight"], [[0.097901216985, -0.027700320907], [0.165775323833, -0.114028120154], [-0.263676540818, 0.141728441061]])  # fmt: skip
    close(s.g["bias"], [0.246399943879, -0.237721903333, -0.008678040546])
    assert torch.equal(minus.x, X)
    close(s.losses["freg"], 1.0093978217782185, 1e-14)
    close(s.v["weight"], [[-0.368241949512, -0.067492178121], [0.117861090816, 0.334664062863], [0.250380858696, -0.267171884742]])  # fmt: skip
    close(s.v["bias"], [-0.228287393550, 0.448741311762, -0.220453918212])
    w = by_name(s, "freg", s.moved["freg"])
    close(w["inner.weight"], [[0.004631794756, -0.000977372785, 0.003754415932], [-0.005293479722, 0.001116997469, -0.004290761065]])  # fmt: skip
    close(w["inner.bias"], [0.007408837903, -0.008467243318])
    close(w["outer.weight"], [[0.006534364375, -0.002153975606]])
    close(w["outer.bias"], [0.010584054147])
    w = by_name(s, "freg")
    close(w["inner.bias"], [0.099629558105, -0.049576637834])
    close(w["outer.weight"], [[0.699673281781, -0.799892301220]])
    close(w["outer.bias"], [0.199470797293])
    close(s.freg.seen[1].z, [0.607531516633, 0.561017353867, 0.529620619453])
    close(s.losses["creg"], 0.7143401837725166, 1e-14)
    phi = by_name(s, "creg")
    close(phi["weight"], [[0.290215113116, -0.197231150563], [0.083432945897, 0.411395558929], [-0.473648059013, 0.185835591634]])  # fmt: skip
    close(phi["bias"], [-0.024626305178, 0.123758483342, -0.099132178165])
    close(F.cross_entropy(s.creg.seen[2].z, Y), 0.9780393052252505, 1e-14)
    close(F.cross_entropy(s.creg.seen[3].z, Y), 1.0093793137589686, 1e-14)
    close(mean_of(s, "reward"), -0.0313400085337181, 1e-15)
    close(mean_of(s, "trust"), (0.607531516633 + 0.561017353867 + 0.529620619453) / 3)
    close(s.losses["model"], 1.7337222943193047, 1e-14)
    theta = by_name(s, "model")
    close(theta["weight"], [[0.235345657362, 0.100036664207], [-0.308496490750, 0.480566376065], [0.373150833388, -0.080603040272]])  # fmt: skip
    close(theta["bias"], [0.049148738489, -0.070757767004, 0.021609028515])
    assert len(s.model.seen) == 1 and len(s.creg.seen) == 4  # passes: local 1; C-reg 1 on u, 3 on x (14.10)


VARIANTS = [
    (dict(creg_weight_grad_virtual="detach"), 0.7147682750067622, 1.0032160431781083, 0.011337622516580631, [0.002189544947888547, 0.0016934782418885775]),
    (dict(freg_input="logits"), 0.6918807839567781, 1.0105799038048615, 0.010757851204546344, [0.007685129842996877, -0.002703171012264639]),
    (dict(freg_normalise="sum"), 1.2763336111324146, 1.0224759631147098, 0.0006472565339756071, [-0.0011340992625168927, 0.001038108292152272]),
]  # fmt: skip


@pytest.mark.parametrize("options, virtual, meta, c2, a2", VARIANTS)
def test_toy_variants(options, virtual, meta, c2, a2):
    s = toy(**options)
    w = by_name(s, "freg", s.moved["freg"])
    close(s.virtual, virtual, 1e-14), close(s.losses["freg"], meta, 1e-14)
    close(w["outer.bias"], [c2], 1e-14), close(w["outer.weight"], [a2], 1e-14)


def test_toy_ablations_of_table_2():
    s = toy(creg=False)
    close(s.virtual, 0.4668014158775204, 1e-14), close(s.losses["freg"], 1.3202722378706349, 1e-14)
    close(by_name(s, "freg", s.moved["freg"])["outer.bias"], [0.009999099113794863], 1e-14)
    assert set(s.nets) == {"model", "freg"} and "reward" not in s.logs
    other = toy(creg=False, virtual_lr=7.0)  # theta's virtual step is by its own rate, C-reg's is not in it
    close(other.losses["freg"], 1.3202722378706349, 1e-14)
    s = toy(freg="threshold", threshold=0.44)
    close(mean_of(s, "reward"), -0.04587820075873261, 1e-14), close(s.losses["model"], 1.8336594816361624, 1e-14)
    assert set(s.nets) == {"model", "creg"}
    s = toy(creg=False, freg="threshold", threshold=0.44)
    close(s.losses["model"], 1.8714923574339322, 1e-14)
    assert set(s.nets) == {"model"}


def test_toy_of_the_released_loop():
    s = toy(batch(X, Y, WEAK, STRONG, ramp=8 * 1 / 20), loop="meta-pseudo", reward_sign="new-minus-old", threshold=0.44)
    assert set(s.nets) == {"model", "creg"} and torch.equal(s.creg.seen[0].x, WEAK)
    close(s.losses["creg"], 1.1564913599106437, 1e-14)
    close(mean_of(s, "reward"), 0.041927645521627754, 1e-14)
    close(s.losses["model"], 1.61044983819936, 1e-14)
    assert s.logs["label/counts"].tolist()[:2] == [3, 2]  # two of three accepted
    _, zw, zt = s.model.seen[0].z.split([2, 3, 3])
    soft = -(zw.softmax(1) * zt.log_softmax(1)).sum(1)
    close(soft, [1.0661130384758377, 1.0822978367257634, 1.038927201434172], 1e-14)


def test_the_released_reward_is_for_the_strong_views_own_label():
    strong = STRONG[[2, 0, 1]]  # the toy has the same labels on both views
    s = toy(batch(X, Y, WEAK, strong, ramp=1.0), loop="meta-pseudo", reward_sign="new-minus-old", threshold=2.0)
    zs, zw, zt = s.model.seen[0].z.detach().split([2, 3, 3])
    assert not torch.equal(zw.argmax(1), zt.argmax(1))
    expected = F.cross_entropy(zs, Y) + mean_of(s, "reward") * F.cross_entropy(zt, zt.argmax(1))
    close(s.losses["model"], expected, 1e-14)


def test_the_gradient_of_the_released_loop():
    """14.2.6 e: CE_s + lambda L_u + dot CE(own label); soft targets, labels and dot are constants."""
    strong = STRONG[[2, 0, 1]]
    s = toy(batch(X, Y, WEAK, strong, ramp=1.2), loop="meta-pseudo", reward_sign="new-minus-old", threshold=0.44)
    net = toy_modules()["model"]
    zs, zw, zt = net(X), net(WEAK).detach(), net(strong)
    t = zw.softmax(1)
    kept = (t.max(1).values >= 0.44).double()
    assert kept.tolist() == [0, 1, 1]
    soft = (kept * -(t * zt.log_softmax(1)).sum(1)).sum() / 3
    loss = F.cross_entropy(zs, Y) + 1.2 * soft + float(mean_of(s, "reward")) * F.cross_entropy(zt, zt.detach().argmax(1))
    close(s.losses["model"], loss.detach(), 1e-14)
    gradient = torch.autograd.grad(loss, list(net.parameters()))
    close(plain(s, s.moved["model"]), torch.cat([g.flatten() for g in gradient]), 1e-14)


def test_the_warm_phase_of_the_released_loop():
    """14.2.6, 1: one pass over [x; W(u); S(u)], so that batch norm sees all of it; the labelled loss alone; theta alone."""
    nets = {"model": seeded(small_resnet, 1), "creg": seeded(small_resnet, 2)}
    x, y, weak, strong = pictures(2, 8)
    method, s = bench(3, nets, loop="meta-pseudo")
    before = s.creg.flat.groups["parameters"].clone()
    method.warm(s, batch(x, y, weak, strong))
    net = copy.deepcopy(nets["model"]).double().train()
    loss = F.cross_entropy(net(torch.cat([x, weak, strong]))[:4], y)
    close(s.losses["model"], loss.detach(), 1e-12)
    for (name, _), g in zip(net.named_parameters(), torch.autograd.grad(loss, list(net.parameters()))):
        close(by_name(s, "model", s.moved["model"])[name], g, 1e-11)
    for name, b in net.named_buffers():
        close(s.model.flat[name].double(), b.double(), 1e-12)
    assert torch.equal(s.creg.flat.groups["parameters"], before)


# -- the second-order term, the other way (14.2.5 B) -------------------------------------------------------------------
def small_resnet(classes=3, width=6):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            block = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, 1, 1), nn.BatchNorm2d(o), nn.ReLU())
            self.stem, self.residual, self.head = block(2, width), block(width, width), nn.Linear(width, classes)

        def forward(self, x):
            x = F.max_pool2d(self.stem(x), 2)
            return self.head((self.residual(x) + x).amax((2, 3)))

    return Net()


def seeded(make, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def pictures(channels, size, classes=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, channels, size, size, dtype=D, generator=g)
    y = torch.randint(classes, (4,), generator=g)
    return draw(4), y, draw(5), draw(5)


def form_b(net, freg, x, y, strong, yhat, rate, flow, q, norm):
    """grad_w L_m by one forward-mode pass of C-reg and a backward pass over U x C numbers only."""
    params = {k: p.detach().clone() for k, p in net.weights.items()}
    net.modes.stats = "batch"
    f = lambda w, u: functional_call(net.module, w, (u,))
    look = lambda a: a.softmax(1) if q == "probs" else a

    def lv(w):
        a = f(w, strong)
        h = freg(look(a if flow == "through" else a.detach()))
        l = F.cross_entropy(a, yhat, reduction="none")
        return (h * l).mean() if norm == "none" else (h * l).sum() / h.sum()

    wanted = {k: p.requires_grad_() for k, p in params.items()}
    g = dict(zip(wanted, torch.autograd.grad(lv(wanted), list(wanted.values()))))
    minus = {k: (p - rate * g[k]).detach().requires_grad_() for k, p in params.items()}
    v = dict(zip(minus, torch.autograd.grad(F.cross_entropy(f(minus, x), y), list(minus.values()))))
    params = {k: p.detach() for k, p in params.items()}
    a, adot = jvp(lambda w: f(w, strong), (params,), (v,))
    p, rows = a.softmax(1), torch.arange(len(a))
    l, ldot = -a.log_softmax(1)[rows, yhat], (p * adot).sum(1) - adot[rows, yhat]
    into = p if q == "probs" else a
    dot = p * (adot - (p * adot).sum(1, keepdim=True)) if q == "probs" else adot
    pre = into @ freg.inner.weight.T + freg.inner.bias
    h = torch.sigmoid(pre.clamp(min=0) @ freg.outer.weight.T + freg.outer.bias)[:, 0]
    hdot = h * (1 - h) * (((pre > 0) * (dot @ freg.inner.weight.T)) @ freg.outer.weight.T)[:, 0]
    hdot = hdot if flow == "through" else hdot * 0
    if norm == "none":
        directional = (h * ldot + hdot * l).mean()
    else:
        directional = ((hdot * l + h * ldot).sum() - (h * l).sum() / h.sum() * hdot.sum()) / h.sum()
    names = [n for n, _ in freg.named_parameters()]
    return dict(zip(names, (-rate * t for t in torch.autograd.grad(directional, list(freg.parameters())))))


@pytest.mark.parametrize("flow", ["through", "detach"])
@pytest.mark.parametrize("q", ["probs", "logits"])
@pytest.mark.parametrize("norm", ["none", "sum"])
def test_meta_gradient_is_the_forward_mode_one(flow, q, norm):
    for name, data in (("toy", None), ("resnet", pictures(2, 8))):
        nets = toy_modules()
        if name == "resnet":
            nets |= {"model": seeded(small_resnet, 1), "creg": seeded(small_resnet, 2), "freg": seeded(lambda: FReg(3, 7), 3).double()}  # fmt: skip
        x, y, weak, strong = data or (X, Y, WEAK, STRONG)
        s = toy(
            batch(x, y, weak, strong),
            nets,
            creg_weight_grad_virtual=flow,
            freg_input=q,
            freg_normalise=norm,
            freg_hidden=7,
        )
        yhat = s.model.seen[0].z[len(x) :][: len(weak)].argmax(1)
        fresh = Exact(copy.deepcopy(nets["creg"]))
        for k, p in fresh.weights.items():
            p.data.copy_(dict(nets["creg"].named_parameters())[k])
        other = form_b(fresh, nets["freg"], x, y, strong, yhat, 0.1, flow, q, norm)
        scale = max(float(t.abs().max()) for t in other.values())
        assert scale > 1e-7
        for k, got in by_name(s, "freg", s.moved["freg"]).items():
            assert float((got - other[k]).abs().max()) < 1e-10 * scale, (name, k)


def test_meta_gradient_of_the_real_resnet9():
    nets = {n: seeded(lambda: models.build("resnet9", 10, 3), i) for i, n in enumerate(("model", "creg"))}
    nets["freg"] = seeded(lambda: FReg(10, 128), 5).double()
    assert sum(p.numel() for p in nets["freg"].parameters()) == 1537
    x, y, weak, strong = pictures(3, 8, 10)
    method, s = bench(10, nets, virtual_lr=5e-4)
    method.step(s, batch(x, y, weak, strong))
    yhat = s.model.seen[0].z[4:9].argmax(1)
    other = form_b(Exact(nets["creg"]), nets["freg"], x, y, strong, yhat, 5e-4, "through", "probs", "none")
    scale = max(float(t.abs().max()) for t in other.values())
    for k, got in by_name(s, "freg", s.moved["freg"]).items():
        assert float((got - other[k]).abs().max()) < 1e-9 * scale, k


@pytest.mark.parametrize("loop", ["regulators", "meta-pseudo"])
def test_a_step_with_batch_norm_equals_plain_torch(loop):
    """14.2.2 and 14.2.6 by torch's own modules in train mode: C-reg's passes, old and new among them, by batch statistics."""
    nets = {"model": seeded(small_resnet, 1), "creg": seeded(small_resnet, 2), "freg": seeded(lambda: FReg(3, 7), 3)}
    x, y, weak, strong = pictures(2, 8)
    method, s = bench(3, nets, loop=loop, freg_hidden=7, threshold=0.995)
    (method.step if loop == "regulators" else method.main)(s, batch(x, y, weak, strong, ramp=0.4))
    theta, phi, freg = (copy.deepcopy(n).double().train() for n in nets.values())
    zs, zw, zt = theta(torch.cat([x, weak, strong])).split([4, 5, 5])
    yhat, t = zw.argmax(1), zw.softmax(1).detach()
    names = [n for n, _ in phi.named_parameters()]

    def moved(loss, net, rate, **how):
        return {n: p - rate * g for (n, p), g in zip(net.named_parameters(), torch.autograd.grad(loss, list(net.parameters()), **how))}

    at = lambda w, u: functional_call(phi, w, (u,))
    now = dict(phi.named_parameters())
    if loop == "regulators":
        l = F.cross_entropy(phi(strong), yhat, reduction="none")
        virtual = moved((freg(phi(strong).softmax(1)) * l).mean(), phi, 0.1, create_graph=True)
        w = moved(F.cross_entropy(at(virtual, x), y), freg, 0.05)
        freg.load_state_dict({n: v.detach() for n, v in w.items()})
        a = phi(strong)
        creg = (freg(a.softmax(1)) * F.cross_entropy(a, yhat, reduction="none")).mean()
    else:
        creg = F.cross_entropy(phi(weak), yhat)
    after = {n: v.detach() for n, v in moved(creg, phi, 0.1).items()}
    with torch.no_grad():
        d = F.cross_entropy(at(now, x), y) - F.cross_entropy(at(after, x), y)
    if loop == "regulators":
        loss = F.cross_entropy(zs, y) + ((freg(zt.softmax(1)).detach() + d) * F.cross_entropy(zt, yhat, reduction="none")).mean()
    else:
        kept = (t.max(1).values >= 0.995).double()
        assert 0 < kept.sum() < 5
        loss = F.cross_entropy(zs, y) + 0.4 * (kept * -(t * zt.log_softmax(1)).sum(1)).mean() + d * F.cross_entropy(zt, zt.argmax(1))
    close(mean_of(s, "reward"), d, 1e-12)
    close(s.losses["model"], loss.detach(), 1e-12)
    for n in names:
        close(by_name(s, "creg")[n], after[n], 1e-12)
        close(by_name(s, "model")[n], moved(loss, theta, 0.1, retain_graph=True)[n].detach(), 1e-12)


# -- invariants ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_without_a_virtual_step_freg_stays(optimizer):
    before = by_name(bench(3, toy_modules())[1], "freg")
    after = by_name(toy(virtual_lr=0.0, optimizer=optimizer, momentum=0.9 if optimizer == "adam" else 0.0), "freg")
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert not torch.equal(by_name(toy(), "freg")["outer.bias"], before["outer.bias"])


def test_an_indifferent_freg_trusts_everyone_by_half():
    nets = toy_modules()
    nets["freg"].outer = linear([[0, 0]], [0])
    s = toy(modules=nets, virtual_lr=0.0)
    close(s.freg.seen[0].z, [0.5] * 3, 1e-16), close(s.freg.seen[1].z, [0.5] * 3, 1e-16)
    nets = toy_modules()
    nets["freg"].inner = linear([[0, 0, 0], [0, 0, 0]], [0.1, -0.05])
    through, detach = (toy(modules=nets, virtual_lr=0.0, creg_weight_grad_real=f) for f in ("through", "detach"))
    assert torch.equal(by_name(through, "creg")["weight"], by_name(detach, "creg")["weight"])
    through, detach = (toy(creg_weight_grad_real=f) for f in ("through", "detach"))
    assert not torch.equal(by_name(through, "creg")["weight"], by_name(detach, "creg")["weight"])


def theta_gradient(s, d):
    """CE_s + mean (m + d) l at the toy's theta, by plain autograd on a plain net."""
    net, m = toy_modules()["model"], s.freg.seen[1].z.detach()
    zt, yhat = net(STRONG), net(WEAK).argmax(1)
    loss = F.cross_entropy(net(X), Y) + ((m + d) * F.cross_entropy(zt, yhat, reduction="none")).mean()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


def test_a_creg_that_stands_still_gives_no_reward():
    method, s = bench(3, toy_modules())
    s.lr["creg"].zero_()
    method.step(s, TOY)
    assert mean_of(s, "reward") == 0
    close(plain(s, s.moved["model"]), theta_gradient(s, 0.0), 1e-14)


def test_a_weight_may_be_negative():
    """14.2.2: m + d < 0 is ascent on that pseudo-label; it is not clamped."""
    method, s = bench(3, toy_modules())
    s.lr["creg"].fill_(20.0)
    method.step(s, TOY)
    d, m = float(mean_of(s, "reward")), s.freg.seen[1].z.detach()
    assert (m + d < 0).all()
    close(plain(s, s.moved["model"]), theta_gradient(s, d), 1e-12)


def test_what_freg_looks_at_when_it_weighs():
    """Eq. 6 with `freg_input`: the local model's strong logits, or their softmax, and F-reg after its step."""
    for q in ("probs", "logits"):
        s, freg, net = toy(freg_input=q), toy_modules()["freg"], toy_modules()["model"]
        freg.load_state_dict(by_name(s, "freg"))
        z = net(STRONG).detach()
        m = freg(z.softmax(1) if q == "probs" else z).detach()
        close(mean_of(s, "trust"), m.mean(), 1e-14)
        close(s.losses["model"], (F.cross_entropy(net(X), Y) + ((m + mean_of(s, "reward")) * F.cross_entropy(net(STRONG), net(WEAK).argmax(1), reduction="none")).mean()).detach(), 1e-14)


@pytest.mark.parametrize("loop", ["regulators", "meta-pseudo"])
def test_flags_left_on_inputs_change_nothing(loop):
    """14.12.11."""
    flagged = batch(X.clone().requires_grad_(), Y, WEAK.clone().requires_grad_(), STRONG.clone().requires_grad_(), ramp=0.4)
    s, other = (toy(b, loop=loop, threshold=0.44) for b in (flagged, batch(X, Y, WEAK, STRONG, ramp=0.4)))
    for name in s.nets:
        assert torch.equal(s.nets[name].flat.groups["parameters"], other.nets[name].flat.groups["parameters"])
    assert bool(torch.isfinite(mean_of(s, "reward")))


def test_the_sign_turns_only_the_reward():
    ours, theirs = toy(), toy(reward_sign="new-minus-old")
    assert mean_of(ours, "reward") == -mean_of(theirs, "reward") != 0
    d = float(mean_of(ours, "reward"))
    (
        close(plain(ours, ours.moved["model"]), theta_gradient(ours, d), 1e-14),
        close(plain(theirs, theirs.moved["model"]), theta_gradient(ours, -d), 1e-14),
    )
    assert torch.equal(by_name(ours, "creg")["weight"], by_name(theirs, "creg")["weight"])


def test_the_order_of_unlabelled_samples_does_not_matter():
    order = torch.tensor([2, 0, 1])
    x, y, weak, strong = pictures(2, 8)
    nets = {"model": seeded(small_resnet, 1), "creg": seeded(small_resnet, 2), "freg": seeded(lambda: FReg(3, 128), 3)}
    method, s = bench(3, nets)
    method.step(s, batch(x, y, weak[:3], strong[:3]))
    other = bench(3, nets)[1]
    method.step(other, batch(x, y, weak[order], strong[order]))
    close(other.freg.seen[1].z, s.freg.seen[1].z[order].detach(), 1e-12)
    for name in s.nets:
        close(other.moved[name], s.moved[name], 1e-12)
    close(mean_of(other, "reward"), mean_of(s, "reward"), 1e-12)
    assert all(((c.z > 0) & (c.z < 1)).all() for c in s.freg.seen)


@pytest.mark.parametrize("loop", ["regulators", "meta-pseudo"])
def test_batch_norm_statistics_move_once_a_step_and_cregs_never(loop):
    nets = {"model": seeded(small_resnet, 1), "creg": seeded(small_resnet, 2), "freg": seeded(lambda: FReg(3, 128), 3)}
    method, s = bench(3, nets, loop=loop)
    (method.step if loop == "regulators" else method.main)(s, batch(*pictures(2, 8), ramp=0.4))
    assert set(s.model.flat.groups["counters"].tolist()) == {1}
    assert set(s.creg.flat.groups["counters"].tolist()) == {0}
    fresh = Exact(nets["creg"]).flat.groups["statistics"]
    assert torch.equal(s.creg.flat.groups["statistics"], fresh)
    together = torch.cat([pictures(2, 8)[i] for i in (0, 2, 3)])
    first = F.conv2d(together, nets["model"].stem[0].weight.double(), nets["model"].stem[0].bias.double(), padding=1)
    close(s.model.flat["stem.1.running_mean"], 0.1 * first.mean((0, 2, 3)).detach(), 1e-12)


@pytest.mark.parametrize("options", [{}, {"creg": False}, {"freg": "threshold"}, {"loop": "meta-pseudo"}])
def test_parties_that_lack_labels_or_unlabelled_data(options):
    before = bench(3, toy_modules(), **options)[1]
    s = toy(batch(weak=WEAK, strong=STRONG, ramp=0.4), threshold=0.44, **options)
    for name in set(s.nets) - {"model"}:  # w unchanged, d = 0, only g_u
        assert torch.equal(s.nets[name].flat.groups["parameters"], before.nets[name].flat.groups["parameters"])
    net = toy_modules()["model"]
    zt, t = net(STRONG), net(WEAK).softmax(1).detach()
    m = (t.max(1).values >= 0.44).double()
    if options.get("loop"):
        loss = 0.4 * (m * -(t * zt.log_softmax(1)).sum(1)).mean()
    else:
        m = m if options.get("freg") else toy_modules()["freg"](zt.softmax(1)).detach()
        loss = (m * F.cross_entropy(zt, t.argmax(1), reduction="none")).mean()
    close(s.losses["model"], loss.detach(), 1e-14)
    s = toy(batch(X, Y), **options)
    close(s.losses["model"], F.cross_entropy(net(X), Y).detach(), 1e-14)
    if options.get("freg") or options.get("loop"):  # nothing accepted and no labels: no step, whatever the momentum
        method, s = bench(3, toy_modules(), threshold=1.1, **options | {"momentum": 0.9})
        s.optimizers["model"].tensors["momentum"].fill_(1.0)
        (method.main if options.get("loop") else method.step)(s, batch(weak=WEAK, strong=STRONG, ramp=0.4))
        assert torch.equal(s.model.flat.groups["parameters"], before.model.flat.groups["parameters"])


# -- batches and schedules ---------------------------------------------------------------------------------------------
def party(labelled, unlabelled, **options):
    o = FedDure.Options(**options)
    x = Samples.of(np.arange(labelled), np.zeros(labelled, np.int64))
    return SimpleNamespace(options=o, labelled=x, unlabelled=Samples.of(np.arange(unlabelled)), batch=10,
                           epochs=None if o.steps else o.epochs, steps=o.steps)  # fmt: skip


def test_batches_end_together():
    examples = {(50, 450): (5, 90), (50, 550): (5, 110), (50, 850): (5, 170), (23, 700): (4, 175), (116, 975): (12, 81), (11, 1700): (4, 106)}  # fmt: skip
    for (labelled, unlabelled), (n, size) in examples.items():
        assert matched(labelled, unlabelled, 10, floor=True) == (n, size)
        plan = FedDure(FedDure.Options(), 10).plan(party(labelled, unlabelled), {})
        assert len(plan) == n and plan.segments[0].streams["u"].sizes(n) == [size] * n
    assert paired(party(47, 450), "labelled", ("weak",))[0].sizes(5) == [10, 10, 10, 10, 7]
    wrapped = FedDure(FedDure.Options(labelled_tail="wrap"), 10).plan(party(47, 450), {}).segments[0].streams["x"]
    assert wrapped.sizes(5) == [10] * 5 and len(np.unique(np.concatenate(wrapped.positions(3, 5)))) == 47
    x, u = paired(party(50, 453, epochs=2), "labelled", ("weak",))
    assert len(x) == len(u) == 10 and u.sizes(10) == [90] * 10
    p = party(50, 453, steps=7)
    assert [len(i) for i in paired(p, "labelled", ("weak",))[1].positions(3, 7)] == [90] * 7


def test_the_released_loader_keeps_what_is_left_of_a_pass():
    """torch's DataLoader(drop_last=False), begun anew when it runs out: 116 labels, 975 images are 12 batches of 81 and one of 3."""
    p = party(116, 975, **FedDure.readings["released"] | {"steps": 15, "warm_steps": 14})
    warm, main = (segment.streams["u"] for segment in feddure(p.options, 10).plan(p, {}).segments)
    assert warm.sizes(14) == [81] * 12 + [3, 81] and main.sizes(15) == [81] * 12 + [3, 81, 81]
    first, second = np.concatenate(main.positions(3, 13)), np.concatenate(main.positions(3, 26)[13:])
    assert sorted(first) == sorted(second) == list(range(975)) and not np.array_equal(first, second)
    papers = FedDure(FedDure.Options(steps=15), 10).plan(party(116, 975, steps=15), {}).segments[0].streams["u"]
    assert papers.sizes(15) == [81] * 15


def test_learning_rates_of_the_released_loop():
    p = party(50, 450, **FedDure.readings["released"])
    plan = feddure(p.options, 10).plan(p, {})
    warm, main = plan.segments
    assert len(warm) == len(main) == 5 and warm.step.__name__ == "warm" and main.step.__name__ == "main"
    assert np.allclose(warm.numbers["lr"], 6e-4 * np.array([0, 0.1, 0.2, 0.3, 0.4]))
    assert np.allclose(main.numbers["lr"]["model"], 6e-4 * np.array([0.5, 0.6, 0.7, 0.8, 0.9]))
    assert np.allclose(main.numbers["lr"]["creg"], 6e-4 * np.array([0, 0, 1 / 6, 1 / 4, 1 / 3]))
    assert np.allclose(main.numbers["ramp"], [0.4, 0.8, 1.2, 1.6, 2.0])
    cinic = [multiplier(s, 10, 100) for s in range(110)]
    assert np.allclose(cinic[:100], np.arange(100) / 100) and np.allclose(cinic[100:], [1, 0] * 5)
    assert np.allclose([multiplier(s, 10, 100, 0) for s in range(10)], np.arange(10) / 100)
    none = party(0, 450, **FedDure.readings["released"])
    assert [s.step.__name__ for s in feddure(p.options, 10).plan(none, {}).segments if len(s)] == ["main"]


def test_the_ramp_ends_at_its_weight():
    p = party(50, 450, **FedDure.readings["released"] | {"steps": 30})
    ramp = feddure(p.options, 10).plan(p, {}).segments[1].numbers["ramp"]
    assert np.allclose([ramp[k] for k in (0, 9, 18, 19, 20, 29)], [0.4, 4.0, 7.6, 8.0, 8.0, 8.0])


# -- in the engine -----------------------------------------------------------------------------------------------------
SMALL = dict(data="digits", model="small-cnn", norm="bn", clients=6, active=2, label_per_class=2, unlabelled_ratio=0.3,
             rounds=2, slots=1, eval_every=2, defaults="paper")  # fmt: skip


@pytest.mark.parametrize("labels", [{}, {"labels": "some", "labelled_clients": 3, "active": 4, "label_per_class": 4}])
def test_without_both_regulators_it_is_fixmatch(tmp_path, labels):
    same = (
        SMALL | labels | dict(optimizer="adam", lr=1e-3, batch=10, unlabelled_batch="match-steps:floor", threshold=0.15)
    )
    ours = fallow.run(method="feddure", creg=False, freg="threshold", out=tmp_path, name="a", **same)
    theirs = fallow.run(method="fixmatch", out=tmp_path, name="b", **same)
    assert (ours.path / "model.safetensors").read_bytes() == (theirs.path / "model.safetensors").read_bytes()
    ratio = [m["label_ratio"] for m in ours.metrics]
    assert ratio == [m["label_ratio"] for m in theirs.metrics] and 0 < ratio[0] < 1


def at_work(tmp_path, **keys):
    method, options, source, federation = prepare(None, SMALL | dict(method="feddure") | keys)
    return Run(RunFolder.new(tmp_path, "run"), method, options, source, federation)


def test_freg_stays_with_its_client_and_nothing_else_travels(tmp_path):
    run = at_work(tmp_path, rounds=3)
    federated, seen = run.federated, []
    merge = type(run.kit.method).merge
    run.kit.method.__dict__["merge"] = lambda server, updates: (
        seen.extend(updates),
        merge(run.kit.method, server, updates),
    )[1]
    known = {}
    for number in range(3):
        federated.round(number)
        active = set(federated.server.active)
        for client, record in known.items():
            same = torch.equal(record.groups["parameters"], federated.keep.read(client)["freg"].groups["parameters"])
            assert same == (client not in active)
        known |= {c: federated.keep.read(c)["freg"].clone() for c in active}
    assert set(federated.keep.version) == set(known)
    assert all(set(federated.keep.read(c)) == {"freg"} for c in known)
    model = models.build("small-cnn", 10, 1, "bn")
    for update in seen:
        assert list(update) == ["model"] and set(update["model"].tensors()) == set(model.state_dict())
    first = {
        c: federated.kit.fresh("freg", federated.kit.key("random", "freg", c)).groups["parameters"] for c in known
    }
    assert all(not torch.equal(a, b) for c, a in first.items() for e, b in first.items() if c != e)
    assert all(not torch.equal(first[c], known[c].groups["parameters"]) for c in known)


@pytest.mark.parametrize("init", ["client", "shared"])
def test_where_freg_starts_and_its_own_rate(tmp_path, init):
    """14.1: F-reg's first weights are a client's own draw, or one for all; `freg_lr` is F-reg's alone."""
    run = at_work(tmp_path, active=3, freg_init=init, freg_lr=1e-12)
    federated, kit = run.federated, run.kit
    start = federated.server.model.groups["parameters"].clone()
    federated.round(0)
    found = {c: federated.keep.read(c)["freg"].groups["parameters"] for c in federated.server.active}
    for client, w in found.items():
        own = kit.initial("freg") if init == "shared" else kit.fresh("freg", kit.key("random", "freg", client))
        assert torch.allclose(w, own.groups["parameters"], atol=1e-9)
    values = list(found.values())
    assert len(values) == 3 and torch.allclose(values[0], values[1], atol=1e-9) == (init == "shared")
    assert (federated.server.model.groups["parameters"] - start).abs().max() > 1e-5


def test_a_round_starts_with_both_nets_at_the_received_model_and_new_optimisers(tmp_path):
    """14.12.7, 14.1: phi == theta == theta_g, in later rounds too; no moments of C-reg or F-reg outlive a round."""
    run = at_work(tmp_path, rounds=3, optimizer_state="keep")
    f, seen = run.federated, []
    method, step = run.kit.method, FedDure.step

    def looking(s, b):
        moments = [t for n in ("creg", "freg") for t in s.optimizers[n].tensors.values()]
        seen.append((s.model.flat.clone(), s.creg.flat.clone(), all(not t.any() for t in moments)))
        step(method, s, b)

    method.__dict__["step"] = looking
    for number in range(3):
        seen.clear()
        received = f.server.model.clone()
        f.round(number)
        assert len(seen) == 8, "two clients, 20 labels: n = 2 is taken as 4 (14.2.7)"
        for first in (seen[0], seen[4]):
            for net in first[:2]:
                assert all(torch.equal(net.groups[g], received.groups[g]) for g in ("parameters", "statistics"))
            assert first[2]
        assert not torch.equal(seen[1][0].groups["parameters"], seen[1][1].groups["parameters"])
        assert all(set(f.keep.read(c)) == {"freg", "model/optimizer"} for c in f.server.active)


def test_its_defaults():
    """14.1 to 14.4, 14.7."""
    _, o = resolve({}, dict(method="feddure"))
    assert (o.loop, o.creg, o.freg, o.reward_sign, o.threshold) == ("regulators", True, "regulator", "old-minus-new", 0.6)
    assert (o.creg_weight_grad_virtual, o.creg_weight_grad_real, o.virtual_lr) == ("through", "through", 5e-4)
    assert (o.freg_hidden, o.freg_input, o.freg_normalise, o.freg_state, o.freg_optimizer_state) == (128, "probs", "none", "client", "reset")
    assert (o.optimizer, o.lr, o.freg_lr, o.momentum, o.weight_decay, o.schedule) == ("adam", 5e-4, None, 0.9, 0.0, "constant")
    assert (o.batch, o.unlabelled_batch, o.epochs, o.weights, o.optimizer_state) == (10, "match-steps:floor", 1, "samples", "reset")
    assert (o.statistics, o.server_momentum) == ("average", 0.0)
    _, o = resolve({}, dict(method="feddure", reading="released"))
    assert (o.weight, o.ramp, o.warm_steps, o.lr_warmup, o.creg_wait, o.threshold) == (8.0, 20, 5, 10, 2, 0.6)


def test_one_client_is_the_mean_and_options_reach_the_nets(tmp_path):
    run = at_work(
        tmp_path, active=1, freg_state="round", freg_hidden=100, freg_lr=1e-3, reading="released", loop="regulators"
    )
    seen = []
    end = type(run.kit.method).end
    run.kit.method.__dict__["end"] = lambda party: (seen.append(end(run.kit.method, party)), seen[-1])[1]
    run.federated.round(0)
    model = seen[0]["model"]
    assert all(torch.equal(model.groups[g], run.federated.server.model.groups[g]) for g in model.groups)
    assert not run.federated.keep.version  # F-reg is new every round
    assert sum(e.numel for e in run.kit.layouts()["freg"].entries) == 10 * 100 + 100 + 100 + 1


def test_the_released_reading_learns_at_its_own_rates(tmp_path):
    run = at_work(tmp_path, reading="released")
    o = run.options
    assert (o.loop, o.reward_sign, o.lr, o.steps, o.epochs) == ("meta-pseudo", "new-minus-old", 6e-4, 5, None)
    rewards = []
    method = run.kit.method
    reward = type(method).reward
    method.__dict__["reward"] = lambda s, b, loss: (rewards.append(reward(method, s, b, loss)), rewards[-1])[1]
    row = run.federated.round(0)
    assert row["clients"] == 2 and set(run.kit.held) == {"model", "creg"}
    assert len(rewards) == 10
    for client in (rewards[:5], rewards[5:]):  # C-reg's rate is 0 in its first two steps
        assert client[0] == client[1] == 0 and all(d != 0 for d in client[2:])


def test_its_schedule_is_its_own():
    with pytest.raises(fallow.UserError, match="schedule"):
        resolve({}, dict(method="feddure", reading="released", schedule="cosine"))


# -- recipes -----------------------------------------------------------------------------------------------------------
TABLE = Grid.of(recipe("feddure/table1"))
SETTINGS = [(row, cell) for cell in TABLE.cells for row in ("FedDure", "FedAvg*", "FedAvg+Fixmatch")]


@pytest.mark.parametrize("row, cell", SETTINGS, ids=lambda x: getattr(x, "slug", x))
def test_recipes_are_the_papers_settings(row, cell):
    method, o = resolve(TABLE.keys(row, cell), {})
    assert (o.clients, o.active, o.rounds, o.model, o.batch, o.optimizer, o.weights) == (
        100,
        5,
        200,
        "resnet9",
        10,
        "adam",
        "samples",
    )
    assert o.image.normalise == "feddure" and o.augment.labelled == "weak-zero-cutout"
    kind, long = {"cifar10": 50_000, "fashion-mnist": 60_000, "cinic10": 90_000}[cell.data], cell.setting == "dir,dir"
    if issubclass(method, FedDure):
        assert o.loop == "meta-pseudo" and o.reward_sign == "new-minus-old"
        assert (o.lr, o.warm_steps, o.steps, o.creg_wait) == ((5e-4, 100, 10, 0) if long or kind == 90_000 else (6e-4, 5, 5, 2))
        assert o.lr_warmup == (100 if long or kind == 90_000 else 10)
    else:
        assert o.lr == 5e-4 and (o.steps, o.epochs) == ((110, None) if long else (None, 1))
    if kind == 60_000:
        assert (o.image.size, o.image.channels) == (32, 3)
    if not issubclass(method, FedDure):
        return
    labels = np.arange(kind) % 10
    f = make_federation(
        o, SimpleNamespace(classes=range(10), train=SimpleNamespace(labels=torch.from_numpy(labels), clients=None))
    )
    x, u = [c.labelled for c in f.clients], [c.unlabelled for c in f.clients]
    assert np.array_equal(np.sort(np.concatenate(x + u)), np.arange(kind)) and len(f.dropped) == 0
    assert np.bincount(labels[np.concatenate(x)]).tolist() == [500] * 10
    labelled, unlabelled = cell.setting.split(",")
    for parts, how, each in ((x, labelled, 50), (u, unlabelled, (kind - 5000) // 100)):
        sizes = [len(p) for p in parts]
        most = np.mean([np.bincount(labels[p], minlength=10).max() / len(p) for p in parts])
        assert min(sizes) >= 10 and (most > 0.3 if how == "dir" else sizes == [each] * 100 and most < 0.3)


@pytest.mark.parametrize("data", ["cifar10", "fashion-mnist"])
def test_the_short_work_with_dirichlet_labels_stays_by_name(data):
    long, short = (Grid.of(recipe(f"feddure/{name}")) for name in ("table1", "table1-short"))
    assert list(long.rows) == list(short.rows)
    for row in ("FedDure", "FedAvg*", "FedAvg+Fixmatch"):
        other, same = (resolve(recipe(f"feddure/{t}"), {"setting": f"{data} {s}", "method": row})[1].model_dump()
                       for t, s in (("table1-short", "dir,dir"), ("table1", "iid,dir")))  # fmt: skip
        assert {k for k, v in same.items() if other[k] != v} == {"partition"}


class Threads(torch.autograd.Function):
    """Notes in its backward pass whether autograd may hand work to threads of its own."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(torch._C._is_multithreading_enabled())
        return grad, None


@pytest.mark.parametrize(("create_graph", "threads"), [(True, False), (False, True)])
def test_a_gradients_graph_is_made_in_this_thread(create_graph, threads):
    """A thread numbers the nodes it makes, and sums follow these numbers: in another thread they would be the process's history."""
    net, seen = Exact(nn.Linear(2, 2)), []
    loss = Threads.apply(net(torch.ones(1, 2, dtype=torch.float64)), seen).square().sum()
    g = Slot.gradient(SimpleNamespace(), loss, net, create_graph)
    assert seen == [threads] and all(t.requires_grad == create_graph for t in g.values())
    assert torch._C._is_multithreading_enabled()
