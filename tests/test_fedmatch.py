"""FedMatch: the worked numbers and invariants, and rounds against plain torch."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KDTree
from torch import Tensor, nn

from fallow import models
from fallow.data.samples import Samples
from fallow.engine.feed import Batch, Part
from fallow.engine.nets import NetHandle
from fallow.engine.party import Tally
from fallow.errors import UserError
from fallow.methods import find
from fallow.methods.base import Update, Updates
from fallow.methods.fedmatch import FedMatch
from fallow.methods.parts import helping, plateau
from fallow.methods.parts.summands import by_fan_in, decomposed
from fallow.methods.sparse import Sparse, cut, encoded
from fallow.methods.state import State
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder

SMALL: dict[str, Any] = {
    "method": "fedmatch", "data": "digits", "clients": 4, "active": 3, "label_count": 80, "steps": 2, "rounds": 6, "slots": 1, "device": "cpu",
    "defaults": "paper", "threshold": 0.12, "norm": "none",
}  # fmt: skip
WEIGHTS = ("sigma", "psi")


def federated(path: Path, kind: Any = None, **keys: Any) -> Any:
    method, options, source, federation = prepare(None, SMALL | keys)
    path.mkdir(exist_ok=True, parents=True)
    return Run(RunFolder(path), kind or method, options, source, federation).federated


def equal(a: State, b: State) -> bool:
    return a.groups.keys() == b.groups.keys() and all(torch.equal(a.groups[g], b.groups[g]) for g in a.groups)


# -- the worked example, a linear model of two inputs and three classes ----------------------------------------------------
SIGMA = [[2.0, -1, 0], [0, 1, -2]]
PSI = [[0.4, -0.2, 0], [0, 0.2, -0.4]]
H1 = [[0.5, -0.1, 0], [0.1, 0.2, -0.3]]
H2 = [[-3, 1.5, 0.3], [0, 0.3, -0.5]]
U, STRONG = [[1, -0.5], [0.2, 0.1], [-0.6, 0.8]], [[0.8, -0.2], [0.1, 0.1], [-0.3, 0.9]]


def net(w: Any) -> NetHandle:
    handle = NetHandle(nn.Linear(2, 3, bias=False), torch.device("cpu"))
    handle.load(state(w))
    return handle


def state(w: Any) -> State:
    module = nn.Linear(2, 3, bias=False)
    module.weight.data = torch.tensor(w, dtype=torch.float64).T.contiguous()
    return State.of(module)


def numbers(thing: NetHandle | State) -> list[list[float]]:
    """Weights, named."""
    weight = thing["weight"] if isinstance(thing, State) else thing.weights["weight"]
    return weight.detach().T.tolist()


class Bench:
    """A slot with plain SGD of rate 1e-3, which keeps the losses and gradients."""

    def __init__(self) -> None:
        self.model, self.sigma, self.psi = net(SIGMA), net(SIGMA), net(PSI)
        self.losses: list[float] = []
        self.grads: list[Tensor] = []
        self.judged: Any = None

    def descend(self, loss: Tensor, only: NetHandle) -> None:
        [g] = torch.autograd.grad(loss, only.params)
        only.params[0].data.sub_(1e-3 * g)
        self.losses.append(loss.item())
        self.grads.append(g.T)

    def judge(self, part: Any, label: Tensor, sure: Tensor, confidence: Tensor) -> None:
        self.judged = label.tolist(), sure.tolist(), confidence.tolist()

    def log(self, **_: Any) -> None:
        pass


def method(classes: int = 3, **options: Any) -> FedMatch:
    return FedMatch(FedMatch.Options(**options), classes)


def labelled() -> Part:
    return Part({"labelled": torch.tensor([[1, 0.5], [-0.5, 1]]), "y": torch.tensor([0, 1])})


def votes(sigma: Any = SIGMA) -> Tensor:
    """Of the two helpers, on the sigma that was received."""
    each = [(torch.tensor(U) @ (torch.tensor(sigma) + torch.tensor(h))).softmax(1) for h in (H1, H2)]
    return torch.stack([torch.cat([p, F.one_hot(p.argmax(1), 3)], 1) for p in each], 1)


def unlabelled(**more: Tensor) -> Part:
    return Part({"weak": torch.tensor(U), "strong": torch.tensor(STRONG)} | more)


def near(found: Any, expected: Any, within: float) -> None:
    assert np.abs(np.array(found) - np.array(expected)).max() < within, found


SIGMA_1 = [[2.0004748469, -1.0003832169, -9.1629961e-5], [-5.4813823e-5, 1.0001886490, -2.0001338352]]


@pytest.mark.usefixtures("in_double")
def test_worked_supervised_step() -> None:
    s = Bench()
    before = s.psi.state.clone()
    method().step(s, Batch({"x": labelled(), "u": Part(None)}, {}))
    assert s.losses == [pytest.approx(0.6852647601, abs=1e-10)]
    near(s.grads[0].tolist(), [[-0.4748469023, 0.3832169411, 0.0916299612], [0.0548138225, -0.1886489785, 0.1338351559]], 1e-10)
    near(numbers(s.sigma), SIGMA_1, 1e-10)
    assert equal(s.psi.state, before), "psi is bit-identical"


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("form", ["exact", "clipped"])
def test_worked_unsupervised_step(form: Any) -> None:
    s = Bench()
    s.sigma.load(state(SIGMA_1))
    before = s.sigma.state.clone()
    said = votes()
    near(said[0, :, :3].tolist(), [[0.7762190035, 0.0122366397, 0.2115443568], [0.0619319653, 0.1448989276, 0.7931691071]], 1e-10)
    method(probabilities=form).step_with_helpers(s, Batch({"x": Part(None), "u": unlabelled(votes=said)}, {}))
    label, sure, confidence = s.judged
    assert sure == [True, False, True] and [label[0], label[2]] == [0, 1]
    near([confidence[0], confidence[2]], [0.7598689350, 0.9333253459], 1e-9)
    assert s.losses == [pytest.approx(64.0356120282, abs=1e-8)]
    near(s.grads[0].tolist(), [[-32.0081012850, 16.0069236620, 0.0011776231], [9.02293e-5, -16.0032612360, 32.0031710070]], 1e-5)
    near(numbers(s.psi), [[0.4320081013, -0.2160069237, -1.1776e-6], [-9.0229e-8, 0.2160032612, -0.4320031710]], 1e-8)
    assert equal(s.sigma.state, before), "sigma is bit-identical"


@pytest.mark.usefixtures("in_double")
def test_the_parts_of_the_worked_loss() -> None:
    found = {}
    for name, options in (("icc", {"lambda_a": 0.0, "lambda_l1": 0.0, "lambda_l2": 0.0}), ("ce", {"lambda_i": 0.0, "lambda_l1": 0.0, "lambda_l2": 0.0}),
                          ("l1", {"lambda_i": 0.0, "lambda_a": 0.0, "lambda_l2": 0.0}), ("l2", {"lambda_i": 0.0, "lambda_a": 0.0, "lambda_l1": 0.0})):  # fmt: skip
        s = Bench()
        s.sigma.load(state(SIGMA_1))
        method(**options).step_with_helpers(s, Batch({"x": Part(None), "u": unlabelled(votes=votes())}, {}))
        found[name] = s.losses[0]
    assert found == pytest.approx({"icc": 0.0049555097, "ce": 0.0019044655, "l1": 0.00012, "l2": 64.0286320529}, abs=1e-10, rel=1e-10)
    s = Bench()
    s.sigma.load(state(SIGMA_1))
    method(lambda_a=0.0, lambda_l1=0.0, lambda_l2=0.0).step(s, Batch({"x": Part(None), "u": unlabelled()}, {}))
    assert s.losses == [0.0], "no helpers, no consistency"


@pytest.mark.usefixtures("in_double")
def test_worked_upload_and_mean() -> None:
    psi = state([[0.4320081013, -0.2160069237, -1.1776e-6], [-9.0229e-8, 0.2160032612, -0.4320031710]])
    o = FedMatch.Options()
    up_psi, up_sigma = cut(psi, state(PSI), o.delta_threshold, o.l1_threshold), cut(state(SIGMA_1), state(SIGMA), o.delta_threshold)
    near(numbers(up_psi), [[0.4320081013, -0.2160069237, 0], [0, 0.2160032612, -0.4320031710]], 1e-12)
    near(numbers(up_sigma), SIGMA_1, 1e-15)
    assert [int(Sparse(up_psi, state(PSI)).changed), int(Sparse(up_sigma, state(SIGMA)).changed)] == [4, 6]
    other = Update(sigma=state([[2.01, -1.02, 0], [0, 1.01, -2]]), psi=state([[0.44, -0.22, 0], [0, 0.22, -0.44]]), model=state(PSI).only())
    first = Update(sigma=Sparse(up_sigma, state(SIGMA)), psi=Sparse(up_psi, state(PSI)), model=state(PSI).only())
    other.entries = {k: Sparse(v, state(SIGMA)) if k != "model" else v for k, v in other.entries.items()}
    for client, update in enumerate((first, other)):
        update.client = client
    server = FakeServer()
    method().merge(server, Updates([first, other]))
    near(numbers(server["sigma"]), [[2.0052374235, -1.0101916085, -4.581498e-5], [-2.740691e-5, 1.0050943245, -2.0000669176]], 1e-10)
    near(numbers(server["psi"]), [[0.4360040506, -0.2180034618, 0], [0, 0.2180016306, -0.4360015855]], 1e-10)
    near(numbers(server["model"]), (np.array(numbers(server["sigma"])) + np.array(numbers(server["psi"]))).tolist(), 1e-15)
    near(server.said[0], numbers(up_sigma + up_psi), 1e-15)


class FakeServer(dict):  # type: ignore[type-arg]
    """Remembers which models were shown the noise."""

    def __init__(self) -> None:
        super().__init__(sigma=state(SIGMA), psi=state(PSI), model=state(SIGMA), embeddings={}, probe=None)
        self.pool: dict[int, Any] = {}
        self.said: list[Any] = []
        self.active, self.round = [0, 1], 0

    @property
    def model(self) -> State:
        return self["model"]

    def predict(self, model: State, images: Any) -> Tensor:
        self.said.append(numbers(model))
        return torch.zeros(1, 3)

    def log(self, **values: Any) -> None:
        self.logged = values


def test_ties_go_to_the_lowest_class_or_to_the_local_model() -> None:
    own, said = torch.tensor([2, 2, 0]), torch.tensor([[0, 1], [1, 1], [0, 2]])
    cast = F.one_hot(said, 3).float()
    assert method().agreed(own, cast).tolist() == [0, 1, 0]
    assert method(agreement_tie="local").agreed(own, cast).tolist() == [2, 1, 0]


@pytest.mark.usefixtures("in_double")
def test_nothing_confident_leaves_the_pull() -> None:
    s = Bench()
    method(threshold=2.0).step_with_helpers(s, Batch({"x": Part(None), "u": unlabelled(votes=votes())}, {}))
    sigma, psi = np.array(SIGMA), np.array(PSI)
    near(numbers(s.psi), psi - 1e-3 * (1e-4 * np.sign(psi) + 20 * (psi - sigma)), 1e-15)


def test_clipped_probabilities_end_where_keras_does() -> None:
    z = torch.tensor([[0.0, 60.0, 0.0]])
    clipped = method(probabilities="clipped")
    assert clipped.surprise(z, torch.tensor([0])).item() == pytest.approx(-np.log(1e-7), rel=1e-5)
    assert clipped.divergence(torch.tensor([[1.0, 0.0, 0.0]]), z).item() == pytest.approx(-np.log(1e-7) - 1e-7 * np.log(1e7), rel=1e-4)
    assert method().surprise(z, torch.tensor([0])).item() == pytest.approx(60)


# -- the rate ----------------------------------------------------------------------------------------------------------
def test_the_rate_falls_on_a_plateau() -> None:
    o = FedMatch.Options()
    party = SimpleNamespace(falls=torch.zeros(()), lowest=torch.tensor(torch.inf), patience=torch.tensor(5.0))
    rates = []
    for loss in (2.0, 1.9, 1.95, 1.90, 1.92, 1.93, 1.94, 1.89, 1.9, 1.9, 1.9, 1.9, 1.9):
        plateau.observe(o, party, torch.tensor(loss))
        rates.append(plateau.rate(o, float(party.falls)))
    assert rates == pytest.approx([1e-3] * 6 + [1e-3 / 3] * 6 + [1e-3 / 9])
    assert plateau.rate(FedMatch.Options(lr_floor=5e-4), 1) == 5e-4


def test_each_client_has_its_own_rate_and_keeps_it(tmp_path: Path) -> None:
    """Nothing is learnt, so no loss falls after a client's first round."""
    still = {"lambda_s": 0.0, "lambda_i": 0.0, "lambda_a": 0.0, "lambda_l1": 0.0, "lambda_l2": 0.0}
    f = federated(tmp_path, validation=0.2, lr_patience=1, active=2, **still)
    rounds_of = dict.fromkeys(range(4), 0)
    for number in range(6):
        row = f.round(number)
        assert row["lr"] == pytest.approx(sum(1e-3 / 3 ** max(0, rounds_of[c] - 1) for c in f.server.active) / 2)
        for c in f.server.active:
            rounds_of[c] += 1
            assert int(f.keep.read(c)["falls"]) == rounds_of[c] - 1
    assert max(rounds_of.values()) > 1


# -- helpers -----------------------------------------------------------------------------------------------------------
WORKED = {7: (0.5, 0.3, 0.2), 3: (0.48, 0.32, 0.2), 9: (0.1, 0.1, 0.8), 1: (0.55, 0.25, 0.2), 4: (0.2, 0.6, 0.2)}


def test_worked_helpers() -> None:
    vectors = {k: torch.tensor(v) for k, v in WORKED.items()}
    assert {k: set(helping.nearest(vectors, k, 2)) for k in vectors} == {7: {3, 1}, 3: {7, 1}, 9: {3, 7}, 1: {7, 3}, 4: {3, 7}}


@pytest.mark.parametrize("known", [1, 2, 3, 40])
def test_helpers_are_those_of_a_search_over_all(known: int) -> None:
    points = np.random.default_rng(known).dirichlet(np.ones(10), known)
    vectors = {100 - i: torch.from_numpy(p) for i, p in enumerate(points)}
    tree = KDTree(points)
    for i, client in enumerate(vectors):
        found = helping.nearest(vectors, client, 2)
        by_hand = [100 - j for j in np.argsort([((p - points[i]) ** 2).sum() for p in points], kind="stable") if j != i][:2]
        by_tree = [100 - j for j in tree.query(points[i : i + 1], k=min(3, known))[1][0] if j != i][:2]
        assert found == by_hand and set(found) == set(by_tree) and client not in found and len(found) == min(2, known - 1)


def test_equal_embeddings_help_in_the_order_in_which_they_came() -> None:
    same = torch.tensor([0.5, 0.5])
    assert helping.nearest({5: same, 2: same, 9: same, 1: same}, 9, 2) == [5, 2]


class Watched(FedMatch):
    sent: dict[tuple[int, int], list[str]] = {}

    def down(self, server: Any, client: int) -> Any:
        message = super().down(server, client)
        Watched.sent[server.round, client] = [name for name in message if name.startswith("helper")]
        for j, name in enumerate(Watched.sent[server.round, client]):
            near = helping.nearest(server["embeddings"], client, self.o.helpers)
            assert client not in near and equal(message[name].only("parameters"), server.pool[near[j]]["psi"])
        return message


def test_helpers_come_every_so_often_to_those_who_were_there(tmp_path: Path) -> None:
    Watched.sent = {}
    f = federated(tmp_path, Watched, helper_every=2, rounds=6, active=2)
    seen: set[int] = set()
    for number in range(6):
        f.round(number)
        for client in f.server.active:
            helped = len(Watched.sent[number, client])
            assert helped == (min(2, len(seen) - 1) if number % 2 and client in seen else 0)
        seen |= set(f.server.active)
    assert any(Watched.sent.values()) and sorted(f.server["embeddings"]) == sorted(f.server.pool) == sorted(seen)
    for client in seen:
        theta = f.server.pool[client]["psi"]
        assert set(theta.groups) == {"parameters"} and abs(float(f.server["embeddings"][client].sum()) - 1) < 1e-5


def test_helpers_that_are_held_help_in_every_round(tmp_path: Path) -> None:
    seen: list[tuple[int, int, float]] = []

    class Counting(FedMatch):
        def begin(self, party: Any) -> Any:
            found = super().begin(party)
            seen.append((party.round, party.id, float(found["votes"][..., : self.classes].sum(2).mean()) if "votes" in found else 0.0))
            return found

    f = federated(tmp_path, Counting, helper_hold=True, helper_every=2, rounds=4, active=4)
    for number in range(4):
        f.round(number)
    assert [h for r, _, h in seen if r == 0] == [0] * 4
    assert all(h == pytest.approx(1) for r, _, h in seen if r > 0), "two of two helpers, also in the round without a message"


# -- what stays bit by bit, what is sent -----------------------------------------------------------------------------------
class Frozen(FedMatch):
    steps = 0

    def supervised(self, s: Any, b: Any) -> None:
        self.without_touching(s.psi, super().supervised, s, b)

    def unsupervised(self, s: Any, b: Any, votes: Any) -> None:
        self.without_touching(s.sigma, super().unsupervised, s, b, votes)

    @staticmethod
    def without_touching(net: Any, work: Any, *args: Any) -> None:
        before = net.flat.clone()
        work(*args)
        assert equal(before, net.flat)
        Frozen.steps += 1


@pytest.mark.parametrize("norm", ["none", "bn", "gn"])
def test_labels_leave_psi_and_the_rest_leaves_sigma(norm: str, tmp_path: Path) -> None:
    Frozen.steps = 0
    f = federated(tmp_path, Frozen, norm=norm, helper_every=1, rounds=2)
    assert equal(f.server["psi"], decomposed(f.server["sigma"], 0.2))
    f.round(0)
    f.round(1)
    assert Frozen.steps == 2 * 3 * 2 * 2


def test_psi_starts_as_a_share_of_sigma_but_for_biases_and_norms() -> None:
    sigma = State.of(models.build("small-cnn", 10, 1, norm="gn", size=8)).only("parameters")
    psi = decomposed(sigma, 0.2)
    for name, p in psi.tensors().items():
        assert torch.equal(p, 0.2 * sigma[name] if p.dim() > 1 else torch.zeros_like(p)), name


def test_first_weights_of_the_released_code() -> None:
    """A normal distribution cut at two deviations, of variance 1 / fan-in after the cut; biases as they were."""
    sigma = State.of(models.build("small-cnn", 10, 1, norm="none", size=8)).only("parameters")
    drawn = by_fan_in(sigma, np.random.default_rng(0))
    for name, fan_in in (("conv2.weight", 9 * 32), ("conv3.weight", 9 * 64), ("head.weight", 128)):
        w, parent = drawn[name].double(), fan_in**-0.5 / 0.87962566
        assert w.abs().max() <= 2 * parent * (1 + 1e-6) and w.abs().max() > 1.9 * parent, "the tail is drawn anew, not clamped"
        assert (w.abs() > 1.999 * parent).double().mean() < 0.005
        assert w.std() == pytest.approx(fan_in**-0.5, rel=5 / (2 * w.numel()) ** 0.5), "five deviations of a sample's"
    assert torch.equal(drawn["conv2.bias"], sigma["conv2.bias"])


class Sending(FedMatch):
    up: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def end(self, party: Any) -> Any:
        update = super().end(party)
        if update is not None and not party.is_server:
            Sending.up.append((dict(update.entries), dict(party.received)))
        return update


@pytest.mark.parametrize("labels", ["clients", "server", "some"])
def test_what_goes_up_is_what_changed_enough(labels: str, tmp_path: Path) -> None:
    Sending.up = []
    f = federated(tmp_path, Sending, labels=labels, delta_threshold=1e-4, l1_threshold=1e-3, norm="bn")
    before = f.server["sigma"]
    row = f.round(0)
    total = 0
    for sent, received in Sending.up:
        assert set(sent) <= {"sigma", "psi", "model"} and ("sigma" in sent) <= (labels != "server")
        for name in set(sent) & set(WEIGHTS):
            new, old = sent[name].groups["parameters"], received[name].groups["parameters"]
            shown = torch.where(new.abs() > 1e-3, new, 0.0) if name == "psi" else new
            changed = new != old
            assert ((shown - old).abs()[changed] > 1e-4).all() and changed.any()
            total += len(encoded(sent[name], received[name]))
        total += sent["model"].nbytes
    assert row["bytes_up"] == total
    if labels == "server":
        trained = f.server["sigma"]
        alone = federated(tmp_path / "again", labels=labels, delta_threshold=1e-4, l1_threshold=1e-3, norm="bn")
        alone.server.draw(0)
        alone._turn(Tally())
        assert equal(trained, alone.server["sigma"]) and not equal(before, trained), "sigma is the server's own"


@pytest.mark.parametrize("order", ["shuffled", "slices"])
def test_each_epoch_ends_with_a_cut(order: str, tmp_path: Path) -> None:
    """7.6: of three epochs the first two by their column, the last in `end`; between them nothing is cut."""
    seen: list[Any] = []

    class Cutting(FedMatch):
        def cut_back(self, s: Any, b: Any) -> None:
            before = [net.flat.groups["parameters"].clone() for net in (s.sigma, s.psi)]
            super().cut_back(s, b)
            seen.append((bool(b.epoch_ends), before, [net.flat.groups["parameters"].clone() for net in (s.sigma, s.psi)], [s.sent_sigma, s.sent_psi]))

    keys = {"steps": None, "epochs": 3, "active": 1, "delta_threshold": 1e-4, "l1_threshold": 1e-3, "order": order}
    f = federated(tmp_path, Cutting, **keys)
    came = [f.server[name].groups["parameters"].clone() for name in WEIGHTS]
    f.round(0)
    assert [end for end, *_ in seen] == [False, True, False, True, False, False], "20 labels in batches of 10"
    for end, before, after, sent in seen:
        for own, new, old, net, zero in zip(before, after, came, sent, (0.0, 1e-3)):
            assert torch.equal(net.flat.groups["parameters"], old)
            changed = (torch.where(own.abs() > zero, own, 0.0) - old).abs() > 1e-4
            assert torch.equal(new, torch.where(changed, own, old) if end else own)
            assert not end or not changed.all()
    assert "sent_psi" not in federated(tmp_path / "one", steps=None, epochs=1).method.holds()


def test_a_summand_that_was_not_trained_counts_as_it_came(tmp_path: Path) -> None:
    """Labels at clients, of whom one has no labels and one no unlabelled images: the plain mean of both summands over all four."""
    Sending.up = []
    _, options, source, federation = prepare(None, SMALL | {"active": 4, "delta_threshold": 0.0, "l1_threshold": 0.0})
    without, whole, *others = federation.clients
    empty = np.zeros(0, np.int64)
    clients = (replace(without, labelled=empty), replace(whole, unlabelled=empty), *others)
    f = Run(RunFolder(tmp_path), Sending, options, source, replace(federation, clients=clients)).federated
    f.round(0)
    sent = [{name: (one[name].groups["parameters"], received[name].groups["parameters"]) for name in WEIGHTS} for one, received in Sending.up]
    assert sorted([torch.equal(*pair) for pair in one.values()] for one in sent) == [[False, False], [False, False], [False, True], [True, False]]
    for name in WEIGHTS:
        wanted = torch.stack([one[name][0] for one in sent]).double().mean(0).float()
        torch.testing.assert_close(f.server[name].groups["parameters"], wanted, rtol=0, atol=1e-7)


def test_without_thresholds_everything_goes_up(tmp_path: Path) -> None:
    Sending.up = []
    federated(tmp_path, Sending, delta_threshold=0.0, l1_threshold=0.0).round(0)
    for sent, received in Sending.up:
        assert all(sent[n].nbytes == len(encoded(sent[n], received[n])) for n in WEIGHTS)


def test_what_clients_keep_of_the_weights(tmp_path: Path) -> None:
    """7.13.7: measuring changes nothing; with `sparse` a client starts within delta of the server's weights."""
    final, rows = {}, {}

    class Starting(FedMatch):
        def begin(self, party: Any) -> Any:
            found = super().begin(party)
            starts.append((party.round, party.id, party.sigma.state.clone(), party.psi.state.clone()))
            return found

    for way in ("none", "reference", "sparse"):
        starts: list[Any] = []
        f = federated(tmp_path / way, Starting, keep_between=way, delta_threshold=1e-3, active=3, rounds=4, helper_every=2)
        rows[way] = []
        for number in range(4):
            sigma, psi = f.server["sigma"], f.server["psi"]
            rows[way].append(f.round(number))
            for _, client, s, p in [x for x in starts if x[0] == number]:
                within = 1e-3 if way == "sparse" else 0.0
                assert (s.groups["parameters"] - sigma.groups["parameters"]).abs().max() <= within * 1.001
                assert (p.groups["parameters"] - psi.groups["parameters"]).abs().max() <= (within + 1e-5 if within else 0.0) * 1.001
                if way == "sparse":
                    assert all(equal(f.keep.read(client)[n].only("parameters"), f.server.pool[client][n]) for n in WEIGHTS)
        final[way] = f.server.model
    assert equal(final["none"], final["reference"]) and not equal(final["none"], final["sparse"])
    assert rows["reference"][0]["share_down"] == rows["sparse"][0]["share_down"] == 2.0 and "share_down" not in rows["none"][0]
    assert rows["reference"][-1]["share_down"] < 2 and rows["sparse"][-1]["bytes_down"] < rows["reference"][-1]["bytes_down"]


def test_worked_share_of_the_way_down() -> None:
    """Of six numbers: one of sigma, one of psi (0.05 counts as 0), two of a helper (not where it is 0); first contact is 2."""
    server = FakeServer()
    server.active, server.round = [0, 5], 1
    server["embeddings"] = {0: torch.tensor([1.0, 0.0]), 1: torch.tensor([0.9, 0.1])}
    server.pool = {
        0: {"sigma": state([[2.2, -1, 0], [0, 1, -2]]), "psi": state([[0.4, -0.2, 0.05], [0, 0.32, -0.4]])},
        1: {"sigma": state(SIGMA), "psi": state([[0.4, 0, 0], [0.3, 0.2, -0.42]])},
    }
    one = method(keep_between="reference", l1_threshold=0.1, delta_threshold=0.05, helper_every=2)
    one.measure(server, Updates([]))
    assert server.logged == {"share_down": pytest.approx((4 / 6 + 2) / 2)}
    server.round = 0
    one.measure(server, Updates([]))
    assert server.logged == {"share_down": pytest.approx((2 / 6 + 2) / 2)}, "a round without helpers"


@pytest.mark.usefixtures("in_double")
def test_without_the_second_summand_it_is_fedavg(tmp_path: Path) -> None:
    off = {"lambda_i": 0.0, "lambda_a": 0.0, "lambda_l1": 0.0, "lambda_l2": 0.0, "psi_factor": 0.0, "l1_threshold": 0.0, "delta_threshold": 0.0}
    one = federated(tmp_path / "1", lr=1e-2, lambda_s=3.0, **off)
    plain = {"lr": 3e-2, "momentum": 0.0, "nesterov": False, "weights": "uniform", "augment": {"labelled": "plain"}, "batch": 10}
    _, options, source, federation = prepare(None, {k: v for k, v in SMALL.items() if k != "threshold"} | {"method": "fedavg"} | plain)
    (tmp_path / "2").mkdir()
    other = Run(RunFolder(tmp_path / "2"), find("fedavg"), options, source, federation).federated
    for number in range(2):
        one.round(number)
        other.round(number)
    ours, theirs = one.server.model.groups["parameters"], other.server.model.groups["parameters"]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


# -- rounds against plain torch ----------------------------------------------------------------------------------------------
SEEN: list[Any] = []


class Recording(FedMatch):
    def both(self, s: Any, b: Any, votes: Any) -> None:
        SEEN.append((b.x.labelled, b.x.y, b.u.weak, b.u.strong))
        super().both(s, b, votes)


@pytest.mark.usefixtures("in_double")
def test_rounds_equal_plain_torch(tmp_path: Path) -> None:
    """Four rounds, helpers in the second and fourth, asked batch by batch; SGD, cut and mean written out."""
    SEEN.clear()
    lr, tau, ls, la, l1, l2, least, delta = 2**-7, 0.4, 2.0, 0.5, 1e-3, 0.3, 2e-3, 1e-3
    keys = {"lr": lr, "threshold": tau, "lambda_s": ls, "lambda_i": la, "lambda_a": la, "lambda_l1": l1, "lambda_l2": l2,
            "l1_threshold": least, "delta_threshold": delta, "helper_every": 2, "rounds": 4, "psi_factor": 2.0}  # fmt: skip
    f = federated(tmp_path, Recording, **keys)
    net = models.build("small-cnn", 10, 1, norm="none", size=8)
    sigma = {k: v.clone() for k, v in f.server["sigma"].tensors().items()}
    psi = {k: 2.0 * v if v.dim() > 1 else torch.zeros_like(v) for k, v in sigma.items()}
    probe = (f.server["probe"].double() / 255 - f.kit.views.mean[0]) / f.kit.views.std[0]
    pool: dict[int, Any] = {}
    points: dict[int, np.ndarray] = {}
    kept, helped = [], 0

    def out(x: Tensor, *parts: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, {k: sum(p[k] for p in parts[1:]) + parts[0][k] for k in parts[0]}, (x,))

    def big(t: Tensor) -> Tensor:
        return t * (t.abs() > least)

    for number in range(4):
        f.round(number)
        new_sigma, new_psi = [], []
        before, older = dict(points), dict(pool)
        for client in f.server.active:
            order = sorted((k for k in before if k != client), key=lambda k: float(((before[k] - before[client]) ** 2).sum()) if client in before else 0)
            helpers = [older[k] for k in order[:2]] if number % 2 and client in before else []
            s, p = ({k: v.clone().requires_grad_() for k, v in part.items()} for part in (sigma, psi))
            for _ in range(2):
                x, y, weak, strong = SEEN.pop(0)
                grads = torch.autograd.grad(ls * F.cross_entropy(out(x, s, {k: v.detach() for k, v in p.items()}), y), list(s.values()))
                s = {k: (v - lr * g).detach().requires_grad_() for (k, v), g in zip(s.items(), grads)}
                still = {k: v.detach() for k, v in s.items()}
                z = out(weak, still, p)
                q = z.detach().softmax(1)
                sure = q.amax(1) >= tau
                kept.append(sure.double().mean().item())
                ballots, icc = F.one_hot(q.argmax(1), 10), 0.0
                for h in helpers:
                    theirs = out(weak, sigma, h).softmax(1)
                    ballots = ballots + F.one_hot(theirs.argmax(1), 10)
                    icc = icc + F.kl_div(z.log_softmax(1), theirs, reduction="none").sum(1)[sure].mean() / len(helpers)
                    helped += 1
                loss = la * icc + la * F.cross_entropy(out(strong, still, p)[sure], torch.from_numpy(ballots.numpy().argmax(1))[sure])
                for k, v in p.items():
                    if v.dim() > 1:
                        loss = loss + l1 * v.abs().sum() + l2 * (still[k] - v).pow(2).sum()
                grads = torch.autograd.grad(loss, list(p.values()))
                p = {k: (v - lr * g).detach().requires_grad_() for (k, v), g in zip(p.items(), grads)}
            s, p = ({k: v.detach() for k, v in part.items()} for part in (s, p))
            s = {k: torch.where((v - sigma[k]).abs() > delta, v, sigma[k]) for k, v in s.items()}
            p = {k: torch.where((big(v) - psi[k]).abs() > delta, v, psi[k]) for k, v in p.items()}
            pool[client] = p
            points[client] = out(probe, s, p).softmax(1)[0].numpy()
            new_sigma.append(s)
            new_psi.append(p)
        sigma = {k: sum(s[k] for s in new_sigma) / 3 for k in sigma}
        psi = {k: sum(p[k] for p in new_psi) / 3 for k in psi}
        for name in sigma:
            torch.testing.assert_close(f.server["sigma"][name], sigma[name], rtol=0, atol=1e-9)
            torch.testing.assert_close(f.server["psi"][name], psi[name], rtol=0, atol=1e-9)
            torch.testing.assert_close(f.server.model[name], sigma[name] + big(psi[name]), rtol=0, atol=1e-9)
    assert not SEEN and 0 < sum(kept) / len(kept) < 1 and helped, "some labels pass, some do not; there were helpers"
    assert copy.copy(points).keys() == f.server["embeddings"].keys()


# -- readings, keys ----------------------------------------------------------------------------------------------------
def options(**keys: Any) -> Any:
    return prepare(None, {"method": "fedmatch", "data": "digits", "defaults": "paper"} | keys)[1]


def test_constants_of_both_scenarios() -> None:
    for labels, l1, least, delta, patience, batch in (("clients", 1e-4, 5e-6, 5e-5, 5, 10), ("server", 1e-5, 1e-5, 1e-5, 20, 100)):
        o = options(labels=labels, label_count=100)
        assert (o.lambda_l1, o.l1_threshold, o.delta_threshold, o.lr_patience, o.batch) == (l1, least, delta, patience, batch)
        assert (o.lambda_s, o.lambda_i, o.lambda_a, o.lambda_l2, o.threshold, o.helpers, o.helper_every) == (10, 0.01, 0.01, 10, 0.75, 2, 10)
        assert (o.lr, o.momentum, o.weight_decay, o.lr_factor, o.psi_factor, o.weights, o.server_turn) == (1e-3, 0, 0, 3, 0.2, "uniform", "before")
        assert (o.augment.labelled, o.augment.weak, o.augment.strong) == ("plain", "plain", "ra-fedmatch")
    paper, released = options(reading="paper"), options(reading="released")
    assert (paper.threshold, paper.weight_decay, paper.helper_hold) == (0.85, 1e-4, True)
    assert (released.threshold, released.order, released.probabilities, released.server_psi) == (0.75, "slices", "clipped", "thresholded")
    assert (released.first_weights, paper.first_weights) == ("fan-in", "model")


class Worker:
    """What a plan looks at."""

    def __init__(self, labels: int, unlabelled: int, **o: Any):
        self.options = FedMatch.Options(**o)
        self.labelled, self.unlabelled = Samples.of(np.arange(labels), np.zeros(labels)), Samples.of(np.arange(unlabelled))
        self.validation, self.is_server, self.batch, self.epochs, self.steps = Samples.of(np.zeros(0)), False, self.options.batch, 1.0, None


def test_the_released_batches_are_the_same_slices_for_ever() -> None:
    """7.6: labelled batches of 10, as many as round(n / 10); at a client without labels round(n / 100), the rest is never seen."""
    plan = method(order="slices", batch=10).plan(Worker(50, 450, batch=10), {"falls": 0.0})
    [segment] = plan.segments
    drawn = {n: s.positions(3, len(segment)) for n, s in segment.streams.items()}
    assert len(plan) == 5 and [len(p) for p in drawn["u"]] == [90] * 5
    assert np.concatenate(drawn["x"]).tolist() == list(range(50)) and np.concatenate(drawn["u"]).tolist() == list(range(450))
    plan = method(order="slices", batch=100).plan(Worker(0, 450, batch=100), {"falls": 0.0})
    [segment] = plan.segments
    assert np.concatenate(segment.streams["u"].positions(3, len(segment))).tolist() == list(range(400))


def test_a_client_without_labels_has_batches_of_its_own() -> None:
    """ceil(450 / 100) steps, however small labelled batches are; as given where a number is."""
    for keys, sizes in (({"batch": 10}, [100, 100, 100, 100, 50]), ({"batch": 10, "unlabelled_batch": 225}, [225, 225])):
        [segment] = method(**keys).plan(Worker(0, 450, **keys), {"falls": 0.0}).segments
        assert segment.streams["u"].sizes(len(segment)) == sizes
    [segment] = method(order="slices", batch=10).plan(Worker(0, 450, batch=10), {"falls": 0.0}).segments
    assert segment.streams["u"].sizes(len(segment)) == [100] * 4


def test_only_the_released_server_trains_with_small_psi_left_out(tmp_path: Path) -> None:
    ways = [federated(tmp_path / way, labels="server", server_psi=way, l1_threshold=0.02) for way in ("whole", "thresholded")]
    for f in ways:
        f.round(0)
    assert not equal(ways[0].server["sigma"], ways[1].server["sigma"])
    same = [federated(tmp_path / f"{way}2", labels="clients", server_psi=way, l1_threshold=0.02) for way in ("whole", "thresholded")]
    for f in same:
        f.round(0)
    assert equal(same[0].server["sigma"], same[1].server["sigma"])


@pytest.mark.parametrize("keys", [{}, {"debias_helpers": True}])
def test_debias_changes_labels_only(keys: Any, tmp_path: Path) -> None:
    plain, other = federated(tmp_path / "1", helper_every=1), federated(tmp_path / "2", helper_every=1, debias=True, **keys)
    for number in range(2):
        plain.round(number)
        other.round(number)
    assert not equal(plain.server["psi"], other.server["psi"])
    free = federated(tmp_path / "3", helper_every=1, lambda_a=0.0, lambda_i=0.0), federated(tmp_path / "4", helper_every=1, lambda_a=0.0, lambda_i=0.0, debias=True)
    for number in range(2):
        for f in free:
            f.round(number)
    assert equal(free[0].server["psi"], free[1].server["psi"])


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"statistics": "static"}, "neither has statistics of its own"),
        ({"norm": "sbn"}, "use statistics=average or batch"),
        ({"server_momentum": 0.5}, "plain means of sigma and of psi"),
        ({"prox": 0.1}, "trains two summands"),
        ({"lr": 0.1}, "throws psi past sigma at each step; use lr below 0.05"),
        ({"measure": "diversity"}, "leave diversity out"),
        ({"average": "dma"}, "merges updates in its own way"),
        ({"average": "grouped"}, "merges updates in its own way"),
        ({"validation": 0.2, "schedule": "cosine"}, "lr_rule=validation says how the rate falls"),
        ({"labels": "all"}, "not defined for labels=all"),
        ({"labeller": "received"}, "use labeller=current"),
    ],
)
def test_settings_without_a_meaning_are_refused(keys: Any, sentence: str) -> None:
    with pytest.raises(UserError) as told:
        options(**keys)
    assert sentence in str(told.value)
