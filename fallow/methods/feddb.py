"""FedDB: pseudo-labels and averaging freed from the classes' prior bias."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from fallow.config import key
from fallow.errors import UserError
from fallow.keys.section import Keys
from fallow.methods.base import Batch, BatchPart, Found, Held, Method, Net, Party, Plan, Slot, Update, Value, Work
from fallow.methods.parts.dma import mean_prediction
from fallow.methods.parts.fitting import Facts
from fallow.methods.parts.labelling import confidence, cuts, debiased, hard, weak_logits
from fallow.methods.parts.losses import Reduction, cross_entropy

PAD = 64  # whole sets are filled up to a multiple of this, so that few batch sizes occur


class PriorParty(Party):
    prior: Tensor  # the client's mean prediction


class PriorSlot(Slot):
    prior: Tensor


class Columns(Batch):
    share: Tensor  # of the unlabelled samples, the accepted ones
    every: BatchPart  # all unlabelled samples


class FedDB(Method[PriorSlot, PriorParty, Columns]):
    """Divides predictions by the client's mean prediction; averages towards a uniform one.  Zhu et al., IJCAI 2024.

    `debias=false average=mean` is the paper's FixMatch row, `debias=true average=mean` its FixMatch-FedDPL.
    """

    paper = "Zhu et al., IJCAI 2024"
    group = "founding"
    keeps = "optimiser state"
    sends = "parameters; up also the mean prediction"
    scenarios = {"clients", "some"}
    labellers = {"received"}
    labels_how = "labels once a round with the model it receives (Algorithm 3)"
    defaults = {
        "batch": "full", "labelled_as_unlabelled": True, "labeller": "received", "debias": True, "average": "dma",
        "statistics": "batch", "optimizer_state": "keep", "weights": "uniform", "server_momentum": 0.5,
    }  # fmt: skip
    readings = {
        "paper": {
            "dma": "paper-loop", "app_u_over": "all", "reduction": "all", "empty_mask": "full-batch", "optimizer_state": "reset",
            "server_momentum": 0.0, "schedule": "constant", "augment": {"strong": "ra-fixmatch"},
        },
        "released": {"schedule": "cosine", "augment": {"strong": "ra-semifl"}},
    }  # fmt: skip

    class Options(Method.Options):
        threshold: float = key(0.95, "confidence a debiased pseudo-label needs", "tau", ge=0)
        weight: float = key(1.0, "of the unlabelled loss", "lambda", ge=0)
        reduction: Reduction = key("selected", "unlabelled loss: over the accepted, or over all unlabelled samples")
        app_u_over: Literal["accepted", "all"] = key("accepted", "samples it is refreshed with at each step")
        app_u_order: Literal["stored", "shuffled"] = key("stored", "order in which samples make up its batches")
        app_u_batch: int = key(250, "samples per batch when it is measured over all, a BN batch each", ge=1)
        empty_mask: Literal["minibatch64", "full-batch"] = key("minibatch64", "labelled batches where nothing was accepted")
        least_accepted: int = key(1, "a client that accepts fewer pseudo-labels trains on its labels only", ge=1)
        passes: Literal["apart", "joint"] = key("apart", "labelled and accepted samples: a BN batch each, or one for both")
        full_batch_chunk: int | None = key(None, "accepted samples per pass of a step, a BN batch each, where memory is short", ge=2)

        def refuse(self) -> None:
            super().refuse()
            if self.full_batch_chunk and self.passes == "joint":
                raise UserError("full_batch_chunk cuts the accepted samples, passes=joint joins them with the labelled ones", "use one of the two")

    o: Options

    @property
    def captured(self) -> bool:  # type: ignore[override]
        return not self.o.full_batch_chunk                                              # every client has its own sizes

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        """Whole sets as batches make one step an epoch; these make as many as everybody's."""
        return super().automatic(facts) | {"threshold": facts.threshold, "batch": facts.unlabelled_batch}

    def holds(self) -> Held:
        return {"model": Net(), "prior": Value(self.classes, start=1 / self.classes)}

    def begin(self, party: PriorParty) -> dict[str, Tensor]:
        if not len(party.unlabelled):
            return {}
        z = weak_logits(party, self.o.app_u_order == "shuffled", self.o.app_u_batch)
        prior = mean_prediction(z)                                                      # Eq. 8: APP-U
        party.prior.copy_(prior)
        z = debiased(z, prior) if self.o.debias else z                                  # Eq. 14: DPL
        label, sure = hard(z, self.o.threshold)
        party.judge(party.unlabelled, label, sure, confidence(z))
        return {"label": label, "sure": sure}

    def plan(self, party: PriorParty, found: Found) -> Plan:
        B, work, x = party.batch, Work(epochs=party.epochs, steps=party.steps), party.labelled
        if "sure" not in found or found["sure"].sum() < self.o.least_accepted:
            size = 64 if self.o.empty_mask == "minibatch64" else B
            return Plan(self.supervised, x=x.batches(size, "labelled", **work))
        accepted = party.unlabelled.label(found["label"]).where(found["sure"])
        pad, chunk = PAD if B is None else 1, self.o.full_batch_chunk
        plan = Plan(self.chunked if chunk else self.step,
                    x=x.batches(B, "labelled", pad=pad if party.uneven else 1),
                    u=accepted.batches(B, "weak", "strong", pad=1 if chunk else pad, **work),
                    share=len(accepted) / len(party.unlabelled))  # fmt: skip
        if self.o.app_u_over == "accepted" or self.o.average != "dma":
            return plan
        shuffle = self.o.app_u_order == "shuffled"
        return plan.having(every=party.unlabelled.batches(None, "weak", shuffle=shuffle, pad=1 if shuffle else PAD))

    def step(self, s: PriorSlot, b: Columns) -> None:
        zx, zu = self.logits(s, b)
        loss = cross_entropy(zx, b.x.y, b.x.rows) if b.x else 0.0                        # L_s
        if self.o.average == "dma":
            self.refresh(s, b)
        loss = loss + self.unlabelled(b, cross_entropy(zu, b.u.y, b.u.rows))             # L_u, mean over the accepted
        s.descend(loss)
        s.log(loss=loss)

    def unlabelled(self, b: Columns, mean: Tensor) -> Tensor:
        return self.o.weight * (b.share * mean if self.o.reduction == "all" else mean)   # Eqs. 4, 5: over N_u

    def chunked(self, s: PriorSlot, b: Columns) -> None:
        """The same step in near-equal pieces of the accepted samples, whose gradients add up."""
        if self.o.average == "dma":
            self.refresh(s, b)
        grads: dict[str, Tensor] = {}
        losses: list[Tensor] = []
        for loss in self.pieces(s, b):                                                  # each let go before the next is made
            grads = {k: g if not grads else grads[k] + g for k, g in s.gradient(loss, s.model).items()}
            losses.append(loss.detach())
        s.apply(s.model, grads)
        s.log(loss=sum(losses))

    def pieces(self, s: PriorSlot, b: Columns) -> Iterator[Tensor]:
        n, count = len(b.u.y), math.ceil(len(b.u.y) / (self.o.full_batch_chunk or 1))
        if b.x:
            yield cross_entropy(s.model(b.x.labelled, rows=b.x.rows), b.x.y, b.x.rows)
        for v, y in zip(b.u.strong.tensor_split(count), b.u.y.tensor_split(count)):
            yield self.unlabelled(b, len(y) / n * cross_entropy(s.model(v), y))

    def logits(self, s: PriorSlot, b: Columns) -> list[Tensor]:
        join = s.model.together if self.o.passes == "joint" else s.model.apart
        return join(b.x.labelled, b.u.strong, rows=(b.x.rows, b.u.rows))

    @torch.no_grad()
    def refresh(self, s: PriorSlot, b: Columns) -> None:
        """The client's mean prediction, moved towards that of the net before this step (Algorithm 3)."""
        u, sizes = b.u, [len(b.u.weak)]
        if self.o.app_u_over == "all":
            u, sizes = b.every, cuts(len(b.every.weak), self.o.app_u_order == "shuffled", self.o.app_u_batch)
        rows = [None] * len(sizes) if u.rows is None else u.rows.split(sizes)
        p = torch.cat([s.model(x, stats="batch", rows=r).softmax(1) for x, r in zip(u.weak.split(sizes), rows)])
        new = p.mean(0) if u.rows is None else torch.where(u.rows[:, None], p, 0.0).sum(0) / u.rows.sum()
        s.prior.lerp_(new, 1 - self.o.app_u_momentum)

    def end(self, party: PriorParty) -> Update:
        """A client that made no step counts as any other; DMA sends the mean prediction and goes by it (Eqs. 16, 17)."""
        return Update(model=party.model.state, **self.averager.end(party))
