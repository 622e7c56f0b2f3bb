"""FedDure: two regulators weigh pseudo-labels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from fallow.config import Config, key
from fallow.errors import UserError
from fallow.keys.section import Keys
from fallow.methods.base import AnyMethod, Batch, Found, Held, Method, Net, NetHandle, Party, Plan, Slot
from fallow.methods.parts.batching import paired
from fallow.methods.parts.fitting import Facts, common
from fallow.methods.parts.labelling import confidence, hard
from fallow.methods.parts.losses import ce, cross_entropy

Flow = Literal["through", "detach"]


class FReg(nn.Module):
    """f_w: what a net says of a sample -> how far its pseudo-label is to be trusted, in (0, 1)."""

    def __init__(self, classes: int, hidden: int):
        super().__init__()
        self.inner, self.outer = nn.Linear(classes, hidden), nn.Linear(hidden, 1)

    def forward(self, q: Tensor) -> Tensor:
        z: Tensor = self.outer(self.inner(q).relu())
        return z.sigmoid().squeeze(1)


class Regulated(Slot):
    creg: NetHandle
    freg: NetHandle


class FedDure(Method[Regulated]):
    """C-reg rewards pseudo-labels that help on labelled data, F-reg weighs each.  Bai et al., AAAI 2024.

    theta is `model`, phi is `creg` (a copy of the received model, thrown away), w is `freg` (stays with the client). What the
    authors released is another algorithm, without F-reg: feddure_released.py.
    """

    paper = "Bai et al., AAAI 2024"
    group = "founding"
    keeps = "F-reg, a small net"
    scenarios = {"clients", "some"}
    labels_how = "labels with the net in training, and its regulators judge the labels"
    defaults = {"batch": 10, "unlabelled_batch": "match-steps:floor", "optimizer": "adam", "lr": 5e-4}
    readings = {
        "released": {
            "loop": "meta-pseudo", "reward_sign": "new-minus-old", "lr": 6e-4, "steps": 5, "epochs": None,
            "warm_steps": 5, "lr_warmup": 10, "creg_wait": 2,
        },
    }  # fmt: skip

    class Options(Method.Options):
        loop: Literal["regulators", "meta-pseudo"] = key("regulators", "local steps: Eqs. 1-10, or the released code's")
        creg: bool = key(True, "C-reg and its reward (off: Table 2's w/o C-reg)")
        reward_sign: Literal["old-minus-new", "new-minus-old"] = key("old-minus-new", "what C-reg's reward is", "d")
        threshold: float = key(0.6, "confidence a pseudo-label needs (freg=threshold, loop=meta-pseudo)", "tau", ge=0)
        weight: float = key(8.0, "of the soft loss at the end of its ramp (loop=meta-pseudo)", "lambda", ge=0)
        ramp: int = key(20, "steps of that ramp, from 0 in each round", "uda_steps", ge=1)
        warm_steps: int = key(5, "labelled steps before the main ones (loop=meta-pseudo)", "fine_tune_steps", ge=0, le=10**6)
        lr_warmup: int = key(10, "steps in which lr grows, from 0 in each round (loop=meta-pseudo)", ge=0)
        creg_wait: int = key(2, "main steps before C-reg's lr leaves 0 (loop=meta-pseudo)", ge=0)
        freg: Literal["regulator", "threshold"] = key("regulator", "what weighs a label: F-reg, or a threshold")
        creg_weight_grad_virtual: Flow = key("through", "virtual step: gradient through F-reg's weights, or not")
        creg_weight_grad_real: Flow = key("through", "C-reg's step: gradient through F-reg's weights, or not")
        virtual_lr: float = key(5e-4, "rate of C-reg's virtual step (plain SGD)", "eta_s", ge=0)
        freg_hidden: int = key(128, "hidden units of F-reg", ge=1, le=2**20)
        freg_input: Literal["probs", "logits"] = key("probs", "what F-reg looks at")
        freg_normalise: Literal["none", "sum"] = key("none", "C-reg's weighted losses: mean, or over the weights' sum")
        freg_state: Literal["client", "round"] = key("client", "F-reg stays with the client, or is new every round")
        freg_init: Literal["client", "shared"] = key("client", "F-reg's first weights: one draw per client, or for all")
        freg_optimizer_state: Literal["reset", "keep"] = key("reset", "F-reg's optimiser: new each round, or kept")
        freg_lr: float | None = key(None, "F-reg's learning rate (default: lr)", "eta_w", gt=0)
        labelled_tail: Literal["keep", "wrap"] = key("keep", "last labelled batch of a pass: smaller, or filled from its start")

        def refuse(self) -> None:
            super().refuse()
            if self.loop == "meta-pseudo" and self.schedule != "constant":
                raise UserError(f"loop=meta-pseudo has its own schedule, so schedule={self.schedule} has no place", "leave it out")

    o: Options

    @classmethod
    def algorithm(cls, options: Config) -> type[AnyMethod]:
        from fallow.methods.feddure_released import FedDureReleased

        if not isinstance(options, FedDure.Options) or options.loop == "regulators":
            return cls
        if cls not in (FedDure, FedDureReleased):
            raise UserError("loop=meta-pseudo is another algorithm than FedDure's", "derive the class from FedDureReleased")
        return FedDureReleased

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        """All nets learn as everybody's do, C-reg's virtual step too."""
        lr = facts.having(optimizer="sgd").lr
        sgd = {} if facts.given & {"optimizer", "lr"} else {"optimizer": "sgd", "lr": lr, "virtual_lr": lr}
        return super().automatic(facts) | common(facts) | {"threshold": facts.threshold} | sgd

    @property
    def has_freg(self) -> bool:
        return self.o.freg == "regulator"

    def holds(self) -> Held:
        o = self.o
        nets: Held = {"model": Net(autocast=o.creg or not self.has_freg)}  # no meta-gradient in bf16
        if o.creg:
            nets["creg"] = Net(start="model", optimizer="reset", autocast=False)
        if self.has_freg:
            start, stays = "random" if o.freg_init == "client" else "initial", o.freg_state == "client"
            make = partial(FReg, hidden=o.freg_hidden)
            nets["freg"] = Net(make, start, keep=stays, optimizer=o.freg_optimizer_state, autocast=False)
        return nets

    def plan(self, party: Party, found: Found) -> Plan:
        x, u = paired(party, "labelled", ("weak", "strong"))
        x = replace(x, tail=self.o.labelled_tail)
        return Plan(x=x, u=u, lr=None if self.o.freg_lr is None else {"freg": self.o.freg_lr})

    def step(self, s: Regulated, b: Batch) -> None:
        zs, zw, zt = s.model.together(b.x.labelled, b.u.weak, b.u.strong)
        loss, sure = cross_entropy(zs, b.x.y) if b.x else 0.0, None                         # Eq. 9
        if b.u:
            yhat, sure = hard(zw.detach(), self.o.threshold)                                # Eq. 1
            judged = bool(b.x) and self.o.creg                                              # no labels, no C-reg
            net, a = (s.creg, s.creg(b.u.strong, stats="batch")) if judged else (s.model, zt)
            l = ce(a, yhat)
            if self.has_freg:
                if b.x:
                    self.tune_freg(s, b, net, a, l)                                         # Eqs. 4, 5
                m, sure = self.trust(s, zt, "detach").detach(), None                        # Eq. 6
            else:
                m = sure.to(l.dtype)
            s.log(trust=m)
            if judged:
                d = self.reward(s, b, self.weighted(s, a, l, self.o.creg_weight_grad_real))  # Eqs. 2, 3
                s.log(reward=d)
                m = m + d
            loss = loss + (m * ce(zt, yhat)).mean()                                         # Eqs. 7, 8
            s.judge(b.u, yhat, sure, confidence=confidence(zw.detach()))
        s.descend(loss, s.model, when=None if b.x or sure is None else sure.any())          # Eq. 10
        s.log(loss=loss)

    def reward(self, s: Regulated, b: Batch, loss: Tensor) -> Tensor:
        """d: C-reg takes a step on `loss`; what that changed on labelled data."""
        with torch.no_grad():
            old = cross_entropy(s.creg(b.x.labelled, stats="batch"), b.x.y)
        s.descend(loss, s.creg)                                                             # Eq. 2
        with torch.no_grad():
            new = cross_entropy(s.creg(b.x.labelled, stats="batch"), b.x.y)
        return old - new if self.o.reward_sign == "old-minus-new" else new - old            # Eq. 3

    def trust(self, s: Regulated, z: Tensor, flow: Flow) -> Tensor:
        """H: F-reg's weight of each sample; the gradient flows on into `z`, or not."""
        z = z if flow == "through" else z.detach()
        return s.freg(z.softmax(1) if self.o.freg_input == "probs" else z)

    def weighted(self, s: Regulated, a: Tensor, l: Tensor, flow: Flow) -> Tensor:
        """L_v: C-reg's loss on pseudo-labels, weighed by F-reg as it now is."""
        if not self.has_freg:
            return l.mean()
        h = self.trust(s, a, flow)
        if self.o.freg_normalise == "none":
            return (h * l).mean()
        return (h * l).sum() / h.sum().clamp_min(torch.finfo(h.dtype).tiny)

    def tune_freg(self, s: Regulated, b: Batch, net: NetHandle, a: Tensor, l: Tensor) -> None:
        """F-reg learns to give weights under which one plain step of `net` helps on labelled data."""
        g = s.gradient(self.weighted(s, a, l, self.o.creg_weight_grad_virtual), net, create_graph=True)
        rate = s.lr["model"] if net is s.model else self.o.virtual_lr                       # w/o C-reg: theta's own
        minus = {k: p - rate * g[k] for k, p in net.weights.items()}                        # Eq. 4
        s.descend(cross_entropy(net(b.x.labelled, weights=minus, stats="batch"), b.x.y), s.freg, retain=True)  # Eq. 5
