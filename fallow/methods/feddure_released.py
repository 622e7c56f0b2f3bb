"""FedDure as its authors released it: another algorithm than the paper's, Meta Pseudo Labels with C-reg as the student."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from fallow.keys.section import Keys
from fallow.methods.base import Batch, Found, Held, Net, Party, Plan, Work
from fallow.methods.feddure import FedDure, Regulated
from fallow.methods.parts.batching import paired
from fallow.methods.parts.fitting import Facts, common
from fallow.methods.parts.labelling import confidence, hard
from fallow.methods.parts.losses import ce, cross_entropy, masked_mean


class Ramped(Batch):
    ramp: Tensor  # lambda times the step's share of its ramp


class FedDureReleased(FedDure):
    """`loop=meta-pseudo`: `model` labels, `creg` learns from the labels, what that changes rewards `model`. No F-reg."""

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        """Its schedule is its own."""
        return super(FedDure, cls).automatic(facts) | common(facts) | {"threshold": facts.threshold, "schedule": "constant"}

    def holds(self) -> Held:
        creg: Held = {"creg": Net(start="model", optimizer="reset", autocast=False)}
        return {"model": Net()} | (creg if self.o.creg else {})

    def plan(self, party: Party, found: Found) -> Plan:
        """Labelled steps, then the main ones, with a schedule that starts anew in each round."""
        o = self.o
        x, u = paired(party, "labelled", ("weak", "strong"))
        x, u = replace(x, tail=o.labelled_tail), replace(u, tail="keep")  # a pass ends with what is left
        later = Plan(self.main, x=x, u=u)
        few = Work(steps=o.warm_steps, epochs=None)
        first = {"x": replace(x, **few), "u": replace(u, **few)} if x else {}
        steps = range(len(later))

        def rate(step: int, wait: int = 0) -> float:
            return o.lr * multiplier(step, len(later), o.lr_warmup, wait)

        return Plan(self.warm, **first, lr=[rate(k) for k in range(o.warm_steps)]) + later.having(
            lr={"model": [rate(o.warm_steps + k) for k in steps], "creg": [rate(k, o.creg_wait) for k in steps]},
            ramp=[o.weight * min(1, (k + 1) / o.ramp) for k in steps],
        )

    def warm(self, s: Regulated, b: Batch) -> None:
        """The labelled loss; the unlabelled views are there for batch norm."""
        zs, _, _ = s.model.together(b.x.labelled, b.u.weak, b.u.strong)
        loss = cross_entropy(zs, b.x.y)
        s.descend(loss, s.model)
        s.log(loss=loss)

    def main(self, s: Regulated, b: Ramped) -> None:
        zs, zw, zt = s.model.together(b.x.labelled, b.u.weak, b.u.strong)
        loss: Tensor | float = cross_entropy(zs, b.x.y) if b.x else 0.0
        when: Tensor | None = None
        if b.u:
            yhat, sure = hard(zw.detach(), self.o.threshold)
            when = None if b.x else sure.any()
            loss = loss + b.ramp * masked_mean(ce(zt, zw.detach().softmax(1)), sure)            # soft labels
            if b.x and self.o.creg:
                d = self.reward(s, b, cross_entropy(s.creg(b.u.weak, stats="batch"), yhat))     # Eqs. 2, 3
                loss = loss + d * cross_entropy(zt, zt.detach().argmax(1))                      # of its own strong view
                s.log(reward=d)
            s.judge(b.u, yhat, sure, confidence=confidence(zw.detach()))
        s.descend(loss, s.model, when=when)
        s.log(loss=loss)


def multiplier(step: int, total: int, warmup: int, wait: int = 0) -> float:
    """What lr is multiplied by, anew in each round: 0 while waiting, a straight line, then a cosine."""
    late = step - warmup - wait
    if late < 0:
        return 0.0 if step < wait else step / (warmup + wait)
    return max(0.0, 0.5 * (1 + math.cos(math.pi * late / max(1, total - warmup - wait))))
