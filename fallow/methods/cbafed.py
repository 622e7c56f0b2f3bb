"""CBAFed: pseudo-labels by thresholds that follow the classes' counts, and weights that fall back on earlier ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fallow.config import key
from fallow.data.samples import Samples, Stream
from fallow.keys.section import Keys
from fallow.methods.base import Held, Method, Net, Plan, State, Update, Updates, Value
from fallow.methods.interface import Batch, Found, Message, NetHandle, Party, Server, Slot
from fallow.methods.parts.averaging import mean
from fallow.methods.parts.batching import rates
from fallow.methods.parts.fitting import Facts
from fallow.methods.parts.labelling import one_hot
from fallow.methods.parts.losses import cross_entropy


class CountedParty(Party):
    counts: Tensor


class ResidualSlot(Slot):
    residual: NetHandle


class Columns(Batch):
    share: Tensor  # what the new weights count against the residual ones after this step
    store: Tensor  # 1 where they become the residual ones


class CBAFed(Method[ResidualSlot, CountedParty, Columns]):
    """Rare classes have lower thresholds, and tail classes are taken where they come second.

    "Class Balanced Adaptive Pseudo Labeling for Federated Semi-Supervised Learning", CVPR 2023.
    """

    paper = "Li et al., CVPR 2023"
    keeps = "optimiser state"
    sends = "model; up also class counts, down thresholds"
    scenarios = {"clients", "some"}
    labels_how = "labels once a round, by the classes' counts"
    accepts_by = "base"
    defaults = {"epochs": 11, "batch": 64, "nesterov": False, "weight_decay": 5e-4, "clip": 5.0, "optimizer_state": "keep"}
    readings = {"paper": {"beta": 0.07}, "released": {}}

    class Options(Method.Options):
        base: float = key(0.84, "threshold of a class without samples, before the spread is taken off", "tau", ge=0)
        top: float = key(0.95, "largest threshold", "tau_h", ge=0)
        tail: float = key(0.03, "share (of ten classes) below which a class is taken where it is second best", ge=0)
        beta: float | None = key(None, "the same in the paper's form, by the number of classes: beta / K", "beta", ge=0)
        residual: float = key(0.8, "what earlier weights count at a labelled client", ge=0, le=1)
        server_residual: float = key(0.5, "the same at the server", ge=0, le=1)
        residual_every: int = key(5, "epochs, and rounds, between such steps back", ge=1)
        unlabelled_lr: float = key(0.02, "learning rate on pseudo-labels, which are seen once", gt=0)
        warmup_epochs: int = key(501, "epochs of a round in which only labelled clients train", ge=1)

    o: Options

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        """Pseudo-labels are trained on alone, in the view in which they were given, and wrong ones confirm themselves.

        So the paper's thresholds stay, labels alone teach the model until it is as sure as those ask for, and what
        follows is slow: a fifth of the rate, which is the paper's 0.02.
        """
        return super().automatic(facts) | {"batch": facts.batch, "warmup_rounds": 2 * facts.rounds // 3, "unlabelled_lr": round(facts.lr / 5, 6)}

    def holds(self) -> Held:
        return {"model": Net(), "residual": Net(start="model", train=False), "counts": Value(self.classes)}

    def start(self, server: Server) -> None:
        super().start(server)
        server["residual"] = server.model

    def down(self, server: Server, client: int) -> Message:
        counts = server["counts"] if "counts" in server else server.model.groups["parameters"].new_ones(self.classes)
        cuts, tail = self.thresholds(counts)
        return super().down(server, client) | {"cuts": cuts, "tail": tail}

    def thresholds(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Of each class its threshold, and 1 if it is a tail class."""
        share = counts / counts.sum() * self.classes / 10
        tail = share < (self.o.tail if self.o.beta is None else self.o.beta / self.classes)
        return (share + self.o.base - share.std()).clamp_max(self.o.top), tail.to(share)

    def begin(self, party: CountedParty) -> dict[str, Tensor]:
        if not len(party.unlabelled) or party.round < self.o.warmup_rounds:
            return {}
        p = party.predict(party.model, party.unlabelled, "weak").softmax(1)
        label, kept = self.label(p, party.received["cuts"], party.received["tail"])
        party.counts.copy_((one_hot(label, p) * kept[:, None]).sum(0))
        party.judge(party.unlabelled, label, kept)
        return {"label": label, "kept": kept}

    def label(self, p: Tensor, cuts: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest class where it passes its threshold, else the second best if that is a tail class."""
        best, order = p.sort(dim=1, descending=True, stable=True)                        # of equal ones the lowest class
        first, second = order[:, 0], order[:, 1]
        sure, rescued = best[:, 0] > cuts.index_select(0, first), tail.index_select(0, second) > 0
        return torch.where(sure | ~rescued, first, second), sure | rescued

    def plan(self, party: CountedParty, found: Found) -> Plan:
        warm = party.round < self.o.warmup_rounds
        epochs = self.o.warmup_epochs if warm and party.epochs else party.epochs
        x = even(party, party.labelled).batches(party.batch, "labelled", epochs=epochs, steps=party.steps)
        plan = Plan(self.supervised, x=x, **self.steps_back(x))
        if "label" in found and found["kept"].any():
            kept = even(party, party.unlabelled.label(found["label"]).where(found["kept"]))
            u = kept.batches(party.batch, "weak", epochs=1 if party.epochs else None, steps=party.steps)
            plan = plan + Plan(u=u).having(lr=rates(party, len(u), self.o.unlabelled_lr))
        return plan

    def steps_back(self, x: Stream) -> dict[str, np.ndarray]:
        """The columns `share` and `store`: at the end of epochs 0, 5, 10, ..., of which the first only stores."""
        per, step = max(1, len(x.sizes_of_pass())), np.arange(len(x))
        epoch, last = step // per, step % per == per - 1
        store = last & (epoch % self.o.residual_every == 0)
        return {"share": np.where(store & (epoch > 0), 1 - self.o.residual, 1.0), "store": store.astype(np.float64)}

    def supervised(self, s: ResidualSlot, b: Columns) -> None:
        super().supervised(s, b)
        s.model.load(back(s.residual, s.model, b.share))
        s.residual.load(back(s.residual, s.model, b.store))

    def step(self, s: ResidualSlot, b: Columns) -> None:
        loss = cross_entropy(s.model(b.u.weak), b.u.y)
        s.descend(loss)
        s.log(loss=loss)

    def end(self, party: CountedParty) -> Update | None:
        update = super().end(party)
        if update is not None:
            y = party.labelled.y
            own = np.bincount([] if y is None else y, minlength=self.classes)
            update["counts"] = party.counts + torch.from_numpy(own).to(party.counts)
        return update

    def merge(self, server: Server, updates: Updates) -> None:
        counts = torch.stack([u["counts"] for u in updates])
        server.move(mean(updates, weights=counts.sum(1).double().cpu()))
        server["counts"] = counts.sum(0)
        since = server.round - self.o.warmup_rounds                                    # rounds after the warm-up
        if since > 0 and since % self.o.residual_every == 0:
            server["model"] = server.model.lerp(server["residual"], self.o.server_residual)
        if since < 0 or (since > 0 and since % self.o.residual_every == 0):
            server["residual"] = server.model


def even(party: Party, data: Samples) -> Samples:
    """Without one sample, drawn, where the last batch would be of one alone, which batch norm cannot bear."""
    alone = party.batch and len(data) % party.batch == 1
    return data.take(party.rng("even").permutation(len(data))[1:]) if alone else data


def back(residual: NetHandle, model: NetHandle, share: Tensor) -> State:
    """Between earlier and new weights and statistics; exact at 0 and 1."""
    return residual.flat.lerp(model.flat, share).only("parameters", "statistics")
