"""RSCFed: worked numbers, invariants, subsets, a client against a plain-torch loop; the labelled client, the net and the view it brings."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from PIL import Image
from torch import nn

from fallow import models
from fallow.data import ops
from fallow.data.federate import PartitionError, Spec, covering, federate
from fallow.data.views import Views
from fallow.engine.feed import Batch, Part
from fallow.methods.parts.mixing import sharpened
from fallow.methods.rscfed import RSCFed, consensus
from fallow.methods.state import State
from fallow.models.cnn import Pool3, pool3_by_choice
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def federated(path, **keys):
    kind, options, source, federation = prepare(None, TINY | {"method": "rscfed", "labels": "some", "norm": "bn"} | keys)
    path.mkdir(exist_ok=True)
    return Run(RunFolder(path), kind, options, source, federation).federated


# -- Examples A to C ---------------------------------------------------------------------------------------------------------
def test_worked_consistency():
    target = sharpened(double([[0.5, 0.3, 0.2], [0.8, 0.15, 0.05]]), 0.5)
    expected = double([[0.6578947368, 0.2368421053, 0.1052631579], [0.9624060150, 0.0338345865, 0.0037593985]])
    assert torch.allclose(target, expected, atol=1e-10)
    total = ((double([[0.4, 0.4, 0.2], [0.6, 0.3, 0.1]]) - target) ** 2).sum().item()
    assert total == pytest.approx(0.3135496636, abs=1e-10) and 0.02 * total / 64 == pytest.approx(9.798426989e-5, abs=1e-13)


class Three(nn.Module):
    """Two tensors of together three numbers."""

    def __init__(self, a, b, c):
        super().__init__()
        self.two, self.one = nn.Parameter(torch.tensor([a, b])), nn.Parameter(torch.tensor([c]))


@pytest.mark.parametrize("first, boost, scale, how, d, w", [
    (False, 6.0, 1e4, "tensors", [0.1068528044, 0.9230780368, 1.0824409435], [0.5557047227, 0.2792645701, 0.1650307072]),
    (True, 6.0, 100.0, "tensors", [0.0439982136, 0.9081114638, 1.1044267705], [0.9358306823, 0.0342943154, 0.0298750022]),
    (False, 1.0, 1e4, "whole", [0.0898474394, 0.6625895738, 0.7846601876], [0.4720892469, 0.3193727409, 0.2085380122]),
])  # fmt: skip
@pytest.mark.usefixtures("in_double")
def test_worked_consensus(first, boost, scale, how, d, w):
    states = [State.of(Three(*t)) for t in ((1.0, 2.0, 0.5), (1.3, 1.6, 0.1), (0.4, 2.4, 0.9))]
    found = consensus(states, [6000, 8000, 7000], [first, False, False], boost, scale, how)
    assert found[0].tolist() == pytest.approx(d, abs=1e-9) and found[1].tolist() == pytest.approx(w, abs=1e-9)


def test_invariants_of_consensus():
    one = State.of(Three(1.0, 2.0, 0.5))
    d, w = consensus([one, one], [30, 10], [True, False], 6.0, 1e4, "tensors")
    assert d.tolist() == [0, 0] and w.tolist() == pytest.approx([6 * 180 / (6 * 180 + 10), 10 / (6 * 180 + 10)])
    other = State.of(Three(-9.0, 2.0, 0.5))
    assert consensus([one, other], [30, 10], [True, False], 1.0, 0.0, "tensors")[1].tolist() == pytest.approx([0.75, 0.25]), "FedAvg"
    far = consensus([one, other, one], [1, 1, 1], [False] * 3, 6.0, 1e9, "tensors")[1]
    assert torch.isfinite(far).all() and far.tolist() == pytest.approx([0.5, 0, 0.5]), "nothing underflows"


# -- subsets, merging ------------------------------------------------------------------------------------------------------
def test_subsets_are_drawn_alike_all_round(tmp_path):
    f = federated(tmp_path, clients=8, active=8, label_count=40, subset_size=3, subsets=2, rounds=3, warmup_rounds=1)
    f.server.draw(0)
    assert f.method.drawn(f.server) == [set(range(8))], "warm-up"
    seen = []
    for number in range(1, 9):
        f.server.draw(number)
        subsets = f.method.drawn(f.server)
        assert subsets == f.method.drawn(f.server) and [len(s) for s in subsets] == [3, 3]
        seen += [frozenset(s) for s in subsets]
        for client in range(8):
            wanted = any(client in s for s in subsets)
            assert f.method.down(f.server, client)["drawn"].item() == wanted
    assert len(set(seen)) > 8, "of each other and of the round independent"
    rows = [f.round(number) for number in range(3)]
    assert all(r["accuracy"] >= 0 for r in rows)


def test_the_server_averages_the_subsets_means(tmp_path):
    f = federated(tmp_path, clients=6, active=6, label_count=40, subset_size=4, subsets=2, labelled_clients=2)
    f.server.draw(0)
    replies, own = f.clients.train(f._requests())
    updates = f._updates(replies, own)
    subsets = f.method.drawn(f.server)
    assert {u.client for u in updates} == set().union(*subsets), "who is in none makes no step"
    expected = []
    for subset in subsets:
        members = [u for u in updates if u.client in subset]
        flat = [torch.cat([t.double().flatten() for n, t in u["model"].tensors().items()]) for u in members]
        n = [u.weight * (6 if u["labelled"] else 1) for u in members]
        average = sum(a * b for a, b in zip(n, flat)) / sum(n)
        weights = []
        for u, size in zip(members, n):
            d, start = 0.0, 0
            for t in u["model"].tensors().values():
                if t.is_floating_point():
                    d += (t.double().flatten() - average[start : start + t.numel()]).norm().item()
                start += t.numel()
            any_labelled = any(m["labelled"] for m in members)
            weights.append(size * (6 if u["labelled"] else 1) * np.exp(-(100 if any_labelled else 1e4) * d / u.weight))
        expected.append(sum(a * b for a, b in zip(weights, flat)) / sum(weights))
    f.method.merge(f.server, updates)
    floating = [t.is_floating_point() for t in f.server.model.tensors().values()]
    start = 0
    for (name, t), is_float in zip(f.server.model.tensors().items(), floating):
        if is_float:
            assert torch.allclose(t.double().flatten(), (sum(expected) / 2)[start : start + t.numel()], rtol=1e-5, atol=1e-5), name
        start += t.numel()


def test_the_warm_up_is_averaged_plainly(tmp_path):
    f = federated(tmp_path, clients=6, active=6, label_count=40, labelled_clients=3, warmup_rounds=1, rounds=2)
    f.server.draw(0, f._warming())
    replies, own = f.clients.train(f._requests())
    updates = f._updates(replies, own)
    sizes = [3.0, 1.0, 2.0]
    for u, n in zip(updates, sizes, strict=True):
        u.weight = n
    expected = sum(n * u["model"].groups["parameters"].double() for u, n in zip(updates, sizes)) / 6
    f.method.merge(f.server, updates)
    assert torch.allclose(f.server.model.groups["parameters"].double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("labelled, keys, by", [
    (False, {}, 64), (False, {"batch": 16, "unlabelled_batch": 32}, 32), (False, {"batch": 16, "unlabelled_batch": "equal"}, 16), (False, {"unlabelled_batch": "full"}, 2),
    (True, {}, 2), (True, {"unlabelled_batch": 32}, 32), (True, {"batch": 16, "unlabelled_batch": "ratio:2"}, 32), (True, {"batch": "full", "unlabelled_batch": "full"}, 2),
])  # fmt: skip
def test_a_short_batch_counts_for_less(labelled, keys, by):
    z = {"teacher": double([[0.5, 0.3, 0.2], [0.8, 0.15, 0.05]]).log(), "student": double([[0.4, 0.4, 0.2], [0.6, 0.3, 0.1]]).log()}
    lost = []
    sure, of_x = double([[1e9, 0, 0]]), {"labelled": "x", "y": torch.tensor([0])}
    model = SimpleNamespace(together=lambda x, u: (sure, z[u]))

    class Teacher:
        def __call__(self, u, stats):
            return z[u]

        def follow(self, net, decay):
            lost.append(decay.item())

    s = SimpleNamespace(model=model, teacher=Teacher(), age=torch.ones(1), descend=lost.append, judge=lambda *a: None, log=lambda **_: None)
    RSCFed(RSCFed.Options(**keys), 3).step(s, Batch({"x": Part(of_x if labelled else None), "u": Part({"weak": "teacher", "other": "student"})}, {}))
    assert lost[0].item() == pytest.approx(0.02 * 0.3135496636 / by, rel=1e-9) and lost[1] == 0.5 and s.age == 2


# -- a client in plain torch --------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("in_double")
def test_a_client_without_labels_in_plain_torch(tmp_path, monkeypatch):
    """Two visits: the teacher is the received model at the first one's start, grows slower with its steps, and stays."""
    keys = {"clients": 2, "active": 2, "labelled_clients": 1, "lr": 0.5, "unlabelled_lr": 0.25, "weight": 2.0, "clip": None, "momentum": 0.0, "weight_decay": 0.0}
    f = federated(tmp_path, norm="none", model="small-cnn", decay=0.75, **keys)
    client = next(i for i, c in enumerate(f.simulation.federation.clients) if not len(c.labelled))
    seen, step, sent, end = [], RSCFed.step, {}, RSCFed.end

    def watched(self, s, b):
        if not b.x:
            seen.append((b.u.weak.clone(), b.u.other.clone()))
        step(self, s, b)

    def ended(self, party):
        update = end(self, party)
        if update is not None and party.id == client:
            sent["state"] = party.model.flat.clone()
        return update

    monkeypatch.setattr(RSCFed, "step", watched)
    monkeypatch.setattr(RSCFed, "end", ended)
    student, teacher = (models.build("small-cnn", 10, 1, "none", 8) for _ in range(2))
    teacher.load_state_dict(f.server.model.tensors())
    made = 0
    for number in range(2):
        student.load_state_dict(f.server.model.tensors())
        seen.clear()
        f.round(number)
        for weak, other in seen:
            p = teacher(weak).softmax(1).detach() ** 2
            loss = 2.0 * ((student(other).softmax(1) - p / p.sum(1, keepdim=True)) ** 2).sum() / 8
            grads = torch.autograd.grad(loss, list(student.parameters()))
            with torch.no_grad():
                for w, g in zip(student.parameters(), grads):
                    w -= 0.25 * g
                a = min(1 - 1 / (made + 1), 0.75)
                for t, w in zip(teacher.parameters(), student.parameters()):
                    t.copy_(a * t + (1 - a) * w)
            made += 1
        assert len(seen) == 2
        for n, w in student.named_parameters():
            assert torch.allclose(sent["state"][n], w, rtol=1e-10, atol=1e-12), n
    kept = f.keep.read(client)
    assert kept["age"].item() == 4
    assert all(torch.allclose(kept["teacher"][n], w, rtol=1e-10, atol=1e-12) for n, w in teacher.named_parameters())


def test_decay_of_the_teacher():
    students = iter([1.0, 2.0, 3.0, 4.0])
    t, out = 9.0, []
    for k in range(4):
        a = (1 - 1 / (torch.tensor(float(k)) + 1)).clamp_max(0.999).item()
        t = a * t + (1 - a) * next(students)
        out.append(t)
    assert out == pytest.approx([1, 1.5, 2, 2.5])
    assert [(1 - 1 / (torch.tensor(k) + 1)).clamp_max(0.999).item() for k in (0.0, 1.0, 9.0, 999.0)] == pytest.approx([0, 0.5, 0.9, 0.999])


# -- who has the labels ------------------------------------------------------------------------------------------------------
def test_the_labelled_client_covers_all_classes():
    labels = np.tile(np.arange(3), 20)
    parts = [np.arange(0, 10), np.array([12, 15, 18, 21, 24, 27]), np.arange(28, 48), np.arange(48, 52), np.arange(52, 60)]
    assert covering(labels, 3, parts).tolist() == [0, 4, 3, 2, 1], "all classes and 9.6 samples; 1 has one class alone"
    assert covering(labels, 4, parts).tolist()[:2] == [0, 4], "if nobody has all: by size"
    assert covering(labels, 3, [np.arange(6), np.arange(6, 12)]).tolist() == [0, 1], "equally near: the lower id"
    spec = Spec(labels="some", labelled_clients=1, label_ratio=1.0, clients=5, partition="dirichlet-capped:0.8", labelled_pick="cover")
    made = federate(np.arange(500) % 10, 10, spec)
    sizes = [len(c.labelled) + len(c.unlabelled) for c in made.clients]
    [chosen] = [i for i, c in enumerate(made.clients) if len(c.labelled)]
    whole = [i for i, c in enumerate(made.clients) if len({int(x) % 10 for x in (*c.labelled, *c.unlabelled)}) == 10] or range(5)
    assert chosen in whole and abs(sizes[chosen] - 100) == min(abs(sizes[i] - 100) for i in whole)
    assert not len(made.clients[chosen].unlabelled)
    with pytest.raises(PartitionError, match="goes by what clients hold"):
        federate(np.arange(500) % 10, 10, Spec(labels="some", label_count=50, clients=5, labelled_pick="cover"))


# -- the nets, the view ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, classes, total", [
    ("simple-cnn", 10, 92_626), ("simple-cnn", 100, 115_756), ("resnet18:imagenet", 10, 11_181_642), ("resnet18:imagenet", 100, 11_227_812),
])  # fmt: skip
def test_counts(name, classes, total):
    with torch.device("meta"):
        assert sum(p.numel() for p in models.build(name, classes, 3).parameters()) == total


def test_pooling_by_choice():
    g = torch.Generator().manual_seed(0)
    for side in (1, 2, 5, 8):
        x = torch.randint(-3, 4, (2, 3, side, side), generator=g).double()
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, z = Pool3()(one), pool3_by_choice(other)
        assert torch.equal(y, z)
        way = torch.randn(y.shape, generator=g, dtype=torch.float64)
        assert torch.equal(torch.autograd.grad(y, one, way)[0], torch.autograd.grad(z, other, way)[0])


def test_the_resized_view_is_pillows():
    g = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (6, 3, 32, 32), generator=g, dtype=torch.uint8)
    flip, top, left = torch.tensor([0, 1, 0, 1, 0, 1]), torch.tensor([0, 8, 3, 4, 8, 0]), torch.tensor([0, 8, 5, 1, 0, 8])
    found = ops.resize_crop(images, flip, top, left, 8)
    for i in range(6):
        large = Image.fromarray(images[i].permute(1, 2, 0).numpy()).resize((40, 40), Image.Resampling.BILINEAR)
        large = large.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip[i] else large
        a, b = top[i].item(), left[i].item()
        by_pillow = np.asarray(large)[a : a + 32, b : b + 32].astype(int)
        assert np.abs(found[i].permute(1, 2, 0).numpy().astype(int) - by_pillow).max() <= 1
    views = Views(size=32, channels=3, mean=[0.0] * 3, std=[1.0] * 3, flip=True, weak="weak-resize", strong="weak-resize-eighth")
    made, nearer = (views.uint8(role, images[:1].expand(400, -1, -1, -1), torch.arange(400)) for role in ("weak", "strong"))
    assert len({m.numpy().tobytes() for m in made}) > 120, "162 places and mirrors"
    assert len({m.numpy().tobytes() for m in nearer}) == 50, "of 36 pixels: 5 x 5 places and mirrors"
    assert F.l1_loss(made.float().mean(0), images[0].float()) < 128
