"""Cross-entropy on labels and an unlabelled loss that grows in: the frame of Pi-model, pseudo-labelling and Mean Teacher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from fallow.config import key
from fallow.methods.base import Plan
from fallow.methods.parts.averaged import CENTRAL, Averaged
from fallow.methods.parts.batching import paired, progress
from fallow.methods.parts.losses import cross_entropy


class Consistency(Averaged):
    """Passes over unlabelled views have the batch's statistics and leave the running ones alone."""

    group = "central"
    keeps = "optimiser state"
    sends = "two models: the trained one and its average"
    scenarios = {"server", "clients", "some"}
    defaults = CENTRAL | {"unlabelled_batch": "equal"}
    views = {"weak": "weak", "other": "weak"}  # of an unlabelled image: two draws

    class Options(Averaged.Options):
        weight: float = key(1.0, "of the unlabelled loss at the end of its ramp", "w", ge=0)
        ramp_share: float = key(0.4, "share of all steps in which that weight grows from 0", ge=0, le=1)

    def plan(self, party: Any, found: dict[str, Any]) -> Plan:
        x, u = paired(party, "labelled", ())
        x, u = replace(x, tail="drop"), replace(u, tail="drop", views=self.views)
        plan = Plan(x=x, u=u)
        done = progress(party, len(plan))
        return plan.having(ramp=np.minimum(1, done / self.o.ramp_share) if self.o.ramp_share else 1.0)

    def unlabelled(self, s: Any, b: Any) -> Tensor:
        raise NotImplementedError

    def step(self, s: Any, b: Any) -> None:
        loss: Any = cross_entropy(s.model(b.x.labelled), b.x.y) if b.x else 0.0
        if b.u:
            loss = loss + self.o.weight * b.ramp * self.unlabelled(s, b)
        self.descend(s, loss)
