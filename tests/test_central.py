"""Central references against worked numbers (float64), and whole rounds of them again in plain torch."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import HERE, TINY
from plain import close, descend, federated, net_of, sgd, watched, weights_of
from torch import Tensor, nn

import fallow
from fallow.config import Config
from fallow.data.samples import Samples
from fallow.engine.feed import Part
from fallow.errors import UserError
from fallow.listing import GROUPS
from fallow.listing import rows as rows_of
from fallow.methods import find
from fallow.methods.fixmatch import annealed
from fallow.methods.parts import mixing, thresholds
from fallow.methods.parts.batching import progress
from fallow.methods.parts.fitting import Facts
from fallow.runs.settings import resolve
from fallow.schedule import Schedule

CENTRAL = ("pimodel", "pseudolabel", "meanteacher", "mixmatch", "remixmatch", "flexmatch", "freematch", "softmatch")
RAMP = 100_000 / (0.4 * 2**20)


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def labelled() -> Tensor:
    return rows([2, 1, 0], [0, 2, -1])


def weak() -> Tensor:
    return rows([3, 0, -1], [1, 0.5, 0], [-1, 4, 0])


def strong() -> Tensor:
    return rows([1.2, 1, 0], [0.3, 0.5, 0.4], [0, 2, 1])


class Echo:
    """A slot whose nets answer with what they are shown, or with what is said for that very tensor."""

    def __init__(self, answer: Any = None, **memory: Tensor):
        self.answer, self.model = answer, self
        self.__dict__.update(memory)

    def __call__(self, x: Tensor, **_: Any) -> Tensor:
        return x if self.answer is None else self.answer(x)

    def together(self, *parts: Any) -> tuple[Any, ...]:
        return parts

    def descend(self, loss: Tensor, when: Any = None) -> None:
        self.loss = float(loss)

    def judge(self, _: Any, label: Tensor, sure: Tensor | None = None, **__: Any) -> None:
        self.label, self.sure = label, sure

    def log(self, **_: Any) -> None: ...


def a_method(name: str, **keys: Any) -> Any:
    kind = find(name)
    return kind(kind.Options(method=name, **({} if name == "meanteacher" or "weight_ema" not in kind.Options.model_fields else {"weight_ema": 0.0}), **keys), 3)


def batch(ramp: float = 1.0, **columns: Any) -> Any:
    x = Part({"labelled": labelled(), "y": torch.tensor([0, 1])})
    u = Part({"weak": weak(), "strong": strong(), "other": strong(), "index": torch.arange(3)})
    return SimpleNamespace(x=x, u=u, ramp=torch.tensor(ramp), **columns)


def loss_of(name: str, b: Any, slot: Echo | None = None, **keys: Any) -> float:
    s = slot or Echo()
    a_method(name, **keys).step(s, b)
    return s.loss


# -- worked numbers --------------------------------------------------------------------------------------------------------
LX = 0.2887259920


@pytest.mark.usefixtures("in_double")
def test_labelled_loss() -> None:
    for name in ("pimodel", "pseudolabel", "fixmatch", "flexmatch"):
        b = batch()
        b.u = Part(None)
        assert loss_of(name, b) == pytest.approx(LX, abs=1e-10), name


@pytest.mark.usefixtures("in_double")
def test_pi_model_and_mean_teacher() -> None:
    assert pytest.approx(0.2384185791, abs=1e-10) == RAMP
    assert loss_of("pimodel", batch(RAMP)) == pytest.approx(0.4393825860, abs=1e-9)
    teacher = SimpleNamespace(follow=lambda *_: None)
    s = Echo()
    s.ema = type("Teacher", (), {"__call__": lambda self, x, **_: x, "follow": lambda self, *_: None})()  # type: ignore[attr-defined]
    assert teacher and loss_of("meanteacher", batch(RAMP), s) == pytest.approx(1.0420089619, abs=1e-9)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize(("tau", "mask", "wanted"), [(0.95, [0, 0, 1], 0.0082482967), (0.9, [1, 0, 1], 0.0302095980), (1.01, [0, 0, 0], 0.0)])
def test_pseudo_label(tau: float, mask: list[int], wanted: float) -> None:
    s = Echo()
    assert loss_of("pseudolabel", batch(), s, labeller="current", threshold=tau) == pytest.approx(LX + wanted, abs=1e-9)
    assert s.sure is not None and s.sure.tolist() == [bool(m) for m in mask]


@pytest.mark.usefixtures("in_double")
def test_fixmatch_and_uda() -> None:
    assert loss_of("fixmatch", batch(), labeller="current") == pytest.approx(0.4245946468, abs=1e-9)
    assert loss_of("fixmatch", batch(), labeller="current", threshold=0.9) == pytest.approx(0.6750548782, abs=1e-9)
    assert loss_of("uda", batch(), labeller="current") == pytest.approx(LX + 0.3844857131, abs=1e-9)


@pytest.mark.usefixtures("in_double")
def test_signal_annealing() -> None:
    assert [annealed(kind, 0.5, 3) for kind in ("linear", "exp", "log")] == pytest.approx([0.6666666667, 0.3880566657, 0.9452766676], abs=1e-10)
    b = batch(eta=torch.tensor(annealed("linear", 0.5, 3)))
    b.u = Part(None)
    assert loss_of("uda", b, labeller="current", tsa="linear") == pytest.approx(0.4076059644, abs=1e-9)
    assert loss_of("uda", b, labeller="current", tsa="linear", tsa_form="usb") == pytest.approx(0.2038029822, abs=1e-9)


@pytest.mark.usefixtures("in_double")
def test_mixmatch() -> None:
    """One labelled image and one unlabelled in two views; the mixed ones go through a linear model."""
    one, other, W = rows([0, 1]), rows([0.5, 0.5]), rows([1, 0, -1], [0, 2, 1])
    answers = {id(one): rows([3, 0, -1]), id(other): rows([1, 0.5, 0])}
    shown: list[Tensor] = []

    def answer(x: Tensor) -> Tensor:
        if id(x) not in answers:
            shown.append(x)
        return answers.get(id(x), x @ W)

    q = mixing.sharpened((answers[id(one)].softmax(1) + answers[id(other)].softmax(1)) / 2, 0.5)
    assert q[0].tolist() == pytest.approx([0.9258987971, 0.0556847141, 0.0184164887], abs=1e-10)
    x, u = Part({"labelled": rows([1, 0]), "y": torch.tensor([1])}), Part({"weak": one, "other": other})
    b = SimpleNamespace(x=x, u=u, ramp=torch.tensor(1.0), lam=torch.full((3,), 0.7), partner=torch.tensor([2, 0, 1]))
    assert loss_of("mixmatch", b, Echo(answer)) == pytest.approx(14.8192360375, abs=1e-8)
    assert torch.cat(shown).flatten().tolist() == pytest.approx([0.85, 0.15, 0.3, 0.7, 0.35, 0.65])
    assert loss_of("mixmatch", b, Echo(answer), weight=0.0) == pytest.approx(0.9845189992, abs=1e-9)


@pytest.mark.usefixtures("in_double")
def test_remixmatch() -> None:
    p, seen, even = weak().softmax(1), torch.tensor([0.5, 0.3, 0.2]), torch.full((3,), 1 / 3)
    q = thresholds.aligned(p, even, seen)
    assert q[0].tolist() == pytest.approx([0.8859221942, 0.0735123501, 0.0405654558], abs=1e-9)
    assert q[1].tolist() == pytest.approx([0.3412295059, 0.3449431357, 0.3138273584], abs=1e-9)
    q = mixing.sharpened(q, 0.5)
    assert q[2].tolist() == pytest.approx([0.0000163314, 0.9992294618, 0.0007542068], abs=1e-9)
    assert F.cross_entropy(strong(), q, reduction="none").tolist() == pytest.approx([0.7552390736, 1.1011797133, 0.4083928341], abs=1e-9)
    s = Echo(seen=seen.clone())
    method = a_method("remixmatch", mean_over="ema")
    torch.testing.assert_close(method.guess(s, SimpleNamespace(u=Part({"weak": weak()}), wanted=even)), q, rtol=0, atol=1e-9)
    assert s.seen.tolist() == pytest.approx([0.4999830977, 0.3001431224, 0.1998737798], abs=1e-9)
    assert float(F.cross_entropy(rows([1, 0, 0, -1]), torch.tensor([2]))) == pytest.approx(1.6265233750, abs=1e-9)


def test_a_window_of_mean_predictions() -> None:
    """The oldest of 128 goes, the newest comes; before the first all are even."""
    s = Echo(seen=torch.full((128, 3), 1 / 3))
    method = a_method("remixmatch")
    for k in range(2):
        method.guess(s, SimpleNamespace(u=Part({"weak": weak().float()}), wanted=torch.full((3,), 1 / 3)))
        assert torch.allclose(s.seen[-1], weak().softmax(1).mean(0).float()) and torch.equal(s.seen[: 127 - k], torch.full((127 - k, 3), 1 / 3))


def test_turns_are_quarters_of_the_image_itself() -> None:
    """The engine's rotation pass sees each image turned by its own number of quarters."""
    method, shown = a_method("remixmatch"), []
    image = torch.arange(8.0).view(2, 1, 2, 2)
    s = SimpleNamespace(model=lambda x, weights, **_: shown.extend([x, weights]), rotation=SimpleNamespace(weights={"weight": 4, "bias": 5}))
    s.model.weights, s.model.head = {"body.weight": 1, "last.weight": 2, "last.bias": 3}, "last.weight"  # type: ignore[attr-defined]
    method.turned(s, image, torch.tensor([1, 3]))
    assert shown.pop() == {"body.weight": 1, "last.weight": 4, "last.bias": 5}
    assert shown[0][0, 0].tolist() == [[1, 3], [0, 2]] and shown[0][1, 0].tolist() == [[6, 4], [7, 5]]


def test_rotations_of_a_model_of_ones_own(tmp_path: Path) -> None:
    """The second head is as wide as the run's images make the model's features."""
    run = fallow.run(out=tmp_path, **TINY | {"method": "remixmatch", "model": f"{HERE / 'linear.py'}:Linear", "rounds": 1, "steps": 2, "strong_views": 1})
    assert run.metrics[0]["loss"] > 0


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize(
    ("last", "warmup", "beta", "needed"),
    [
        ([0, 0, 0, 0, 1, 1, 2, -1, -1, -1], True, [1, 0.5, 0.25], [0.95, 0.3166666667, 0.1357142857]),
        ([0, 0, 1, 2, -1, -1, -1, -1, -1, -1], True, [1 / 3, 1 / 6, 1 / 6], [0.19, 0.0863636364, 0.0863636364]),
        ([0, 0, 1, 2, -1, -1, -1, -1, -1, -1], False, [1, 0.5, 0.5], [0.95, 0.3166666667, 0.3166666667]),
        ([-1] * 10, True, [0, 0, 0], [0, 0, 0]),
    ],
)
def test_flexmatch_thresholds(last: list[int], warmup: bool, beta: list[float], needed: list[float]) -> None:
    """Samples that other parties' memory has room for, and this one has not, do not count: the list is longer than `size`."""
    found = thresholds.learnt(torch.tensor([*last, -1, -1]).double(), torch.tensor(10.0), 3, warmup)
    assert found.tolist() == pytest.approx(beta)
    assert thresholds.convex(found, 0.95).tolist() == pytest.approx(needed, abs=1e-9)


@pytest.mark.usefixtures("in_double")
def test_flexmatch_step() -> None:
    """Masked by the labels so far; then the accepted ones are remembered: sample 2 as class 1, the others as they were."""
    s = Echo(last=torch.tensor([0.0, 0, 0, 0, 1, 1, 2, -1, -1, -1]))
    found = loss_of("flexmatch", batch(size=torch.tensor(10.0)), s, labeller="current")
    assert s.sure is not None and s.sure.tolist() == [False, False, True]
    assert found == pytest.approx(0.4245946468, abs=1e-9)
    assert s.last.tolist() == [0, 0, 1, 0, 1, 1, 2, -1, -1, -1]
    fresh = Echo(last=torch.full((3,), -1.0))
    loss_of("flexmatch", batch(size=torch.tensor(3.0)), fresh, labeller="current")
    assert fresh.sure is not None and fresh.sure.all() and fresh.last.tolist() == [-1, -1, 1]


def test_a_sample_that_is_twice_in_a_batch() -> None:
    """The last sure label counts, and both places say the same, so that their order does not matter."""
    known, label = torch.tensor([5.0, 6, 5, 7, 6]), torch.tensor([1, 2, 3, 4, 0])
    index, sure = torch.tensor([0, 1, 0, 2, 1]), torch.tensor([True, True, True, False, False])
    assert thresholds.latest(known, label, sure, index).tolist() == [3, 2, 3, 7, 2]


def freematch(m: float, tau: float = 1 / 3, **keys: Any) -> tuple[Echo, float]:
    even = torch.full((3,), 1 / 3)
    s = Echo(tau=torch.full((1,), tau), mean_p=even.clone(), shares=even.clone())
    return s, loss_of("freematch", batch(size=torch.tensor(3.0)), s, labeller="current", momentum_of_thresholds=m, **keys)


@pytest.mark.usefixtures("in_double")
def test_freematch() -> None:
    s, loss = freematch(0.9, fairness=0.0)
    assert float(s.tau) == pytest.approx(0.3806092899, abs=1e-10)  # type: ignore[attr-defined]
    assert s.mean_p.tolist() == pytest.approx([0.3483097735, 0.3443122421, 0.3073779844], abs=1e-10)  # type: ignore[attr-defined]
    assert s.shares.tolist() == pytest.approx([0.3666666667, 0.3333333333, 0.3], abs=1e-10)  # type: ignore[attr-defined]
    assert loss == pytest.approx(LX + 0.7869765023, abs=1e-9) and s.sure is not None and s.sure.all()
    assert freematch(0.9, fairness=1.0)[1] - loss == pytest.approx(-9.8762673538, abs=1e-8)
    assert freematch(0.999, fairness=1.0)[1] - loss == pytest.approx(-9.6776299559, abs=1e-8)
    s, _ = freematch(0.999, fairness=0.0)
    assert float(s.tau) == pytest.approx(0.3338060929, abs=1e-10)  # type: ignore[attr-defined]
    s, _ = freematch(0.0, threshold_range="global")
    assert float(s.tau) == pytest.approx(0.8060928993, abs=1e-10)  # type: ignore[attr-defined]
    s, _ = freematch(0.9, threshold_range="global", tau=1.2)
    assert float(s.tau) == 0.95, "what is remembered"  # type: ignore[attr-defined]
    s, _ = freematch(0.9, threshold_range="final")  # between 0.9 and 0.95: the first and the last sample
    assert s.sure is not None and s.sure.tolist() == [True, False, True]


def test_fairness_of_nothing_is_nothing() -> None:
    ps = strong().softmax(1).requires_grad_()
    even = torch.full((3,), 1 / 3, dtype=torch.float64)
    loss = thresholds.fairness(ps, torch.zeros(3, dtype=torch.bool), even, even)
    loss.backward()
    assert float(loss.detach()) == 0 and ps.grad is not None and not ps.grad.any()


@pytest.mark.usefixtures("in_double")
def test_softmatch() -> None:
    s = Echo(mean_p=torch.zeros(3), mu=torch.full((1,), 1 / 3), var=torch.ones(1))
    loss = loss_of("softmatch", batch(size=torch.tensor(3.0)), s, labeller="current", momentum_of_weights=0.9)
    assert float(s.mu) == pytest.approx(0.3779794947, abs=1e-9) and float(s.var) == pytest.approx(0.9026986886, abs=1e-9)
    assert loss == pytest.approx(LX + 0.7869765023, abs=1e-9), "weights of 1: the mean cross-entropy"
    soft = thresholds.truncated(torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([0.8]), torch.tensor([0.01]), 2.0)
    assert soft.tolist() == pytest.approx([1, 1, 0.1353352832, 0.0003354626], abs=1e-9)
    assert thresholds.aligned(weak().softmax(1), torch.full((3,), 1 / 3), weak().softmax(1).mean(0)).amax(1).tolist() == pytest.approx(
        [0.8516402145, 0.5918342289, 0.8959103969], abs=1e-6
    )
    alone = Echo(mean_p=torch.zeros(3), mu=torch.full((1,), 1 / 3), var=torch.tensor([0.25]))
    b = SimpleNamespace(x=Part(None), u=Part({"weak": weak()[:1], "strong": strong()[:1]}))
    loss_of("softmatch", b, alone, labeller="current")
    assert float(alone.var) == 0.25, "one confidence has no variance"


def test_learning_rate() -> None:
    """0.03 at the start, then by cos(7 pi k / 16 K)."""
    s, K = Schedule.parse("cosine-7-16"), 1024
    rates = [0.03 * s.factor(r, 0, 1024, K) for r in (0, K // 4, K // 2, K)]
    assert rates == pytest.approx([0.03, 0.0282463220, 0.0231903136, 0.0058527097], abs=1e-10)


def test_progress_goes_through_all_rounds() -> None:
    o = SimpleNamespace(rounds=4)
    made = np.concatenate([progress(SimpleNamespace(round=r, options=o), 5) for r in range(4)])
    assert made == pytest.approx(np.arange(20) / 20)


# -- Mixup's draws ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["sample", "batch"])
def test_ratios_of_mixup(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 1/2, of Beta(a, a) folded; partners are a permutation of all the step's views; X and Y are mixed alike."""
    seen = watched(monkeypatch, "mixmatch", "step")
    f = federated(tmp_path, "mixmatch", clients=1, active=1, steps=20, rounds=1, mix_draw=how, unlabelled_batch=6)
    f.round(0)
    for b in seen[0]:
        assert sorted(b.partner.tolist()) == list(range(8 + 2 * 6)) and float(b.lam.min()) >= 0.5
        assert b.lam.shape == ((20,) if how == "sample" else (1,))
    X, Y = mixing.mixed([torch.eye(4)[:2], torch.eye(4)[2:]], [torch.eye(4)[:2], torch.eye(4)[2:]], torch.tensor([0.6]), torch.tensor([3, 2, 1, 0]))
    assert [t.tolist() for t in X] == [t.tolist() for t in Y]
    same = mixing.mixed([torch.eye(4)], [torch.eye(4)], torch.ones(4), torch.tensor([3, 2, 1, 0]))
    assert torch.equal(same[0][0], torch.eye(4))


# -- whole rounds in plain torch -------------------------------------------------------------------------------------------
class Features(nn.Module):
    """What lies before a net's last layer."""

    def __init__(self, net: Any):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net.features(x)


def batch_only(net: nn.Module, x: Tensor) -> Tensor:
    """A pass with the batch's own statistics: those that run are copies, which are let go."""
    return torch.func.functional_call(net, {n: b.clone() for n, b in net.named_buffers()}, (x,))


def decaying(net: nn.Module, lr: float) -> torch.optim.SGD:
    """Decay of what has two axes and more."""
    matrices, others = ([p for p in net.parameters() if (p.dim() > 1) == many] for many in (True, False))
    return torch.optim.SGD([{"params": matrices, "weight_decay": 0.25}, {"params": others}], lr=lr, momentum=0.9, nesterov=True)


class Plain:
    """One client's training by a method, written again with nothing of Fallow's."""

    def __init__(self, f: Any, lr: float, ema: float):
        self.o, self.net, self.ema, self.decay = f.o, net_of(f.server.model, "bn"), net_of(f.server.model, "bn"), ema
        self.head = nn.Linear(128, 4)
        if "rotation" in f.kit.held:
            self.head.load_state_dict(dict(f.kit.initial("rotation").tensors()))
        self.optimizers = [decaying(self.net, lr), decaying(self.head, lr)]
        self.memory: dict[str, Any] = {}

    def step(self, b: Any) -> None:
        loss = getattr(self, self.o.method)(b)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers[: 2 if self.o.method == "remixmatch" else 1]:
            optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(self.ema.parameters(), self.net.parameters()):
                mine.mul_(self.decay).add_(theirs * (1 - self.decay))
            for mine, theirs in zip(self.ema.buffers(), self.net.buffers()):
                mine.copy_(theirs)

    def pimodel(self, b: Any, teacher: nn.Module | None = None) -> Tensor:
        loss = F.cross_entropy(self.net(b.x.labelled), b.x.y)
        with torch.no_grad():
            q = torch.softmax(batch_only(teacher or self.net, b.u.weak), 1)
        return loss + self.o.weight * b.ramp * F.mse_loss(torch.softmax(batch_only(self.net, b.u.other), 1), q)

    def meanteacher(self, b: Any) -> Tensor:
        return self.pimodel(b, self.ema)

    def pseudolabel(self, b: Any) -> Tensor:
        loss = F.cross_entropy(self.net(b.x.labelled), b.x.y)
        z = batch_only(self.net, b.u.weak)
        p, label = torch.softmax(z.detach(), 1).max(1)
        kept = [F.cross_entropy(z[i : i + 1], label[i : i + 1]) for i in range(len(z)) if p[i] >= self.o.threshold]
        return loss + b.ramp * sum(kept) / len(z)

    def mix(self, views: list[Tensor], targets: list[Tensor], b: Any) -> tuple[Tensor, Tensor]:
        X, Y = torch.cat(views), torch.cat(targets)
        pairs = [(l * X[i] + (1 - l) * X[j], l * Y[i] + (1 - l) * Y[j]) for i, (l, j) in enumerate(zip(b.lam, b.partner))]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])

    def mixmatch(self, b: Any) -> Tensor:
        with torch.no_grad():
            p = sum(torch.softmax(batch_only(self.net, v), 1) for v in (b.u.weak, b.u.other)) / 2
            q = p**2 / (p**2).sum(1, keepdim=True)
        X, Y = self.mix([b.x.labelled, b.u.weak, b.u.other], [torch.eye(10)[b.x.y], q, q], b)
        n, m = len(b.x.y), len(q)
        lx = -(Y[:n] * torch.log_softmax(self.net(X[:n]), 1)).sum(1).mean()
        zu = torch.cat([batch_only(self.net, X[n : n + m]), batch_only(self.net, X[n + m :])])
        return lx + 75 * b.ramp * F.mse_loss(torch.softmax(zu, 1), Y[n:])

    def remixmatch(self, b: Any) -> Tensor:
        seen = self.memory.setdefault("seen", [torch.full((10,), 0.1)] * 128)
        with torch.no_grad():
            p = torch.softmax(batch_only(self.net, b.u.weak), 1)
            q = p * (b.wanted + 1e-6) / (torch.stack(seen).mean(0) + 1e-6)
            q = q / q.sum(1, keepdim=True)
            q = q**2 / (q**2).sum(1, keepdim=True)
        self.memory["seen"] = [*seen[1:], p.mean(0)]
        X, Y = self.mix([b.x.labelled, b.u.strong0, b.u.strong1, b.u.weak], [torch.eye(10)[b.x.y], q, q, q], b)
        n, m = len(b.x.y), len(q)
        lx = -(Y[:n] * torch.log_softmax(self.net(X[:n]), 1)).sum(1).mean()
        lu = -(Y[n:] * torch.log_softmax(torch.cat([batch_only(self.net, x) for x in X[n:].split(m)]), 1)).sum(1).mean()
        l1 = -(q * torch.log_softmax(batch_only(self.net, b.u.strong0), 1)).sum(1).mean()
        turned = torch.stack([torch.rot90(image, int(k), (1, 2)) for image, k in zip(b.u.strong0, b.turns)])
        lr = F.cross_entropy(self.head(batch_only(Features(self.net), turned)), b.turns)
        return lx + b.ramp * (1.5 * lu + 0.5 * l1) + 0.5 * lr

    def confident(self, b: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        z = self.net(torch.cat([b.x.labelled, b.u.weak, b.u.strong]))
        zx, zw, zs = z.split([len(b.x.y), len(b.u.weak), len(b.u.strong)])
        return F.cross_entropy(zx, b.x.y), torch.softmax(zw.detach(), 1), zs, F.cross_entropy(zs, zw.argmax(1), reduction="none")

    def flexmatch(self, b: Any) -> Tensor:
        loss, p, _, each = self.confident(b)
        size = len(self.memory.setdefault("last", [-1] * 240))
        counts = [self.memory["last"].count(c) for c in range(10)]
        most, kept = max(*counts, size - sum(counts)), 0.0
        for i, (row, index) in enumerate(zip(p, b.u.index.tolist())):
            c, beta = int(row.argmax()), counts[int(row.argmax())] / most
            kept = kept + (each[i] if row[c] >= self.o.threshold * beta / (2 - beta) else 0.0)
            if row[c] >= self.o.threshold:
                self.memory["last"][index] = c
        return loss + kept / len(p)

    def freematch(self, b: Any) -> Tensor:
        loss, p, zs, each = self.confident(b)
        m = self.memory or {"tau": 0.1, "p": torch.full((10,), 0.1), "h": torch.full((10,), 0.1)}
        label = p.argmax(1)
        hist = torch.tensor([(label == c).sum() / len(p) for c in range(10)])
        self.memory = m = {"tau": 0.999 * m["tau"] + 0.001 * p.amax(1).mean(), "p": 0.999 * m["p"] + 0.001 * p.mean(0), "h": 0.999 * m["h"] + 0.001 * hist}
        mask = p.amax(1) >= m["tau"] * m["p"][label] / m["p"].max()
        ps = torch.softmax(zs, 1)[mask]
        found = torch.tensor([(ps.argmax(1) == c).sum() / len(ps) for c in range(10)])
        A, B = m["p"] / m["h"], torch.stack([ps[:, c].mean() / found[c] if found[c] > 0 else torch.tensor(0.0) for c in range(10)])
        fair = (A / A.sum() * torch.log(B / B.sum() + 1e-12)).sum()
        return loss + each[mask].sum() / len(p) + 0.01 * fair

    def softmatch(self, b: Any) -> Tensor:
        loss, p, _, each = self.confident(b)
        m = self.memory or {"mu": 0.1, "var": 1.0}
        mean = 0.999 * m["p"] + 0.001 * p.mean(0) if "p" in m else p.mean(0)
        q = p * (0.1 + 1e-6) / (mean + 1e-6)
        c = (q / q.sum(1, keepdim=True)).amax(1)
        self.memory = m = {"p": mean, "mu": 0.999 * m["mu"] + 0.001 * c.mean(), "var": 0.999 * m["var"] + 0.001 * c.var()}
        weight = torch.stack([torch.tensor(1.0) if x >= m["mu"] else torch.exp(-((x - m["mu"]) ** 2) / (2 * m["var"] / 4)) for x in c])
        return loss + (weight * each).mean()


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("name", CENTRAL)
def test_rounds_of_a_central_method(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds at one client with batch norm: weights, running statistics, the average that is tested, and the memory."""
    seen = watched(monkeypatch, name, "step")
    keys: dict[str, Any] = {"clients": 1, "active": 1, "norm": "bn", "lr": 0.125, "schedule": "constant", "weight_ema": 0.875, "unlabelled_batch": 8, "weight_decay": 0.25}
    keys |= {k: v for k, v in {"threshold": 0.15, "ramp_share": 0.5, "strong_views": 2}.items() if k in find(name).Options.model_fields}
    f = federated(tmp_path, name, **keys)
    plain = Plain(f, 0.125, 0.875)
    for number in range(2):
        seen.clear()
        f.round(number)
        assert len(seen[0]) == 2
        for b in seen[0]:
            plain.step(b)
    close(f.server["trained"], weights_of(plain.net))
    close(f.server.model, weights_of(plain.ema))
    running = {n: b for n, b in plain.net.named_buffers() if b.is_floating_point()}
    close(f.server["trained"], running)
    close(f.server.model, running)
    kept = f.keep.read(0)
    if name == "flexmatch":
        assert kept["last"].tolist() == plain.memory["last"] and max(plain.memory["last"]) >= 0
    if name == "remixmatch":
        close(kept["rotation"], weights_of(plain.head))
    assert "ramp" not in vars(seen[0][0])["_numbers"] or float(seen[0][-1].ramp) == 1.0


@pytest.mark.parametrize("name", ["mixmatch", "softmatch"])
def test_both_streams_are_endless_permutations(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 batches of 7 of 40 labelled samples, of 50 of 240 others: all as large, each sample there two or three times."""
    seen = watched(monkeypatch, name, "step")
    federated(tmp_path, name, clients=1, active=1, batch=7, unlabelled_batch=50, steps=12, rounds=1).round(0)
    for part, size, count in (("x", 7, 40), ("u", 50, 240)):
        batches = [getattr(b, part).index for b in seen[0]]
        assert [len(b) for b in batches] == [size] * 12
        assert set(torch.cat(batches).bincount(minlength=count).tolist()) == {2, 3}


@pytest.mark.usefixtures("in_double")
def test_an_average_that_warms_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After k steps it keeps min(0.75, 1 - 1/k) of itself: nothing, 1/2, 2/3, 3/4, 3/4; also over rounds."""
    seen = watched(monkeypatch, "pimodel", "step")
    f = federated(tmp_path, "pimodel", clients=1, active=1, norm="gn", lr=0.125, schedule="constant", weight_ema=0.75, weight_ema_warmup=True, rounds=3, weight_decay=0)
    net, ema = net_of(f.server.model), net_of(f.server.model)
    optimizer, k = sgd(net, 0.125), 0
    for number in range(3):
        seen.clear()
        f.round(number)
        for b in seen[0]:
            q = torch.softmax(net(b.u.weak).detach(), 1)
            descend(optimizer, F.cross_entropy(net(b.x.labelled), b.x.y) + 10 * b.ramp * F.mse_loss(torch.softmax(net(b.u.other), 1), q))
            k += 1
            keep = [0, 1 / 2, 2 / 3, 3 / 4, 3 / 4, 3 / 4][k - 1]
            with torch.no_grad():
                for mine, theirs in zip(ema.parameters(), net.parameters()):
                    mine.mul_(keep).add_(theirs * (1 - keep))
        close(f.server.model, weights_of(ema))
    with pytest.raises(UserError, match="weight_ema=0 makes no average"):
        resolve({}, {"method": "fixmatch", "weight_ema_warmup": True})


@pytest.mark.usefixtures("in_double")
def test_averages_are_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients, two rounds: both start from the mean of the trained ones; what is tested is the mean of the averages."""
    seen = watched(monkeypatch, "pimodel", "step")
    f = federated(tmp_path, "pimodel", clients=2, active=2, norm="gn", lr=0.125, schedule="constant", weight_ema=0.75, weight_decay=0.0, weights="uniform", weight=0.0)
    net, ema = net_of(f.server.model), net_of(f.server.model)
    optimizers: list[Any] = [None, None]
    nets = [net_of(f.server.model) for _ in range(2)]
    optimizers = [sgd(n, 0.125) for n in nets]
    for number in range(2):
        seen.clear()
        f.round(number)
        trained, averages = [], []
        for k in range(2):
            nets[k].load_state_dict(net.state_dict())
            average = weights_of(ema)
            for b in seen[k]:
                descend(optimizers[k], F.cross_entropy(nets[k](b.x.labelled), b.x.y))
                average = {n: 0.75 * average[n] + 0.25 * p for n, p in weights_of(nets[k]).items()}
            trained.append(weights_of(nets[k]))
            averages.append(average)
        net.load_state_dict({n: (trained[0][n] + trained[1][n]) / 2 for n in trained[0]})
        ema.load_state_dict({n: (averages[0][n] + averages[1][n]) / 2 for n in averages[0]})
        close(f.server["trained"], weights_of(net))
        close(f.server.model, weights_of(ema))


# -- invariants --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["pseudolabel", "fixmatch", "flexmatch"])
def test_an_average_of_nothing_and_no_average(name: str, tmp_path: Path) -> None:
    """A threshold above 1 is a weight of 0; with ema=0 nothing else is tested than what is trained."""
    models = []
    keys = {"clients": 1, "active": 1, "weight_ema": 0.0, "norm": "gn"}
    for more in ({"threshold": 2.0} if name != "flexmatch" else {"weight": 0.0}, {"weight": 0.0}):
        f = federated(tmp_path / str(len(models)), name, **keys | more)
        f.round(0)
        assert "trained" not in f.server
        models.append(f.server.model.groups["parameters"])
    assert torch.equal(*models)


def test_an_average_can_be_had_with_fixmatch(tmp_path: Path) -> None:
    f = federated(tmp_path, "fixmatch", clients=1, active=1, weight_ema=0.5, norm="gn", steps=1, rounds=1)
    before = f.server.model.groups["parameters"].clone()
    f.round(0)
    torch.testing.assert_close(f.server.model.groups["parameters"], (before + f.server["trained"].groups["parameters"]) / 2, rtol=0, atol=1e-7)


def test_an_average_of_a_short_run_is_one() -> None:
    """Over the last twentieth of the steps: 1 - 20 / 400; from 0.5, however few they are, to 0.999, however many."""
    facts = {"o": Config(), "classes": 10, "size": 8, "channels": 1, "labelled": 8, "unlabelled": 100}
    made = [find("meanteacher").automatic(Facts(**facts, rounds=n, room=10**6)) for n in (1, 40, 10_000)]
    assert {m["steps"] for m in made} == {10}
    assert [m["weight_ema"] for m in made] == [0.5, 0.95, 0.999]


def test_methods_are_listed_by_group() -> None:
    title, *listed = rows_of("methods")
    places = [GROUPS.index(row[title.index("group")]) for row in listed]
    assert places == sorted(places) and {row[0] for row in listed if row[title.index("group")] == "central"} == set(CENTRAL)


# -- refused -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"method": "meanteacher", "weight_ema": 0.0}, "leaves meanteacher without a teacher"),
        ({"method": "pimodel", "average": "grouped"}, "tests an average of the weights"),
        ({"method": "fixmatch", "weight_ema": 0.9, "server_momentum": 0.5}, "use server_lr=1 server_momentum=0"),
        ({"method": "pimodel", "debias": True}, "compares two answers of its own, .* so debias=true has no place"),
        ({"method": "meanteacher", "debias": True}, "its teacher's whole answers, .* so debias=true has no place"),
        ({"method": "mixmatch", "debias": True}, "sharpens the mean of its answers to two views, so debias=true has no place"),
        ({"method": "remixmatch", "debias": True}, "aligns its guesses with the labels' classes, so debias=true has no place"),
        ({"method": "flexmatch", "labeller": "received"}, "use labeller=current"),
        ({"method": "mixmatch", "labels": "all"}, "not defined for labels=all"),
    ],
)
def test_what_makes_no_sense(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve({}, keys)


def test_shares_of_the_labels_are_what_guesses_are_aligned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch, "remixmatch", "step")
    f = federated(tmp_path, "remixmatch", clients=1, active=1, rounds=1, label_count=20, label_balance="random", strong_views=1)
    f.round(0)
    y = f.simulation.labels[f.simulation.federation.clients[0].labelled]
    assert seen[0][0].wanted.tolist() == pytest.approx((np.bincount(y, minlength=10) / 20).tolist(), abs=1e-7)
    assert math.isclose(float(seen[0][0].wanted.sum()), 1, abs_tol=1e-6) and len(Samples.of(y)) == 20
