"""MixMatch: guessed labels, sharpened, and everything mixed with everything."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from fallow.config import key
from fallow.methods.base import Found, Plan
from fallow.methods.parts import mixing
from fallow.methods.parts.consistency import Consistency, ConsistencySlot, RampedBatch
from fallow.methods.parts.labelling import LabellerParty, one_hot
from fallow.methods.parts.losses import ce


class MixMatch(Consistency):
    """Labels guessed from several views, sharpened, then Mixup over labelled and unlabelled images.  Berthelot et al., NeurIPS 2019."""

    paper = "Berthelot et al., NeurIPS 2019"
    labels_how = "sharpens the mean of its answers to two views"

    class Options(Consistency.Options):
        weight: float = key(75.0, "of the unlabelled loss at the end of its ramp", "lambda_u", ge=0)
        ramp_share: float = key(1 / 64, "share of all steps in which that weight grows from 0", ge=0, le=1)
        temperature: float = key(0.5, "of the sharpened guess", "T", gt=0)
        mixup: float = key(0.75, "Mixup ratios are drawn from Beta(a, a)", "alpha", gt=0)
        mix_draw: Literal["sample", "batch"] = key("sample", "one ratio for each image, or for a whole batch")

    o: Options

    def plan(self, party: LabellerParty, found: Found) -> Plan:
        return mixing.planned(super().plan(party, found), party, self.o.mixup, self.o.mix_draw == "batch")

    def step(self, s: ConsistencySlot, b: RampedBatch) -> None:
        b = cast(mixing.MixedBatch, b)
        views, targets = ([b.x.labelled], [one_hot(b.x.y, self.classes)]) if b.x else ([], [])
        if b.u:
            with torch.no_grad():
                p = (s.model(b.u.weak, stats="batch").softmax(1) + s.model(b.u.other, stats="batch").softmax(1)) / 2
            q = mixing.sharpened(p, self.o.temperature)
            s.judge(b.u, q.argmax(1))
            views, targets = [*views, b.u.weak, b.u.other], [*targets, q, q]
        X, Y = mixing.mixed(views, targets, b.lam, b.partner)                            # W = Shuffle(X, U); X', U' = MixUp(., W)
        loss: Tensor | float = 0.0
        if b.x:
            loss = ce(s.model(X.pop(0)), Y.pop(0)).mean()                                # L_x
        if b.u:
            p = torch.cat([s.model(x, stats="batch") for x in X]).softmax(1)
            loss = loss + self.o.weight * b.ramp * (p - torch.cat(Y)).square().mean()    # L_u
        self.descend(s, loss)
