"""CBAFed: worked numbers, steps back to earlier weights by hand, its plan, what is sent and merged."""

import numpy as np
import pytest
import torch
from conftest import TINY

import fallow
from fallow import models
from fallow.data.samples import Samples
from fallow.methods.cbafed import CBAFed
from fallow.methods.update import Update, Updates
from fallow.recipes.reading import recipe
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder
from fallow.runs.settings import resolve


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def method(K, **options):
    return CBAFed(CBAFed.Options(**options), K)


def federated(path, **keys):
    kind, options, source, federation = prepare(None, TINY | {"method": "cbafed", "labels": "some", "norm": "bn", "base": 0.0} | keys)
    path.mkdir(exist_ok=True)
    return Run(RunFolder(path), kind, options, source, federation).federated


# -- Examples A and B --------------------------------------------------------------------------------------------------------
def test_worked_thresholds():
    counts = double([15, 292, 986, 116, 63, 1285, 1352, 1438, 807, 267])
    cuts, tail = method(10, top=0.9).thresholds(counts)
    share = counts / counts.sum()
    assert share.std().item() == pytest.approx(0.0866291128, abs=1e-10)
    expected = [0.7556364060, 0.7974729866, 0.9, 0.7708908993, 0.7628860662, 0.9, 0.9, 0.9, 0.8752557989, 0.7936971219]
    assert cuts.tolist() == pytest.approx(expected, abs=1e-10) and tail.nonzero().flatten().tolist() == [0, 3, 4]
    even = method(10).thresholds(torch.full((10,), 7.0, dtype=torch.float64))[0]
    assert even.tolist() == pytest.approx([0.94] * 10)
    assert method(10, beta=0.07).thresholds(counts)[1].nonzero().flatten().tolist() == [0], "0.07 / 10"


P = double([[0.8, 0.1, 0.05, 0.05], [0.6, 0.05, 0.05, 0.3], [0.4, 0.35, 0.05, 0.2], [0.1, 0.7, 0.15, 0.05], [0.05, 0.1, 0.64, 0.21], [0.05, 0.05, 0.1, 0.8]])


def test_worked_labels():
    one = method(4, base=0.6)
    cuts, tail = one.thresholds(double([40, 30, 25, 5]))
    assert cuts.tolist() == pytest.approx([0.7011215942, 0.6611215942, 0.6411215942, 0.5611215942], abs=1e-10) and tail.tolist() == [0, 0, 0, 1]
    label, kept = one.label(P, cuts, tail)
    assert [int(c) if k else None for c, k in zip(label, kept)] == [0, 3, None, 1, 3, 3]
    counts = torch.bincount(label[kept], minlength=4)
    assert counts.tolist() == [1, 1, 0, 3]
    cuts, tail = one.thresholds(double([40, 30, 25, 5]) + counts)
    assert cuts.tolist() == pytest.approx([0.7034614738, 0.6653662357, 0.6425090928, 0.5777471881], abs=1e-10) and not tail.any()


@pytest.mark.parametrize("tail, label", [(2, 2), (3, None), (1, None)])
def test_of_equal_classes_the_lowest_is_taken(tail, label):
    """Three classes are the likeliest: the first of them is the label, the second the second best; and of 40 alike the same two."""
    three, cuts = double([[0.05, 0.3, 0.3, 0.3, 0.05]] * 4), torch.full((40,), 0.9, dtype=torch.float64)
    for p in (three, torch.cat([three, double([[0.0] * 35] * 4)], 1)):
        found, kept = method(p.shape[1]).label(p, cuts[: p.shape[1]], torch.zeros(p.shape[1]).index_fill(0, torch.tensor([tail]), 1.0))
        assert [int(c) if k else None for c, k in zip(found, kept)] == [label] * 4
    even = torch.full((1, 40), 1 / 40, dtype=torch.float64)
    found, kept = method(40).label(even, cuts * 0, torch.zeros(40))
    assert found.tolist() == [0] and kept.all(), "all alike"


# -- Example C: steps back -----------------------------------------------------------------------------------------------------
def test_worked_steps_back():
    """A weight that gains 1 an epoch, by the plan's columns; the server's by its merges."""
    x = Samples.of(np.arange(10), np.zeros(10)).batches(4, "weak", epochs=11)
    columns = method(10).steps_back(x)
    assert len(x) == 33
    w, r, out = 1.0, 1.0, []
    for k in range(33):
        w += 1 / 3
        w = r + columns["share"][k] * (w - r)
        r = r + columns["store"][k] * (w - r)
        if k % 3 == 2:
            out.append(w)
    assert out == pytest.approx([2, 3, 4, 5, 6, 3, 4, 5, 6, 7, 4])


def test_worked_steps_back_at_the_server(tmp_path):
    for warm in (0, 2):
        f = federated(tmp_path / str(warm), norm="none", model="small-cnn", warmup_rounds=warm, rounds=20)
        f.server["model"] = f.server["residual"] = f.server.model * 0.0
        out = []
        for number in range(11 + warm):
            f.server.round = number
            model = f.server.model
            sent = model.map(lambda t: t + (1.0 if number >= warm else 0.0))
            update = Update(model=sent, counts=torch.ones(10))
            f.method.merge(f.server, Updates([update, update]))
            out.append(f.server.model.groups["parameters"][0].item())
        assert out[warm:] == pytest.approx([1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 5.5])


@pytest.mark.usefixtures("in_double")
def test_a_labelled_client_in_plain_torch(tmp_path, monkeypatch):
    keys = {"clients": 1, "active": 1, "labelled_clients": 1, "label_ratio": 0.1, "label_count": None, "steps": None, "epochs": 7, "lr": 0.0625, "residual": 0.75, "batch": 16}
    f = federated(tmp_path, **keys)
    seen, step, sent, end = [], CBAFed.supervised, [], CBAFed.end
    monkeypatch.setattr(CBAFed, "supervised", lambda self, s, b: (seen.append((b.x.labelled.clone(), b.x.y.clone())), step(self, s, b))[1])
    monkeypatch.setattr(CBAFed, "step", lambda self, s, b: None)
    monkeypatch.setattr(CBAFed, "end", lambda self, party: sent.append((party.model.flat.clone(), end(self, party))) or sent[-1][1])
    net = models.build("small-cnn", 10, 1, "bn", 8)
    net.load_state_dict(f.server.model.tensors())
    f.round(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0625, momentum=0.9, weight_decay=5e-4)
    per, residual = len(seen) // 7, None
    floating = [t for t in (*net.parameters(), *net.buffers()) if t.is_floating_point()]
    for k, (x, y) in enumerate(seen):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        if k % per == per - 1 and (k // per) % 5 == 0:
            with torch.no_grad():
                for i, t in enumerate(floating):
                    if residual is not None:
                        t.copy_(0.75 * residual[i] + 0.25 * t)
            residual = [t.detach().clone() for t in floating]
    assert per >= 2 and len(seen) == 7 * per
    state, update = sent[0]
    for n, t in net.state_dict().items():
        if t.is_floating_point():
            assert torch.allclose(state[n], t, rtol=1e-9, atol=1e-11), n
    assert update["counts"].sum() >= sum(len(y) for _, y in seen) // 7


def test_fashion_mnist_is_cut_from_36_pixels():
    """32 from 40 elsewhere; all tested at 32."""
    found = {data: resolve(recipe("cbafed/table1"), {"data": data, "setting": "1 of 10"})[1] for data in ("svhn", "cifar10", "cifar100", "fashion-mnist")}
    assert {data: (o.augment.weak, o.augment.labelled, o.image.size) for data, o in found.items()} == {
        data: (*2 * ("weak-resize-eighth" if data == "fashion-mnist" else "weak-resize",), 32) for data in found
    }  # fmt: skip


# -- plans and merging ---------------------------------------------------------------------------------------------------------
class Worker:
    def __init__(self, L, U, round=0, batch=64, epochs=11, steps=None):
        self.labelled, self.unlabelled = Samples.of(np.arange(L), np.zeros(L, np.int64)), Samples.of(np.arange(L, L + U))
        self.batch, self.epochs, self.steps, self.round, self.options = batch, None if steps else epochs, steps, round, CBAFed.Options(lr=0.03)

    def rng(self, stream):
        return np.random.default_rng(0)


def test_what_a_round_is():
    found = {"label": np.arange(300) % 10, "kept": np.arange(300) < 193}
    plan = method(10, lr=0.03).plan(Worker(0, 300), found)
    [segment] = plan.segments[-1:]
    assert len(plan) == 3 and segment.numbers["lr"] == pytest.approx([0.02] * 3) and len(segment.streams["u"].samples) == 192, "none is left alone"
    assert not len(method(10).plan(Worker(0, 300), {"label": found["label"], "kept": np.zeros(300, bool)})), "nothing kept: no step"
    assert len(method(10).plan(Worker(640, 0), {})) == 110
    assert len(method(10, warmup_rounds=1).plan(Worker(640, 0), {})) == 5010
    assert len(method(10, warmup_rounds=1).plan(Worker(640, 0, round=1), {})) == 110
    assert len(method(10).plan(Worker(640, 0, steps=7), {})) == 7
    assert len(method(10).plan(Worker(65, 0, epochs=1), {})) == 1
    assert not len(method(10).plan(Worker(1, 0), {})), "one sample alone"
    assert not len(method(10).plan(Worker(0, 300), {"label": found["label"], "kept": np.arange(300) == 7}))
    assert method(10, warmup_rounds=1).begin(Worker(10, 300)) == {}, "the warm-up is the labels'"


def test_who_trained_more_weighs_more_and_counts_come_back(tmp_path):
    f = federated(tmp_path, clients=4, active=4, labelled_clients=2)
    f.server.draw(0)
    replies, own = f.clients.train(f._requests())
    updates = f._updates(replies, own)
    n = [u["counts"].sum().item() for u in updates]
    assert len(set(n)) > 1 and all(x == int(x) > 0 for x in n)
    by_hand = sum(x * u["model"].groups["parameters"].double() for x, u in zip(n, updates)) / sum(n)
    f.method.merge(f.server, updates)
    assert torch.allclose(f.server.model.groups["parameters"].double(), by_hand, atol=1e-6)
    assert torch.equal(f.server["counts"], sum(u["counts"] for u in updates))
    expected = f.method.thresholds(f.server["counts"])
    message = f.method.down(f.server, 0)
    assert torch.equal(message["cuts"], expected[0]) and torch.equal(message["tail"], expected[1])


def test_a_run_ends_in_a_round_whose_model_is_the_one_to_fall_back_on(tmp_path):
    """Both are then one State, of which a checkpoint once wanted two."""
    result = fallow.run(**TINY | {"method": "cbafed", "labels": "some", "rounds": 2, "warmup_rounds": 2, "out": tmp_path})
    assert len(result.metrics) == 2
