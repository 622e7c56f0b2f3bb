"""ReMixMatch: MixMatch with aligned guesses, strong views that must agree with them, and turned images."""

from __future__ import annotations

from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from fallow.config import key
from fallow.keys.section import Keys
from fallow.methods.base import Found, Held, Net, NetHandle, Plan, Value
from fallow.methods.mixmatch import MixMatch
from fallow.methods.parts import heads, mixing, thresholds
from fallow.methods.parts.consistency import ConsistencySlot, RampedBatch
from fallow.methods.parts.fitting import Facts
from fallow.methods.parts.labelling import LabellerParty, one_hot
from fallow.methods.parts.losses import ce

WINDOW = 128  # batches


class ReSlot(ConsistencySlot):
    rotation: NetHandle
    seen: Tensor  # mean predictions


class ReBatch(mixing.MixedBatch):
    wanted: Tensor  # the labels' classes, as shares
    turns: Tensor


class ReMixMatch(MixMatch):
    """Guesses aligned with the labels' classes, taught to several strong views; Mixup; rotations told apart.  Berthelot et al., ICLR 2020."""

    paper = "Berthelot et al., ICLR 2020"
    keeps = "optimiser state, rotation head, its mean predictions"
    labels_how = "aligns its guesses with the labels' classes"

    class Options(MixMatch.Options):
        weight: float = key(1.5, "of the unlabelled loss at the end of its ramp", "lambda_u", ge=0)
        weight_strong: float = key(0.5, "of the loss on one strong view without Mixup, at the end of that ramp", "lambda_U1", ge=0)
        weight_turned: float = key(0.5, "of telling rotations apart, always", "lambda_r", ge=0)
        strong_views: int = key(8, "strong views of an image, each with its guess", "K", ge=1, le=64)
        mean_over: Literal["window", "ema"] = key("window", "the mean prediction: of the last 128 batches, or an average that keeps 0.999 of itself")

    o: Options

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        return super().automatic(facts) | {"strong_views": 2}

    @property
    def views(self) -> dict[str, str]:  # type: ignore[override]
        return {"weak": "weak"} | {f"strong{k}": "strong" for k in range(self.o.strong_views)}

    def holds(self) -> Held:
        rotation = Net(lambda classes, model: heads.second_head(model, 4), start="initial", keep=True, fits=True)
        if self.o.mean_over == "window":
            return super().holds() | {"rotation": rotation, "seen": Value(WINDOW, self.classes, start=1 / self.classes, keep=True)}
        return super().holds() | {"rotation": rotation, "seen": Value(self.classes, keep=True)}

    def plan(self, party: LabellerParty, found: Found) -> Plan:
        plan, y = super().plan(party, found), party.labelled.y
        shares = np.bincount(y, minlength=self.classes) / len(y) if y is not None and len(y) else np.full(self.classes, 1 / self.classes)
        u = plan.segments[0].streams["u"] if len(plan) else None
        turns = party.rng("turns").integers(4, size=(len(plan), u.sizes(1)[0])) if u else None
        return plan.having(wanted=np.tile(shares, (len(plan), 1)), turns=turns)

    def step(self, s: ConsistencySlot, b: RampedBatch) -> None:
        s, b = cast(ReSlot, s), cast(ReBatch, b)
        views, targets = ([b.x.labelled], [one_hot(b.x.y, self.classes)]) if b.x else ([], [])
        loss: Tensor | float = 0.0
        if b.u:
            q = self.guess(s, b)
            strong = [getattr(b.u, f"strong{k}") for k in range(self.o.strong_views)]
            views, targets = [*views, *strong, b.u.weak], [*targets, *[q] * (len(strong) + 1)]
        X, Y = mixing.mixed(views, targets, b.lam, b.partner)
        if b.x:
            loss = ce(s.model(X.pop(0)), Y.pop(0)).mean()                                        # L_x
        if b.u:
            mix = ce(torch.cat([s.model(x, stats="batch") for x in X]), torch.cat(Y)).mean()     # L_u
            one = ce(s.model(strong[0], stats="batch"), q).mean()                                # L_U1
            turned = ce(self.turned(s, strong[0], b.turns), b.turns).mean()                      # L_r
            loss = loss + b.ramp * (self.o.weight * mix + self.o.weight_strong * one) + self.o.weight_turned * turned
        self.descend(s, loss)

    @torch.no_grad()
    def guess(self, s: ReSlot, b: ReBatch) -> Tensor:
        """The weak view's answer, brought to the labels' classes, sharpened; its mean is remembered."""
        p = s.model(b.u.weak, stats="batch").softmax(1)
        mean, seen = p.mean(0), s.seen.mean(0) if self.o.mean_over == "window" else torch.where(s.seen.sum() > 0, s.seen, p.mean(0))
        q = mixing.sharpened(thresholds.aligned(p, b.wanted, seen), self.o.temperature)
        if self.o.mean_over == "window":
            s.seen.copy_(torch.cat([s.seen[1:], mean[None]]))
        else:
            thresholds.moved_from_first(s.seen, mean, 0.999)
        s.judge(b.u, q.argmax(1))
        return q

    def turned(self, s: ReSlot, x: Tensor, turns: Tensor) -> Tensor:
        """By how many quarters each image seems to be turned: the features under a head of its own."""
        every = torch.stack([torch.rot90(x, k, (2, 3)) for k in range(4)])
        chosen = every[turns, torch.arange(len(x), device=x.device)]
        return s.model(chosen, weights=heads.in_place_of_the_last(s.model, s.rotation.weights), stats="batch")
