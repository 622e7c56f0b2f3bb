"""Meta Pseudo Labels with a warm phase and a soft loss: what FedDure's authors released (methods chapter 14.2.6)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fallow.config import key
from fallow.data.samples import Stream
from fallow.methods.base import Batch, Method, NetHandle, Party, Plan, Slot, Work
from fallow.methods.parts.labelling import confidence, hard
from fallow.methods.parts.losses import ce, cross_entropy, masked_mean


class Regulated(Slot):
    creg: NetHandle  # phi
    freg: NetHandle  # w


class Ramped(Batch):
    ramp: Tensor  # weight of the soft loss


class MetaPseudo(Method[Regulated, Party, Ramped]):
    """`model` labels; `creg`, a copy of the received model, learns from the labels; what that changes rewards `model`."""

    class Options(Method.Options):
        creg: bool = key(True, "C-reg and its reward (off: Table 2's w/o C-reg)")
        reward_sign: Literal["old-minus-new", "new-minus-old"] = key("old-minus-new", "what C-reg's reward is", "d")
        threshold: float = key(0.6, "confidence a pseudo-label needs (freg=threshold, loop=meta-pseudo)", "tau", ge=0)
        weight: float = key(8.0, "of the soft loss at the end of its ramp (loop=meta-pseudo)", "lambda", ge=0)
        ramp: int = key(20, "steps of that ramp, from 0 in each round", "uda_steps", ge=1)
        warm_steps: int = key(5, "labelled steps before the main ones (loop=meta-pseudo)", "fine_tune_steps", ge=0, le=10**6)
        lr_warmup: int = key(10, "steps in which lr grows, from 0 in each round (loop=meta-pseudo)", ge=0)
        creg_wait: int = key(2, "main steps before C-reg's lr leaves 0 (loop=meta-pseudo)", ge=0)

    o: Options

    def warm_and_main(self, x: Stream, u: Stream) -> Plan:
        """Labelled steps, then the main ones over these streams, with a schedule that starts anew in each round."""
        o, main = self.o, Plan(self.meta_pseudo, x=x, u=u)
        rate = lambda s, wait=0: o.lr * multiplier(s, len(main), o.lr_warmup, wait)
        few = Work(steps=o.warm_steps, epochs=None)
        first = {"x": replace(x, **few), "u": replace(u, **few)} if x else {}
        steps = range(len(main))
        return Plan(self.warm, **first, lr=[rate(s) for s in range(o.warm_steps)]) + main.having(
            lr={"model": [rate(o.warm_steps + s) for s in steps], "creg": [rate(s, o.creg_wait) for s in steps]},
            ramp=[o.weight * min(1, (s + 1) / o.ramp) for s in steps],
        )

    def warm(self, s: Regulated, b: Ramped) -> None:
        """The labelled loss; the unlabelled views are there for batch norm."""
        zs, _, _ = s.model.together(b.x.labelled, b.u.weak, b.u.strong)
        loss = cross_entropy(zs, b.x.y)
        s.descend(loss, s.model)
        s.log(loss=loss)

    def meta_pseudo(self, s: Regulated, b: Ramped) -> None:
        zs, zw, zt = s.model.together(b.x.labelled, b.u.weak, b.u.strong)
        loss, sure = cross_entropy(zs, b.x.y) if b.x else 0.0, None
        if b.u:
            yhat, sure = hard(zw.detach(), self.o.threshold)
            loss = loss + b.ramp * masked_mean(ce(zt, zw.detach().softmax(1)), sure)            # soft labels
            if b.x and self.o.creg:
                dot = self.reward(s, b, cross_entropy(s.creg(b.u.weak, stats="batch"), yhat))
                loss = loss + dot * cross_entropy(zt, zt.detach().argmax(1))                    # of its own strong view
                s.log(reward=dot)
            s.judge(b.u, yhat, sure, confidence=confidence(zw.detach()))
        s.descend(loss, s.model, when=None if b.x or sure is None else sure.any())
        s.log(loss=loss)

    def reward(self, s: Regulated, b: Ramped, loss: Tensor) -> Tensor:
        """d: C-reg takes a step on `loss`; what that changed on labelled data (FedDure, Eqs. 2, 3)."""
        with torch.no_grad():
            old = cross_entropy(s.creg(b.x.labelled, stats="batch"), b.x.y)
        s.descend(loss, s.creg)
        with torch.no_grad():
            new = cross_entropy(s.creg(b.x.labelled, stats="batch"), b.x.y)
        return old - new if self.o.reward_sign == "old-minus-new" else new - old


def multiplier(step: int, total: int, warmup: int, wait: int = 0) -> float:
    """The released schedule, anew in each round: 0 while waiting, a straight line, then a cosine (14.7)."""
    late = step - warmup - wait
    if late < 0:
        return 0.0 if step < wait else step / (warmup + wait)
    return max(0.0, 0.5 * (1 + math.cos(math.pi * late / max(1, total - warmup - wait))))
