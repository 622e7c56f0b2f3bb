"""Cross-entropy on labels and an unlabelled loss that grows in: the frame of Pi-model, pseudo-labelling and Mean Teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from fallow.config import key
from fallow.methods.base import Found, Plan
from fallow.methods.parts.averaged import CENTRAL, Averaged, AveragedSlot
from fallow.methods.parts.batching import paired, progress
from fallow.methods.parts.labelling import LabellerBatch, LabellerPart, LabellerParty, LabellerSlot
from fallow.methods.parts.losses import cross_entropy


class Views(LabellerPart):
    other: Tensor


class RampedBatch(LabellerBatch):
    u: Views
    ramp: Tensor


class ConsistencySlot(LabellerSlot, AveragedSlot): ...


class Consistency(Averaged[ConsistencySlot, LabellerParty, RampedBatch]):
    """Passes over unlabelled views have the batch's statistics and leave the running ones alone."""

    group = "central"
    keeps = "optimiser state"
    sends = "two models: the trained one and its average"
    scenarios = {"server", "clients", "some"}
    defaults = CENTRAL | {"unlabelled_batch": "equal"}
    views: Mapping[str, str] = {"weak": "weak", "other": "weak"}  # of an unlabelled image: two draws

    class Options(Averaged.Options):
        weight: float = key(1.0, "of the unlabelled loss at the end of its ramp", "w", ge=0)
        ramp_share: float = key(0.4, "share of all steps in which that weight grows from 0", ge=0, le=1)

    o: Options

    def plan(self, party: LabellerParty, found: Found) -> Plan:
        x, u = paired(party, "labelled", ())
        x, u = replace(x, tail="chain"), replace(u, tail="chain", views=dict(self.views))
        plan = Plan(x=x, u=u)
        done = progress(party, len(plan))
        return plan.having(ramp=np.minimum(1, done / self.o.ramp_share) if self.o.ramp_share else 1.0)

    def unlabelled(self, s: ConsistencySlot, b: RampedBatch) -> Tensor:
        raise NotImplementedError

    def step(self, s: ConsistencySlot, b: RampedBatch) -> None:
        loss: Tensor | float = cross_entropy(s.model(b.x.labelled), b.x.y) if b.x else 0.0
        if b.u:
            loss = loss + self.o.weight * b.ramp * self.unlabelled(s, b)
        self.descend(s, loss)
