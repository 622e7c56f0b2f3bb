"""SemiFL: alternate training of the server on labels and of clients on pseudo-labels."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fallow.config import key
from fallow.keys.section import Keys
from fallow.methods.base import BatchPart, Found, Held, Method, Net, Plan, Work
from fallow.methods.parts import labelling
from fallow.methods.parts.fitting import Facts
from fallow.methods.parts.labelling import LabellerBatch, LabellerParty, LabellerSlot
from fallow.methods.parts.losses import cross_entropy

FULL = 64  # whole sets are filled up to a multiple of this, so that few batch sizes occur


class Columns(LabellerBatch):
    fix: BatchPart  # samples whose pseudo-label is accepted
    mix: BatchPart  # samples to mix them with
    lam: Tensor  # Mixup's ratio


class SemiFL(Method[LabellerSlot, LabellerParty, Columns]):
    """Clients label with the model they receive, the server then tunes it on its labels.  Diao et al., NeurIPS 2022.

    With labels at clients there is no server turn and no static batch norm, and each step has a labelled batch too.
    """

    paper = "Diao et al., NeurIPS 2022"
    group = "founding"
    keeps = "optimiser state"
    sends = "parameters; down also static BN statistics"
    scenarios = {"server", "clients", "some"}
    labellers = labelling.ALL
    defaults = {
        "labeller": "received", "server_turn": "after", "statistics": "static", "optimizer_state": "keep",
        "weights": "uniform", "server_momentum": 0.5,
    }  # fmt: skip
    readings = {
        "paper": {"server_turn": "before+last", "server_momentum": 0.0, "mix_resample": "per-round", "mix_augment": "after"},
        "released": {},
    }

    class Options(Method.Options):
        threshold: float = key(0.95, "confidence a pseudo-label needs", "tau", ge=0)
        mixup: float = key(0.75, "Mixup ratios are drawn from Beta(a, a)", "a", gt=0)
        mix_weight: float = key(1.0, "of the mix loss; 0: no Mixup", "lambda", ge=0)
        mix_resample: Literal["per-access", "per-round"] = key("per-access", "the mix set: drawn for every batch, or once a round")
        mix_augment: Literal["before", "after"] = key("before", "weak augmentation of each image before mixing, or of the mixture")

    o: Options

    @classmethod
    def scenario_defaults(cls, labels: str) -> Keys:
        return {} if labels == "server" else {"statistics": "batch"}

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        """A batch is of accepted images, and of as many labelled ones where a client has both.

        Clients may label once a round because a server has just tuned what they receive. Where they have the labels nobody
        has, and what they would learn is what they already say: there the net in training labels each batch (Table 2).
        """
        common: Keys = {"threshold": facts.threshold, "batch": facts.unlabelled_batch}
        if facts.o.labels == "server":
            return super().automatic(facts) | common | {"server_batch": facts.batch}
        clients = {"labeller": "current", "statistics": "average"}
        return super().automatic(facts.having(**clients)) | common | clients

    def holds(self) -> Held:
        return {"model": Net()} | labelling.holds(self.o, self.classes)

    def begin(self, party: LabellerParty) -> dict[str, Tensor]:
        found = labelling.begin(self.o, party, once=True)
        if "z" not in found:
            return {}
        label, sure = labelling.hard(found["z"], self.o.threshold)                      # Eqs. 2, 3
        party.judge(party.unlabelled, label, sure, labelling.confidence(found["z"]))
        return {"label": label, "sure": sure}

    def plan(self, party: LabellerParty, found: Found) -> Plan:
        B, work = party.batch, Work(epochs=party.epochs, steps=party.steps)
        pad = FULL if B is None else 1
        x = party.labelled.batches(B, "labelled", pad=pad)                              # endless: cycles until `fix` ends
        if self.o.labeller == "current" and len(party.unlabelled):
            return Plan(self.relabel, x=x, u=party.unlabelled.batches(B, "weak", "strong", pad=pad, **work))
        if "label" not in found or not found["sure"].any():
            return super().plan(party, found)                                           # labels only; without any: no steps
        data = party.unlabelled.label(found["label"])
        fix = data.where(found["sure"]).batches(B, "weak", "strong", pad=pad, **work)   # Eq. 3: D_fix
        if not self.o.mix_weight:
            return Plan(x=x, fix=fix)
        anew = self.o.mix_resample == "per-access"
        if not anew:
            data = data.take(party.rng("mix").integers(len(data), size=len(fix.samples)))
        alike = "fix" if self.o.mix_augment == "after" else None                        # one view of both is that of the mixture
        mix = data.batches(fix, "weak", pad=pad, replace=anew, alike=alike)              # Eq. 4: D_mix, of all samples
        return Plan(x=x, fix=fix, mix=mix, lam=party.rng("mixup").beta(self.o.mixup, self.o.mixup, len(fix)))

    def step(self, s: LabellerSlot, b: Columns) -> None:
        rows = b.fix.rows
        mixed: Tensor | None = None
        if self.o.mix_weight:
            mixed = b.lam * b.fix.weak + (1 - b.lam) * b.mix.weak                       # x_mix
        zx, zs, zm = s.model.apart(b.x.labelled, b.fix.strong, mixed, rows=(b.x.rows, rows, rows))
        loss = cross_entropy(zs, b.fix.y, rows)                                         # Eq. 5: L_fix
        if self.o.mix_weight:
            mix = b.lam * cross_entropy(zm, b.fix.y, rows) + (1 - b.lam) * cross_entropy(zm, b.mix.y, rows)  # L_mix
            loss = loss + self.o.mix_weight * mix                                       # Eq. 6
        if b.x:
            loss = loss + cross_entropy(zx, b.x.y, b.x.rows)
        s.descend(loss)
        labelling.follow(self.o, s)
        s.log(loss=loss)

    def supervised(self, s: LabellerSlot, b: Columns) -> None:
        super().supervised(s, b)
        labelling.follow(self.o, s)

    def relabel(self, s: LabellerSlot, b: Columns) -> None:
        """Labels for this batch from the net in training and the batch's own statistics: no mix loss (Table 2)."""
        with torch.no_grad():
            z = s.model(b.u.weak, stats="batch", rows=b.u.rows)
        zu = labelling.logits(self.o, s, b.u, z)
        label, sure = labelling.hard(zu, self.o.threshold)
        sure = sure if b.u.rows is None else sure & b.u.rows
        loss = cross_entropy(s.model(b.u.strong, rows=sure), label, sure)
        if b.x:
            loss = loss + cross_entropy(s.model(b.x.labelled, rows=b.x.rows), b.x.y, b.x.rows)
        s.judge(b.u, label, sure, confidence=labelling.confidence(zu))
        s.descend(loss, when=None if b.x else sure.any())
        s.log(loss=(loss, torch.ones_like(loss, dtype=torch.bool) if b.x else sure.any()))
