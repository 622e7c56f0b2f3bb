"""SAGE: worked numbers, invariants, its plan, and rounds against a plain-torch loop; the net, the split and the labeller it brings."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from torch import nn

from fallow import models
from fallow.data.dealing import Pool
from fallow.data.dirichlets import PairsDraw, apply_pairs, pair_blocks
from fallow.data.normalisation import normalisation
from fallow.data.partitions import parse
from fallow.data.samples import Samples
from fallow.data.skews import skew
from fallow.engine.feed import Batch, Part
from fallow.errors import UserError
from fallow.methods.parts.batching import walks
from fallow.methods.parts.labelling import one_hot
from fallow.methods.parts.losses import smoothed_kl
from fallow.methods.sage import SAGE
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder
from fallow.runs.settings import resolve

LOCAL = [[4, 0, -1], [3.5, 0, 0], [1, 0.5, 0], [0.2, 0.1, 0]]
RECEIVED = [[3.5, -0.5, 0], [0.2, 2.4, 0], [0, 4, 0.5], [0.3, 0, 0.1]]
STRONG = [[1, 0.5, 0], [0.4, 0.2, -0.2], [0, 1, 0.5], [1, 0, 0]]


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def probabilities(rows):
    return double(rows).softmax(1)


def method(**options):
    return SAGE(SAGE.Options(**options), 3)


# -- Examples A and B ------------------------------------------------------------------------------------------------------
def test_worked_targets():
    local, received = probabilities(LOCAL), probabilities(RECEIVED)
    assert local.amax(1).tolist() == pytest.approx([0.9755587549, 0.9430450161, 0.5064803911, 0.3671654011], abs=1e-10)
    assert received.amax(1).tolist() == pytest.approx([0.9537315977, 0.8322783431, 0.9537315977, 0.3906938333], abs=1e-10)
    target, used = method(threshold=0.93).target(local, received)
    assert used.tolist() == [True, True, True, False]
    assert torch.allclose(target, double([[1, 0, 0], [0.2153337766, 0.7846662234, 0], [0, 1, 0], [1, 0, 0]]), atol=1e-10)
    terms = smoothed_kl(target, double(STRONG))
    assert terms.tolist() == pytest.approx([0.6802696663, 0.4978473824, 0.6802696663, 0.5514447096], abs=1e-9)
    assert (terms * used).mean().item() == pytest.approx(0.4645966788, abs=1e-9)
    plain = F.cross_entropy(double(STRONG), target, reduction="none")[1].item(), torch.special.entr(target).sum(1)[1].item()
    assert plain == pytest.approx((1.0187856952, 0.5209383106), abs=1e-10)


def test_the_surer_of_both_labels():
    """FedLabel, a lambda of 0 or 1: of labels that are sure enough the one of the surer model, of equally sure ones the local one."""
    local, received = probabilities([*LOCAL, [0, 3, 0]]), probabilities([*RECEIVED, [3, 0, 0]])
    for threshold, sure in ((0.93, [True, True, True, False, False]), (0.5, [True, True, True, False, True])):
        target, used = method(threshold=threshold, trust="surer").target(local, received)
        assert used.tolist() == sure
        assert target[used].argmax(1).tolist() == [0, 0, 1, 1][: used.sum()] and torch.equal(target, one_hot(target.argmax(1), target))


@pytest.mark.parametrize("gap, expected", [(0, 0.9999861372), (0.01, 0.8705384950), (0.05, 0.4999930686), (0.1, 0.2499965343)])
def test_how_fast_the_local_label_loses_weight(gap, expected):
    local, received = double([[0.97, 0.03, 0]]), double([[0, 0.97 - gap, 0.03 + gap]])
    assert method().target(local, received)[0][0, 0].item() == pytest.approx(expected, abs=1e-10)


def test_invariants_of_the_target():
    g = torch.Generator().manual_seed(0)
    local, received = (torch.randn(500, 10, generator=g, dtype=torch.float64).mul(4).softmax(1) for _ in range(2))
    for kappa in (0.0, math.log(2) / 0.05, 1e9):
        target, used = method(kappa=kappa, threshold=0.9).target(local, received)
        assert torch.allclose(target.sum(1), torch.ones(500, dtype=torch.float64))
        agree = local.argmax(1) == received.argmax(1)
        assert agree.any() and torch.allclose(target[agree], one_hot(received.argmax(1), target)[agree])
        assert torch.equal(used, (local.amax(1) >= 0.9) | (received.amax(1) >= 0.9))
    assert torch.allclose(target, one_hot(received.argmax(1), target), atol=2e-6), "without end: the received model's labels"
    assert not method(threshold=1.1).target(local, received)[1].any()


def test_smoothing_changes_only_what_is_impossible():
    target, z = double([[0.25, 0.75, 0]]), double([[0.3, -1, 2]])
    assert smoothed_kl(target, z).item() == pytest.approx(F.kl_div(z.log_softmax(1), target, reduction="batchmean").item(), abs=1e-8)
    far = double([[800.0, 0, 0]])
    assert smoothed_kl(double([[0, 1, 0]]), far).item() == pytest.approx(math.log(1e10), abs=1e-6), "finite where softmax is 0"


# -- the step ----------------------------------------------------------------------------------------------------------------
class Bench:
    """A slot whose nets are linear layers, and which keeps the loss."""

    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.W, self.V = (torch.randn(3, 5, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2))
        self.judged, self.model, self.asked = {}, self, []

    def together(self, *parts):
        return [None if p is None else p @ self.W.T for p in parts]

    def teacher(self, x, stats):
        self.asked.append(stats)
        return x @ self.V.T

    def descend(self, loss, *nets, when=None):
        self.loss, self.when = loss, when

    def judge(self, part, label, sure, confidence):
        self.judged = {"label": label, "sure": sure, "confidence": confidence}

    def log(self, **values):
        pass


def batch(labelled=True, unlabelled=True):
    g = torch.Generator().manual_seed(2)
    x, w, s = (0.8 * torch.randn(6, 5, generator=g, dtype=torch.float64) for _ in range(3))
    return Batch({"x": Part({"labelled": x, "y": torch.arange(6) % 3} if labelled else None), "u": Part({"weak": w, "strong": s} if unlabelled else None)}, {})


@pytest.mark.parametrize("labelled", [True, False])
def test_a_step_by_hand(labelled):
    """The loss, sample by sample in plain numbers, and no gradient through either labelling net."""
    bench, b = Bench(), batch(labelled)
    method(threshold=0.8, weight=0.5).step(bench, b)
    expected = F.cross_entropy(b.x.labelled @ bench.W.T, b.x.y).item() if labelled else 0.0
    kept = 0
    for w, s in zip(b.u.weak, b.u.strong):
        pl, pg, q = ((v @ m.T).softmax(0).tolist() for v, m in ((w, bench.W), (w, bench.V), (s, bench.W)))
        cl, cg = max(pl), max(pg)
        if cl < 0.8 and cg < 0.8:
            continue
        kept += 1
        t = [0.0] * 3
        share = 2 ** (-min(abs(cl - cg) + 1e-6, 1) / 0.05) if cl >= 0.8 else 0.0
        t[pl.index(cl)] += max(share, 1e-6) if cl >= 0.8 else 0.0
        t[pg.index(cg)] += 1 - sum(t)
        expected += 0.5 / 6 * sum(a * math.log(a / p) for a, p in zip(t, q) if a)
    assert 0 < kept < 6 and bench.judged["sure"].sum() == kept and bench.asked == ["running"]
    assert bench.loss.item() == pytest.approx(expected, abs=1e-7)
    assert (bench.when is None) == labelled
    assert torch.autograd.grad(bench.loss, bench.V, allow_unused=True) == (None,)


def test_nothing_accepted_is_the_labelled_loss():
    bench, b = Bench(), batch()
    method(threshold=1.1).step(bench, b)
    assert bench.loss.item() == F.cross_entropy(b.x.labelled @ bench.W.T, b.x.y).item()
    method(threshold=1.1).step(bench, batch(labelled=False))
    assert not bench.when
    method().step(bench, batch(unlabelled=False))
    assert bench.loss.item() == F.cross_entropy(b.x.labelled @ bench.W.T, b.x.y).item()


# -- the plan ----------------------------------------------------------------------------------------------------------------
class Worker:
    def __init__(self, L, U, batch=128, epochs=5, steps=None, **options):
        self.labelled, self.unlabelled = Samples.of(np.arange(L), np.zeros(L, np.int64)), Samples.of(np.arange(L, L + U))
        self.batch, self.steps, self.epochs, self.options = batch, steps, None if steps else epochs, SAGE.Options(**options)


@pytest.mark.parametrize("U, steps", [(2500, 95), (230 + 3432, 140), (4500, 175), (100, 5)])
def test_steps_of_a_round(U, steps):
    """C10 and C100, SVHN, CINIC-10; at least one step an epoch."""
    plan = method().plan(Worker(250, U), {})
    assert len(plan) == steps and len(plan.segments) == 5
    x, u = plan.segments[0].streams["x"], plan.segments[0].streams["u"]
    assert (x.size, u.size, x.replace, u.tail) == (128, 256, True, "drop")
    if U >= 256:
        positions = u.positions(7, steps // 5)
        assert {len(p) for p in positions} == {256}
        once = np.concatenate(positions[: U // 256])
        assert len(once) == len(set(once.tolist())), "a pass has each sample once at most"


def test_steps_in_other_words():
    assert walks(Worker(250, 2500, steps=95)) == [19] * 5 and walks(Worker(250, 2500, steps=20)) == [19, 1] and walks(Worker(250, 2500, steps=7)) == [7]
    assert walks(Worker(250, 2500, epochs=0.5)) == [10] and walks(Worker(300, 0, epochs=2)) == [2, 2]
    assert len(method().plan(Worker(0, 2500), {})) == len(method().plan(Worker(250, 0, epochs=95), {})) == 95
    assert not len(method().plan(Worker(0, 0), {}))
    for keys in ({"batch": "full", "unlabelled_batch": 256}, {"unlabelled_batch": "match-steps"}, {"unlabelled_batch": "full"}):
        with pytest.raises(UserError, match="sage draws batches of a set size"):
            resolve({}, TINY | {"method": "sage"} | keys)


# -- against a plain-torch loop ------------------------------------------------------------------------------------------------
def federated(path, **keys):
    kind, options, source, federation = prepare(None, TINY | {"method": "sage", "norm": "bn", "threshold": 0.12} | keys)
    path.mkdir(exist_ok=True)
    return Run(RunFolder(path), kind, options, source, federation).federated


@pytest.mark.usefixtures("in_double")
def test_a_round_in_plain_torch(tmp_path, monkeypatch):
    """One client's steps with torch's own SGD and batch norm, on the batches that the round drew."""
    f = federated(tmp_path, clients=1, active=1, lr=0.0625, weight_decay=0.01, augment={"strong": "weak"})
    seen, step = [], SAGE.step
    monkeypatch.setattr(SAGE, "step", lambda self, s, b: (seen.append((b.x.labelled.clone(), b.x.y.clone(), b.u.weak.clone(), b.u.strong.clone())), step(self, s, b))[1])

    def fresh():
        net = models.build("small-cnn", 10, 1, "bn", 8)
        net.load_state_dict(f.kit.initial().tensors())
        return net

    net, teacher = fresh(), fresh().eval()
    f.round(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0625, momentum=0.9, weight_decay=0.01)
    for x, y, weak, strong in seen:
        zx, zw, zs = net(torch.cat([x, weak, strong])).split([len(x), len(weak), len(strong)])
        pl, pg = zw.detach().softmax(1), teacher(weak).detach().softmax(1)
        (cl, yl), (cg, yg) = pl.max(1), pg.max(1)
        lam = (-((cl - cg).abs() + 1e-6).clamp(max=1) * math.log(2) / 0.05).exp().clamp(min=1e-6)
        lam = torch.where(cl >= 0.12, lam, 0.0)
        t = lam[:, None] * F.one_hot(yl, 10) + (1 - lam)[:, None] * F.one_hot(yg, 10)
        kept = ((cl >= 0.12) | (cg >= 0.12)).double()
        divergence = F.kl_div((zs.softmax(1) + 1e-10).log(), t + 1e-10, reduction="none").sum(1)
        optimizer.zero_grad()
        (F.cross_entropy(zx, y) + (kept * divergence).mean()).backward()
        optimizer.step()
    assert len(seen) == 2 and kept.any()
    for name, value in f.server.model.tensors().items():
        assert torch.allclose(value, dict(net.state_dict())[name], rtol=1e-9, atol=1e-11), name


def test_nothing_accepted_in_a_run_is_fixmatch_with_nothing_accepted(tmp_path):
    """Both then learn from labels alone, in a joint pass (the same plan, the same views)."""
    f = federated(tmp_path / "a", threshold=1.1, rounds=1)
    f.round(0)
    kappa = federated(tmp_path / "b", threshold=1.1, kappa=0.0, weight=0.0, rounds=1)
    kappa.round(0)
    assert torch.equal(f.server.model.groups["parameters"], kappa.server.model.groups["parameters"])


# -- labeller=received-each ------------------------------------------------------------------------------------------------
def test_the_received_model_labels_every_batch(tmp_path, monkeypatch):
    """FixMatch by the received model: in the first step it is the net in training, then it stays while that one moves."""
    asked = []

    def target(self, z):
        asked.append(z.clone())
        return z.argmax(1), torch.ones(len(z), dtype=torch.bool)

    monkeypatch.setattr("fallow.methods.fixmatch.FixMatch.target", target)
    f = federated(tmp_path, method="fixmatch", labeller="received-each", clients=1, active=1, lr=0.5, steps=3, batch=4, unlabelled_batch=300)
    (record,) = f._requests() if f.server.draw(0) is None else ()
    f.round(0)
    teacher = models.build("small-cnn", 10, 1, "bn", 8).eval()
    teacher.load_state_dict(record.message["model"].tensors())
    assert len(asked) == 3 and not any(torch.equal(asked[0], z) for z in asked[1:]), "other views in each step"
    assert f.keep.read(0) == {}, "it does not stay with the client"


# -- the net -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("classes, total", [(10, 1_227_594), (100, 1_250_724)])
def test_resnet8_counts(classes, total):
    with torch.device("meta"):
        net = models.build("resnet8", classes, 3)
    assert sum(p.numel() for p in net.parameters()) == total
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 9 and sum(2 * m.num_features for m in norms) == 2_688


def test_resnet8_first_weights_and_maps():
    torch.manual_seed(0)
    net = models.build("resnet8", 10, 3).eval()
    for m in net.modules():
        if isinstance(m, nn.Conv2d):
            expected = math.sqrt(2 / (m.kernel_size[0] * m.kernel_size[1] * m.out_channels))
            assert m.weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * m.weight.numel()))
    assert net.head.bias.abs().max() > 0, "torch's default"
    x = torch.randn(2, 3, 32, 32)
    assert net.stage3(net.stage2(net.stage1(net.conv(x)))).shape == (2, 256, 8, 8)
    with torch.no_grad():
        assert torch.equal(net(x), net.head(net.features(x)))


# -- the split -----------------------------------------------------------------------------------------------------------------
def test_the_worked_split():
    labels = np.tile(np.repeat(np.arange(3), 4), 2)
    pool = Pool(labels, 3, 4)
    blocks = pair_blocks(pool, np.arange(24))
    assert [b.tolist() for b in blocks] == [list(range(12)), list(range(12, 24))]
    shares = [np.array([[1, 0], [0.5, 0.5], [0.5, 0.5]]), np.array([[0.25, 0.75], [0.75, 0.25], [0.75, 0.25]])]
    parts = [p.tolist() for p in apply_pairs(pool, PairsDraw(blocks, shares)).parts]
    assert parts == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 16, 17, 18, 20, 21], [22, 13, 14, 15, 19, 23]]


@pytest.mark.parametrize("clients, samples, sizes", [(1, 10, [10]), (3, 11, [4, 4, 3]), (4, 14, [4, 4, 3, 3]), (5, 52, [11, 11, 10, 10, 10])])
def test_sizes_and_odd_clients(clients, samples, sizes):
    pool = Pool(np.arange(samples) % 3, 3, clients)
    split = parse("dirichlet-pairs:1")(pool, np.random.default_rng(0))
    assert [len(p) for p in split.parts] == sizes and sorted(np.concatenate(split.parts).tolist()) == list(range(samples))
    assert [len(b) for b in pair_blocks(Pool(np.zeros(11), 1, 3), np.arange(11))] == [7, 4]


@pytest.mark.parametrize("alpha, published", [(0.1, 0.517), (0.5, 0.426), (1, 0.391)])
def test_the_skew_of_the_papers_split(alpha, published):
    """R of CIFAR-10's unlabelled pool over 20 clients; the mean of five draws, whose spread is some 0.02."""
    pool = Pool(np.repeat(np.arange(10), 4500), 10, 20)
    found = []
    for seed in range(5):
        parts = parse(f"dirichlet-pairs:{alpha}")(pool, np.random.Generator(np.random.PCG64(seed))).parts
        found.append(skew(np.stack([np.bincount(pool.labels[p], minlength=10) for p in parts])))
    assert np.mean(found) == pytest.approx(published, abs=0.04)


def test_a_split_that_never_comes_ends():
    with pytest.raises(UserError, match="between two clients with a quarter for each in 3 tries"):
        parse("dirichlet-pairs:0.0001,max_tries=3")(Pool(np.zeros(40, np.int64), 1, 2), np.random.default_rng(0))


def test_the_preset():
    train = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)
    assert all(normalisation("sage", data, 3) == train for data in ("cifar10", "cifar100", "svhn", "cinic10", "stl10", "photos"))
    assert normalisation("sage", "digits", 1) == ((pytest.approx(sum(train[0]) / 3),), (pytest.approx(sum(train[1]) / 3),))
    assert normalisation("usb", "photos", 3) == ((0.5,) * 3, (0.5,) * 3), "other presets do not fall back on it"
