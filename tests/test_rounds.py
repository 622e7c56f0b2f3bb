"""Rounds against a second computation in plain numpy, and worked numbers."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HERE

from fallow.config import Config
from fallow.data.federate import Federation, Holding
from fallow.data.readers.common import ImageSet
from fallow.data.sources import Source
from fallow.engine.clients import SERVER, Reply, Samples
from fallow.engine.feed import Batch, Part
from fallow.engine.optim import Optimizer, clip_
from fallow.engine.party import Tally
from fallow.engine.round import Federated
from fallow.engine.slot import Slot
from fallow.errors import UserError
from fallow.methods import find
from fallow.methods.base import Update
from fallow.methods.fixmatch import annealed
from fallow.methods.parts import losses
from fallow.methods.parts.averaging import mean
from fallow.methods.state import State
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder
from fallow.runs.settings import resolve

Arrays = dict[str, np.ndarray]
CLASSES, SIDE = 3, 8


def toy() -> Source:
    """Thirty noisy images of three classes, drawn here once and for all."""
    rng = np.random.default_rng(7)
    labels = np.arange(30) % CLASSES
    images = rng.integers(0, 120, (30, 1, SIDE, SIDE)).astype(np.uint8)
    for image, label in zip(images, labels):
        image[0, 2 * label : 2 * label + 3] += 100
    return Source("toy", ("a", "b", "c"), ImageSet(torch.from_numpy(images), torch.from_numpy(labels)),
                  ImageSet(torch.from_numpy(images[:6].copy()), torch.from_numpy(labels[:6].copy())), flip=False)  # fmt: skip


HELD = ((np.array([0, 4, 8, 3, 7]), np.array([9, 10, 11, 12, 13, 14, 15])), (np.array([1, 5, 2]), np.array([16, 17, 18, 19, 20])))


def set_up(path: Path, **keys: Any) -> Federated:
    """Two clients whose data is written down above, and a linear model."""
    method, options = resolve({}, {
        "model": f"{HERE / 'linear.py'}:Linear", "clients": 2, "rounds": 3, "device": "cpu", "slots": 1, "data": "toy",
    } | keys)  # fmt: skip
    nothing = np.zeros(0, np.int64)
    federation = Federation(Holding(nothing, nothing), tuple(Holding(*h) for h in HELD), nothing, ("0", "1"), {})
    path.mkdir(exist_ok=True)
    return Run(RunFolder(path), method, options, toy(), federation).federated


# -- the second computation: draws, batches, losses, gradients, optimiser, mean ------------------------------------------
def key(*parts: int | str) -> int:
    text = "\x1f".join(f"{type(p).__name__[0]}{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def bits(k: int, n: np.ndarray) -> np.ndarray:
    """SplitMix64 with its own unsigned integers."""
    with np.errstate(over="ignore"):
        x = np.uint64(k) + (n.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def order(k: int, n: int) -> np.ndarray:
    """A shuffle sorts draws, which are signed there."""
    return np.argsort(bits(k, np.arange(n)).view(np.int64), kind="stable")


def batches(k: int, n: int, size: int, count: int) -> list[np.ndarray]:
    """Passes over n samples in batches, the short last one kept."""
    out: list[np.ndarray] = []
    for number in range(count):
        shuffled = order(key(k, number), n)
        out += [shuffled[i : i + size] for i in range(0, n, size)]
    return out[:count]


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


class Reference:
    """Client by client and step by step, in float64. Only the pixels of views are taken from the product."""

    def __init__(self, f: Federated):
        self.o, self.kit, self.simulation = f.o, f.kit, f.simulation
        model = f.server.model
        self.model: Arrays = {n: model[f"last.{n}"].double().numpy().copy() for n in ("weight", "bias")}
        self.buffer: Arrays | None = None
        self.losses: list[float] = []

    def view(self, role: str, rows: np.ndarray, k: int, first: int) -> np.ndarray:
        keys = torch.from_numpy(bits(key(k, "view", role), np.arange(first, first + len(rows))).view(np.int64))
        return self.kit.views(role, self.simulation.images[rows], keys).flatten(1).double().numpy()

    def round(self, number: int) -> None:
        trained, counts = [], []
        for client, (labelled, unlabelled) in enumerate(HELD):
            trained.append(self.client(number, client, labelled, unlabelled))
            counts.append(len(labelled) + (len(unlabelled) if self.o.weights == "samples" else 0))
        shares = np.array(counts) / sum(counts)
        moved = {n: sum(s * t[n] for s, t in zip(shares, trained)) for n in self.model}
        if self.o.server_momentum:
            d = {n: self.model[n] - moved[n] for n in moved}
            if self.buffer is not None:
                d = {n: self.o.server_momentum * self.buffer[n] + d[n] for n in d}
            self.buffer = d
            moved = {n: self.model[n] - self.o.server_lr * d[n] for n in d}
        self.model = moved

    def client(self, number: int, client: int, labelled: np.ndarray, unlabelled: np.ndarray) -> Arrays:
        o, w = self.o, {n: v.copy() for n, v in self.model.items()}
        momentum = {n: np.zeros_like(v) for n, v in w.items()}
        plan = key(key(o.seed, "party", number, client, "plan"), 0)
        xs = batches(key(plan, "x"), len(labelled), o.batch, o.steps)
        us = batches(key(plan, "u"), len(unlabelled), self.unlabelled_batch(len(labelled), len(unlabelled)), o.steps)
        seen_x = seen_u = 0
        for step in range(o.steps):
            x = self.view("labelled", labelled[xs[step]], key(plan, "x"), seen_x)
            y = toy().train.labels.numpy()[labelled[xs[step]]]
            gradient, loss = self.supervised(w, x, y, (number * o.steps + step) / (o.rounds * o.steps))
            if o.method in ("fixmatch", "uda"):
                rows = unlabelled[us[step]]
                weak, strong = (self.view(v, rows, key(plan, "u"), seen_u) for v in ("weak", "strong"))
                more, extra = self.unsupervised(w, weak, strong)
                gradient = {n: gradient[n] + o.weight * more[n] for n in w}
                loss += o.weight * extra
            self.losses.append(loss)
            seen_x, seen_u = seen_x + len(xs[step]), seen_u + len(us[step])
            gradient = {n: g + o.prox * (w[n] - self.model[n]) for n, g in gradient.items()}
            norm = math.sqrt(sum((g**2).sum() for g in gradient.values()))
            scale = min(1.0, o.clip / (norm + 1e-6)) if o.clip else 1.0
            for n in w:
                g = gradient[n] * scale + o.weight_decay * w[n]
                momentum[n] = o.momentum * momentum[n] + g
                w[n] = w[n] - o.lr * (g + o.momentum * momentum[n] if o.nesterov else momentum[n])
        return w

    def unlabelled_batch(self, labelled: int, unlabelled: int) -> int:
        assert self.o.unlabelled_batch == "match-steps"
        return math.ceil(unlabelled / max(1, round(labelled / self.o.batch)))

    @staticmethod
    def backward(x: np.ndarray, dz: np.ndarray) -> Arrays:
        return {"weight": dz.T @ x, "bias": dz.sum(0)}

    def supervised(self, w: Arrays, x: np.ndarray, y: np.ndarray, share: float) -> tuple[Arrays, float]:
        p, t = softmax(x @ w["weight"].T + w["bias"]), np.eye(CLASSES)[y]
        true = (p * t).sum(1)
        kept = np.ones(len(y))
        if getattr(self.o, "tsa", "none") == "linear":
            kept = (true <= share * (1 - 1 / CLASSES) + 1 / CLASSES).astype(float)
        count = max(1.0, kept.sum())
        return self.backward(x, kept[:, None] * (p - t) / count), float((kept * -np.log(true)).sum() / count)

    def unsupervised(self, w: Arrays, weak: np.ndarray, strong: np.ndarray) -> tuple[Arrays, float]:
        o, z = self.o, weak @ w["weight"].T + w["bias"]
        p = softmax(z)
        assert (abs(p.max(1) - o.threshold) > 1e-5).all()  # else rounding would decide
        mask = (p.max(1) >= o.threshold).astype(float)
        target = np.eye(CLASSES)[p.argmax(1)] if o.method == "fixmatch" else softmax(z / o.temperature)
        q = softmax(strong @ w["weight"].T + w["bias"])
        entropy = 0.0 if o.method == "fixmatch" else (target * np.log(target)).sum(1)
        values = entropy - (target * np.log(q)).sum(1)
        count = len(mask) if o.reduction == "all" else max(1.0, mask.sum())
        return self.backward(strong, mask[:, None] * (q - target) / count), float((mask * values).sum() / count)


PLAIN = {"batch": 3, "steps": 2, "lr": 0.05}
CASES = {
    "fedavg": {"method": "fedavg"},
    "fedavg-plain-sgd": {"method": "fedavg", "momentum": 0.0},
    "fedavg-heavy-ball": {"method": "fedavg", "nesterov": False, "weight_decay": 0.01},
    "fedprox": {"method": "fedprox", "prox": 0.7, "steps": 3},
    "fixmatch": {"method": "fixmatch", "threshold": 0.42, "weight": 0.8},
    "fixmatch-clipped": {"method": "fixmatch", "threshold": 0.42, "clip": 0.5, "weight_decay": 0.001, "reduction": "selected"},
    "fixmatch-fedprox": {"method": "fixmatch", "threshold": 0.45, "prox": 0.5, "server_momentum": 0.5, "server_lr": 0.8},
    "uda": {"method": "uda", "threshold": 0.45},
    "uda-tsa": {"method": "uda", "threshold": 0.45, "temperature": 0.7, "tsa": "linear"},
}


@pytest.mark.parametrize("case", CASES)
def test_rounds_by_hand(case: str, tmp_path: Path) -> None:
    f = set_up(tmp_path, **PLAIN | CASES[case])
    by_hand = Reference(f)
    first = {n: v.copy() for n, v in by_hand.model.items()}
    for number in range(2):
        row = f.round(number)
        by_hand.round(number)
        assert row["loss"] == pytest.approx(np.mean(by_hand.losses), abs=1e-6)
        by_hand.losses.clear()
        assert row["label_ratio"] is None or 0 < row["label_ratio"] < 1
        for n, value in by_hand.model.items():
            np.testing.assert_allclose(f.server.model[f"last.{n}"].numpy(), value, rtol=0, atol=2e-6)
    assert max(abs(by_hand.model[n] - first[n]).max() for n in first) > 1e-3


# -- the worked numbers --------------------------------------------------------------------------------------------------
X = torch.tensor([[1, 0, -1], [0.2, 0.1, 0]], dtype=torch.float64)
Y = torch.tensor([0, 2])
WEAK = torch.tensor([[3, 0, -1], [0.5, 0.4, 0], [0, 2.5, 0], [-1, -1, 4]], dtype=torch.float64)
STRONG = torch.tensor([[1, 0.5, 0], [0, 0, 0], [0.3, 1, -0.2], [0, 1, 1.5]], dtype=torch.float64)


def near(found: Any, wanted: Any, by: float = 1e-10) -> None:
    torch.testing.assert_close(torch.as_tensor(found).double(), torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=by)


def a_method(name: str, **keys: Any) -> Any:
    method, options = resolve({}, {"method": name} | keys)
    return method(options, 3)


def test_losses_of_fixmatch() -> None:
    near(losses.cross_entropy(X, Y), 0.8047744063368122)
    near(WEAK.softmax(1).max(1).values, [0.9362395518765058, 0.398189341044936, 0.85898107867759, 0.986703291042268])
    for threshold, over_all, selected in ((0.8, 0.46773814424498517, 0.6236508589933135), (0.95, 0.15103265133418206, 0.6041306053367282)):
        method = a_method("fixmatch", threshold=threshold)
        label, sure = method.target(WEAK)
        assert label.tolist() == [0, 0, 1, 2]
        values = method.unsupervised(STRONG, label)
        near(values, [0.6802696706417346, 1.0986122886681098, 0.5865523010014776, 0.6041306053367282])
        near(losses.masked_mean(values, sure), over_all)
        near(losses.masked_mean(values, sure, "selected"), selected)
        near(losses.masked_mean(values, sure, "selected") * sure.double().mean(), over_all)  # 6.15.7
    assert a_method("fixmatch", threshold=0.0).target(torch.tensor([[2.0, 2.0, 0.0]]))[0].item() == 0  # ties: the lowest


def test_losses_of_uda() -> None:
    method = a_method("uda")
    target, sure = method.target(WEAK)
    assert sure.tolist() == [True, False, True, True]
    values = method.unsupervised(STRONG, target)
    near(values, [0.6753937354975469, 0.10565884047219502, 0.5623147142515542, 0.6040374396740428])
    near(losses.masked_mean(values, sure), 0.460436472355786)
    near(losses.masked_mean(losses.ce(STRONG, target), sure), 0.4687338839563546)


def test_training_signal_annealing() -> None:
    for share, linear, exp, log in (
        (0.25, 0.325, 0.12116597127040821, 0.7421456828258288),
        (0.5, 0.55, 0.17387649876150893, 0.9261235012384911),
        (0.0, 0.1, 0.10606415229917693, 0.1),
        (1.0, 1.0, 1.0, 0.9939358477008231),
    ):
        assert annealed("linear", share, 10) == pytest.approx(linear, abs=1e-12)
        assert annealed("exp", share, 10) == pytest.approx(exp, abs=1e-12)
        assert annealed("log", share, 10) == pytest.approx(log, abs=1e-12)
    method = a_method("uda", tsa="linear")
    for eta, loss in ((0.5, 1.201942848229244), (0.7, 0.8047744063368122)):
        near(method.labelled_loss(X, Batch({"x": Part({"y": Y})}, {"eta": torch.tensor(eta, dtype=torch.float64)})), loss)


def test_kl_and_soft_cross_entropy_pull_alike() -> None:
    z = STRONG.clone().requires_grad_()
    target = (WEAK / 0.4).softmax(1)
    one, other = (torch.autograd.grad(f(z), z)[0] for f in (lambda z: losses.kl(target, z).sum(), lambda z: losses.ce(z, target).sum()))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    sharp = (WEAK / 1e-4).softmax(1)  # T -> 0
    hard = torch.autograd.grad(losses.ce(z, WEAK.argmax(1)).sum(), z)[0]
    torch.testing.assert_close(torch.autograd.grad(losses.kl(sharp, z).sum(), z)[0], hard, rtol=0, atol=1e-12)


W0 = torch.tensor([[0.8, -0.4], [-0.2, 0.6], [0.1, 0.3]])
XS = {"labelled": torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "y": Y}
US = {"weak": torch.tensor([[3, -1], [0.5, 0.4], [-2, 3]]), "strong": torch.tensor([[2, -1.5], [1, 0], [-2.5, 2]])}


class Watched(Slot):
    """Remembers the loss it descended."""

    loss: torch.Tensor

    def descend(self, loss: Any, *nets: Any, when: Any = None, retain: bool = False) -> None:
        self.loss = loss
        super().descend(loss, *nets, when=when, retain=True)


def one_step(path: Path, name: str, x: bool = True, pulled_to: Any = None, **keys: Any) -> Watched:
    """The method's own step on the numbers of 6.5, plain SGD with lr 0.1."""
    easy = {"method": name, "model": f"{HERE / 'linear.py'}:Two", "momentum": 0.0, "nesterov": False}
    f = set_up(path, **easy | keys)
    slot = Watched(f.kit)
    start = State.of(slot.model.module)
    start["last.weight"].copy_(W0)
    start["last.bias"].zero_()
    received = start.clone()
    if pulled_to is not None:
        received["last.weight"].copy_(torch.tensor(pulled_to[0]))
        received["last.bias"].copy_(torch.tensor(pulled_to[1]))
    slot.load({"model": received}, {}, f.o.prox)
    slot.model.load(start)
    slot.lr["model"].fill_(0.1)
    u = US | {"_truth": torch.tensor([0, 1, 2])}
    f.method.step(slot, Batch({"x": Part(XS if x else None), "u": Part(u)}, {}))
    return slot


def now(slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
    state = slot.model.state
    return state["last.weight"], state["last.bias"]


def test_one_step_of_fixmatch(tmp_path: Path) -> None:
    slot = one_step(tmp_path, "fixmatch", threshold=0.8)
    near(slot.loss, 0.8345222734705366 + 0.11649419091370276, 1e-6)
    weight, bias = now(slot)
    near(weight, [[0.83086716751645, -0.41452272976767585], [-0.22940323904178322, 0.5918286771843613], [0.09853607152533331, 0.32269405258331446]], 1e-6)  # fmt: skip
    near(bias, [0.01764614072339124, -0.027384594720740674, 0.00973845399734944], 1e-6)
    judged = slot.logs["label/counts"].tolist()
    assert judged[:2] == [3, 2] and sum(judged[6:]) == 2  # two of three accepted
    assert judged[2:6] == [2, 1, 3, 1]  # one of the two right, and one of all three


def test_one_step_with_a_pull(tmp_path: Path) -> None:
    to = [[0.7, -0.4], [-0.2, 0.5], [0.1, 0.3]], [0.0, 0.1, 0.0]
    weight, bias = now(one_step(tmp_path, "fixmatch", threshold=0.8, prox=0.1, pulled_to=to))
    near(weight, [[0.82986716751645, -0.41452272976767585], [-0.22940323904178322, 0.5908286771843613], [0.09853607152533331, 0.32269405258331446]], 1e-6)  # fmt: skip
    near(bias, [0.01764614072339124, -0.026384594720740673, 0.00973845399734944], 1e-6)


def test_one_step_over_the_selected(tmp_path: Path) -> None:
    slot = one_step(tmp_path, "fixmatch", threshold=0.8, reduction="selected")
    near(slot.loss, 0.8345222734705366 + 0.17474128637055414, 1e-6)
    near(now(slot)[0][0, 0], 0.8347094253016532, 1e-6)


def test_one_step_of_uda(tmp_path: Path) -> None:
    slot = one_step(tmp_path, "uda")
    near(slot.loss, 0.8345222734705366 + 0.08855403867689615, 1e-6)
    weight, bias = now(slot)
    near(weight, [[0.8308031063399749, -0.4144746687144394], [-0.22748513800269762, 0.5902943475414621], [0.09668203166272281, 0.3241803211729772]], 1e-6)  # fmt: skip
    near(bias, [0.01761438321099569, -0.028149113745727157, 0.010534730534731477], 1e-6)


def test_an_empty_step(tmp_path: Path) -> None:
    """No labels and nothing accepted: the step is skipped, momentum and weight decay too, or taken."""
    keys = {"x": False, "threshold": 2.0, "weight_decay": 0.5, "momentum": 0.9}
    skipped = one_step(tmp_path, "fixmatch", **keys)
    assert torch.equal(now(skipped)[0], W0) and not skipped.optimizers["model"].tensors["momentum"].any()
    taken = one_step(tmp_path, "fixmatch", empty_step="take", **keys)
    torch.testing.assert_close(now(taken)[0], W0 * (1 - 0.1 * 0.5))
    labelled = one_step(tmp_path, "fixmatch", threshold=2.0)  # with labels it is always taken
    assert not torch.equal(now(labelled)[0], W0)


@pytest.mark.parametrize("name", ["fixmatch", "uda"])
def test_no_gradient_through_the_weak_view(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weak, strong = US["weak"].clone().requires_grad_(), US["strong"].clone().requires_grad_()
    monkeypatch.setitem(US, "weak", weak)
    monkeypatch.setitem(US, "strong", strong)
    slot = one_step(tmp_path, name, threshold=0.3)
    through, taught = torch.autograd.grad(slot.loss, (weak, strong), allow_unused=True)
    assert through is None or not through.any()
    assert taught is not None and taught.any()


def test_argmax_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(US, "strong", US["weak"])
    slot = one_step(tmp_path, "fixmatch", x=False, threshold=0.0)
    z = (US["weak"] @ W0.T).double()
    near(slot.loss, float(losses.cross_entropy(z, z.argmax(1))), 1e-6)


# -- optimisers ----------------------------------------------------------------------------------------------------------
def test_the_pull_of_fedprox() -> None:
    w, reference, g = torch.tensor([0.5, -1.5]), torch.tensor([0.5, -1.5]), torch.tensor([0.2, 0.4])
    near(g + 0.1 * (torch.tensor([1.0, -2.0]) - reference), [0.25, 0.35], 1e-7)
    sgd = Optimizer(Config(momentum=0.9, nesterov=False), w)
    for wanted in ([0.48, -1.54], [0.4422, -1.6156], [0.388758, -1.722484]):
        sgd.step(w, g + 0.1 * (w - reference), torch.tensor(0.1))
        near(w, wanted, 1e-6)


def test_the_pull_in_a_slot(tmp_path: Path) -> None:
    """The engine's own `descend` with a constant gradient, through both modes."""
    for mode, wanted in (("gradient", [0.48, 0.4422, 0.388758]), ("decoupled", None)):
        f = set_up(tmp_path, method="fedprox", prox=0.1, prox_mode=mode, momentum=0.9, nesterov=False)
        slot = Slot(f.kit)
        start = State.of(slot.model.module)
        start.groups["parameters"].fill_(0.5)
        slot.load({"model": start}, {}, 0.1)
        slot.lr["model"].fill_(0.1)
        w, v = 0.5, 0.0
        for k in range(3):
            slot.descend(0.2 * sum(p.sum() for p in slot.model.params))
            v = 0.9 * v + 0.2
            w = w - 0.1 * v
            w = w - 0.1 * 0.1 * (w - 0.5)
            found = slot.model.flat.groups["parameters"][:1]
            near(found, [wanted[k] if wanted else w], 1e-6)


def test_sgd_of_semifl_and_fedrgd() -> None:
    w, sgd = torch.tensor([1.0, -2.0]), None
    sgd = Optimizer(Config(weight_decay=5e-4), w)
    for g, weight, buffer in (([3.0, 4.0], [0.9657715, -2.0455430], [0.6005, 0.7990]), ([0.3, 0.4], [0.9340518, -2.0877004], [0.8409328, 1.1180770])):
        sgd.step(w, clip_(torch.tensor(g), 1.0, None), torch.tensor(0.03))
        near(w, weight, 1e-6)
        near(sgd.tensors["momentum"], buffer, 1e-6)
    w = torch.tensor([1.0])
    sgd = Optimizer(Config(weight_decay=1e-4), w)
    for g, weight, buffer in ((0.5, 0.90498100, 0.5001), (0.0, 0.86445571, 0.45018050), (0.0, 0.82797466, 0.40524889)):
        sgd.step(w, torch.tensor([g]), torch.tensor(0.1))
        near(w, [weight], 1e-7)
        near(sgd.tensors["momentum"], [buffer], 1e-7)


def test_clipping() -> None:
    near(clip_(torch.tensor([3.0, 4.0]), 1.0, None), [3 / (5 + 1e-6), 4 / (5 + 1e-6)], 1e-7)
    near(clip_(torch.tensor([0.3, 0.4]), 1.0, None), [0.3, 0.4], 1e-7)
    near(clip_(torch.tensor([3.0, -0.05]), None, 0.1), [0.1, -0.05], 1e-7)
    near(clip_(torch.zeros(2), 1.0, 0.1), [0.0, 0.0])


@pytest.mark.parametrize("keys", [{}, {"momentum": 0.5, "weight_decay": 0.01}])
def test_adam_is_torchs(keys: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(50, generator=generator)
    theirs = w.clone().requires_grad_()
    ours = Optimizer(Config(optimizer="adam", **keys), w)  # type: ignore[arg-type]
    adam = torch.optim.Adam([theirs], lr=0.01, betas=(keys.get("momentum", 0.9), 0.999), weight_decay=keys.get("weight_decay", 0.0))
    for _ in range(100):
        theirs.grad = torch.randn(50, generator=generator)
        ours.step(w, theirs.grad.clone(), torch.tensor(0.01))
        adam.step()
        torch.testing.assert_close(w, theirs.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_step_that_is_left_out(kind: str) -> None:
    w, g, lr = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5]), torch.tensor(0.1)
    o = Optimizer(Config(optimizer=kind, weight_decay=0.1), w)  # type: ignore[arg-type]
    o.step(w, g, lr)
    before = [w.clone(), *[t.clone() for t in o.tensors.values()]]
    o.step(w, g, lr, when=torch.tensor(False))
    assert all(map(torch.equal, before, [w, *o.tensors.values()]))
    o.step(w, g, lr, when=torch.tensor(True))
    assert not torch.equal(before[0], w)


# -- the server among the updates ----------------------------------------------------------------------------------------
def scalar(x: float) -> State:
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(net.weight, x)
    return State.of(net)


def reply(party: int, update: Update | None = None) -> Reply:
    return Reply(party, 1, update, Samples(0, 0), {}, {}, torch.tensor(True))


@pytest.mark.parametrize(("rule", "wanted"), [("uniform", 3.25), ("half", 2.5)])
def test_the_server_beside(rule: str, wanted: float, tmp_path: Path) -> None:
    f = set_up(tmp_path, method="fixmatch", weights=rule)
    held = f.simulation.federation
    f.simulation.federation = dataclasses.replace(held, clients=(*held.clients, held.clients[0]))
    replies = [reply(p, Update(model=scalar(x))) for p, x in ((2, 6.0), (0, 2.0), (1, 4.0), (SERVER, 1.0))]
    for r in replies:
        assert r.update is not None
        r.update.client = None if r.party == SERVER else r.party
    updates = f._updates(replies[:3], replies[3:])
    assert [u.client for u in updates] == [None, 0, 1, 2]
    assert mean(updates)["weight"].item() == wanted


def test_weights_of_clients(tmp_path: Path) -> None:
    for rule, wanted in (("samples", [12.0, 8.0]), ("labelled", [5.0, 3.0]), ("uniform", [1.0, 1.0]), ("half", [1.0, 1.0])):
        f = set_up(tmp_path, method="fixmatch", weights=rule)
        f.server.draw(0)
        assert [f._weight(r) for r in f.clients.train(f._requests())[0]] == [wanted[k] for k in f.server.active]


def test_server_momentum(tmp_path: Path) -> None:
    f = set_up(tmp_path, method="fedavg", server_momentum=0.5)
    server = f.server
    server["model"] = scalar(0.0)
    for average, wanted in ((3.0, 3.0), (3.5, 5.0)):
        server.sent = server.model
        server.move(scalar(average))
        assert server.model["weight"].item() == wanted


def test_kits_are_alike(tmp_path: Path) -> None:
    """The toy's model is built from the seed alone."""
    one, other = (set_up(tmp_path, method="fedavg").kit for _ in range(2))
    assert torch.equal(one.initial().groups["parameters"], other.initial().groups["parameters"])
    third = set_up(tmp_path, method="fedavg", seed=1).kit.initial()
    assert not torch.equal(one.initial().groups["parameters"], third.groups["parameters"])
    assert find("fedprox").Options.model_fields["prox"].default == 0.01


# -- seeds of a part of the draws --------------------------------------------------------------------------------------
def test_split_and_clients_can_have_seeds_of_their_own(tmp_path: Path) -> None:
    """FedDure's released code has one split and one sequence of clients in all its runs (14.7, trap 9)."""

    def drawn(**keys: Any) -> tuple[str, list[list[int]], float]:
        small = {"data": "digits", "partition": "dirichlet-equal:0.5", "labels": "clients", "label_count": 100, "active": 3, "clients": 9}
        method, options, source, federation = prepare(None, small | {"device": "cpu", "rounds": 4, "defaults": "paper"} | keys, None)
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        path.mkdir()
        f = Run(RunFolder(path), method, options, source, federation).federated
        actives = []
        for number in range(4):
            f.server.draw(number)
            actives.append(f.server.active)
        return federation.fingerprint, actives, float(f.server.model.groups["parameters"].sum())

    zero, three = drawn(seed=0), drawn(seed=3)
    assert all(a != b for a, b in zip(zero, three))
    assert drawn(seed=0, split_seed=3) == (three[0], zero[1], zero[2])
    assert drawn(seed=0, active_seed=3) == (zero[0], three[1], zero[2])
    assert drawn(seed=3, split_seed=0, active_seed=0) == (zero[0], zero[1], three[2])


# -- what is read from the device --------------------------------------------------------------------------------------
def test_a_round_is_summed_and_the_broken_client_is_named(tmp_path: Path) -> None:
    """Means are over samples; what a slot's earlier party left has count 0 and makes no column."""
    f, tally = set_up(tmp_path), Tally()

    def outcome(party: int, finite: bool, **logs: tuple[float, float]) -> Reply:
        sums = {k: torch.tensor(v, dtype=torch.float64) for k, v in logs.items()}
        return dataclasses.replace(reply(party), logs=sums, finite=torch.tensor(finite))

    whole = [outcome(7, True, loss=(6.0, 3.0), gone=(0.0, 0.0)), outcome(4, True), outcome(2, True, loss=(1.0, 1.0), share=(2.0, 8.0))]
    f._check(whole, tally)
    assert tally.columns() == {"loss": 7 / 4, "share": 0.25}
    f.server.round = 5
    with pytest.raises(UserError, match="the weights of client 4 became NaN or infinite in round 6"):
        f._check([outcome(4, False), outcome(7, True), outcome(2, True)], tally)
    with pytest.raises(UserError, match="the weights of the server became"):
        f._check([outcome(SERVER, False)], tally)
