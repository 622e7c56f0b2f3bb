"""RSCFed: the mean of means over random subsets of clients, in which clients far from their subset's mean weigh less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fallow.config import key
from fallow.keys.section import Keys
from fallow.methods.base import Held, Method, Net, Plan, State, Update, Updates, Value
from fallow.methods.interface import Batch, BatchPart, Found, Message, NetHandle, Party, Server, Slot
from fallow.methods.parts.averaging import mean
from fallow.methods.parts.batching import paired, rates, set_size
from fallow.methods.parts.fitting import CLIP, Facts
from fallow.methods.parts.losses import cross_entropy
from fallow.methods.parts.mixing import sharpened

Distance = Literal["tensors", "whole"]
USUAL = 6000  # images of a client of the paper's, for which its scales are


class TaughtParty(Party):
    teacher: NetHandle
    age: Tensor  # steps this client has ever made


class TaughtSlot(Slot):
    teacher: NetHandle
    age: Tensor


class OtherPart(BatchPart):
    other: Tensor  # a second weak view


class Columns(Batch):
    u: OtherPart


class RSCFed(Method[TaughtSlot, TaughtParty, Columns]):
    """Clients without labels follow a mean teacher of their own; the server averages random subsets, then their means.

    "RSCFed: Random Sampling Consensus Federated Semi-supervised Learning", CVPR 2022.
    """

    paper = "Liang et al., CVPR 2022"
    keeps = "mean teacher, optimiser state"
    sends = "model; up also whether there are labels"
    scenarios = {"clients", "some"}
    labels_how = "has a teacher of its own, whose answers stay soft"
    defaults = {"batch": 64, "nesterov": False, "weight_decay": 5e-4, "clip": 5.0, "optimizer_state": "keep"}
    readings = {"paper": {"boost": 1.0, "labelled_scale": 1e4, "distance": "whole"}, "released": {}}

    class Options(Method.Options):
        weight: float = key(0.02, "of the consistency", ge=0)
        temperature: float = key(0.5, "of the teacher's sharpened answer", "tau", gt=0)
        decay: float = key(0.999, "largest decay of the teacher; it grows from 0 with the client's steps", "1 - alpha", ge=0, le=1)
        unlabelled_lr: float = key(0.021, "learning rate of clients without labels", gt=0)
        subsets: int = key(3, "subsets of the active clients, drawn each round", "M", ge=1)
        subset_size: int = key(5, "clients in each", "K", ge=1)
        boost: float = key(6.0, "how much more a labelled client weighs, before and after distances", ge=1)
        distance_scale: float = key(1e4, "how fast a client loses weight with its distance by its size", "beta", ge=0)
        labelled_scale: float = key(100.0, "the same in subsets with a labelled client", ge=0)
        distance: Distance = key("tensors", "of two models: the sum of each tensor's norm, or one norm")

    o: Options

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        """The distances' scales are for clients of the paper's size; at everybody's rate gradients have everybody's bound."""
        few = (facts.unlabelled or facts.labelled) / USUAL
        rate = {"unlabelled_lr": 0.07} if facts.o.optimizer == "sgd" else {}
        return super().automatic(facts) | {
            "batch": facts.batch, "unlabelled_batch": facts.unlabelled_batch, "warmup_rounds": facts.rounds // 8, "clip": CLIP, **rate,
            "distance_scale": round(1e4 * few, 3), "labelled_scale": round(100 * few, 3),
        }  # fmt: skip

    def holds(self) -> Held:
        return {"model": Net(), "teacher": Net(keep=True, start="model", train=False), "age": Value(1, keep=True)}

    def drawn(self, server: Server) -> list[set[int]]:
        """This round's subsets; while labelled clients warm the model up, all of them."""
        if server.round < self.o.warmup_rounds:
            return [set(server.active)]
        rng, active = server.rng("subsets"), server.active
        return [{active[i] for i in rng.permutation(len(active))[: self.o.subset_size].tolist()} for _ in range(self.o.subsets)]

    def down(self, server: Server, client: int) -> Message:
        wanted = any(client in subset for subset in self.drawn(server))
        return super().down(server, client) | {"drawn": server.model.groups["parameters"].new_full((1,), float(wanted))}

    def begin(self, party: TaughtParty) -> dict[str, Tensor]:
        party.teacher.load(party.teacher.flat.lerp(party.received["model"], (party.age == 0).to(party.age.dtype)))  # first steps: anew
        return {}

    def plan(self, party: TaughtParty, found: Found) -> Plan:
        if "drawn" in party.received and not float(party.received["drawn"]):
            return Plan()
        x, u = paired(party, "labelled", ("weak",))
        plan = Plan(x=x, u=replace(u, views=u.views | {"other": "weak"}))
        return plan if x else plan.having(lr=rates(party, len(plan), self.o.unlabelled_lr))

    def step(self, s: TaughtSlot, b: Columns) -> None:
        zx, zu = s.model.together(b.x.labelled, b.u.other)
        loss: Tensor | float = cross_entropy(zx, b.x.y) if b.x else 0.0
        if b.u:
            with torch.no_grad():
                target = sharpened(s.teacher(b.u.weak, stats="batch").softmax(1), self.o.temperature)
            loss = loss + self.o.weight * ((zu.softmax(1) - target) ** 2).sum() / self.whole(b, len(zu))
            s.judge(b.u, target.argmax(1))
        s.descend(loss)
        s.teacher.follow(s.model, (1 - 1 / (s.age + 1)).clamp_max(self.o.decay))
        s.age.add_(1)
        s.log(loss=loss)

    def whole(self, b: Columns, size: int) -> int:
        """Of how many images an unlabelled batch is that is not short, which counts for less; this one's size where none is set."""
        mode, batch = self.o.unlabelled_batch, self.o.batch
        if mode == "full" or batch == "full":
            return mode if isinstance(mode, int) else size
        if b.x:
            return set_size(mode, batch) or size
        return mode if isinstance(mode, int) else batch

    def end(self, party: TaughtParty) -> Update | None:
        update = super().end(party)
        if update is not None:
            update["labelled"] = torch.full_like(party.age, float(len(party.labelled) > 0))
        return update

    def merge(self, server: Server, updates: Updates) -> None:
        if server.round < self.o.warmup_rounds:
            return super().merge(server, updates)
        means, o = [], self.o
        for subset in self.drawn(server):
            members = [u for u in updates.clients if u.client in subset]
            if members:
                labelled = [bool(u["labelled"] > 0) for u in members]
                states, sizes = [u["model"] for u in members], [u.weight for u in members]
                scale = o.labelled_scale if any(labelled) else o.distance_scale
                means.append(mean(states, weights=consensus(states, sizes, labelled, o.boost, scale, o.distance)[1]))
        if means:
            server.move(mean(means))


def consensus(states: Sequence[State], sizes: Sequence[float], labelled: Sequence[bool], boost: float, scale: float, how: Distance) -> tuple[Tensor, Tensor]:
    """How far each model is from the mean of all, and what it weighs."""
    n, more = torch.tensor(sizes, dtype=torch.float64), torch.where(torch.tensor(labelled), boost, 1.0).double()
    f = n * more / (n * more).sum()
    d = torch.stack([distance(state, mean(states, weights=f), how) for state in states])
    fall = scale * d / n
    w = f * (fall.min() - fall).exp() * more
    return d, w / w.sum()


def distance(a: State, b: State, how: Distance) -> Tensor:
    """Over parameters and statistics, tensor by tensor or all at once."""
    other = b.tensors()
    norms = torch.stack([(t.double() - other[n].double()).norm() for n, t in a.tensors().items() if t.is_floating_point()]).cpu()
    return norms.sum() if how == "tensors" else norms.norm()
