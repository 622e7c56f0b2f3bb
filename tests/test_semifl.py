"""SemiFL against the worked numbers and invariants, and static batch norm."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from safetensors.torch import load_file
from torch import nn

import fallow
from fallow import models
from fallow.engine import feed, statistics
from fallow.engine.eager import Eager
from fallow.engine.keep import Keep
from fallow.engine.nets import NetHandle
from fallow.engine.optim import Optimizer, clip_
from fallow.engine.party import SERVER, Job, Party, run_step
from fallow.engine.policies import STATIC
from fallow.engine.round import Federated
from fallow.engine.server import Server
from fallow.engine.simulation import Simulation
from fallow.engine.slot import Slot
from fallow.engine.strict import relaxed, strict
from fallow.methods import semifl
from fallow.methods.base import Update, Updates
from fallow.methods.semifl import SemiFL
from fallow.methods.state import State
from fallow.runs import prepare
from fallow.runs.settings import resolve
from fallow.schedule import Schedule

CPU = torch.device("cpu")
SMALL = {"label_count": 50, "clients": 4, "unlabelled_ratio": 0.15, "rounds": 3, "norm": "bn", "slots": 1, "device": "cpu", "defaults": "paper"}


def federated(tmp: Path, **keys: Any) -> Federated:
    method, options, source, federation = prepare(None, SMALL | {"method": "semifl", "labels": "server", "batch": 10} | keys)
    simulation = Simulation(options, method(options, len(source.classes)), source, federation)
    return Federated(simulation, Eager(simulation), Keep(tmp, 1e9, simulation.kit.layouts(), CPU))


def rounds(f: Federated, n: int = 2) -> list[dict[str, Any]]:
    return [f.round(i) for i in range(n)]


def parameters(f: Federated) -> torch.Tensor:
    return f.server.model.groups["parameters"]


def a_party(f: Federated, client: int = 0) -> Party:
    f.server.draw(0)
    f.server["model"] = f.model()
    slot = Slot(f.kit)
    slot.load({"model": f.server.model}, {}, 0.0)
    return Party(f.simulation.site(client), slot, Job(client, 0, {"model": f.server.model}))


def planned(f: Federated, party: Party) -> Any:
    found = {k: v.numpy() for k, v in f.method.begin(party).items()}
    return f.method.plan(party, found), found


def batches(f: Federated, party: Party, plan: Any) -> list[Any]:
    return [s.batch() for s in feed.steps(party.site, plan, party.key("plan"), lambda *a: {})]


def numbered(x: float) -> State:
    """A model with one parameter."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, x)
    return State.of(net)


# -- optimisers and schedule --------------------------------------------------------------------------------------------
def test_local_step() -> None:
    o = SimpleNamespace(optimizer="sgd", momentum=0.9, nesterov=True, weight_decay=5e-4)
    w = torch.tensor([1.0, -2.0])
    optimizer, lr = Optimizer(o, w), torch.tensor(0.03)
    optimizer.step(w, clip_(torch.tensor([3.0, 4.0]), 1.0, None), lr)
    assert w.tolist() == pytest.approx([0.9657715, -2.0455430], abs=1e-6)
    assert optimizer.tensors["momentum"].tolist() == pytest.approx([0.6005, 0.7990], abs=1e-6)
    optimizer.step(w, clip_(torch.tensor([0.3, 0.4]), 1.0, None), lr)
    assert w.tolist() == pytest.approx([0.9340518, -2.0877004], abs=1e-6)
    assert optimizer.tensors["momentum"].tolist() == pytest.approx([0.8409328, 1.1180770], abs=1e-6)


def a_server(**keys: Any) -> Server:
    options = SimpleNamespace(server_lr=1.0, server_momentum=0.5)
    return Server(SimpleNamespace(options=SimpleNamespace(**(vars(options) | keys))), None)  # type: ignore[arg-type]


def merged(server: Server, sent: float, clients: list[float], beside: float | None = None, base: str = "distributed") -> float:
    """One aggregation as the engine makes it: weights uniform, or half to a server that trained beside."""
    method = SemiFL(SemiFL.Options(method="semifl", average_base=base), 10)  # type: ignore[arg-type]
    server["model"] = server.sent = numbered(sent)
    updates = Updates(Update(model=numbered(x)) for x in clients)
    for k, u in enumerate(updates):
        u.client = k
    if beside is not None:
        updates.insert(0, Update(model=numbered(beside)))
        updates[0].weight = max(1, len(clients))
    method.merge(server, updates)
    return float(server.model["weight"])


def test_server_momentum() -> None:
    server = a_server()
    assert merged(server, 1.0, [0.7, 0.9]) == pytest.approx(0.8)
    assert merged(server, 0.75, [0.70]) == pytest.approx(0.60)
    assert merged(server, 0.62, [0.62, 0.60, 0.64]) == pytest.approx(0.545)
    assert merged(a_server(server_momentum=0.0), 3.0, [0.7]) == pytest.approx(0.7)  # I2
    assert merged(a_server(), 3.0, [3.0, 3.0]) == 3.0


def test_server_beside_and_the_base_of_momentum() -> None:
    server = a_server()
    assert merged(server, 0.2, [0.7, 0.5], beside=0.9, base="trained") == pytest.approx(0.75)
    assert merged(server, 0.3, [0.8, 0.8], beside=0.8, base="trained") == pytest.approx(0.725)
    for base, want in {"trained": [0.5, 0.75, 0.875, 0.9375], "distributed": [0.5, 1.25, 2.125, 3.0625]}.items():
        server, w, seen = a_server(), 0.0, []
        for _ in want:  # idle clients, the server moves by 1 each round
            w = merged(server, w, [w, w], beside=w + 1, base=base)
            seen.append(w)
        assert seen == pytest.approx(want), base


def test_momentum_around_group_means() -> None:
    """I14 with ten idle clients in two groups (13.5.4): the server weighs 1/6, and the drift tends to s/3 or -2s/3."""
    first = {"trained": [0.1667, -0.0833, -0.5417, -1.1042], "distributed": [0.1667, 0.4167, 0.7083, 1.0208]}
    for base, drift in {"trained": -2 / 3, "distributed": 1 / 3}.items():
        keys = {"method": "semifl", "labels": "server", "server_turn": "beside", "clients": 10, "average": "grouped", "groups": 2}
        method = SemiFL(SemiFL.Options(**keys, group_models=False, average_base=base), 10)
        server, w, seen = a_server(), 0.0, []
        server.active = list(range(10))
        for _ in range(30):
            server["model"] = server.sent = numbered(w)
            updates = Updates(Update(model=numbered(w + 1 if k == 0 else w)) for k in range(11))
            for k, u in enumerate(updates):
                u.client = k - 1 if k else None
            method.merge(server, updates)
            w = float(server.model["weight"])
            seen.append(w)
        assert seen[:4] == pytest.approx(first[base], abs=5e-5), base
        assert seen[-1] - seen[-2] == pytest.approx(drift, abs=1e-4), base


def test_cosine() -> None:
    s = Schedule.parse("cosine")
    lr = [0.03 * s.factor(t, 0, 5, 800) for t in range(800)]
    want = {1: 0.03, 2: 0.0299998843, 100: 0.0288806280, 401: 0.015, 600: 0.0044351320}
    assert [lr[t - 1] for t in want] == pytest.approx(list(want.values()), abs=1e-10)
    assert [lr[798], lr[799]] == pytest.approx([4.6263533e-7, 1.1565928e-7], rel=1e-6)
    assert sum(lr) == pytest.approx(12.015)
    assert all(a > b for a, b in pairwise(lr))
    assert 0.03 * Schedule.parse("cosine,horizon=800").factor(99, 0, 5, 100) == pytest.approx(lr[99])


# -- the client's step ---------------------------------------------------------------------------------------------------
class Stub:
    """A slot whose net answers with given logits."""

    def __init__(self, *answers: torch.Tensor | None):
        self.answers, self.model, self.inputs = answers, self, ()

    def apart(self, *parts: Any, **_: Any) -> tuple[Any, ...]:
        self.inputs = parts
        return self.answers

    def descend(self, loss: torch.Tensor, when: Any = None) -> None:
        self.loss = float(loss)

    def log(self, **_: Any) -> None: ...


def mixed_loss(lam: float, y_fix: list[int], y_mix: list[int], **keys: Any) -> tuple[float, Stub]:
    strong, mixed = torch.tensor([[2.0, 0, 0], [0, 1, 0]]), torch.tensor([[1.0, 0, 0], [0, 0, 2]])
    weak = torch.arange(8.0).view(2, 1, 2, 2)
    part = {"rows": None, "strong": weak, "weak": weak}
    b = SimpleNamespace(
        x=feed.Part(None), lam=torch.tensor(lam),
        fix=SimpleNamespace(**part, y=torch.tensor(y_fix)), mix=SimpleNamespace(weak=10 * weak, y=torch.tensor(y_mix)),
    )  # fmt: skip
    s = Stub(None, strong, mixed)
    SemiFL(SemiFL.Options(method="semifl", **keys), 3).step(s, b)
    return s.loss, s


def test_loss() -> None:
    loss, s = mixed_loss(0.3, [0, 1], [2, 2])
    assert loss == pytest.approx(1.4409895, abs=1e-6)
    assert torch.allclose(s.inputs[2], 0.3 * s.inputs[1] + 0.7 * 10 * s.inputs[1])
    assert mixed_loss(0.3, [0, 1], [2, 2], mix_weight=0)[0] == pytest.approx(0.3954948, abs=1e-6)
    assert mixed_loss(1.0, [0, 1], [2, 2])[0] == pytest.approx(0.3954948 + 1.3954947, abs=1e-6)
    assert mixed_loss(0.0, [0, 1], [2, 2])[0] == pytest.approx(0.3954948 + 0.8954947, abs=1e-6)


def test_weight_of_the_mix_loss() -> None:
    assert mixed_loss(0.3, [0, 1], [2, 2], mix_weight=0.5)[0] == pytest.approx(0.3954948 + 0.5 * 1.0454947, abs=1e-6)


def test_loss_with_labels_at_the_client() -> None:
    """15.5: L = L_s + L_fix + L_mix, every term a batch mean. L_s is that of 12.3's worked step, 0.395495."""
    keys, y = {"method": "semifl", "labels": "clients"}, torch.tensor([0, 1])
    strong, mixed = torch.tensor([[2.0, 0, 0], [0, 1, 0]]), torch.tensor([[1.0, 0, 0], [0, 0, 2]])
    labelled, image = torch.tensor([[1.0, 0, 0], [0, 2, 0]]), torch.zeros(2, 1, 2, 2)
    b = SimpleNamespace(
        x=feed.Part({"labelled": image, "y": y}), lam=torch.tensor(0.3),
        fix=SimpleNamespace(rows=None, strong=image, weak=image, y=y), mix=SimpleNamespace(weak=image, y=torch.tensor([2, 2])),
    )  # fmt: skip
    s = Stub(labelled, strong, mixed)
    SemiFL(SemiFL.Options(**keys), 3).step(s, b)
    assert s.loss == pytest.approx(0.395495 + 1.4409895, abs=2e-6)


class Echo:
    """A slot whose net answers with what it is shown."""

    def __init__(self) -> None:
        self.model = lambda x, **_: x

    def descend(self, loss: torch.Tensor, when: Any = None) -> None:
        self.loss, self.when = float(loss), when

    def judge(self, *_: Any, **__: Any) -> None: ...

    def log(self, **_: Any) -> None: ...


def test_loss_by_batch() -> None:
    """labeller=current (13.5.3) on the logits of 11.3's example, over the accepted: 0.907606; L_s (12.3) comes on top."""
    weak = torch.tensor([[4, 0, 0], [1, 0, 0], [0, 0, 5], [0, 3.6, 0]])
    u = feed.Part({"weak": weak, "strong": torch.tensor([[2.0, 1, 0], [0, 1, 0], [0, 2, 1], [1, 1, 1]])})
    x = feed.Part({"labelled": torch.tensor([[1.0, 0, 0], [0, 2, 0]]), "y": torch.tensor([0, 1])})
    for part, threshold, want in ((feed.Part(None), 0.95, 0.907606), (x, 0.95, 0.907606 + 0.395495), (x, 1.1, 0.395495)):
        s = Echo()
        SemiFL(SemiFL.Options(method="semifl", labeller="current", threshold=threshold), 3).relabel(s, SimpleNamespace(x=part, u=u))
        assert s.loss == pytest.approx(want, abs=2e-6)
        assert (s.when is None) == bool(part)


def test_sets(tmp_path: Path) -> None:
    """13.3.2, I5: the fix set has the confident samples and no others; the mix set has partners from all of them."""
    f = federated(tmp_path, epochs=6)
    rounds(f, 1)
    party = a_party(f)
    p = party.predict(party.model, party.unlabelled, "weak").softmax(1).max(1).values
    party._predictions = 0
    threshold = float(p.sort().values[len(p) // 2 - 1 : len(p) // 2 + 1].mean())
    f.method = f.kit.method = SemiFL(f.kit.options.model_copy(update={"threshold": threshold}), 10)
    plan, _ = planned(f, party)
    sure = set((p >= threshold).nonzero()[:, 0].tolist())
    assert len(sure) == len(p) - len(p) // 2
    made = batches(f, party, plan)
    assert len(made) == 6 * math.ceil(len(sure) / 10)
    fix, mix = (np.concatenate([getattr(b, n).index.numpy() for b in made]) for n in ("fix", "mix"))
    assert np.bincount(fix, minlength=len(p)).tolist() == [6 * (k in sure) for k in range(len(p))]
    assert len(mix) == len(fix) and 0.3 < np.isin(mix, list(sure)).mean() < 0.7


@pytest.mark.parametrize("a", [0.75, 3.0])
def test_ratios_of_mixup(tmp_path: Path, a: float) -> None:
    """Beta(a, a): mean 1/2, variance 1 / (4 (2 a + 1)), symmetric."""
    f = federated(tmp_path, threshold=0.0, mixup=a, epochs=800)
    lam = planned(f, a_party(f))[0].segments[0].numbers["lam"]
    assert len(lam) > 3000
    assert lam.mean() == pytest.approx(0.5, abs=0.025)
    assert lam.var() == pytest.approx(1 / (4 * (2 * a + 1)), rel=0.1)
    assert ((lam - 0.5) ** 3).mean() == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("resample", ["per-access", "per-round"])
def test_plan(tmp_path: Path, resample: str) -> None:
    """I4, I5: all pass at tau 0; mix labels are the frozen labels of the drawn samples; sizes agree."""
    f = federated(tmp_path, threshold=0.0, epochs=3, mix_resample=resample)
    party = a_party(f)
    plan, found = planned(f, party)
    n = len(party.unlabelled)
    assert len(plan) == 3 * math.ceil(n / 10)
    drawn = []
    for b in batches(f, party, plan):
        assert len(b.fix.y) == len(b.mix.y)
        assert np.array_equal(b.fix.y.numpy(), found["label"][b.fix.index.numpy()])
        assert np.array_equal(b.mix.y.numpy(), found["label"][b.mix.index.numpy()])
        drawn.append(b.mix.index.numpy())
    passes = [sorted(np.concatenate(drawn[k :: 1][: len(drawn) // 3])) for k in (0, len(drawn) // 3, 2 * len(drawn) // 3)]
    assert (passes[0] == passes[1] == passes[2]) == (resample == "per-round")
    assert len(set(passes[0])) < n  # with replacement
    lam = [float(b.lam) for b in batches(f, party, plan)]
    assert 0 <= min(lam) < 0.5 < max(lam) <= 1


def shifts(view: torch.Tensor, image: torch.Tensor) -> set[tuple[int, int]]:
    """Every crop of the reflect-padded image that equals the view."""
    padded = F.pad(image[None], (1, 1, 1, 1), mode="reflect")[0]
    return {(i, j) for i in range(3) for j in range(3) if torch.allclose(padded[:, i : i + 8, j : j + 8], view, atol=1e-5)}


@pytest.mark.parametrize("when", ["before", "after"])
def test_mixture_is_augmented_as_one(tmp_path: Path, when: str) -> None:
    """Weak views are linear, so augmenting after mixing means the same crop for both images."""
    f = federated(tmp_path, threshold=0.0, mix_augment=when)
    party = a_party(f)
    same = []
    for b in batches(f, party, planned(f, party)[0]):
        for part in (b.fix, b.mix):
            rows = party.unlabelled.rows[part.index.numpy()]
            part.plain = party.site.plain(rows)
        same += [bool(shifts(v, x) & shifts(w, y)) for v, x, w, y in zip(b.fix.weak, b.fix.plain, b.mix.weak, b.mix.plain)]
    assert all(same) == (when == "after")


def test_labels_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    f = federated(tmp_path)
    rounds(f, 1)
    party = a_party(f)
    z = party.predict(party.model, party.unlabelled, "weak")
    party._predictions = 0
    assert torch.allclose(z, party.predict(party.model, party.unlabelled, "weak", batch=7), atol=1e-4)


@pytest.mark.usefixtures("in_double")
def test_step_is_two_batches(tmp_path: Path) -> None:
    """The step in the engine against plain torch: two forwards in train mode, SGD by torch, buffers untouched."""
    f = federated(tmp_path, threshold=0.0, weight_decay=5e-4, clip=1.0)
    party = a_party(f)
    slot = party.slot
    net = models.build("small-cnn", 10, 1, norm="bn", size=8)
    net.load_state_dict({k: v for k, v in f.server.model.tensors().items()} | {k: v for k, v in net.state_dict().items() if "num_" in k})
    sgd = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9, nesterov=True, weight_decay=5e-4)
    before = slot.model.flat.groups["statistics"].clone()
    slot.lr["model"].fill_(0.03)
    for b in batches(f, party, planned(f, party)[0])[:3]:
        mixed, lam = b.lam * b.fix.weak + (1 - b.lam) * b.mix.weak, float(b.lam)
        loss = F.cross_entropy(net(b.fix.strong), b.fix.y)
        zm = net(mixed)
        loss = loss + lam * F.cross_entropy(zm, b.fix.y) + (1 - lam) * F.cross_entropy(zm, b.mix.y)
        sgd.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        sgd.step()
        f.method.step(slot, b)
    for name, p in net.named_parameters():
        assert torch.allclose(slot.model.weights[name], p, atol=1e-9), name
    assert torch.equal(slot.model.flat.groups["statistics"], before)  # I7
    sent = f.method.end(SimpleNamespace(model=slot.model, made=1))  # type: ignore[arg-type]
    assert list(sent["model"].groups) == ["parameters"]  # type: ignore[index]


@pytest.mark.usefixtures("in_double")
def test_labelling_by_batch_filters_before_the_loss(tmp_path: Path) -> None:
    """labeller=current: one step on the confident samples only, as if the others were not there (13.5.3)."""
    f = federated(tmp_path, labeller="current")
    rounds(f, 1)
    party = a_party(f)
    slot, net = party.slot, models.build("small-cnn", 10, 1, norm="bn", size=8)
    net.load_state_dict({k: v for k, v in slot.model.flat.tensors().items()})
    b = batches(f, party, planned(f, party)[0])[0]
    p = net.train()(b.u.weak).softmax(1).detach()
    threshold = float(p.max(1).values.sort().values[4:6].mean())
    method = SemiFL(f.kit.options.model_copy(update={"threshold": threshold}), 10)
    sure = p.max(1).values >= threshold
    assert int(sure.sum()) == 5
    F.cross_entropy(net(b.u.strong[sure]), p.argmax(1)[sure]).backward()
    slot.lr["model"].fill_(0.03)
    before = {k: v.clone() for k, v in slot.model.weights.items()}
    method.relabel(slot, b)
    for name, q in net.named_parameters():  # first step: g + 0.9 g
        assert torch.allclose(before[name] - slot.model.weights[name], 0.03 * 1.9 * q.grad, atol=1e-9), name
    now = slot.model.flat.groups["parameters"].clone()
    SemiFL(f.kit.options.model_copy(update={"threshold": 1.1}), 10).relabel(slot, b)
    assert torch.equal(slot.model.flat.groups["parameters"], now)  # nothing passes: no step, no momentum


# -- whole rounds --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_nothing_passes_is_the_server_alone(tmp_path: Path, norm: str) -> None:
    """I1, I4, 17.3: bit for bit, and nobody sends or keeps anything."""
    f = federated(tmp_path / "a", threshold=1.1, norm=norm)
    rows = rounds(f)
    alone = federated(tmp_path / "b", method="fedavg", server_turn="after", statistics="static", norm=norm)
    for row, other in zip(rows, rounds(alone)):
        assert row["accuracy"] == other["accuracy"]
        assert row["bytes_up"] == row["clients"] == row["label_ratio"] == 0
    assert torch.equal(parameters(f), parameters(alone))
    assert "momentum" not in f.server
    assert not f.keep.version


def test_idle_round_leaves_momenta_alone(tmp_path: Path) -> None:
    """I12: clients skipped for an empty fix set keep their optimisers, the server its momentum, bit for bit."""
    f = federated(tmp_path, threshold=0.0)
    rounds(f, 1)
    momentum = f.server["momentum"].clone()
    kept = {k: {n: t["momentum"]["head.weight"].clone() for n, t in f.keep.read(k).items()} for k in range(4)}
    f.method = f.kit.method = SemiFL(f.kit.options.model_copy(update={"threshold": 1.1}), 10)
    assert f.round(1)["clients"] == 0
    assert torch.equal(f.server["momentum"], momentum)
    for k, record in kept.items():
        assert all(torch.equal(f.keep.read(k)[n]["momentum"]["head.weight"], t) for n, t in record.items())
        assert list(record) == ["model/optimizer"]


@pytest.mark.parametrize("how", ["keep", "reset"])
@pytest.mark.usefixtures("in_double")
def test_momentum_of_the_servers_own_steps(tmp_path: Path, how: str) -> None:
    """13.2: with one step a round the buffer after two is 0.9 g1 + g2, or g2 if it starts anew; the second weights tell which."""
    f = federated(tmp_path, threshold=1.1, server_steps=1, server_epochs=None, server_optimizer_state=how, clip=None, weight_decay=0.0,
                  schedule="constant")  # fmt: skip
    w = [parameters(f).clone()]
    for number in range(2):
        f.round(number)
        w.append(parameters(f).clone())
    g1 = (w[0] - w[1]) / (0.03 * 1.9)  # first step: w - lr (g + 0.9 g)
    slot = Slot(f.kit)
    party = Party(f.simulation.site(SERVER), slot, Job(SERVER, 1, {"model": f.server.model}))
    slot.load({"model": State(f.server.model.layout, {"parameters": w[1]})}, {}, 0.0)
    for step in feed.steps(party.site, f.method.plan(party, {}), party.key("plan"), lambda *a: {}):
        b = step.batch()
        loss = torch.nn.functional.cross_entropy(slot.model(b.x.labelled), b.x.y)
        g2 = torch.cat([g.flatten() for g in slot.gradient(loss, slot.model).values()])
    buffer = g2 + 0.9 * flat_like(f, g1) if how == "keep" else g2
    expected = 0.03 * (g2 + 0.9 * buffer)
    assert torch.allclose(flat_like(f, w[1] - w[2]), expected, atol=1e-9)


def flat_like(f: Federated, parameters: torch.Tensor) -> torch.Tensor:
    """A flat parameter tensor without gaps, tensor after tensor."""
    found = State(f.server.model.layout, {"parameters": parameters})
    return torch.cat([found[n].flatten() for n in found.layout.names("parameters")])


def test_traffic(tmp_path: Path) -> None:
    f = federated(tmp_path, threshold=0.0)
    row = rounds(f, 1)[0]
    net = f.kit.net()
    assert row["bytes_up"] == 4 * sum(4 * p.numel() for p in net.module.parameters())
    assert row["bytes_down"] - row["bytes_up"] == 4 * sum(4 * b.numel() for b in net.module.buffers() if b.is_floating_point())


def test_traffic_of_wide_resnets() -> None:
    """13.9, without PyTorch's counters."""
    for name, classes, sizes in (("wrn-28-2", 10, (5_870_440, 14_464)), ("wrn-28-8", 100, (93_604_048, 57_472))):
        net = NetHandle(models.build(name, classes, 3, norm="sbn"), CPU, STATIC)
        assert net.state.nbytes == sizes[0]
        assert len(net.state.tensors()) == 80
        assert net.flat.only("parameters", "statistics").nbytes == sum(sizes)


def test_hidden_labels_change_nothing(tmp_path: Path) -> None:
    f, g = federated(tmp_path / "a", threshold=0.16), federated(tmp_path / "b", threshold=0.16)
    g.simulation.truth = g.simulation.truth.roll(7)
    a, b = rounds(f), rounds(g)
    assert torch.equal(parameters(f), parameters(g))
    assert a[1]["label_ratio"] == b[1]["label_ratio"] > 0
    assert a[1]["label_accuracy"] != b[1]["label_accuracy"]


def test_how_much_a_client_has_does_not_matter(tmp_path: Path) -> None:
    """I3: clients of different sizes weigh the same, and the model is the plain mean of theirs."""
    f = federated(tmp_path, threshold=0.0, server_momentum=0.0, server_turn="before", partition="dirichlet-capped:0.3,min_size=5")
    assert len({len(c.unlabelled) for c in f.simulation.federation.clients}) > 1
    f.server.draw(0)
    f.server["model"] = f.model()
    f.server.sent = f.server.model
    updates = f._updates(*f.clients.train(f._requests()))
    f.method.merge(f.server, updates)
    want = sum(u["model"].groups["parameters"].double() for u in updates) / 4
    assert len(updates) == 4 and torch.allclose(parameters(f).double(), want, atol=1e-7)


def test_its_defaults() -> None:
    """The table before 13.1, as far as a method sets it; recipes set the rest."""
    _, o = resolve({}, {"method": "semifl", "labels": "server"})
    assert (o.threshold, o.mixup, o.mix_weight, o.mix_resample, o.mix_augment) == (0.95, 0.75, 1.0, "per-access", "before")
    assert (o.labeller, o.server_turn, o.statistics, o.sbn, o.sbn_data, o.sbn_order) == ("received", "after", "static", "cumulative", "all", "authors")
    assert (o.optimizer_state, o.weights, o.server_lr, o.server_momentum, o.average_base) == ("keep", "uniform", 1.0, 0.5, "distributed")
    assert (o.optimizer, o.lr, o.momentum, o.nesterov) == ("sgd", 0.03, 0.9, True)


def test_readings() -> None:
    _, o = resolve({}, {"method": "semifl", "labels": "server", "reading": "paper"})
    assert (o.server_turn, o.server_momentum, o.mix_resample, o.mix_augment) == ("before+last", 0.0, "per-round", "after")
    _, o = resolve({}, {"method": "semifl", "labels": "server", "reading": "released"})
    assert (o.server_turn, o.server_momentum, o.statistics, o.weights) == ("after", 0.5, "static", "uniform")
    _, o = resolve({}, {"method": "semifl", "labels": "clients"})
    assert o.statistics == "batch"


@pytest.mark.usefixtures("in_double")
def test_labels_at_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """15.5: whole sets; filling batches up changes nothing; a client without accepted samples trains on its labels."""
    keys = {"labels": "clients", "batch": "full", "epochs": 3, "threshold": 0.17}
    f = federated(tmp_path / "a", **keys)
    row = rounds(f, 1)[0]
    assert 0 < row["label_ratio"] < 1 and row["clients"] == 4
    monkeypatch.setattr(semifl, "FULL", 1)
    g = federated(tmp_path / "b", **keys)
    rounds(g, 1)
    assert torch.allclose(parameters(f), parameters(g), atol=1e-9)
    h = federated(tmp_path / "c", **keys | {"threshold": 1.1})
    only = federated(tmp_path / "d", method="fedavg", weights="uniform", statistics="batch", optimizer_state="keep",
                     server_momentum=0.5, **{k: v for k, v in keys.items() if k != "threshold"})  # fmt: skip
    rounds(h), rounds(only)
    assert torch.equal(parameters(h), parameters(only))


@pytest.mark.usefixtures("in_double")
def test_debias(tmp_path: Path) -> None:
    """Labels and acceptance from p / mean p (15.5)."""
    f = federated(tmp_path, debias=True, threshold=0.4)
    rounds(f, 1)
    party = a_party(f)
    found = f.method.begin(party)
    party._predictions = 0
    p = party.predict(party.model, party.unlabelled, "weak").softmax(1)
    q = p / p.mean(0)
    q = q / q.sum(1, keepdim=True)
    assert torch.equal(found["label"], q.argmax(1))
    assert torch.equal(found["sure"], q.max(1).values >= 0.4)


@pytest.mark.parametrize("keys", [
    {}, {"mix_weight": 0.0}, {"labeller": "current", "debias": True}, {"labels": "clients", "batch": "full", "debias": True},
    {"method": "feddb", "labels": "clients"}, {"method": "feddb", "labels": "clients", "reading": "paper"},
    {"method": "feddb", "labels": "clients", "app_u_over": "all", "app_u_order": "shuffled"},
    {"method": "fixmatch", "labels": "clients", "labeller": "received", "debias": True},
    {"method": "uda", "labels": "clients", "labeller": "local-ema", "debias": True},
    {"method": "fixmatch", "labels": "clients", "debias": True, "app_u_source": "running"},
    {"method": "feddb", "labels": "clients", "full_batch_chunk": 100},
])  # fmt: skip
def test_begin_and_step_are_tensor_code(tmp_path: Path, keys: dict[str, Any]) -> None:
    f = federated(tmp_path, **({"threshold": 0.0} | keys | ({"batch": "full"} if keys.get("method") == "feddb" else {})))
    party = a_party(f)
    for net in party.slot.nets.values():
        net.load(f.server.model)
    make = f.kit.view

    def view(*args: Any) -> torch.Tensor:
        with relaxed():  # making views is the engine's
            return make(*args)

    f.kit.view = view  # type: ignore[method-assign]
    with strict(copies=True):
        found = f.method.begin(party)
    plan = f.method.plan(party, {k: v.numpy() for k, v in found.items()})
    steps = list(feed.steps(party.site, plan, 1, lambda made, n, *_: {"lr/model": torch.full((n,), 0.03), "dropout/key": torch.arange(n)}))
    assert steps
    with strict():
        run_step(party.slot, steps[0])


@pytest.mark.parametrize("keys", [
    {"labeller": "received"}, {"labeller": "local-ema"}, {"debias": True}, {"labeller": "received", "debias": True, "method": "uda"},
])  # fmt: skip
def test_labeller_of_other_methods(tmp_path: Path, keys: dict[str, Any]) -> None:
    f = federated(tmp_path, **({"method": "fixmatch", "labels": "clients", "threshold": 0.0, "epochs": 1} | keys))
    row = rounds(f)[1]
    assert row["label_ratio"] == 1.0
    plain = federated(tmp_path, **({"method": "fixmatch", "labels": "clients", "threshold": 0.0, "epochs": 1} | {k: v for k, v in keys.items() if k == "method"}))
    rounds(plain)
    assert not torch.equal(parameters(f), parameters(plain))
    assert ("labeller" in f.keep.read(0)) == (keys.get("labeller") == "local-ema")


# -- static batch norm ---------------------------------------------------------------------------------------------------
def one_norm() -> NetHandle:
    return NetHandle(nn.Sequential(nn.BatchNorm1d(1)), CPU, STATIC)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def mean_var(net: NetHandle) -> list[float]:
    return [float(net.module[0].running_mean), float(net.module[0].running_var)]  # type: ignore[index]


def layerwise(net: NetHandle, parties: list[list[torch.Tensor]], passes: int | str) -> None:
    norms = statistics.order(net, parties[0][0][:2])
    statistics.layerwise(net, norms, passes, lambda done, end: [statistics.moments_between(net, norms, done, end, batches) for batches in parties])


@torch.no_grad()
def test_statistics_of_six_numbers() -> None:
    net, first, second = one_norm(), column(1, 2, 3, 4), column(5, 6)
    statistics.cumulative(net, [first, second])
    assert mean_var(net) == pytest.approx([4.0, 1.0833333])
    statistics.cumulative(net, [first])  # I9: that batch's mean and unbiased variance; nothing left of the call before
    assert mean_var(net) == pytest.approx([2.5, 1.6666667])
    layerwise(net, [[first, second]], "exact")
    assert mean_var(net) == pytest.approx([3.5, 2.9166667])
    layerwise(net, [[first], [second]], 1)
    assert mean_var(net) == pytest.approx([3.5, 2.9166667])
    a, b = statistics.moments_of(first), statistics.moments_of(second)
    assert [a[0], *map(float, a[1:]), b[0], *map(float, b[1:])] == pytest.approx([4, 2.5, 5, 2, 5.5, 0.5])
    n, mu, m2 = statistics.merge_moments(a, b)
    assert (n, float(mu), float(m2)) == pytest.approx((6, 3.5, 17.5))
    statistics.cumulative(net, [column(7)])
    assert mean_var(net) == [7, 0]  # one position: variance 0 (section 18)


@torch.no_grad()
def test_pooled_statistics() -> None:
    """I8, with parties that differ much."""
    torch.manual_seed(0)
    x = torch.randn(60, 1, 8, 8) * torch.linspace(0.2, 3, 60).view(-1, 1, 1, 1) + torch.linspace(-2, 2, 60).view(-1, 1, 1, 1)
    net = NetHandle(models.build("small-cnn", 10, 1, norm="sbn"), CPU, STATIC)

    def made(parties: list[list[torch.Tensor]], passes: int | str = "exact") -> torch.Tensor:
        layerwise(net, parties, passes)
        return torch.cat([b.flatten() for b in net.module.buffers() if b.is_floating_point()])

    whole = made([[x]])
    inputs: dict[str, torch.Tensor] = {}
    norms = {n: m for n, m in net.module.named_modules() if n.startswith("norm")}
    hooks = [m.register_forward_hook(lambda m, x, _, n=n: inputs.__setitem__(n, F.batch_norm(x[0], m.running_mean, m.running_var))) for n, m in norms.items()]
    net(x, stats="running")
    for h in hooks:
        h.remove()
    for y in inputs.values():
        assert torch.allclose(y.mean((0, 2, 3)), torch.zeros(y.shape[1]), atol=1e-4)
        assert torch.allclose(y.var((0, 2, 3), correction=0), torch.ones(y.shape[1]), atol=1e-3)
    order = torch.randperm(60)
    assert torch.allclose(made([list(x[order].split(7))]), whole, atol=1e-5)
    parties = [list(x[:13].split(5)), list(x[13:20].split(5)), list(x[20:].split(5))]
    assert torch.allclose(made(parties), whole, atol=1e-5)
    assert torch.equal(made(parties, 3), made(parties))  # as many passes as layers
    once, twice = made(parties, 1), made(parties, 2)
    assert torch.allclose(once[:64], whole[:64], atol=1e-5) and not torch.allclose(once, whole, atol=1e-2)
    # two passes over three layers: round(1.5) = 2 layers from the first, the third sees those
    assert torch.equal(twice[: 64 + 128], once[: 64 + 128]) and not torch.allclose(twice, once, atol=1e-3)


@pytest.mark.usefixtures("in_double")
def test_static_statistics_of_a_run(tmp_path: Path) -> None:
    """The authors' pass against torch's own cumulative norm; caching; whose data."""
    f = federated(tmp_path)
    w, active = f.simulation, [0, 2]
    rows = statistics.data_order(w, active)
    labelled = w.federation.server.labelled
    assert np.array_equal(rows[: len(labelled)], labelled) and np.array_equal(np.diff(w.labels[labelled]) >= 0, np.ones(len(labelled) - 1, bool))
    assert np.array_equal(np.sort(rows), np.arange(len(w.images))) and (np.diff(rows[len(labelled) :]) > 0).all()
    state = w.kit.initial().only("parameters")
    ours = statistics.static(w, f._inference, state, 0, active, f.clients.ask)
    assert torch.equal(ours.groups["statistics"], statistics.static(w, f._inference, state, 0, active, f.clients.ask).groups["statistics"])
    net = models.build("small-cnn", 10, 1, norm="bn", size=8)
    net.load_state_dict(copy.deepcopy(state.tensors()), strict=False)
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = None
    with torch.no_grad():
        for start in range(0, len(rows), 250):
            net.train()(w.plain(rows[start : start + 250]))
    for name, t in net.named_buffers():
        if t.is_floating_point():
            assert torch.allclose(ours[name], t, atol=1e-4), name
    for data, who in {"server": [w.federation.server], "active": [w.federation.server, w.federation.clients[0], w.federation.clients[2]]}.items():
        w.kit.options = w.kit.options.model_copy(update={"sbn_data": data})
        want = np.sort(np.concatenate([np.concatenate([h.labelled, h.unlabelled]) for h in who]))
        assert np.array_equal(np.sort(statistics.data_order(w, active)), want)
        assert np.array_equal(np.sort(np.concatenate(list(statistics._rows(w, active).values()))), want)
    w.kit.options = w.kit.options.model_copy(update={"sbn": "federated", "sbn_passes": "exact", "sbn_data": "active"})
    exact = statistics.static(w, f._inference, state, 0, active, f.clients.ask).groups["statistics"]
    w.kit.options = w.kit.options.model_copy(update={"sbn": "pooled"})
    assert torch.allclose(exact, statistics.static(w, f._inference, state, 0, active, f.clients.ask).groups["statistics"], atol=1e-5)


@pytest.mark.parametrize("data", ["all", "active"])
def test_how_often_one_tests_does_not_change_the_statistics_clients_get(data: str, tmp_path: Path) -> None:
    """Those of `active` are made by the round's own clients, not by whoever was there at the last test."""
    keys = TINY | {"method": "semifl", "labels": "server", "threshold": 0.12, "norm": "bn", "sbn_data": data, "rounds": 4, "clients": 6, "active": 2}
    often, once = (load_file(fallow.run(out=tmp_path, **keys | {"eval_every": n}).path / "model.safetensors") for n in (1, 4))
    assert all(torch.equal(often[k], once[k]) for k in often)
