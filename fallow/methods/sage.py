"""SAGE: the received model corrects the labels of the net in training, the more their confidences part."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fallow.config import key
from fallow.keys.section import Keys
from fallow.methods.base import Batch, Found, Held, Method, Net, NetHandle, Party, Plan, Slot
from fallow.methods.parts.batching import full_batches, refuse_sets, walks
from fallow.methods.parts.fitting import Facts, common
from fallow.methods.parts.labelling import one_hot
from fallow.methods.parts.losses import cross_entropy, masked_mean, smoothed_kl


class TaughtSlot(Slot):
    teacher: NetHandle  # the model as it was received


class SAGE(Method[TaughtSlot, Party, Batch]):
    """Local and received model label together: local labels where both are as sure, else the received model's.

    "Mind the Gap: Confidence Discrepancy Can Guide Federated Semi-Supervised Learning Across Pseudo-Mismatch", CVPR 2025.
    """

    paper = "Liu et al., CVPR 2025"
    scenarios = {"clients", "some"}
    labels_how = "labels by the net in training and the received model together"
    defaults = {
        "epochs": 5, "batch": 128, "unlabelled_batch": "ratio:2", "lr": 0.1, "nesterov": False, "weight_decay": 1e-4,
        "weights": "uniform",
    }  # fmt: skip
    readings = {"released": {"optimizer_state": "travel"}}

    class Options(Method.Options):
        threshold: float = key(0.95, "confidence a pseudo-label needs, of the local or the received model", "tau", ge=0)
        kappa: float = key(math.log(2) / 0.05, "how fast the local label loses weight with the gap of confidences", "kappa", ge=0)
        trust: Literal["gap", "surer"] = key("gap", "a sure local label gives way as confidences part, or wholly where the received model is surer (FedLabel)")
        weight: float = key(1.0, "of the unlabelled loss", ge=0)

        def refuse(self) -> None:
            super().refuse()
            refuse_sets(self)

    o: Options

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        return super().automatic(facts) | common(facts) | {"threshold": facts.threshold}

    def holds(self) -> Held:
        return {"model": Net(), "teacher": Net(start="model", train=False)}

    def plan(self, party: Party, found: Found) -> Plan:
        streams = (full_batches(party, steps, "labelled", ("weak", "strong")) for steps in walks(party))
        return sum((Plan(x=x, u=u) for x, u in streams), Plan())

    def target(self, local: Tensor, received: Tensor) -> tuple[Tensor, Tensor]:
        """Soft labels from both models' probabilities, and which of them are used."""
        (cl, yl), (cg, yg) = local.max(1), received.max(1)
        sure_l, sure_g = cl >= self.o.threshold, cg >= self.o.threshold
        gap = ((cl - cg).abs() + 1e-6).clamp_max(1.0)
        trust = (-self.o.kappa * gap).exp().clamp_min(1e-6) if self.o.trust == "gap" else (cl >= cg).to(cl)  # lambda
        mixed = trust[:, None] * one_hot(yl, local) + (1 - trust[:, None]) * one_hot(yg, local)
        return torch.where(sure_l[:, None], mixed, one_hot(yg, local)), sure_l | sure_g

    def step(self, s: TaughtSlot, b: Batch) -> None:
        zx, zw, zs = s.model.together(b.x.labelled, b.u.weak, b.u.strong)                 # one batch for BN
        loss: Tensor | float = cross_entropy(zx, b.x.y) if b.x else 0.0
        used: Tensor | None = None
        if b.u:
            with torch.no_grad():
                local, received = zw.softmax(1), s.teacher(b.u.weak, stats="running").softmax(1)
                target, used = self.target(local, received)
            loss = loss + self.o.weight * masked_mean(smoothed_kl(target, zs), used)      # L_u
            s.judge(b.u, target.argmax(1), used, confidence=torch.maximum(local.amax(1), received.amax(1)))
        s.descend(loss, when=None if b.x or used is None else used.any())
        s.log(loss=loss)
