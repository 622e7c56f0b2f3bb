"""FedRGD: the worked numbers and invariants of methods chapter 11, and a run against a plain-torch one."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fallow
from fallow import models
from fallow.engine.feed import Batch, Part
from fallow.engine.optim import Optimizer
from fallow.errors import UserError
from fallow.methods.base import Update, Updates
from fallow.methods.fedrgd import FedRGD
from fallow.methods.fixmatch import FixMatch
from fallow.methods.parts.averaging import mean
from fallow.methods.parts.grouping import Grouping, group_sizes
from fallow.methods.state import Layout, State
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder

SMALL = {"clients": 4, "label_count": 40, "batch": 16, "steps": 2, "rounds": 2, "slots": 1, "device": "cpu"}


def federated(path, kind=None, **keys):
    """A federation at work, of a method of this file's own."""
    method, options, source, federation = prepare(None, SMALL | keys)
    path.mkdir(exist_ok=True)
    return Run(RunFolder(path), kind or method, options, source, federation).federated


def same(a: State, b: State) -> bool:
    return a.groups.keys() == b.groups.keys() and all(torch.equal(a.groups[g], b.groups[g]) for g in a.groups)


# -- 11.2: the optimiser -------------------------------------------------------------------------------------------------
def test_sgd_check():
    w = torch.tensor([1.0])
    sgd = Optimizer(FedRGD.Options(), w)
    for g, weight, buffer in ((0.5, 0.90498100, 0.5001), (0, 0.86445571, 0.45018050), (0, 0.82797466, 0.40524889)):
        sgd.step(w, torch.tensor([float(g)]), torch.tensor(0.1))
        assert w.item() == pytest.approx(weight, abs=1e-7)
        assert sgd.tensors["momentum"].item() == pytest.approx(buffer, abs=1e-7)


# -- 11.3: the objectives ------------------------------------------------------------------------------------------------
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


# -- 11.4: averaging -----------------------------------------------------------------------------------------------------
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


# -- 11.1: who gets which model ------------------------------------------------------------------------------------------
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
    _, o, *_ = prepare(None, {"method": "fedrgd", "labels": "server", "reading": "paper"})
    assert (o.group_assignment, o.lr, o.statistics, o.optimizer_state) == ("history", 0.146, "server", "reset")
    _, o, *_ = prepare(None, {"method": "fedrgd", "reading": "released", "epochs": 5})
    assert (o.group_split, o.first_round_extra_step, o.steps, o.epochs) == ("ceil-blocks", True, None, 5)
    assert (o.statistics, o.optimizer_state) == ("average", "travel")
    norms = {m: FedRGD.Options(model=m).norm for m in ("resnet18", "resnet9", "wrn-28-2", "small-cnn", "emnist-cnn")}
    assert norms == {"resnet18": "gn", "resnet9": "gn", "wrn-28-2": "gn", "small-cnn": None, "emnist-cnn": None}
    assert FedRGD.Options(model="resnet18", norm="bn").norm == "bn"


# -- whole rounds --------------------------------------------------------------------------------------------------------
SEEN = []


class Recording(FedRGD):
    def step(self, s, b):
        x = (b.x.labelled, b.x.y) if b.x else None
        u = (b.u.weak, b.u.strong) if b.u else None
        SEEN.append((x, u, s.lr["model"].item()))
        super().step(s, b)


@pytest.mark.parametrize("norm, labels, threshold", [("bn", "server", 0.14), ("gn", "clients", 0.19)])
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
        assert torch.allclose(ours[name], theirs, atol=2e-5), name
    if norm == "bn":
        for name, theirs in places[3].named_buffers():
            assert torch.allclose(ours[name].float(), theirs.float(), atol=1e-4), f"{name}: the server's own statistics"


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
    keys["optimizer_state"] = "travel"
    through = fallow.run(out=tmp_path, name="through", **keys)
    stopped = fallow.run(out=tmp_path, name="stopped", stop_after=1, **keys)
    fallow.resume(stopped.path)
    assert (through.path / "model.safetensors").read_bytes() == (stopped.path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("keys", [{"labels": "some"}, {"objective": "self-training", "norm": "bn", "labels": "server"}])
def test_other_settings_run(tmp_path, keys):
    rows = [federated(tmp_path, method="fedrgd", **keys).round(0)]
    assert rows[0]["clients"] == 4 and math.isfinite(rows[0]["loss"])
