"""FixMatch and UDA at every party that has unlabelled data."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from fallow.config import key
from fallow.keys.section import Keys
from fallow.methods.base import Found, Held, Plan
from fallow.methods.parts import labelling
from fallow.methods.parts.averaged import Averaged
from fallow.methods.parts.batching import paired, progress
from fallow.methods.parts.fitting import Facts
from fallow.methods.parts.labelling import LabellerBatch, LabellerParty, LabellerSlot
from fallow.methods.parts.losses import Reduction, ce, cross_entropy, kl, masked_mean

Empty = Literal["skip", "take"]


class Columns(LabellerBatch):
    eta: Tensor  # UDA's annealing


class FixMatch(Averaged[LabellerSlot, LabellerParty, Columns]):
    """FixMatch at every party that has unlabelled data, averaged by FedAvg.  Sohn et al., NeurIPS 2020."""

    paper = "Sohn et al., NeurIPS 2020"
    scenarios = {"server", "clients", "some"}
    labellers = labelling.EACH
    defaults = {"labeller": "current"}

    class Options(Averaged.Options):
        threshold: float = key(0.95, "confidence a pseudo-label needs", "tau", ge=0)
        weight: float = key(1.0, "of the unlabelled loss", "lambda_u", ge=0)
        reduction: Reduction = key("all", "unlabelled loss: mean over the batch, or over the accepted")
        empty_step: Empty = key("skip", "a party without labels and nothing accepted: skip the step, or take it")
        pseudo_label_mode: Literal["joint", "eval"] = key("joint", "labels from the joint pass, or from an own pass in eval mode")

    o: Options

    @classmethod
    def scenario_defaults(cls, labels: str) -> Keys:
        return {"weights": "uniform"} if labels == "server" else {}  # a server with few samples is one more party

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        """Where only the server has labels the paper's threshold keeps wrong ones out."""
        assert isinstance(facts.o, FixMatch.Options)
        return super().automatic(facts) | {"threshold": facts.o.threshold if facts.o.labels == "server" else facts.threshold}

    def holds(self) -> Held:
        return super().holds() | labelling.holds(self.o, self.classes)

    def begin(self, party: LabellerParty) -> dict[str, Tensor]:
        return labelling.begin(self.o, party)

    def plan(self, party: LabellerParty, found: Found) -> Plan:
        x, u = paired(party, "labelled", ("weak", "strong"), z=found.get("z"))
        return Plan(x=x, u=u)

    def target(self, z: Tensor) -> tuple[Tensor, Tensor]:                       # Eq. 3
        return labelling.hard(z, self.o.threshold)

    def unsupervised(self, zs: Tensor, target: Tensor) -> Tensor:
        return ce(zs, target)

    def labelled_loss(self, zx: Tensor, b: Columns) -> Tensor:
        return cross_entropy(zx, b.x.y)

    def forward(self, s: LabellerSlot, b: Columns) -> tuple[Tensor, Tensor | None, Tensor]:
        """Logits of labelled views, the labeller's of unlabelled samples, and those of the views to learn on."""
        if self.o.labeller == "current" and self.o.pseudo_label_mode == "joint":
            zx, zw, zs = s.model.together(b.x.labelled, b.u.weak, b.u.strong)
            return zx, labelling.logits(self.o, s, b.u, zw) if b.u else None, zs
        z = labelling.logits(self.o, s, b.u) if b.u else None                   # first: the next pass moves statistics
        zx, zs = s.model.together(b.x.labelled, b.u.strong)
        return zx, z, zs

    def step(self, s: LabellerSlot, b: Columns) -> None:
        zx, z, zs = self.forward(s, b)
        loss: Tensor | float = self.labelled_loss(zx, b) if b.x else 0.0
        when: Tensor | None = None
        if z is not None:
            label, sure = self.target(z)
            when = None if b.x or self.o.empty_step == "take" else sure.any()
            loss = loss + self.o.weight * masked_mean(self.unsupervised(zs, label), sure, self.o.reduction)  # Eq. 4
            s.judge(b.u, label if label.dim() == 1 else label.argmax(1), sure, confidence=labelling.confidence(z))
        self.descend(s, loss, when)
        labelling.follow(self.o, s)


class UDA(FixMatch):
    """Soft, sharpened targets in place of hard ones.  Xie et al., NeurIPS 2020."""

    paper = "Xie et al., NeurIPS 2020"

    class Options(FixMatch.Options):
        threshold: float = key(0.8, "confidence a target needs, before sharpening", "tau", ge=0)
        temperature: float = key(0.4, "of the sharpened target", "T", gt=0)
        tsa: Literal["none", "linear", "log", "exp"] = key("none", "training-signal annealing of labelled samples", "eta")
        tsa_form: Literal["authors", "usb"] = key(
            "authors", "left out: samples sure of their true class, a mean over the others; or (USB) sure of any class, a mean over all"
        )

    o: Options

    def plan(self, party: LabellerParty, found: Found) -> Plan:
        plan = super().plan(party, found)
        kind, done = self.o.tsa, progress(party, len(plan))
        return plan if kind == "none" else plan.having(eta=[annealed(kind, share, self.classes) for share in done])

    def target(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return (z / self.o.temperature).softmax(1), z.softmax(1).max(1).values >= self.o.threshold

    def unsupervised(self, zs: Tensor, target: Tensor) -> Tensor:
        return kl(target, zs)

    def labelled_loss(self, zx: Tensor, b: Columns) -> Tensor:
        if self.o.tsa == "none":
            return cross_entropy(zx, b.x.y)
        p, usb = zx.detach().softmax(1), self.o.tsa_form == "usb"
        known = p.amax(1) if usb else p.gather(1, b.x.y[:, None])[:, 0]
        return masked_mean(ce(zx, b.x.y), known <= b.eta, "all" if usb else "selected")


def annealed(kind: str, share: float, classes: int) -> float:
    """TSA's threshold after `share` of all steps: a (1 - 1/C) + 1/C."""
    a = {"linear": share, "exp": math.exp(5 * (share - 1)), "log": 1 - math.exp(-5 * share)}[kind]
    return a * (1 - 1 / classes) + 1 / classes
