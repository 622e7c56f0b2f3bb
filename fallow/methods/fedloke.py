"""FedLoKe: each client's personal model and the global one label for each other."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fallow.config import key
from fallow.errors import UserError
from fallow.keys.section import Keys
from fallow.methods.base import Batch, Found, Held, Method, Net, NetHandle, Party, Plan, Slot, Work
from fallow.methods.parts.fitting import USUAL, Facts, common
from fallow.methods.parts.losses import Divergence, certainty, cross_entropy, entropy, kl, masked_mean

Labelling = Literal["update", "batch", "running"]
VIEWS = {
    "fedloke": ("weak", "strong"),
    "all-strong": ("strong", "strong"),
    "all-weak": ("weak", "weak"),
    "none": ("plain", "plain"),
}


class PersonalParty(Party):
    personal: NetHandle


class PersonalSlot(Slot):
    personal: NetHandle


class Columns(Batch):
    ramp: Tensor  # weight of the unlabelled loss


class FedLoKe(Method[PersonalSlot, PersonalParty, Columns]):
    """A personal model that follows the global one by EMA knows its client; the global one knows the others.

    "Non-IID always bad? Semi-supervised heterogeneous federated learning with local knowledge enhancement", CIKM 2023.
    """

    paper = "Zhang et al., CIKM 2023"
    group = "founding"
    keeps = "personal model"
    scenarios = {"clients", "some"}
    labels_how = "has two models that label for each other"
    accepts_by = "entropy"
    defaults = {
        "batch": 32, "unlabelled_batch": "equal", "lr": 0.01, "momentum": 0.0, "nesterov": False, "clip_value": 0.1,
        "weights": "uniform", "augment": {"strong": "ra-torchvision", "cutout": "none"},
    }  # fmt: skip
    readings = {
        "paper": {
            "personal_start": "random",
            "unlabelled_schedule": "epoch",
            "clip_value": None,
            "weights": "samples",
            "augment": {"draws": "sample"},
        },
        "released": {"augment": {"draws": "batch"}},
    }

    class Options(Method.Options):
        ema: float = key(0.7, "what the old personal model weighs (0: no local model, 1: no fusion)", "mu", ge=0, le=1)
        entropy: float = key(0.1, "entropy in nats below which a pseudo-label is used", "delta", ge=0)
        ramp_rounds: int = key(200, "rounds until the unlabelled loss has full weight", "T_u", ge=1)
        personal_start: Literal["initial", "random", "received"] = key(
            "initial", "a client's first personal model: the run's first weights, random ones of its own, what it gets"
        )
        local_model: Literal["personal", "self"] = key("personal", "who labels: a personal model too, or the one model for itself")
        ema_buffers: bool = key(True, "fusion with the received model: batch norm's running statistics, too")
        kl_form: Divergence = key("log-softmax", "Eqs. 9, 10 from log-softmax, or with the released code's 1e-8")
        unlabelled_schedule: Literal["resample", "epoch"] = key(
            "resample", "both sets shuffled again after each pass over the labels, or one pass over the unlabelled set"
        )
        views: Literal["fedloke", "all-strong", "all-weak", "none"] = key("fedloke", "which views the nets see")
        global_pseudo_label: bool = key(True, "the global model labels for the personal one, too")
        labelling: Labelling = key("update", "BN when labelling: batch and move the running statistics, batch, running")

        def refuse(self) -> None:
            super().refuse()
            if self.unlabelled_batch not in ("equal", self.batch) or self.batch == "full":
                raise UserError("fedloke pairs labelled and unlabelled batches of one size", "set it with batch, a count")

    o: Options

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        """It trains as everybody does: without momentum and clipped at 0.1 an entry it learned less than labels alone.

        0.1 nats let nothing pass in a short run.
        """
        rate: Keys = {"momentum": USUAL, "clip_value": None}
        own: Keys = {"unlabelled_batch": "equal", "ramp_rounds": facts.ramp, "entropy": round(0.2 * math.log(facts.classes), 3)}
        return super().automatic(facts) | common(facts.having(**rate)) | rate | own

    @property
    def has_personal(self) -> bool:
        return self.o.local_model == "personal"

    def holds(self) -> Held:
        if not self.has_personal:
            return {"model": Net()}
        start = {"received": "model"}.get(self.o.personal_start, self.o.personal_start)
        return {"model": Net(), "personal": Net(keep=True, start=start)}

    def begin(self, party: PersonalParty) -> dict[str, Tensor]:
        if self.has_personal:
            fused = party.personal.state.lerp(party.received["model"], 1 - self.o.ema)                     # Eq. 2
            party.personal.load(fused if self.o.ema_buffers else fused.only("parameters"))
        return {}

    def plan(self, party: PersonalParty, found: Found) -> Plan:
        B, L, U, E = party.batch or 1, len(party.labelled), len(party.unlabelled), party.epochs or 1
        weak, strong = VIEWS[self.o.views]
        x, u = party.labelled.at_least(B), party.unlabelled

        def some(xs: Work, us: Work) -> Plan:
            ramp = min(1.0, party.round / self.o.ramp_rounds)                                              # Eq. 12
            return Plan(
                x=x.batches(B, tail="drop", weak=weak, strong=strong, **xs),
                u=u.batches(B, tail="drop", weak=weak, strong=strong, **us), ramp=ramp,
            )  # fmt: skip

        endless, once = Work(epochs=None, steps=None), Work(epochs=1, steps=None)
        if party.steps:
            counted = Work(epochs=None, steps=party.steps)
            return some(counted, counted)
        if not L or (U and self.o.unlabelled_schedule == "epoch"):
            return some(endless, Work(epochs=E, steps=None))
        repetitions = max(1, (U or party.unused) // B // max(1, L // B))                                   # E1
        return sum((some(once, once) for _ in range(math.ceil(repetitions * E - 1e-9))), Plan())

    def step(self, s: PersonalSlot, b: Columns) -> None:
        """Every call is a batch of its own for BN, so each net's statistics move three times."""
        loss: Tensor | float = 0.0
        if b.x:
            loss = cross_entropy(s.model(b.x.strong), b.x.y)                                               # Eq. 14
            if self.has_personal:
                loss = loss + cross_entropy(s.personal(b.x.weak), b.x.y)                                   # Eq. 13
        if b.u:
            with torch.no_grad():
                yg = s.model(b.u.weak, stats=self.o.labelling).softmax(1)                                  # Eq. 4
                yl = s.personal(b.u.weak, stats=self.o.labelling).softmax(1) if self.has_personal else yg  # Eq. 3
            El, Eg = entropy(yl), entropy(yg)                                                              # Eqs. 5, 6
            sure_l, sure_g = El < self.o.entropy, Eg < self.o.entropy                                      # Eqs. 7, 8
            LUg = masked_mean(kl(yl, s.model(b.u.strong), self.o.kl_form), sure_l)                         # Eq. 9
            LUl: Tensor | float = 0.0
            if self.has_personal and self.o.global_pseudo_label:
                LUl = masked_mean(kl(yg, s.personal(b.u.strong), self.o.kl_form), sure_g)                  # Eq. 10
            loss = loss + b.ramp * (LUg + LUl)                                                             # Eqs. 15, 16
            s.judge(b.u, yl.argmax(1), sure_l, confidence=certainty(El, self.classes))
            s.judge(b.u, yg.argmax(1), sure_g, "global_label", certainty(Eg, self.classes))
            s.log(entropy_local=El, entropy_global=Eg)
        s.descend(loss)
        s.log(loss=loss)
