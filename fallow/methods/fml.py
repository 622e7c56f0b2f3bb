"""FML: each client's personal model and the one that travels teach each other."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fallow.config import key
from fallow.keys.section import Keys
from fallow.methods.base import Batch, Found, Held, Method, Net, NetHandle, Party, Plan, Slot
from fallow.methods.parts.batching import paired
from fallow.methods.parts.fitting import CLIP, Facts, common
from fallow.methods.parts.losses import certainty, cross_entropy, entropy, kl, masked_mean


class Mutual(Slot):
    personal: NetHandle


class Columns(Batch):
    ramp: Tensor


class Said(NamedTuple):
    """A net's logits: of labelled views, of unlabelled ones that it teaches by, and of those that it learns on."""

    labelled: Tensor | None
    teaching: Tensor | None
    learning: Tensor | None


class FML(Method[Mutual, Party, Columns]):
    """The global model visits each client as a "meme" and learns from its personal one, and that from it.

    Shen et al., "Federated Mutual Learning", arXiv 2006.16765 (2020); on unlabelled images too as in FedLoKe's tables.
    `model` is the meme w, `personal` theta, which never leaves.
    """

    paper = "Shen et al., arXiv 2020"
    keeps = "personal model and its optimiser"
    scenarios = {"clients", "some", "all"}
    labels_how = "has two models that teach each other"
    accepts_by = "entropy"
    defaults = {"batch": 32, "unlabelled_batch": "equal", "lr": 0.01, "momentum": 0.0, "nesterov": False}

    class Options(Method.Options):
        alpha: float = key(0.5, "of the personal model's loss on labels, against what it learns from the other", "alpha", ge=0, le=1)
        beta: float = key(0.5, "of the travelling model's", "beta", ge=0, le=1)
        lambda_u: float = key(1.0, "of learning from each other on unlabelled images (0: the original method, without them)", "lambda_u", ge=0)
        update: Literal["simultaneous", "alternating"] = key("simultaneous", "both step at once, or the second learns from the first as it then is")
        personal_start: Literal["initial", "random"] = key("initial", "a client's first personal model: the run's first weights, or its own random ones")
        views: Literal["weak", "fedloke"] = key("weak", "one weak view for all, or FedLoKe's: taught on weak views, learnt on strong ones")
        filter: Literal["none", "entropy"] = key("none", "unlabelled images that teach: all, or those of low entropy")
        entropy: float = key(0.1, "filter=entropy: entropy in nats below which an image teaches", "delta", ge=0)
        ramp_rounds: int = key(0, "rounds until lambda_u has full weight", ge=0)

    o: Options

    @classmethod
    def scenario_defaults(cls, labels: str) -> Keys:
        return {"augment": {"strong": "ra-torchvision", "cutout": "none"}}

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        """A net's loss is half one on labels, half on the other net: the bound on gradients leaves labels what everybody's does."""
        assert isinstance(facts.o, FML.Options)
        shares = [share for share in (facts.o.alpha, facts.o.beta) if share]
        return super().automatic(facts) | common(facts) | {"clip": CLIP / min(shares, default=1.0)}

    def holds(self) -> Held:
        return {"model": Net(), "personal": Net(keep=True, start=self.o.personal_start, optimizer="keep")}

    def plan(self, party: Party, found: Found) -> Plan:
        if not self.o.lambda_u:                                                             # the original knows labelled images only
            x = party.labelled.batches(party.batch, "labelled", epochs=party.epochs, steps=party.steps)
            return Plan(x=x, u=party.unlabelled.take(np.arange(0)).batches(1, "weak"), ramp=1.0)
        views = ("weak",) if self.o.views == "weak" else ("weak", "strong")
        x, u = paired(party, "labelled", views)
        return Plan(x=x, u=u, ramp=min(1.0, party.round / self.o.ramp_rounds) if self.o.ramp_rounds else 1.0)

    def step(self, s: Mutual, b: Columns) -> None:
        theta, w = self.say(s.personal, b), self.say(s.model, b)
        L_theta = self.side(self.o.alpha, theta, w, b)
        if self.o.update == "alternating":
            s.descend(L_theta, s.personal)
            with torch.no_grad():
                theta = self.say(s.personal, b)
            L_w = self.side(self.o.beta, w, theta, b)
            s.descend(L_w, s.model)
        else:
            L_w = self.side(self.o.beta, w, theta, b)
            s.descend(L_theta + L_w)                                                   # neither reaches into the other
        if b.u and theta.teaching is not None and w.teaching is not None:
            for name, z in (("label", theta.teaching), ("global_label", w.teaching)):
                p = z.detach().softmax(1)
                s.judge(b.u, p.argmax(1), self.taught_by(p), name, certainty(entropy(p), self.classes))
        s.log(loss=L_w, personal_loss=L_theta)

    def say(self, net: NetHandle, b: Columns) -> Said:
        """Each call is a batch of its own for BN."""
        zx = net(b.x.labelled) if b.x else None
        zw = net(b.u.weak) if b.u else None
        return Said(zx, zw, net(b.u.strong) if b.u and self.o.views == "fedloke" else zw)

    def side(self, weight: float, student: Said, teacher: Said, b: Columns) -> Tensor:
        """L_theta = alpha CE + (1 - alpha)(KL_l(p_w || p_theta) + lambda_u KL_u(p_w || p_theta)); L_w alike, by beta."""
        own, taught = torch.zeros((), device=b.ramp.device), torch.zeros((), device=b.ramp.device)
        if student.labelled is not None and teacher.labelled is not None:
            own = cross_entropy(student.labelled, b.x.y)
            taught = kl(teacher.labelled.detach().softmax(1), student.labelled).mean()
        if student.learning is not None and teacher.teaching is not None:
            p = teacher.teaching.detach().softmax(1)
            taught = taught + self.o.lambda_u * b.ramp * masked_mean(kl(p, student.learning), self.taught_by(p))
        return weight * own + (1 - weight) * taught

    def taught_by(self, p: Tensor) -> Tensor:
        """Which of these answers teach."""
        return entropy(p) < self.o.entropy if self.o.filter == "entropy" else torch.ones_like(p[:, 0], dtype=torch.bool)
