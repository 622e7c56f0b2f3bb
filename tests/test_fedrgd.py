"""FedRGD: the worked numbers and invariants, and a run against a plain-torch one."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fallow
from fallow import models
from fallow.data.samples import Samples
from fallow.engine.feed import Batch, Part
from fallow.engine.optim import Optimizer
from fallow.engine.slot import Slot
from fallow.errors import UserError
from fallow.methods.base import Update, Updates
from fallow.methods.fedrgd import FedRGD
from fallow.methods.fixmatch import FixMatch
from fallow.methods.parts.averaging import mean
from fallow.methods.parts.grouping import Grouping, group_sizes
from fallow.methods.state import Layout, State
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder

SMALL = {"clients": 4, "label_count": 40, "batch": 16, "steps": 2, "rounds": 2, "slots": 1, "device": "cpu", "defaults": "paper"}


def federated(path, kind=None, **keys):
    """A federation at work, of a method of this file's own."""
    method, options, source, federation = prepare(None, SMALL | keys)
    path.mkdir(exist_ok=True)
    return Run(RunFolder(path), kind or method, options, source, federation).federated


def same(a: State, b: State) -> bool:
    return a.groups.keys() == b.groups.keys() and all(torch.equal(a.groups[g], b.groups[g]) for g in a.groups)


# -- the optimiser -------------------------------------------------------------------------------------------------------
def test_sgd_check():
    w = torch.tensor([1.0])
    sgd = Optimizer(FedRGD.Options(), w)
    for g, weight, buffer in ((0.5, 0.90498100, 0.5001), (0, 0.86445571, 0.45018050), (0, 0.82797466, 0.40524889)):
        sgd.step(w, torch.tensor([float(g)]), torch.tensor(0.1))
        assert w.item() == pytest.approx(weight, abs=1e-7)
        assert sgd.tensors["momentum"].item() == pytest.approx(buffer, abs=1e-7)


# -- batches -------------------------------------------------------------------------------------------------------------
def drawn(labelled, unlabelled, labels):
    """The batches of a round's 16 steps, as positions in the party's own data."""
    o = FedRGD.Options(labels=labels)
    x = Samples.of(np.arange(labelled), np.zeros(labelled, np.int64))
    party = SimpleNamespace(options=o, labelled=x, unlabelled=Samples.of(np.arange(unlabelled)), batch=64, steps=16, epochs=None, round=3)
    plan = FedRGD(o, 10).plan(party, {})
    assert len(plan) == 16
    return {n: s.positions(5, 16) for n, s in plan.segments[0].streams.items() if s}


def test_batches_are_full_and_passes_whole():
    """N_s = 1000: 15 full batches, the 16th from a second pass; fewer samples than a batch: drawn with replacement."""
    for made in (drawn(1000, 0, "server")["x"], drawn(0, 1000, "server")["u"]):
        assert [len(i) for i in made] == [64] * 16
        assert len(set(np.concatenate(made[:15]).tolist())) == 960
    few = drawn(50, 100, "clients")
    assert [len(i) for i in few["x"] + few["u"]] == [64] * 32
    assert all(len(set(i.tolist())) == 64 for i in few["u"]), "100 samples: one batch a pass, without replacement"
    assert all(len(set(i.tolist())) < 50 for i in few["x"])


# -- the objectives ------------------------------------------------------------------------------------------------------
class Echo:
    """A net that answers with what it is given."""

    def __call__(self, x, **_):
        return x

    def together(self, *parts, **_):
        return list(parts)


class Bench:
    """A slot that keeps the loss."""

    def __init__(self):
        self.model, self.loss, self.when = Echo(), None, None

    def descend(self, loss, *nets, when=None):
        self.loss, self.when = loss, when

    def judge(self, part, label, sure, **_):
        self.label, self.sure = label, sure

    def log(self, **_):
        pass


WEAK = torch.tensor([[4, 0, 0], [1, 0, 0], [0, 0, 5], [0, 3.6, 0]])
STRONG = torch.tensor([[2.0, 1, 0], [0, 1, 0], [0, 2, 1], [1, 1, 1]])


def step(weak=WEAK, strong=STRONG, **options):
    bench = Bench()
    u = Part({"weak": weak} | ({"strong": strong} if strong is not None else {}))
    FedRGD(FedRGD.Options(**options), 3).step(bench, Batch({"x": Part(None), "u": u}, {}))
    return bench


def test_worked_losses():
    crl = step()
    assert crl.label.tolist() == [0, 0, 2, 1] and crl.sure.tolist() == [True, False, True, False]
    assert crl.loss.item() == pytest.approx(0.453803, abs=1e-6)
    assert step(reduction="selected").loss.item() == pytest.approx(0.907606, abs=1e-6)
    assert step(strong=None, objective="self-training").loss.item() == pytest.approx(0.012341, abs=1e-6)


def test_all_is_selected_times_the_share_that_passed():
    for threshold in (0.0, 0.5, 0.95, 0.98):
        bench = step(threshold=threshold)
        chosen = step(threshold=threshold, reduction="selected").loss
        assert bench.loss <= chosen
        assert bench.loss.item() == pytest.approx(chosen.item() * bench.sure.float().mean().item(), abs=1e-6)


def test_thresholds_at_the_ends():
    strong = STRONG.clone().requires_grad_()
    nothing = step(strong=strong, threshold=1.1)
    assert nothing.loss.item() == 0
    assert not torch.autograd.grad(nothing.loss, strong)[0].any()
    assert nothing.when is None, "a step is made even if nothing passes: decay and momentum act"
    own = step(weak=WEAK, strong=WEAK, threshold=0)
    assert own.loss.item() == pytest.approx(F.cross_entropy(WEAK, WEAK.argmax(1)).item(), abs=1e-7)


def test_no_gradient_through_the_weak_view():
    weak, strong = WEAK.clone().requires_grad_(), STRONG.clone().requires_grad_()
    gradients = torch.autograd.grad(step(weak=weak, strong=strong).loss, (weak, strong), allow_unused=True)
    assert gradients[0] is None and gradients[1].any()


def test_self_training_labels_in_eval_mode_before_the_training_pass(tmp_path):
    """(5): labels of an eval-mode pass with the statistics as they are; one train-mode pass of the same tensor learns."""
    fed = federated(tmp_path, method="fedrgd", labels="server", norm="bn", objective="self-training")
    net = models.build("small-cnn", 10, 1, norm="bn", size=8)
    net.load_state_dict(fed.server.model.tensors(), strict=False)
    weak = torch.rand(24, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        p = net.eval()(weak).softmax(1)
        trained = copy.deepcopy(net).train()(weak).softmax(1)
        moved = copy.deepcopy(net)
        moved.train()(weak)
        late = moved.eval()(weak).softmax(1)
    assert not torch.equal(p.argmax(1), trained.argmax(1)), "train mode would label otherwise"
    best, after = p.max(1).values, late.max(1).values
    one = int((best - after).abs().argmax())
    threshold = float((best[one] + after[one]) / 2)
    assert ((best >= threshold) != (after >= threshold)).any(), "moved statistics would accept others"
    kept = (best >= threshold).float()
    assert 0 < kept.sum() < 24
    slot = Slot(fed.kit)
    slot.load({"model": fed.server.model}, {}, 0.0)
    slot.lr["model"].fill_(0.1)
    before = {k: w.clone() for k, w in slot.model.weights.items()}
    method = FedRGD(fed.kit.options.model_copy(update={"threshold": threshold}), 10)
    method.step(slot, Batch({"x": Part(None), "u": Part({"weak": weak})}, {}))
    loss = (F.cross_entropy(net.train()(weak), p.argmax(1), reduction="none") * kept).sum() / 24
    loss.backward()
    assert slot.logs["loss"][0].item() == pytest.approx(loss.item(), abs=1e-6)
    for name, w in net.named_parameters():  # the first step of Nesterov's momentum: g + 0.9 g
        step = before[name] - slot.model.weights[name]
        assert torch.allclose(step, 0.1 * (1.9 * w.grad + 1.9 * 1e-4 * before[name]), atol=1e-6), name


# -- averaging -----------------------------------------------------------------------------------------------------------
LAYOUT = Layout.of(nn.Linear(2, 1, bias=False))


def state(*values):
    return State(LAYOUT, {"parameters": torch.tensor(values, dtype=torch.float32)})


class Hub(dict):
    """A server without an engine."""

    def __init__(self, active, model=None):
        super().__init__(model=model or state(0.0, 0.0))
        self.active = active

    @property
    def model(self):
        return self["model"]

    def move(self, target, base=None):
        self["model"] = target


def sent(server, *clients):
    """Updates of the server (or None) and of clients 1, 2, ..."""
    out = Updates()
    for number, values in enumerate((server, *clients)):
        if values is not None:
            update = Update(model=state(*values))
            update.client = number or None
            out.append(update)
    return out


def merged(updates, active, **options):
    o = FedRGD.Options(**({"clients": len(active), "labels": "server"} | options))
    hub = Hub(active)
    FedRGD(o, 10).start(hub)
    FedRGD(o, 10).merge(hub, updates)
    return hub


def flat(s):
    return s.groups["parameters"].tolist()


FOUR = ((1, 1), (3, 0), (0, 3), (2, 2), (-1, 1))


def test_worked_means():
    hub = merged(sent(*FOUR), [1, 2, 3, 4], groups=2)
    assert [flat(g) for g in hub["groups"]] == [pytest.approx([4 / 3, 4 / 3]), pytest.approx([2 / 3, 4 / 3])]
    assert flat(hub.model) == pytest.approx([1, 4 / 3])
    assert flat(merged(sent(*FOUR), [1, 2, 3, 4], average="mean").model) == pytest.approx([1, 1.4])
    twice = merged(sent(*FOUR), [1, 2, 3, 4], average="mean", server_copies=2)
    assert flat(twice.model) == pytest.approx(flat(hub.model)), "equal groups: the server counts S times"
    five = sent(*FOUR, (4, 4))
    hub = merged(five, [3, 4, 5, 1, 2], groups=2)  # balanced: the larger group first
    assert flat(hub["groups"][0]) == pytest.approx([1.5, 2])
    assert flat(hub.model) == pytest.approx([1.416667, 1.666667])
    assert flat(merged(five, [1, 2, 3, 4, 5], average="mean").model) == pytest.approx([1.5, 1.833333])


@pytest.mark.parametrize(
    "active, groups, split, alone, grouped",
    [
        (10, 2, "balanced", 0.0909, 0.1667),
        (20, 2, "balanced", 0.0476, 0.0909),
        (30, 3, "balanced", 0.0323, 0.0909),
        (47, 5, "ceil-blocks", 0.0208, 0.0977),
        (47, 5, "balanced", 0.0208, 0.0964),
        (16, 2, "balanced", 0.0588, 0.1111),
        (5, 2, "balanced", 0.1667, 0.2917),
        (2, 2, "balanced", 0.3333, 0.5),
    ],
)
def test_the_servers_share(active, groups, split, alone, grouped):
    ids = list(range(1, active + 1))
    updates = sent((1, 1), *[(0, 0)] * active)
    assert flat(merged(updates, ids, average="mean").model)[0] == pytest.approx(alone, abs=5e-5)
    assert flat(merged(updates, ids, groups=groups, group_split=split).model)[0] == pytest.approx(grouped, abs=5e-5)


def test_each_group_may_have_a_server_of_its_own():
    """11.4: replica i enters group i only. By hand: (1+3+0, 1+0+3) / 3 and (4+2-1, -2+2+1) / 3."""
    updates = sent(*FOUR)
    second = Update(model=state(4, -2))
    second.replica = 1
    updates.insert(1, second)
    hub = merged(updates, [1, 2, 3, 4], groups=2, server_replicas="per-group")
    assert [flat(g) for g in hub["groups"]] == [pytest.approx([4 / 3, 4 / 3]), pytest.approx([5 / 3, 1 / 3])]
    assert flat(hub.model) == pytest.approx([1.5, 5 / 6])


def test_replicas_train_on_their_own(tmp_path):
    """From w_avg each, with batches and momenta of their own; the first is the one server that there otherwise is."""
    keys = {"method": "fedrgd", "labels": "server", "groups": 2, "norm": "bn", "statistics": "server"}
    feds = {how: federated(tmp_path / how, server_replicas=how, **keys) for how in ("shared", "per-group")}
    found = {}
    for how, fed in feds.items():
        merge = fed.method.averager.merge
        fed.method.averager.merge = lambda server, updates, how=how, merge=merge: (found.update({how: updates}), merge(server, updates))
        fed.round(0)
    fed, updates = feds["per-group"], found["per-group"]
    own = [u for u in updates if u.client is None]
    assert [u.replica for u in own] == [0, 1] and updates.server is own[0]
    assert same(own[0]["model"], found["shared"].server["model"]) and not same(own[0]["model"], own[1]["model"])
    for i, group in enumerate(fed.server["groups"]):
        members = [own[i], *(u for u in updates.clients if fed.method.averager.group(fed.server, u.client) == i)]
        expected = sum(u["model"].groups["parameters"].double() for u in members) / len(members)
        assert torch.allclose(group.groups["parameters"].double(), expected, atol=1e-6)
    assert same(fed.server.model.only("statistics"), own[0]["model"].only("statistics")), "statistics are the first one's"
    assert not same(*(fed.server[name]["model/optimizer"]["momentum"] for name in ("record", "record/1")))
    row = fed.round(1)
    assert row["clients"] == len(fed.server.active) == fed.kit.finished and math.isfinite(row["loss"])


def test_replicas_are_not_clients(tmp_path):
    """No pull on them (`prox`), and measured diversity is that of the clients and one server."""
    keys = {"method": "fedrgd", "labels": "server", "groups": 2, "measure": ["diversity", "prior"]}
    sent, rows = {}, {}
    for name, more in {"pulled": {"prox": 9.0}, "free": {}, "shared": {"server_replicas": "shared"}, "groups": {"diversity_scope": "per-group"},
                       "shared groups": {"server_replicas": "shared", "diversity_scope": "per-group"}}.items():  # fmt: skip
        fed = federated(tmp_path / name, **{"server_replicas": "per-group"} | keys | more)
        merge = fed.method.averager.merge
        fed.method.averager.merge = lambda server, updates, name=name, merge=merge: (sent.update({name: updates}), merge(server, updates))
        rows[name] = fed.round(0)
    assert all(same(a["model"], b["model"]) == (a.client is None) for a, b in zip(sent["pulled"], sent["free"], strict=True))
    assert len([u for u in sent["free"] if u.client is None]) == 2
    assert rows["free"]["diversity"] == rows["shared"]["diversity"] and rows["groups"]["diversity"] == rows["shared groups"]["diversity"]
    assert set(rows["free"]["class_accuracy_clients"]) == {str(u.client) for u in sent["free"].clients}


def test_group_sizes():
    assert [group_sizes(c, s) for c, s in ((10, 2), (5, 2), (47, 5))] == [[5, 5], [3, 2], [10, 10, 9, 9, 9]]
    assert group_sizes(47, 5, "ceil-blocks") == [10, 10, 10, 10, 7] and group_sizes(9, 4, "ceil-blocks") == [3, 3, 3]
    for active in range(1, 30):
        for groups in range(1, active + 1):
            for split in ("balanced", "ceil-blocks"):
                sizes = group_sizes(active, groups, split)
                assert sum(sizes) == active and min(sizes) >= 1
                assert split == "ceil-blocks" or (len(sizes) == groups and max(sizes) - min(sizes) <= 1)


def test_auto_groups_are_the_published_ones():
    for active, groups in ((10, 2), (20, 2), (30, 3), (47, 5), (5, 2), (1, 1)):
        assert len(Grouping(FedRGD.Options(clients=active)).sizes) == groups


def test_groups_are_a_partition_and_their_inner_order_does_not_matter():
    updates = sent(*FOUR, (4, 4), (7, -2))
    ways = [merged(updates, order, groups=2) for order in ([1, 2, 3, 4, 5, 6], [3, 1, 2, 6, 5, 4])]
    assert same(ways[0].model, ways[1].model) and same(ways[0]["groups"][0], ways[1]["groups"][0])
    grouping = Grouping(FedRGD.Options(clients=6, groups=2))
    assert sorted(grouping.group(Hub([5, 3, 1, 2, 0, 4]), c) for c in range(6)) == [0, 0, 0, 1, 1, 1]


def test_equal_models_stay():
    hub = merged(sent(*[(0.3, -0.7)] * 5), [1, 2, 3, 4], groups=2)
    assert same(hub.model, state(0.3, -0.7)) and all(same(g, hub.model) for g in hub["groups"])


def test_labels_at_clients_mean_of_group_means():
    hub = merged(sent(None, *FOUR[1:], (4, 4)), [1, 2, 3, 4, 5], groups=2, labels="clients")
    first, second = [5 / 3, 5 / 3], [1.5, 2.5]
    assert flat(hub["groups"][0]) == pytest.approx(first) and flat(hub["groups"][1]) == pytest.approx(second)
    assert flat(hub.model) == pytest.approx([(a + b) / 2 for a, b in zip(first, second)])


# -- who gets which model ------------------------------------------------------------------------------------------------
def test_slot_sends_the_model_of_the_group_a_client_is_drawn_into():
    hub = merged(sent(*FOUR), [1, 2, 3, 4], groups=2)
    method = FedRGD(FedRGD.Options(clients=4, labels="server", groups=2), 10)
    hub.active = [4, 9, 2, 7]
    received = [method.down(hub, c)["model"] for c in hub.active]
    assert received[0] is received[1] is hub["groups"][0] and received[2] is received[3] is hub["groups"][1]


def test_history_sends_the_model_of_the_group_a_client_was_in():
    o = {"groups": 2, "group_assignment": "history"}
    hub = merged(sent(*FOUR), [1, 2, 3, 4], **o)
    method = FedRGD(FedRGD.Options(clients=4, labels="server", **o), 10)
    hub.active = [3, 9, 1, 2]
    assert method.down(hub, 3)["model"] is hub["groups"][1] and method.down(hub, 1)["model"] is hub["groups"][0]
    assert method.down(hub, 9)["model"] is hub.model, "a client that was not there gets the mean"
    assert Grouping(method.o).group(hub, 3) == 0 == Grouping(method.o).group(hub, 9), "and is averaged in a new group"


def test_history_is_that_of_the_last_round_only():
    """11.1: a user of this round that was not in the last one receives w_avg, whichever group it was in before."""
    o = {"groups": 2, "group_assignment": "history"}
    hub = merged(sent(*FOUR), [1, 2, 3, 4], **o)
    method = FedRGD(FedRGD.Options(clients=6, active=4, labels="server", **o), 10)
    hub.active = [5, 3, 6, 4]
    method.merge(hub, Updates(u for u in sent((0, 1), (9, 9), (9, 9), (1, 0), (2, 0), (3, 5), (4, 4)) if u.client not in (1, 2)))
    assert [flat(g) for g in hub["groups"]] == [pytest.approx([4 / 3, 2]), pytest.approx([2, 5 / 3])]
    for client, group in ((5, 0), (3, 0), (6, 1), (4, 1)):
        assert method.down(hub, client)["model"] is hub["groups"][group]
    assert method.down(hub, 1)["model"] is method.down(hub, 2)["model"] is hub.model


def test_a_group_nobody_of_which_answered_keeps_its_model():
    """A group is a lineage: there are S models after every round, and w_avg is the mean of all."""
    method = FedRGD(FedRGD.Options(clients=4, labels="clients", groups=2), 10)
    hub = Hub([1, 2, 3, 4], state(6.0, 2.0))
    method.start(hub)
    method.merge(hub, sent(None, (3, 0), (0, 3)))
    assert [flat(g) for g in hub["groups"]] == [pytest.approx([1.5, 1.5]), pytest.approx([6, 2])]
    assert flat(hub.model) == pytest.approx([3.75, 1.75])
    assert method.down(hub, 4)["model"] is hub["groups"][1]


def test_fixed_groups_go_by_the_clients_number():
    grouping = Grouping(FedRGD.Options(clients=4, groups=2, group_assignment="fixed"))
    assert [grouping.group(Hub([3, 0, 2, 1]), c) for c in range(4)] == [0, 0, 1, 1]


def test_without_group_models_everyone_gets_the_mean():
    for keys in ({"group_models": False}, {"server_turn": "after"}):
        hub = merged(sent(*FOUR), [1, 2, 3, 4], groups=2, **keys)
        assert "groups" not in hub and flat(hub.model) == pytest.approx([1, 4 / 3])
        assert FedRGD(FedRGD.Options(clients=4, labels="server", groups=2, **keys), 10).down(hub, 1)["model"] is hub.model


@pytest.mark.parametrize(
    "keys, word",
    [
        ({"groups": 5}, "groups=5"),
        ({"group_assignment": "fixed", "active": 3}, "fixed"),
        ({"objective": "supervised", "labels": "server"}, "labels=all"),
        ({"weights": "half", "labels": "server"}, "half"),
    ],
)
def test_refusals(keys, word):
    with pytest.raises(UserError, match=word):
        prepare(None, {"method": "fedrgd", "clients": 4} | keys)


def test_settings():
    _, o, *_ = prepare(None, {"method": "fedrgd", "labels": "server", "reading": "paper", "defaults": "paper"})
    assert (o.group_assignment, o.lr, o.statistics, o.optimizer_state) == ("history", 0.146, "server", "reset")
    _, o, *_ = prepare(None, {"method": "fedrgd", "reading": "released", "epochs": 5})
    assert (o.group_split, o.first_round_extra_step, o.steps, o.epochs) == ("ceil-blocks", True, None, 5)
    assert (o.statistics, o.optimizer_state) == ("average", "travel")
    norms = {m: FedRGD.Options(model=m).norm for m in ("resnet18", "resnet9", "wrn-28-2", "small-cnn", "emnist-cnn")}
    assert norms == {"resnet18": "gn", "resnet9": "gn", "wrn-28-2": "gn", "small-cnn": None, "emnist-cnn": None}
    assert FedRGD.Options(model="resnet18", norm="bn").norm == "bn"


def test_its_defaults():
    """11.2 (outside presets), 11.3, 11.10."""
    _, o, *_ = prepare(None, {"method": "fedrgd", "labels": "server", "defaults": "paper"})
    assert (o.objective, o.average, o.groups, o.group_assignment, o.group_split, o.group_models) == ("crl", "grouped", "auto", "slot", "balanced", True)
    assert (o.threshold, o.weight, o.reduction, o.pseudo_label_mode, o.empty_step) == (0.95, 1.0, "all", "joint", "take")
    assert (o.steps, o.epochs, o.batch, o.unlabelled_batch, o.epoch_samples, o.first_round_extra_step) == (16, None, 64, "equal", 65536, False)
    assert (o.lr, o.momentum, o.nesterov, o.weight_decay, o.schedule) == (0.03, 0.9, True, 1e-4, "cosine-7-16")
    assert (o.weights, o.server_turn, o.server_copies, o.server_momentum, o.statistics) == ("uniform", "beside", 1, 0.0, "server")


# -- whole rounds --------------------------------------------------------------------------------------------------------
SEEN = []


class Recording(FedRGD):
    def step(self, s, b):
        x = (b.x.labelled, b.x.y) if b.x else None
        u = (b.u.weak, b.u.strong) if b.u else None
        SEEN.append((x, u, s.lr["model"].item()))
        super().step(s, b)


@pytest.mark.parametrize("norm, labels, threshold", [("bn", "server", 0.14), ("gn", "clients", 0.19)])
@pytest.mark.usefixtures("in_double")
def test_rounds_equal_plain_torch(tmp_path, norm, labels, threshold):
    """3 of 4 clients in groups of 2 and 1: CRL, Nesterov SGD whose momentum stays with the position, Eq. 7."""
    SEEN.clear()
    keys = {"method": "fedrgd", "labels": labels, "norm": norm, "active": 3, "threshold": threshold, "rounds": 3, "groups": 2}
    keys["optimizer_state"] = "travel"
    fed = federated(tmp_path, Recording, **keys)
    net = models.build("small-cnn", 10, 1, norm=norm, size=8)
    net.load_state_dict(fed.server.model.tensors(), strict=False)
    order = []
    for number in range(3):
        fed.round(number)
        order.append(list(fed.server.active))
    assert len({tuple(o) for o in order}) > 1, "clients change places"

    places = [copy.deepcopy(net).train() for _ in range(4 if labels == "server" else 3)]
    sgd = [torch.optim.SGD(p.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4) for p in places]
    weights = lambda m: [p.detach().clone() for p in m.parameters()]
    groups, average, seen, passed = [weights(net), weights(net)], weights(net), iter(SEEN), 0.0
    for number in range(3):
        for place, (module, optimizer) in enumerate(zip(places, sgd)):
            for p, w in zip(module.parameters(), average if place == 3 else groups[place // 2]):
                p.data.copy_(w)
            for k in range(2):
                x, u, lr = next(seen)
                assert lr == pytest.approx(0.03 * math.cos(7 * math.pi / 16 * (2 * number + k) / 6), rel=1e-6)
                loss = torch.zeros(())
                if place == 3:
                    loss = F.cross_entropy(module(x[0]), x[1])
                else:
                    both = torch.cat([*([x[0]] if x else []), *u])
                    z = module(both)
                    weak, strong = z[-32:-16], z[-16:]
                    confidence, label = weak.softmax(1).max(1)
                    kept = (confidence >= threshold).float().detach()
                    loss = (F.cross_entropy(strong, label, reduction="none") * kept).sum() / 16
                    passed += kept.mean().item()
                    loss = loss + (F.cross_entropy(z[:16], x[1]) if x else 0)
                optimizer.param_groups[0]["lr"] = lr
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        w = [weights(p) for p in places]
        own = w[3:]
        groups = [[sum(ts) / len(ts) for ts in zip(*members, *own)] for members in ([w[0], w[1]], [w[2]])]
        average = [(a + b) / 2 for a, b in zip(*groups)]
    assert 0 < passed < 18, "some labels pass, some do not"
    ours = fed.server.model
    for (name, _), theirs in zip(net.named_parameters(), average):
        assert torch.allclose(ours[name], theirs, atol=1e-9), name
    if norm == "bn":
        for name, theirs in places[3].named_buffers():
            assert torch.allclose(ours[name].float(), theirs.float(), atol=1e-9), f"{name}: the server's own statistics"


def test_one_group_is_fedavg_with_a_server_bit_for_bit(tmp_path):
    keys = {"labels": "server", "optimizer_state": "travel", "weights": "uniform", "empty_step": "take", "threshold": 0.2}
    keys |= {"unlabelled_batch": "equal", "weight_decay": 1e-4, "schedule": "cosine-7-16", "statistics": "server", "norm": "bn"}
    ways = {"one group": {"groups": 1}, "mean": {"average": "mean"}, "history": {"groups": 1, "group_assignment": "history"}}
    runs = {name: federated(tmp_path / name, method="fedrgd", **keys | way) for name, way in ways.items()}
    runs["fixmatch"] = federated(tmp_path / "fixmatch", FixMatch, method="fixmatch", **keys)
    for run in runs.values():
        run.round(0)
        run.round(1)
    for run in runs.values():
        assert same(run.server.model, runs["fixmatch"].server.model)


def test_supervised_with_one_group_is_fedavg(tmp_path):
    keys = {"labels": "all", "weights": "uniform", "optimizer_state": "reset", "schedule": "constant", "weight_decay": 0.0}
    runs = [federated(tmp_path / "a", method="fedrgd", groups=1, objective="supervised", **keys)]
    runs.append(federated(tmp_path / "b", method="fedavg", **keys))
    for run in runs:
        run.round(0)
    assert same(runs[0].server.model, runs[1].server.model)


def test_the_server_starts_from_the_mean_and_traffic_is_one_model_each_way(tmp_path):
    fed = federated(tmp_path, method="fedrgd", labels="server", active=2, groups=2, optimizer_state="travel")
    row = fed.round(0)
    assert same(fed.server.model, mean(fed.server["groups"])), "what a server beside the clients starts from"
    parameters = 4 * sum(p.numel() for p in models.build("small-cnn", 10, 1, size=8).parameters())
    assert row["bytes_up"] == row["bytes_down"] == 2 * parameters
    row = fed.round(1)
    assert 0 <= row["optimizer_bytes_down"] - 2 * parameters < 200, "momenta may be padded"
    assert row["bytes_down"] == 2 * parameters


def test_the_extra_step_and_its_learning_rate(tmp_path):
    """Two rounds an epoch: 3, 2, 3, 2 steps, and the schedule counts every one of them."""
    SEEN.clear()
    keys = {"labels": "clients", "clients": 1, "rounds": 4, "first_round_extra_step": True, "epoch_samples": 16 * 2 * 2}
    fed = federated(tmp_path, Recording, method="fedrgd", schedule="cosine-7-16,horizon=20", **keys)
    made = []
    for number in range(4):
        fed.round(number)
        made.append(len(SEEN))
    assert made == [3, 5, 8, 10]
    for t, (*_, lr) in enumerate(SEEN):
        assert lr == pytest.approx(0.03 * math.cos(7 * math.pi / 16 * t / 20), rel=1e-6)


def test_resumed_equals_run_through(tmp_path):
    """Group models, who was in which group, and travelling momenta are all in the checkpoint."""
    keys = SMALL | {"method": "fedrgd", "labels": "server", "active": 3, "group_assignment": "history", "rounds": 3}
    keys |= {"optimizer_state": "travel", "server_replicas": "per-group"}
    through = fallow.run(out=tmp_path, name="through", **keys)
    stopped = fallow.run(out=tmp_path, name="stopped", stop_after=1, **keys)
    fallow.resume(stopped.path)
    assert (through.path / "model.safetensors").read_bytes() == (stopped.path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("keys", [{"labels": "some"}, {"objective": "self-training", "norm": "bn", "labels": "server"}])
def test_other_settings_run(tmp_path, keys):
    rows = [federated(tmp_path, method="fedrgd", **keys).round(0)]
    assert rows[0]["clients"] == 4 and math.isfinite(rows[0]["loss"])
