"""The key `measure`: numbers worked out or in a second way, and a run that does not notice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, rows, same, weights

import fallow
from fallow import machine, models
from fallow.engine.pack import pack
from fallow.engine.party import SERVER
from fallow.engine.round import Federated
from fallow.measure.diversity import every, norm_parameters, per_group
from fallow.measure.prior import bias, class_accuracy, js, share
from fallow.methods.state import State
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder
from fallow.runs.settings import config_hash, resolve

ALL = ["classes", "prior", "diversity", "labels"]
COLUMNS = {"class_accuracy", "prior_js", "prior_js_min", "prior_js_max", "class_accuracy_clients", "diversity", "R",
           "label_accuracy_local", "label_accuracy_global"}  # fmt: skip
PLAIN = {"augment": {"labelled": "plain", "weak": "plain", "strong": "plain", "cutout": "none"}, "norm": "gn"}


def federated(path: Path, **keys: Any) -> Federated:
    method, options, source, federation = prepare(None, TINY | {"measure": ALL} | keys)
    path.mkdir(parents=True, exist_ok=True)
    return Run(RunFolder(path), method, options, source, federation).federated


def module(f: Federated, state: State, norm: str) -> torch.nn.Module:
    net = models.build("small-cnn", 10, 1, norm=norm, size=8)
    net.load_state_dict(state.tensors(), strict=False)
    return net.eval()


def images(f: Federated, which: Any) -> torch.Tensor:
    which = torch.as_tensor(which)
    return f.kit.views("plain", f.simulation.images[which], torch.zeros(len(which), dtype=torch.int64))


# -- formulas ------------------------------------------------------------------------------------------------------------
def test_worked_divergences() -> None:
    b = bias([0.9, 0.6, 0.3, 0.2])
    assert b.tolist() == pytest.approx([0.45, 0.30, 0.15, 0.10])
    for other, nats, bits in (((0.5, 0.25, 0.15, 0.10), 0.001796, 0.002591), ((0.7, 0.1, 0.1, 0.1), 0.042375, 0.061135)):
        assert js(b, torch.tensor(other)) == pytest.approx(nats, abs=5e-7)
        assert js(b, torch.tensor(other)) / math.log(2) == pytest.approx(bits, abs=5e-7)
    one, two = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert js(one, two) == pytest.approx(math.log(2)) and js(one, one) == 0 and js(b, share(b * 7)) == pytest.approx(0)
    assert bias([0.0, None, 0.0, 0.0]).tolist() == [0.25] * 4


def test_accuracy_by_class() -> None:
    logits = torch.tensor([[3.0, 0, 0], [0, 1, 0], [2, 1, 0], [0, 0, 1], [0, 1, 0]])
    assert class_accuracy(logits, torch.tensor([0, 0, 0, 1, 1]), 4) == [pytest.approx(2 / 3), 0.5, None, None]


# -- the run does not notice ---------------------------------------------------------------------------------------------
WATCHED = [
    {"method": "fedrgd", "labels": "server", "threshold": 0.12, "norm": "bn", "groups": 2},
    {"method": "fedloke", "entropy": 2.3, "ramp_rounds": 1, "norm": "bn"},
    {"method": "semifl", "labels": "server", "threshold": 0.12, "norm": "bn", "sbn_data": "active", "eval_every": 3},
    {"method": "fixmatch", "labeller": "local-ema", "threshold": 0.12, "average": "dma", "optimizer_state": "keep"},
    {"method": "feddure", "norm": "bn"},
]


@pytest.mark.parametrize("keys", WATCHED, ids=lambda k: k["method"])
def test_a_measured_run_is_the_same_run(keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = TINY | keys
    plain = fallow.run(out=tmp_path, **keys)
    stopped = fallow.run(out=tmp_path, measure=ALL, stop_after=1, **keys)
    measured = fallow.resume(stopped.path)
    assert weights(plain.path) == weights(measured.path)
    found = rows(measured.path)
    assert [{k: v for k, v in row.items() if k not in COLUMNS} for row in found] == rows(plain.path)
    assert all(set(row) >= COLUMNS for row in found)
    if keys["method"] == "fixmatch":
        monkeypatch.setattr(machine, "cores", lambda: 2)
        machine.pool.cache_clear()
        same(fallow.run(out=tmp_path, measure=ALL, **keys | {"slots": 2}).path, measured.path)


def test_what_the_server_holds_is_the_same(tmp_path: Path) -> None:
    """Static statistics, which belong to the next round's clients, are made for measuring and not stored."""
    runs = [federated(tmp_path / str(len(m)), measure=m, **WATCHED[2]) for m in ([], ALL)]
    for f in runs:
        f.round(0)
    (shape, tensors), (other_shape, others) = (pack(f.server.entries, f.kit.layouts()) for f in runs)
    assert shape == other_shape and all(torch.equal(tensors[k], others[k]) for k in tensors)


def test_when_and_what(tmp_path: Path, fallow_cli: Any) -> None:
    keys = TINY | {"method": "fedavg", "rounds": 5, "measure_every": 2}
    told = fallow_cli("run", *(f"{k}={v}" for k, v in keys.items()), "measure=classes,labels", "--name", "a")
    assert told.code == 0, told.err
    found = rows(Path("runs/a"))
    assert [row["round"] for row in found if "class_accuracy" in row] == [2, 4, 5]
    assert not any("diversity" in row or "prior_js" in row for row in found)
    assert found[-1]["label_accuracy_local"] is None, "FedAvg's clients keep no net"
    whole = [a * n for a, n in zip(found[-1]["class_accuracy"], torch.bincount(prepare(None, keys)[2].test.labels).tolist())]
    assert sum(whole) / 60 == pytest.approx(found[-1]["accuracy"])
    sentence = fallow_cli("run", "measure=clases,labels").sentence
    assert "measure=clases is not allowed" in sentence and "classes" in sentence
    assert "makes no groups; use average=grouped" in fallow_cli("run", "diversity_scope=per-group").sentence


def test_measuring_is_no_part_of_what_a_run_is() -> None:
    hashes = {config_hash(resolve({}, {"method": "fedavg"} | more)[1]) for more in ({}, {"measure": ALL}, {"measure_every": 7})}
    assert len(hashes) == 1


# -- gradient diversity --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("keys", [
    {"method": "fedavg", "batch": "full"},
    {"method": "fixmatch", "batch": "full", "unlabelled_batch": "full", "threshold": 0.11},
    {"method": "fedrgd", "average": "grouped", "groups": 2, "batch": "full", "unlabelled_batch": "full", "threshold": 0.11},
], ids=lambda k: k["method"])  # fmt: skip
@pytest.mark.usefixtures("in_double")
def test_one_plain_step_has_the_gradients_diversity(keys: dict[str, Any], tmp_path: Path) -> None:
    """11.5: scaling changes nothing, so w - lr g tells g. In later rounds too, and from the groups' own starts."""
    sgd = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "schedule": "constant", "steps": None, "epochs": 1, "lr": 0.5}
    f = federated(tmp_path, active=4, measure=["diversity"], rounds=3, **keys, **sgd, **PLAIN)
    for number in range(3):
        found = f.round(number)["diversity"]
        assert len(found) == 8
        for form in ("l2-squared", "l2", "l1-squared", "l1"):
            assert found[f"gradient/users/{form}"] == pytest.approx(found[f"update/users/{form}"], rel=1e-4)


@pytest.mark.usefixtures("in_double")
def test_sixteen_numbers_against_plain_torch(tmp_path: Path) -> None:
    """FedRGD with its server: full-data gradients and whole updates, made here without the engine's steps."""
    keys = {"method": "fedrgd", "labels": "server", "label_count": 30, "groups": 2, "active": 4, "threshold": 0.11}
    f = federated(tmp_path, measure=["diversity"], **keys, **PLAIN)
    f.round(0)  # groups have models of their own from here on
    f.server.draw(1)
    f.server.sent = f.server.model
    requests, beside = f._requests(), f._beside("beside")
    jobs = [*requests, *beside]
    ends = {r.party: r.update["model"] for replies in f.clients.train(requests, beside) for r in replies}
    gradients, updates = {}, {}
    for job in jobs:
        net = module(f, job.message["model"], "gn")
        if job.party == SERVER:
            mine = f.simulation.federation.server.labelled
            loss = F.cross_entropy(net(images(f, mine)), torch.from_numpy(f.simulation.labels[mine]))
        else:
            z = net(images(f, f.simulation.federation.clients[job.party].unlabelled))
            confidence, label = z.detach().softmax(1).max(1)
            loss = (F.cross_entropy(z, label, reduction="none") * (confidence >= 0.11)).mean()
        gradients[job.party] = dict(zip(dict(net.named_parameters()), torch.autograd.grad(loss, list(net.parameters()))))
        updates[job.party] = {n: ends[job.party][n] - p.detach() for n, p in net.named_parameters()}
    row = f.round(1)
    assert len(row["diversity"]) == 16
    flat = lambda v, without=(): torch.cat([t.reshape(-1) for n, t in v.items() if n not in without])
    users = [j.party for j in jobs if j.party != SERVER]
    want = every(*([flat(of[p]) for p in users] for of in (gradients, updates)), (flat(gradients[SERVER]), flat(updates[SERVER])))
    assert row["diversity"] == {k: pytest.approx(v, rel=1e-3) for k, v in want.items()}
    # other scales and scopes, of the same round
    norms = norm_parameters(net)
    for change, expected in {
        ("diversity_scale", "times-n"): {"gradient/all/l2-squared": 5 * want["gradient/all/l2-squared"]},
        ("diversity_norms", False): {"update/users/l2": every([], [flat(updates[p], norms) for p in users])["update/users/l2"]},
        ("diversity_scope", "per-group"): {
            "update/users/l1": per_group([[flat(updates[p]) for p in half] for half in (users[:2], users[2:])], "l1"),
        },
    }.items():
        other = federated(tmp_path, measure=["diversity"], **keys, **PLAIN, **dict([change]))
        other.round(0)
        found = other.round(1)["diversity"]
        assert {k: found[k] for k in expected} == {k: pytest.approx(v, rel=1e-3) for k, v in expected.items()}
        assert change[0] != "diversity_scope" or len(found) == 8
    classes = [torch.bincount(f.simulation.truth[torch.from_numpy(c.unlabelled)], minlength=10).double() for c in f.simulation.federation.clients]
    mixes = [c / c.sum() for c in classes]
    pairs = [(a - b).abs().sum().item() / 2 for i, a in enumerate(mixes) for b in mixes[:i]]
    assert row["R"] == pytest.approx(sum(pairs) / len(pairs))


def test_nothing_gathered_is_changed(tmp_path: Path) -> None:
    """The slot in which gradients are added up ends with the weights and statistics it began with."""
    f = federated(tmp_path, method="fedloke", norm="bn", measure=["diversity"], entropy=2.3, ramp_rounds=1)
    f.round(0)
    slot = f.clients._questions._free.get()
    sent = f.server.sent
    assert all(torch.equal(slot.model.flat.groups[g], sent.groups[g]) for g in ("parameters", "statistics"))
    assert slot.total.any()


# -- prior bias, labels --------------------------------------------------------------------------------------------------
def test_prior_bias_against_plain_torch(tmp_path: Path) -> None:
    f = federated(tmp_path, method="fixmatch", threshold=0.11, measure=["prior", "classes"], **PLAIN)
    f.server.draw(0)
    f.server.sent = f.server.model
    ends = {o.party: o.update["model"] for o in f.clients.train(f._requests())[0]}
    row = f.round(0)
    test, truth = f.kit.views("plain", f.simulation.test_images, torch.zeros(60, dtype=torch.int64)), f.simulation.test_labels

    def found(state: State, client: int) -> tuple[list[float], dict[str, float]]:
        net, holding = module(f, state, "gn"), f.simulation.federation.clients[client]
        with torch.no_grad():
            label, appu = net(test).argmax(1), net(images(f, holding.unlabelled)).softmax(1).mean(0).double()
        accuracy = [float((label[truth == k] == k).double().mean()) for k in range(10)]
        b = torch.tensor(accuracy, dtype=torch.float64) / sum(accuracy)
        labelled = torch.bincount(torch.from_numpy(f.simulation.labels[holding.labelled]), minlength=10).double()
        return accuracy, {n: _js(b, q / q.sum()) for n, q in (("bias", torch.ones(10).double()), ("labels", labelled), ("appu", appu))}

    def _js(p: torch.Tensor, q: torch.Tensor) -> float:
        """By entropies: H(m) - (H(p) + H(q)) / 2."""
        h = lambda x: torch.special.entr(x).sum()
        return float(h((p + q) / 2) - (h(p) + h(q)) / 2)

    for suffix, models_of in (("", dict.fromkeys(ends, f.server.model)), ("_local", ends)):
        each = [found(state, client) for client, state in models_of.items()]
        for name in ("bias", "labels", "appu"):
            values = [divergences[name] for _, divergences in each]
            assert row["prior_js"][name + suffix] == pytest.approx(sum(values) / len(values), abs=1e-6)
            assert row["prior_js_min"][name + suffix] == pytest.approx(min(values), abs=1e-6)
            assert row["prior_js_max"][name + suffix] == pytest.approx(max(values), abs=1e-6)
    assert row["class_accuracy"] == pytest.approx(found(f.server.model, 0)[0])
    assert row["class_accuracy_clients"] == {str(c): pytest.approx(found(s, c)[0]) for c, s in ends.items()}


def test_local_and_global_labels_against_plain_torch(tmp_path: Path) -> None:
    """FedLoKe, Fig. 4: all clients count, one that was never drawn with its first personal model."""
    f = federated(tmp_path, method="fedloke", norm="bn", measure=["labels"], active=2, ema=0.9, steps=6, lr=0.1, clip_value=None)
    row = f.round(0)
    local, whole = [], []
    for client, holding in enumerate(f.simulation.federation.clients):
        truth = f.simulation.truth[torch.from_numpy(holding.unlabelled)]
        own = f.keep.read(client).get("personal", f.kit.initial())
        for state, out in ((own, local), (f.server.model, whole)):
            with torch.no_grad():
                label = module(f, state, "bn")(images(f, holding.unlabelled)).argmax(1)
            out.append(float((label == truth).double().mean()))
    assert len(f.keep.version) == 2 and len(local) == 4
    assert local != whole
    assert row["label_accuracy_local"] == pytest.approx(sum(local) / 4)
    assert row["label_accuracy_global"] == pytest.approx(sum(whole) / 4)
