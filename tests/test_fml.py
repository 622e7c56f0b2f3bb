"""FML: the worked numbers and invariants, and rounds against plain torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fallow import models
from fallow.engine.feed import Batch, Part
from fallow.errors import UserError
from fallow.methods import find
from fallow.methods.fml import FML
from fallow.methods.state import State
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder

SMALL: dict[str, Any] = {"clients": 4, "active": 2, "label_count": 80, "batch": 16, "steps": 2, "rounds": 3, "slots": 1, "device": "cpu", "defaults": "paper"}


def federated(path: Path, kind: Any = None, name: str = "fml", **keys: Any) -> Any:
    _, options, source, federation = prepare(None, SMALL | {"method": name} | keys)
    path.mkdir(exist_ok=True, parents=True)
    return Run(RunFolder(path), kind or find(name), options, source, federation).federated


def equal(a: State, b: State) -> bool:
    return a.groups.keys() == b.groups.keys() and all(torch.equal(a.groups[g], b.groups[g]) for g in a.groups)


# -- the worked step -----------------------------------------------------------------------------------------------------
class Answers:
    def __init__(self, *logits: Any):
        self.logits = [torch.tensor(z, dtype=torch.float64).requires_grad_() for z in logits]
        self.asked = 0

    def __call__(self, x: Any, **_: Any) -> torch.Tensor:
        self.asked += 1
        return self.logits[self.asked - 1]


class Bench:
    def __init__(self, theta: Any, w: Any):
        self.personal, self.model, self.logged, self.loss = Answers(*theta), Answers(*w), {}, None

    def descend(self, loss: Any, *nets: Any) -> None:
        self.loss = loss

    def judge(self, *_: Any) -> None:
        pass

    def log(self, **values: Any) -> None:
        self.logged |= {k: float(torch.as_tensor(v).detach()) for k, v in values.items()}


THETA, W = ([[2, 0, 0], [0, 1, 0]], [[1, 0, 0], [0, 0, 0]]), ([[1, 1, 0], [0, 0, 2]], [[0, 0, 0], [0, 3, 0]])
IMAGES = torch.zeros(2, 1)


def step(theta: Any = THETA, w: Any = W, u: bool = True, ramp: float = 1.0, **options: Any) -> Bench:
    bench = Bench(theta if u else theta[:1], w if u else w[:1])
    x = Part({"labelled": IMAGES, "y": torch.tensor([0, 1])})
    FML(FML.Options(**options), 3).step(bench, Batch({"x": x, "u": Part({"weak": IMAGES} if u else None)}, {"ramp": torch.tensor(ramp)}))
    return bench


def test_worked_step() -> None:
    labels, both = step(u=False).logged, step().logged
    assert labels == pytest.approx({"personal_loss": 0.486976, "loss": 1.061200}, abs=1e-6)
    assert both == pytest.approx({"personal_loss": 0.699855, "loss": 1.341099}, abs=1e-6)
    assert step(lambda_u=0.0).logged == pytest.approx(labels) and step(ramp=0.0).logged == pytest.approx(labels)
    assert step(alpha=1.0, beta=1.0).logged == pytest.approx({"personal_loss": 0.395495, "loss": 1.550770}, abs=1e-6)
    assert step(filter="entropy", entropy=1e-3).logged == pytest.approx(labels), "nobody is as sure as that"


def test_teachers_get_no_gradient_and_the_nets_may_swap() -> None:
    bench = step(alpha=0.3, beta=0.3)
    swapped = step(W, THETA, alpha=0.3, beta=0.3)
    assert (bench.logged["loss"], bench.logged["personal_loss"]) == (swapped.logged["personal_loss"], swapped.logged["loss"])
    bench = step(alpha=1.0, beta=0.0)
    grads = torch.autograd.grad(bench.loss, [bench.personal.logits[1], bench.personal.logits[0]], allow_unused=True)
    plain = F.cross_entropy(bench.personal.logits[0], torch.tensor([0, 1]))
    assert grads[0] is None or not grads[0].any()
    torch.testing.assert_close(grads[1], torch.autograd.grad(plain, bench.personal.logits[0])[0])


# -- rounds ------------------------------------------------------------------------------------------------------------
SEEN: list[Any] = []


class Recording(FML):
    def step(self, s: Any, b: Any) -> None:
        SEEN.append((b.x.labelled, b.x.y, b.u.weak, b.u.strong if self.o.views == "fedloke" else None))
        super().step(s, b)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("views", ["weak", "fedloke"])
def test_rounds_equal_plain_torch(views: str, tmp_path: Path) -> None:
    """2 of 4 clients, BN, momentum: the personal model's stays with it, the other's is new in each round."""
    SEEN.clear()
    lr = 2**-5
    f = federated(tmp_path, Recording, norm="bn", views=views, lr=lr, momentum=0.5, alpha=0.3, beta=0.6, lambda_u=0.7, weights="uniform")
    shared = models.build("small-cnn", 10, 1, norm="bn", size=8)
    shared.load_state_dict(f.server.model.tensors(), strict=False)
    personal = {c: copy.deepcopy(shared).train() for c in range(4)}
    stays = {c: torch.optim.SGD(m.parameters(), lr, momentum=0.5) for c, m in personal.items()}
    for number in range(3):
        before = {c: f.keep.read(c).get("personal") for c in range(4)}
        row = f.round(number)
        for c in set(range(4)) - set(f.server.active):
            after = f.keep.read(c).get("personal")
            assert after is before[c] or equal(before[c], after), "who was not drawn stays as he was"
        uploads = []
        for c in f.server.active:
            theta, w = personal[c], copy.deepcopy(shared).train()
            fresh = torch.optim.SGD(w.parameters(), lr, momentum=0.5)
            for _ in range(2):
                x, y, weak, strong = SEEN.pop(0)
                says = [(net(x), net(weak), net(strong) if strong is not None else None) for net in (theta, w)]
                losses = []
                for share, (zx, zw, zs), (qx, qw, _) in ((0.3, says[0], says[1]), (0.6, says[1], says[0])):
                    learn = zw if zs is None else zs
                    apart = F.kl_div(zx.log_softmax(1), qx.detach().softmax(1), reduction="batchmean")
                    apart = apart + 0.7 * F.kl_div(learn.log_softmax(1), qw.detach().softmax(1), reduction="batchmean")
                    losses.append(share * F.cross_entropy(zx, y) + (1 - share) * apart)
                for optimizer, loss in ((stays[c], losses[0]), (fresh, losses[1])):
                    optimizer.zero_grad()
                    loss.backward()
                for optimizer in (stays[c], fresh):
                    optimizer.step()
            uploads.append(w.state_dict())
        shared.load_state_dict({k: sum(u[k] for u in uploads) / 2 if v.is_floating_point() else uploads[0][k] for k, v in uploads[0].items()})
    assert not SEEN
    for name, theirs in shared.state_dict().items():
        torch.testing.assert_close(f.server.model[name].double(), theirs.double(), rtol=0, atol=1e-9)
    for c in f.keep.version:
        for name, theirs in personal[c].state_dict().items():
            torch.testing.assert_close(f.keep.read(c)["personal"][name].double(), theirs.double(), rtol=0, atol=1e-9)
    one = sum(t.numel() * t.element_size() for t in shared.state_dict().values())
    assert row["bytes_up"] == row["bytes_down"] == 2 * one, "nothing personal travels"


@pytest.mark.usefixtures("in_double")
def test_each_for_itself_is_fedavg(tmp_path: Path) -> None:
    one = federated(tmp_path / "1", alpha=1.0, beta=1.0, norm="gn")
    other = federated(tmp_path / "2", name="fedavg", norm="gn", lr=0.01, momentum=0.0, nesterov=False, weights="samples")
    for number in range(2):
        one.round(number)
        other.round(number)
    torch.testing.assert_close(one.server.model.groups["parameters"], other.server.model.groups["parameters"], rtol=0, atol=1e-12)


def test_the_original_knows_no_unlabelled_images(tmp_path: Path) -> None:
    """Nor do batch norm's statistics: whatever the unlabelled images are, the round is the same, and a pass is one over the labelled."""
    made = []

    class Looking(FML):
        def step(self, s: Any, b: Any) -> None:
            made.append(bool(b.u))
            super().step(s, b)

    f = federated(tmp_path, Looking, lambda_u=0.0, norm="bn", steps=None, epochs=1)
    f.round(0)
    sizes = [len(f.simulation.federation.clients[c].labelled) for c in f.server.active]
    assert made == [False] * sum(-(-n // 16) for n in sizes)


@pytest.mark.parametrize("start", ["initial", "random"])
def test_alike_nets_stay_alike_until_the_first_merge(start: str, tmp_path: Path) -> None:
    f = federated(tmp_path, personal_start=start, norm="gn", active=4)
    uploads: dict[int, State] = {}
    merge = f.method.merge

    def looking(server: Any, updates: Any) -> None:
        uploads.update({u.client: u["model"].clone() for u in updates})
        merge(server, updates)

    f.method.__dict__["merge"] = looking
    f.round(0)
    assert [equal(uploads[c], f.keep.read(c)["personal"]) for c in range(4)] == [start == "initial"] * 4


def test_one_after_the_other_learns_from_what_the_first_has_become(tmp_path: Path) -> None:
    ways = [federated(tmp_path / way, update=way, norm="gn", lr=0.1) for way in ("simultaneous", "alternating")]
    for f in ways:
        f.round(0)
    assert all(torch.isfinite(f.server.model.groups["parameters"]).all() for f in ways) and not equal(*(f.server.model for f in ways))


def test_labels_at_the_server_are_refused() -> None:
    with pytest.raises(UserError, match="fml is not defined for labels=server"):
        prepare(None, SMALL | {"method": "fml", "labels": "server"})
    with pytest.raises(UserError, match="two models that teach each other, so debias=true"):
        prepare(None, SMALL | {"method": "fml", "debias": True})
