"""SemiFed: the worked numbers and invariants, and rounds against plain torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fallow import models
from fallow.engine.feed import Batch, Part
from fallow.errors import UserError
from fallow.methods import find
from fallow.methods.semifed import SemiFed
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder

SMALL: dict[str, Any] = {
    "clients": 4, "active": 3, "label_count": 80, "batch": 16, "steps": 2, "rounds": 4, "slots": 1, "device": "cpu", "defaults": "paper",
    "threshold": 0.11,
}  # fmt: skip


def federated(path: Path, kind: Any = None, name: str = "semifed", **keys: Any) -> Any:
    _, options, source, federation = prepare(None, {k: v for k, v in SMALL.items() if k != "threshold" or name == "semifed"} | {"method": name} | keys)
    path.mkdir(exist_ok=True, parents=True)
    return Run(RunFolder(path), kind or find(name), options, source, federation).federated


def method(**options: Any) -> SemiFed:
    return SemiFed(SemiFed.Options(**options), 3)


# -- the worked example ----------------------------------------------------------------------------------------------------
MODELS = [
    [[4, 0, 0], [4, 0, 0], [0, 4, 0], [1, 0, 0]], [[5, 0, 0], [0, 5, 0], [0, 4, 0], [3, 0, 0]], [[4, 0, 0], [4, 0, 0], [0, 2, 0], [4, 0, 0]],
]  # fmt: skip
WEAK, STRONG = [[2, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], [[1, 0, 0], [0, 1, 0], [0, 2, 0], [0, 0, 0]]


def said(*which: int) -> torch.Tensor:
    return torch.tensor([MODELS[i] for i in which or (0, 1, 2)], dtype=torch.float64).softmax(2)


def test_worked_agreement() -> None:
    confidences = [[0.964663, 0.964663, 0.964663, 0.576117], [0.986703, 0.986703, 0.964663, 0.909443], [0.964663, 0.964663, 0.786986, 0.964663]]
    assert np.abs(said().amax(2).numpy() - np.array(confidences)).max() < 1e-6
    label, agreed, alike = method(threshold=0.9).agree(said())
    assert agreed.tolist() == [True, False, False, False] and label[0] == 0 and alike.tolist() == [True, False, True, True]
    label, agreed, _ = method(threshold=0.9, agreement="majority").agree(said())
    assert label.tolist() == [0, 0, 1, 0] and agreed.all()
    _, agreed, _ = method(threshold=0.9, agreement="majority").agree(said(0, 1))
    assert agreed.tolist() == [True, False, True, False], "one vote each is a tie, and one sure model is not two"


def test_places_without_a_model_have_no_say() -> None:
    for options in ({}, {"agreement": "majority"}, {"agreement": "majority", "min_agree": 1}):
        found = method(threshold=0.9, **options).agree(said(), torch.tensor([1.0, 1.0, 0.0]))
        wanted = method(threshold=0.9, **options).agree(said(0, 1))
        assert torch.equal(found[1], wanted[1]) and torch.equal(found[2], wanted[2]) and torch.equal(found[0][found[1]], wanted[0][wanted[1]])
        assert not method(threshold=0.0, **options).agree(said(), torch.zeros(3))[1].any()


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("keys", [{}, {"agreement": "majority", "include_global": False}])
def test_labels_of_each_step_on_plain_images_are_the_rounds(keys: Any, tmp_path: Path) -> None:
    """The models that label do not change within a round, and nor do plain images."""
    ways = [federated(tmp_path / time, label_time=time, norm="bn", helper_choice="latest", **keys) for time in ("round", "step")]
    held = []
    for number in range(3):
        for f in ways:
            row = f.round(number)
        held.append(row["label_ratio"])
    a, b = (f.server.model.groups["parameters"] for f in ways)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    assert held[0] == 0 and max(held) > 0


def test_agreement_only_shrinks() -> None:
    p = torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(3) / 2, (4, 500)))
    held = {}
    for tau in (0.0, 0.4, 0.6, 2.0):
        everyone = method(threshold=tau).agree(p)[1]
        for least in (1, 2, 3, 4):
            _, most, _ = method(threshold=tau, agreement="majority", min_agree=least).agree(p)
            assert not (everyone & ~most).any()
        shuffled = method(threshold=tau).agree(p[[2, 0, 3, 1]])
        assert torch.equal(shuffled[1], everyone) and torch.equal(shuffled[0][everyone], method(threshold=tau).agree(p)[0][everyone])
        assert not (everyone & ~method(threshold=tau).agree(p[:3])[1]).any()
        held[tau] = everyone
    assert not (held[0.6] & ~held[0.4]).any() and not (held[0.4] & ~held[0.0]).any() and held[0.4].any() and not held[2.0].any()
    assert method(threshold=0.0).agree(p[:1])[1].all(), "the received model alone"


class Bench:
    def __init__(self, *logits: Any):
        self.stats: list[str] = []
        self.logits, self.logged, self.loss = [torch.tensor(z, dtype=torch.float64).requires_grad_() for z in logits], {}, None

    def model(self, x: Any, stats: str = "update") -> torch.Tensor:
        self.stats.append(stats)
        return self.logits.pop(0)

    def descend(self, loss: Any) -> None:
        self.loss = loss

    def log(self, **values: Any) -> None:
        self.logged |= {k: float(torch.as_tensor(v).detach()) for k, v in values.items()}


def loss(x: bool = True, **options: Any) -> Bench:
    bench = Bench(*([[[1, 0, 0], [0, 2, 0]]] if x else []), WEAK, STRONG)
    images = torch.zeros(4, 1)
    u = Part({"weak": images, "strong": images, "label": torch.tensor([0, 1, 1, 0]), "agreed": torch.tensor([True, False, False, False])})
    parts = {"x": Part({"labelled": images, "y": torch.tensor([0, 1])} if x else None), "u": u}
    method(**options).step(bench, Batch(parts, {"ramp": torch.tensor(1.0)}))
    return bench


def test_worked_loss() -> None:
    assert loss().logged == pytest.approx({"consistency": 0.174582, "agreed_loss": 0.137861, "loss": 0.707938}, abs=1e-6)
    assert loss(reduction="selected").logged["agreed_loss"] == pytest.approx(0.551445, abs=1e-6)
    assert loss(x=False).logged["loss"] == pytest.approx(0.174582 + 0.137861, abs=1e-6)
    assert loss(lambda_c=0.0, lambda_p=2.0).logged["loss"] == pytest.approx(0.395495 + 2 * 0.137861, abs=1e-6)
    assert loss().stats == ["update"] * 3 and loss(consistency_stats="running").stats == ["update", "running", "update"]
    each = [0.098886, 0.364175, 0.111983, 0.123284]
    assert loss(consistency_threshold=0.7).logged["consistency"] == pytest.approx(each[0] / 4, abs=1e-6)


# -- the pool ------------------------------------------------------------------------------------------------------------
class Watched(SemiFed):
    seen: dict[tuple[int, int], int] = {}

    def down(self, server: Any, client: int) -> Any:
        message = super().down(server, client)
        chosen = self.chosen(server, client)
        assert client not in chosen and set(chosen) <= set(server.pool)
        Watched.seen[server.round, client] = len([name for name in message if name.startswith("helper")])
        return message


@pytest.mark.parametrize("choice", ["random", "nearest", "latest"])
def test_helpers_are_others_that_were_there(choice: Any, tmp_path: Path) -> None:
    Watched.seen = {}
    f = federated(tmp_path, Watched, helper_choice=choice, active=2, norm="bn")
    known: set[int] = set()
    for number in range(4):
        row = f.round(number)
        expected = [min(2, len(known - {c})) if choice != "nearest" or c in known else 0 for c in f.server.active]
        assert [Watched.seen[number, c] for c in f.server.active] == expected
        one = f.server.model.nbytes
        assert row["bytes_down"] == sum((1 + h) * one for h in expected) and row["bytes_up"] == 2 * one
        known |= set(f.server.active)
    assert sorted(f.server.pool) == sorted(known)


def test_old_models_help_no_more() -> None:
    class Server(dict):  # type: ignore[type-arg]
        round = 9

        def rng(self, _: str) -> np.random.Generator:
            return np.random.default_rng(0)

    server = Server(came={0: 3, 1: 8, 2: 6, 5: 8})
    assert method(helper_choice="latest", helpers=9).chosen(server, 1) == [5, 2, 0]
    assert method(helper_choice="latest", helpers=9, helper_max_age=3).chosen(server, 1) == [5, 2]
    assert sorted(method(helpers=9, helper_max_age=3).chosen(server, 0)) == [1, 2, 5] and len(method(helpers=2).chosen(server, 0)) == 2


# -- rounds ------------------------------------------------------------------------------------------------------------
SEEN: list[Any] = []


class Recording(SemiFed):
    def step(self, s: Any, b: Any) -> None:
        SEEN.append((b.x.labelled, b.x.y, b.u.weak, b.u.strong, b.u.index))
        super().step(s, b)

    def begin(self, party: Any) -> Any:
        images = party.site.plain(party.unlabelled.rows)
        SEEN.append(images)
        return super().begin(party)


@pytest.mark.usefixtures("in_double")
def test_rounds_equal_plain_torch(tmp_path: Path) -> None:
    """Helpers chosen by age, BN; labels by agreement on plain images in eval mode."""
    SEEN.clear()
    lr = 2**-6
    f = federated(tmp_path, Recording, norm="bn", helper_choice="latest", lr=lr, weights="uniform")
    shared = models.build("small-cnn", 10, 1, norm="bn", size=8)
    shared.load_state_dict(f.server.model.tensors(), strict=False)
    pool: dict[int, Any] = {}
    came: dict[int, int] = {}
    held = []
    for number in range(3):
        row, alike = f.round(number), []
        sent = {}
        for client in f.server.active:
            images = SEEN.pop(0)
            helpers = [pool[k] for k in sorted((k for k in pool if k != client), key=lambda k: (-came[k], k))[:2]] if number else []
            with torch.no_grad():
                p = torch.stack([copy.deepcopy(m).eval()(images).softmax(1) for m in [shared, *helpers]])
            labels, sure = p[0].argmax(1), ((p.argmax(2) == p[0].argmax(1)) & (p.amax(2) >= 0.11)).all(0) & bool(helpers)
            if helpers:
                alike += (p.argmax(2) == p[0].argmax(1)).all(0).tolist()
            net = copy.deepcopy(shared).train()
            optimizer = torch.optim.SGD(net.parameters(), lr)
            for _ in range(2):
                x, y, weak, strong, index = SEEN.pop(0)
                zx = net(x)
                with torch.no_grad():
                    target = net(weak).softmax(1)
                zs = net(strong)
                mask = sure[index].double()
                held.append(float(mask.mean()))
                l_p = (F.cross_entropy(zs, labels[index], reduction="none") * mask).sum() / len(mask)
                optimizer.zero_grad()
                (F.cross_entropy(zx, y) + F.kl_div(zs.log_softmax(1), target, reduction="batchmean") + l_p).backward()
                optimizer.step()
            sent[client] = net
        assert row.get("agreement") == (pytest.approx(sum(alike) / len(alike)) if alike else None)
        pool |= sent
        came |= dict.fromkeys(sent, number)
        states = [m.state_dict() for m in sent.values()]
        shared.load_state_dict({k: sum(s[k] for s in states) / 3 if v.is_floating_point() else states[0][k] for k, v in states[0].items()})
    assert not SEEN and sum(held) > 0
    for name, theirs in shared.state_dict().items():
        torch.testing.assert_close(f.server.model[name].double(), theirs.double(), rtol=0, atol=1e-9)


@pytest.mark.usefixtures("in_double")
def test_without_both_terms_it_is_fedavg(tmp_path: Path) -> None:
    one = federated(tmp_path / "1", lambda_c=0.0, lambda_p=0.0, norm="gn")
    other = federated(tmp_path / "2", name="fedavg", norm="gn", lr=0.01, momentum=0.0, nesterov=False, weights="samples")
    for number in range(2):
        one.round(number)
        other.round(number)
    torch.testing.assert_close(one.server.model.groups["parameters"], other.server.model.groups["parameters"], rtol=0, atol=1e-12)


def test_the_received_model_alone_does_not_wait(tmp_path: Path) -> None:
    """Without helpers and without a threshold every image has the received model's class, from the first round on."""
    assert federated(tmp_path, helpers=0, threshold=0.0).round(0)["label_ratio"] == 1.0


def test_labels_that_stay_until_others_are_agreed_on(tmp_path: Path) -> None:
    f = federated(tmp_path, label_memory="sticky", threshold=0.0, helpers=0, start_round=0, active=4, steps=4, lr=0.1)
    ratios = []
    for number in range(3):
        ratios.append(f.round(number)["label_ratio"])
    assert ratios == [1.0] * 3, "all images have a label of the received model"
    n = len(f.simulation.federation.clients[0].unlabelled)
    assert (f.keep.read(0)["memory"][:n] >= 0).all()
    quiet = federated(tmp_path / "2", label_memory="sticky", threshold=2.0, helpers=0, start_round=0, active=4)
    assert quiet.round(0)["label_ratio"] == 0 and (quiet.keep.read(0)["memory"] == -1).all()


@pytest.mark.parametrize(("keys", "words"), [({"labels": "server"}, "not defined for labels=server"), ({"debias": True}, "so debias=true has no place"), ({"average": "dma"}, "merges updates in its own way"), ({"helper_choice": "nearest", "statistics": "static"}, "they come without statistics"), ({"label_time": "step", "label_memory": "sticky"}, "agrees anew at each step")])
def test_settings_without_a_meaning_are_refused(keys: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        prepare(None, SMALL | {"method": "semifed"} | keys)
