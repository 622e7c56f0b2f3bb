"""FedLoKe: the worked numbers and invariants, and a run against a plain-torch one."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fallow import models
from fallow.data.samples import Samples
from fallow.engine.feed import Batch, Part
from fallow.errors import UserError
from fallow.methods.fedloke import FedLoKe
from fallow.methods.parts.losses import entropy, kl
from fallow.methods.state import State
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder

SMALL = {"method": "fedloke", "clients": 4, "active": 2, "label_count": 80, "batch": 16, "steps": 2, "rounds": 3, "slots": 1, "device": "cpu", "defaults": "paper"}


def federated(path, kind=None, **keys):
    method, options, source, federation = prepare(None, SMALL | keys)
    path.mkdir(exist_ok=True)
    return Run(RunFolder(path), kind or method, options, source, federation).federated


def same(a: State, b: State) -> bool:
    return a.groups.keys() == b.groups.keys() and all(torch.equal(a.groups[g], b.groups[g]) for g in a.groups)


# -- the worked step -----------------------------------------------------------------------------------------------------
class Answers:
    """A net that gives prepared logits, whatever it sees."""

    def __init__(self, *logits):
        self.logits = [torch.tensor(z, dtype=torch.float32).requires_grad_() for z in logits]
        self.asked = 0

    def __call__(self, x, **_):
        self.asked += 1
        return self.logits[self.asked - 1]


class Bench:
    """A slot that keeps the loss. Answers come in the order labelled, weak, strong."""

    def __init__(self, labelled=True):
        first = 0 if labelled else 1
        self.personal = Answers(*[[[1, 0, 0], [0, 2, 0]], [[6, 0, 0], [1, 0.5, 0]], [[2, 1, 0], [0, 1, 0]]][first:])
        self.model = Answers(*[[[0, 0, 1], [1, 1, 0]], [[2, 0, 0], [0, 7, 0]], [[3, 0, 1], [2, 2, 0]]][first:])
        self.sure, self.logged = {}, {}

    def descend(self, loss, *nets):
        self.loss = loss

    def judge(self, part, label, sure, name="label", confidence=None):
        self.sure[name] = sure.tolist()

    def log(self, **values):
        self.logged |= values


IMAGES = torch.zeros(2, 1)


def step(round=0, x=True, u=True, **options):
    bench = Bench(labelled=x)
    views = {"weak": IMAGES, "strong": IMAGES}
    parts = {"x": Part(views | {"y": torch.tensor([0, 1])} if x else None), "u": Part(views if u else None)}
    ramp = torch.tensor(min(1.0, round / 200))
    FedLoKe(FedLoKe.Options(**options), 3).step(bench, Batch(parts, {"ramp": ramp}))
    return bench


def test_worked_step():
    bench = step()
    assert bench.logged["entropy_local"].tolist() == pytest.approx([0.034543, 1.020191], abs=1e-6)
    assert bench.logged["entropy_global"].tolist() == pytest.approx([0.665573, 0.014565], abs=1e-6)
    assert bench.sure == {"label": [True, False], "global_label": [False, True]}
    for round, local, shared in ((0, 0.395495, 1.206720), (50, 0.462832, 1.225174), (200, 0.664845, 1.280537)):
        assert step(round).loss.item() == pytest.approx(local + shared, abs=2e-6)
    alone = step(200, global_pseudo_label=False)
    assert alone.loss.item() == pytest.approx(0.395495 + 1.280537, abs=2e-6)
    assert alone.personal.asked == 2
    unlabelled = step(200, x=False)
    assert unlabelled.loss.item() == pytest.approx(0.073818 + 0.269350, abs=2e-6)
    assert step(200, u=False).loss.item() == pytest.approx(0.395495 + 1.206720, abs=2e-6)


def test_kl_is_from_teacher_to_student():
    teacher, student = torch.tensor([[0.0, 7, 0]]).softmax(1), torch.tensor([[0.0, 1, 0]])
    assert kl(teacher, student).item() == pytest.approx(0.538700, abs=1e-6)
    q, p = teacher[0].tolist(), student.softmax(1)[0].tolist()
    by_hand = sum(a * math.log(a / (b + 1e-8) + 1e-8) for a, b in zip(q, p))  # the released form
    assert kl(teacher, student).item() == pytest.approx(by_hand, abs=1e-6)
    assert kl(teacher, teacher.log()).item() == pytest.approx(0, abs=1e-6)


def test_the_released_form_of_kl():
    """sum q ln(q / (p + 1e-8) + 1e-8): apart from the plain form only where the student is almost sure of something else."""
    teacher, student = torch.tensor([[0.25, 0.75, 0.0]]), torch.tensor([[0.0, 40, 0]])
    p = [1 / (2 + math.exp(40)), math.exp(40) / (2 + math.exp(40)), 1 / (2 + math.exp(40))]
    by_hand = sum(q * math.log(q / (r + 1e-8) + 1e-8) for q, r in zip([0.25, 0.75, 0.0], p))
    assert kl(teacher, student, "eps").item() == pytest.approx(by_hand, rel=1e-5)
    assert kl(teacher, student).item() - by_hand > 5
    for teacher, student in (("personal", "model"), ("model", "personal")):  # Eqs. 9 and 10, one by one
        losses = []
        for form in ("log-softmax", "eps"):
            bench = Bench(labelled=False)
            getattr(bench, teacher).logits[0] = torch.tensor([[60.0, 0, 0], [0, 60, 0]])
            getattr(bench, student).logits[0] = torch.zeros(2, 3)  # not sure of anything
            getattr(bench, student).logits[1] = torch.tensor([[0.0, 60, 0], [0, 60, 0]])
            views = {"weak": IMAGES, "strong": IMAGES}
            FedLoKe(FedLoKe.Options(kl_form=form), 3).step(bench, Batch({"x": Part(None), "u": Part(views)}, {"ramp": torch.tensor(1.0)}))
            losses.append(bench.loss.item())
        assert losses == pytest.approx([60 / 2, math.log(1e8) / 2], rel=1e-3)
    assert step(200, kl_form="eps").loss.item() == pytest.approx(0.664845 + 1.280537, abs=2e-6), "the worked step to six digits"


def test_one_model_that_labels_for_itself():
    """12.7's stricter "-Local Model": its own weak view, filtered by its own entropy, teaches its strong view."""
    bench = step(200, local_model="self")
    q, z = torch.tensor([0.0, 7, 0]).softmax(0), torch.tensor([2.0, 2, 0])  # the second sample is below delta, the first is not
    unlabelled = (q * (q.log() - z.log_softmax(0))).sum().item() / 2
    assert bench.loss.item() == pytest.approx(1.206720 + unlabelled, abs=2e-6)
    assert bench.personal.asked == 0 and bench.sure["label"] == [False, True]
    assert set(FedLoKe(FedLoKe.Options(local_model="self"), 10).holds()) == {"model"}


def test_entropy_for_scale():
    for classes, top in ((2, 0.9795), (10, 0.9867), (100, 0.9902), (200, 0.9909)):
        p = torch.full((1, classes), (1 - top) / (classes - 1), dtype=torch.float64)
        p[0, 0] = top
        assert entropy(p).item() == pytest.approx(0.1, abs=5e-4)


def test_gradients_do_not_cross():
    bench = step(200)
    labelled, labelling, strong = bench.model.logits
    _, own_labelling, own_strong = bench.personal.logits
    got = torch.autograd.grad(bench.loss, (labelled, labelling, strong, own_labelling, own_strong), allow_unused=True)
    assert got[1] is None and got[3] is None
    q = own_labelling.detach().softmax(1)[0]
    expected = torch.stack([(strong.detach().softmax(1)[0] - q) / 2, torch.zeros(3)])
    assert torch.allclose(got[2], expected, atol=1e-6), "d KL / d student logits, mean over the whole batch"


def test_thresholds_at_the_ends():
    assert step(200, entropy=0.0).loss.item() == pytest.approx(0.395495 + 1.206720, abs=2e-6)
    every = step(200, entropy=1.2)
    assert every.sure == {"label": [True, True], "global_label": [True, True]}
    z = {n: [a.detach() for a in getattr(every, n).logits] for n in ("personal", "model")}
    crossed = [F.kl_div(z[s][2].log_softmax(1), z[t][1].softmax(1), reduction="batchmean") for t, s in (("personal", "model"), ("model", "personal"))]
    assert every.loss.item() == pytest.approx(0.395495 + 1.206720 + sum(crossed).item(), abs=2e-6)


def test_the_entropy_must_be_below_delta():
    """Strictly (12.3): labels of entropy exactly 0 are not used at delta = 0, and are at any delta above."""
    views = {"weak": IMAGES, "strong": IMAGES}
    for delta, used in ((0.0, False), (1e-6, True)):
        bench = Bench(labelled=False)
        for net in (bench.personal, bench.model):
            net.logits[0] = torch.tensor([[200.0, 0, 0], [0, 200, 0]])
        FedLoKe(FedLoKe.Options(entropy=delta), 3).step(bench, Batch({"x": Part(None), "u": Part(views)}, {"ramp": torch.tensor(1.0)}))
        assert bench.logged["entropy_local"].tolist() == [0, 0] and bench.sure["label"] == bench.sure["global_label"] == [used] * 2
        crossed = [F.cross_entropy(n.logits[1].detach(), torch.tensor([0, 1])).item() for n in (bench.personal, bench.model)]
        assert bench.loss.item() == pytest.approx(sum(crossed) if used else 0, abs=1e-5)


def test_kl_is_never_negative():
    g = torch.Generator().manual_seed(0)
    for scale in (0.1, 1, 10, 100):
        teacher, student = (scale * torch.randn(200, 10, generator=g) for _ in range(2))
        assert kl(teacher.softmax(1), student).min() > -1e-6
        assert kl(teacher.softmax(1), teacher).abs().max() < 1e-5


# -- fusion ----------------------------------------------------------------------------------------------------------------
class Tiny(nn.Module):
    def __init__(self, weight, variance, count):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))
        self.register_buffer("running_var", torch.tensor([variance]))
        self.register_buffer("count", torch.tensor([count]))


class Holder:
    """A party with a personal net and a message."""

    def __init__(self, personal, received):
        self.personal, self.state, self.received = self, personal, {"model": received}

    def load(self, state):
        self.state = state


@pytest.mark.parametrize("mu, w, var", [(0.7, 1.7, 3.4), (0.0, 1.0, 2.0), (1.0, 2.0, 4.0)])
def test_fusion(mu, w, var):
    party = Holder(State.of(Tiny(2.0, 4.0, 87)), State.of(Tiny(1.0, 2.0, 540)))
    FedLoKe(FedLoKe.Options(ema=mu), 10).begin(party)
    values = [party.state[n].item() for n in ("weight", "running_var", "count")]
    assert values == pytest.approx([w, var, 87], rel=1e-6)
    assert mu == 0.7 or values == [w, var, 87], "exact at the ends"
    party = Holder(State.of(Tiny(2.0, 4.0, 87)), State.of(Tiny(1.0, 2.0, 540)))
    FedLoKe(FedLoKe.Options(ema=mu, ema_buffers=False), 10).begin(party)
    assert party.state["weight"].item() == pytest.approx(w, rel=1e-6) and "statistics" not in party.state, "what is not loaded stays"
    alike = Holder(State.of(Tiny(0.3, 0.9, 3)), State.of(Tiny(0.3, 0.9, 3)))
    FedLoKe(FedLoKe.Options(ema=mu), 10).begin(alike)
    assert same(alike.state, State.of(Tiny(0.3, 0.9, 3)))


# -- batches ---------------------------------------------------------------------------------------------------------------
class Worker:
    """A party before its plan."""

    def __init__(self, L, U, batch=32, steps=None, round=0, unused=0):
        self.unused = unused
        self.labelled, self.unlabelled = Samples.of(np.arange(L), np.zeros(L, np.int64)), Samples.of(np.arange(L, L + U))
        self.batch, self.steps, self.round, self.epochs = batch, steps, round, None if steps else 1


def plan(L, U, round=0, steps=None, unused=0, **options):
    return FedLoKe(FedLoKe.Options(**options), 10).plan(Worker(L, U, steps=steps, round=round, unused=unused), {})


@pytest.mark.parametrize(
    "n0, r, L, U, repetitions, steps",
    [
        (1000, 0.01, 10, 990, 30, 30), (1000, 0.05, 50, 950, 29, 29), (1000, 0.10, 100, 900, 9, 27),
        (1465, 0.01, 14, 1451, 45, 45), (1465, 0.05, 73, 1392, 21, 42), (1465, 0.10, 146, 1319, 10, 40),
        (2000, 0.01, 20, 1980, 61, 61), (2000, 0.05, 100, 1900, 19, 57), (2000, 0.10, 200, 1800, 9, 54),
        (1666, 0.05, 83, 1583, 24, 48), (1250, 0.05, 62, 1188, 37, 37), (833, 0.05, 41, 792, 24, 24),
    ],
)  # fmt: skip
def test_steps_of_a_round(n0, r, L, U, repetitions, steps):
    assert (int(r * n0), n0 - int(r * n0)) == (L, U)
    made = plan(L, U)
    assert len(made.segments) == repetitions and len(made) == steps
    assert len(plan(L, U, unlabelled_schedule="epoch")) == U // 32
    per_pass = min(len(made.segments[0].streams["x"]), U // 32)
    coverage = 1 - (1 - per_pass * 32 / U) ** repetitions
    assert 0.62 < coverage < 0.645


def test_local_epochs_repeat_the_loop():
    """12.3: one local epoch is the whole loop, once."""
    for epochs, schedule, steps in ((2, "resample", 58), (0.5, "resample", 15), (2, "epoch", 58)):
        worker = Worker(50, 950)
        worker.epochs = epochs
        assert len(FedLoKe(FedLoKe.Options(unlabelled_schedule=schedule), 10).plan(worker, {})) == steps


def test_clients_that_lack_something():
    assert len(plan(0, 950)) == 29, "no labels: one pass over the unlabelled set"
    assert len(plan(50, 0)) == 1 and len(plan(10, 0)) == 1, "no unlabelled data at all: one pass over the labels"
    for L, unused, steps in ((50, 950, 29), (10, 990, 30), (100, 900, 27), (73, 1392, 42)):
        for schedule in ("resample", "epoch"):
            made = plan(L, 0, unused=unused, unlabelled_schedule=schedule)
            assert len(made) == steps, "Fig. 7 at u = 0: as many steps as with the data that is left out"
            assert not any(segment.streams["u"] for segment in made.segments)
    assert len(plan(50, 0, steps=3, unused=950)) == 3
    assert len(plan(0, 0)) == 0
    assert len(plan(50, 20)) == 1 and len(plan(100, 60)) == 1, "the released code would make no step"
    assert len(plan(50, 190)) == 5


def test_small_label_sets_are_doubled():
    stream = plan(14, 1451).segments[0].streams["x"]
    assert len(stream.samples) == 56
    drawn = stream.positions(3, 1)[0]
    assert len(drawn) == 32 == len(set(drawn.tolist()))


def test_ramp():
    for round, weight in ((0, 0.0), (1, 0.005), (100, 0.5), (200, 1.0), (499, 1.0)):
        assert plan(50, 950, round).segments[0].numbers["ramp"] == weight
    assert plan(50, 950, 8, ramp_rounds=16).segments[0].numbers["ramp"] == 0.5


def test_views_of_the_ablations():
    roles = {"fedloke": ("weak", "strong"), "all-strong": ("strong", "strong"), "all-weak": ("weak", "weak"), "none": ("plain", "plain")}
    for views, (weak, strong) in roles.items():
        for stream in plan(50, 950, views=views).segments[0].streams.values():
            assert stream.views == {"weak": weak, "strong": strong}


# -- whole rounds ----------------------------------------------------------------------------------------------------------
SEEN = []


class Recording(FedLoKe):
    def step(self, s, b):
        SEEN.append((b.x.weak, b.x.strong, b.x.y, b.u.weak, b.u.strong) if b.u else (b.x.weak, b.x.strong, b.x.y))
        super().step(s, b)


@pytest.mark.usefixtures("in_double")
def test_rounds_equal_plain_torch(tmp_path):
    """2 of 4 clients, BN: two separate backward passes, torch's own KL, clipping and SGD, EMA over statistics."""
    SEEN.clear()
    keys = {"norm": "bn", "entropy": 2.26, "ramp_rounds": 2, "lr": 0.05, "weights": "uniform"}
    fed = federated(tmp_path, Recording, **keys)
    start = models.build("small-cnn", 10, 1, norm="bn", size=8)
    start.load_state_dict(fed.server.model.tensors(), strict=False)
    shared, personal, kept = copy.deepcopy(start), [copy.deepcopy(start) for _ in range(4)], []
    moved = 0
    for number in range(3):
        before = {c: fed.keep.read(c).get("personal") for c in range(4)}
        before = {c: s and s.clone() for c, s in before.items()}
        row = fed.round(number)
        for c in set(range(4)) - set(fed.server.active):
            after = fed.keep.read(c).get("personal")
            assert (after is None) if before[c] is None else same(before[c], after), "unselected clients stay as they are"
        uploads = []
        for c in fed.server.active:
            own, copied = personal[c].train(), copy.deepcopy(shared).train()
            theirs = shared.state_dict()
            fused = {k: 0.7 * v + 0.3 * theirs[k] if v.is_floating_point() else v for k, v in own.state_dict().items()}
            own.load_state_dict(fused)
            optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (own, copied)]
            for _ in range(2):
                xw, xs, y, uw, us = SEEN.pop(0)
                zl, zg = own(xw), copied(xs)
                with torch.no_grad():
                    pg, pl = copied(uw).softmax(1), own(uw).softmax(1)
                mask_l, mask_g = [(-(p * (p + 1e-8).log()).sum(1) < 2.26).float() for p in (pl, pg)]
                kept += [mask_l.mean().item(), mask_g.mean().item()]
                ramp = min(1, number / 2)
                unlabelled_g = (F.kl_div(copied(us).log_softmax(1), pl, reduction="none").sum(1) * mask_l).sum() / 16
                unlabelled_l = (F.kl_div(own(us).log_softmax(1), pg, reduction="none").sum(1) * mask_g).sum() / 16
                for module, optimizer, loss in zip(
                    (own, copied), optimizers, (F.cross_entropy(zl, y) + ramp * unlabelled_l, F.cross_entropy(zg, y) + ramp * unlabelled_g)
                ):
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_value_(module.parameters(), 0.1)
                    optimizer.step()
            uploads.append(copied.state_dict())
            moved = max(moved, max((a - b).abs().max().item() for a, b in zip(copied.parameters(), shared.parameters())))
        shared.load_state_dict({k: sum(u[k] for u in uploads) / 2 if v.is_floating_point() else uploads[0][k] for k, v in uploads[0].items()})
    assert not SEEN and 0 < sum(kept) / len(kept) < 1, "some labels pass, some do not"
    assert moved <= 2 * 0.05 * 0.1 + 1e-6, "clipped: no parameter moves further"
    for name, theirs in shared.state_dict().items():
        assert torch.allclose(fed.server.model[name].float(), theirs.float(), atol=1e-9), name
    for c, module in enumerate(personal):
        record = fed.keep.read(c).get("personal")
        for name, theirs in module.state_dict().items() if record else ():
            assert torch.allclose(record[name].float(), theirs.float(), atol=1e-9), (c, name)
            if name.endswith("num_batches_tracked"):
                assert int(record[name]) % 6 == 0, "three passes in each of two steps"
    one = sum(t.numel() * t.element_size() for t in shared.state_dict().values())
    assert row["bytes_up"] == row["bytes_down"] == 2 * one, "one state dict each way, nothing personal"


def test_the_first_round_does_not_depend_on_unlabelled_pixels(tmp_path):
    ways = []
    for name, blank in (("a", False), ("b", True)):
        fed = federated(tmp_path / name, norm="bn", active=1)
        if blank:
            rows = np.concatenate([c.unlabelled for c in fed.simulation.federation.clients])
            fed.simulation.images[torch.from_numpy(rows)] = 7
        fed.round(0)
        ways.append(fed.server.model)
    assert torch.equal(ways[0].groups["parameters"], ways[1].groups["parameters"])
    assert not torch.equal(ways[0].groups["statistics"], ways[1].groups["statistics"])


def test_labels_only_one_pass_over_bn(tmp_path):
    fed = federated(tmp_path, norm="bn", unlabelled_ratio=0.0, active=1)
    fed.round(0)
    counts = {int(t) for n, t in fed.server.model.tensors().items() if n.endswith("num_batches_tracked")}
    assert counts == {2}, "one statistics update in each of two steps"


def test_labels_only_makes_the_steps_of_the_data_left_out(tmp_path):
    """1500 digits over 4 clients: 375 each, 20 labelled, so (355 // 16) // (20 // 16) = 22 steps (12.3, U = 0)."""
    fed = federated(tmp_path, norm="bn", unlabelled_ratio=0.0, active=1, steps=None, epochs=1)
    fed.round(0)
    counts = {int(t) for n, t in fed.server.model.tensors().items() if n.endswith("num_batches_tracked")}
    assert counts == {22}


def test_ablations_by_their_weights_and_starts(tmp_path):
    """mu = 0 forgets the personal model: where it started cannot matter. With mu = 1 it can."""
    final = {}
    for ema in (0.0, 1.0):
        for start in ("initial", "random"):
            fed = federated(tmp_path / f"{ema}-{start}", ema=ema, personal_start=start, active=2, ramp_rounds=1, entropy=2.4)
            for number in range(2):
                fed.round(number)
            final[ema, start] = fed.server.model
    assert same(final[0.0, "initial"], final[0.0, "random"])
    assert not same(final[1.0, "initial"], final[1.0, "random"])


def test_personal_models_start_where_they_should(tmp_path):
    for start in ("initial", "random", "received"):
        fed = federated(tmp_path / start, personal_start=start, ema=1.0, steps=1, lr=1e-12, active=2)
        for number in range(2):
            fed.round(number)
        initial = fed.kit.initial()
        first = [fed.keep.read(c)["personal"] for c in fed.server.active]
        close = [torch.allclose(p.groups["parameters"], initial.groups["parameters"], atol=1e-6) for p in first]
        assert all(close) if start != "random" else not any(close)
        assert start != "random" or not torch.allclose(first[0].groups["parameters"], first[1].groups["parameters"])


def test_settings():
    _, o, *_ = prepare(None, {"method": "fedloke", "reading": "paper"})
    assert (o.personal_start, o.unlabelled_schedule, o.clip_value, o.weights) == ("random", "epoch", None, "samples")
    assert (o.augment.draws, o.augment.strong, o.augment.cutout) == ("sample", "ra-torchvision", "none")
    _, o, *_ = prepare(None, {"method": "fedloke", "reading": "released", "defaults": "paper"})
    assert (o.augment.draws, o.augment.strong, o.clip_value, o.momentum, o.lr) == ("batch", "ra-torchvision", 0.1, 0.0, 0.01)
    with pytest.raises(UserError, match="labels=server"):
        prepare(None, {"method": "fedloke", "labels": "server"})
    with pytest.raises(UserError, match="one size"):
        prepare(None, {"method": "fedloke", "unlabelled_batch": 64})


def test_labels_at_some_clients(tmp_path):
    row = federated(tmp_path, labels="some", active=4, ramp_rounds=1, steps=None).round(0)
    assert row["clients"] == 4 and math.isfinite(row["loss"])


# -- bytes -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("classes, size", [(10, 26_319_400), (100, 26_504_080), (200, 26_709_280)])
def test_bytes_of_a_resnet9(classes, size):
    state = State.of(models.build("resnet9", classes, 3))
    assert state.only("parameters", "statistics").nbytes == size
    assert state.only("counters").nbytes == 64 and state.only("statistics").nbytes == 17_920
    if classes == 10:
        assert 20 * size == 526_388_000 and 50 * state.nbytes == 1_315_973_200


# -- options ----------------------------------------------------------------------------------------------------------------
def test_late_joiners_start_from_what_the_option_says(tmp_path):
    """12.1: a client first drawn in a later round has the initial personal model, or starts from the model it gets."""
    for start in ("initial", "received"):
        fed = federated(tmp_path / start, personal_start=start, ema=1.0, lr=0.1, clip_value=None, active=1, norm="gn", rounds=8)
        begins, begin, method = {}, FedLoKe.begin, fed.kit.method

        def begun(party, begins=begins, begin=begin, method=method):
            found = begin(method, party)
            begins.setdefault(party.id, (party.personal.state.clone(), party.received["model"].clone(), party.round))
            return found

        method.__dict__["begin"] = begun
        for number in range(8):
            fed.round(number)
        late = [(own, received) for own, received, number in begins.values() if number]
        assert late
        for own, received in late:
            assert not same(received, fed.kit.initial())
            assert same(own, received if start == "received" else fed.kit.initial())


@pytest.mark.parametrize("labelling, passes", [("update", 3), ("batch", 2), ("running", 2)])
def test_the_label_pass_and_batch_norm(tmp_path, labelling, passes):
    """12.11.7: three updates of the statistics a step, of both models; two if the label pass leaves them alone."""
    fed = federated(tmp_path, norm="bn", active=1, labelling=labelling)
    fed.round(0)
    for state in (fed.server.model, fed.keep.read(fed.server.active[0])["personal"]):
        assert {int(t) for n, t in state.tensors().items() if n.endswith("num_batches_tracked")} == {2 * passes}


def test_labelling_with_running_statistics_is_eval_mode(tmp_path):
    """`label_mode: eval`: the entropies are those of nets in eval mode, before the step's own passes move anything."""
    fed = federated(tmp_path, norm="bn", active=1, labelling="running", steps=1, ema=1.0)
    start = models.build("small-cnn", 10, 1, norm="bn", size=8)
    start.load_state_dict(fed.server.model.tensors(), strict=False)
    seen = []

    class Looking(FedLoKe):
        def step(self, s, b):
            seen.append((b.x.weak, b.u.weak))
            super().step(s, b)

    fed.kit.method.__dict__["step"] = lambda s, b: Looking(fed.kit.options, 10).step(s, b)
    row = fed.round(0)
    x, u = seen[0]
    with torch.no_grad():
        start.train()(x)  # the labelled pass comes first (12.3, order) and moves the statistics
        p = start.eval()(u).softmax(1)
    assert row["entropy_local"] == pytest.approx(torch.special.entr(p).sum(1).mean().item(), abs=1e-5)


def test_equal_clients_weigh_the_same_by_either_rule(tmp_path):
    """12.11.9: `uniform` is `num_samples` when sizes are equal."""
    ways = [federated(tmp_path / w, weights=w, norm="bn", active=3) for w in ("uniform", "samples")]
    for fed in ways:
        assert len({len(c.labelled) + len(c.unlabelled) for c in fed.simulation.federation.clients}) == 1
        fed.round(0)
    assert same(ways[0].server.model, ways[1].server.model)


@pytest.mark.usefixtures("in_double")
def test_accuracy_does_not_depend_on_the_chunks(tmp_path):
    """12.11.12."""
    fed = federated(tmp_path, norm="bn")
    fed.round(0)
    found = []
    for chunk in (1000, 64, 7):
        fed.o = fed.o.model_copy(update={"eval_batch": chunk})
        found.append(fed.evaluate(fed.server.model))
    assert found[0]["accuracy"] == found[1]["accuracy"] == found[2]["accuracy"]
    assert found[0]["test_loss"] == pytest.approx(found[2]["test_loss"], abs=1e-6)


def test_its_defaults():
    """12.8."""
    _, o, *_ = prepare(None, {"method": "fedloke", "defaults": "paper"})
    assert (o.ema, o.entropy, o.ramp_rounds, o.batch, o.unlabelled_batch, o.epochs) == (0.7, 0.1, 200, 32, "equal", 1)
    assert (o.personal_start, o.unlabelled_schedule, o.views, o.global_pseudo_label, o.labelling) == ("initial", "resample", "fedloke", True, "update")
    assert (o.optimizer, o.lr, o.momentum, o.nesterov, o.weight_decay, o.clip, o.clip_value) == ("sgd", 0.01, 0.0, False, 0.0, None, 0.1)
    assert (o.schedule, o.weights, o.statistics, o.server_momentum, o.augment.strong, o.augment.cutout) == ("constant", "uniform", "average", 0.0, "ra-torchvision", "none")
