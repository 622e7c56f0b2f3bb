"""Pseudo-labelling: a net believes itself where it is sure."""

from __future__ import annotations

from torch import Tensor

from fallow.config import key
from fallow.keys.section import Keys
from fallow.methods.base import Held
from fallow.methods.parts import labelling
from fallow.methods.parts.consistency import Consistency, ConsistencySlot, RampedBatch
from fallow.methods.parts.fitting import Facts
from fallow.methods.parts.labelling import LabellerParty
from fallow.methods.parts.losses import ce, masked_mean


class PseudoLabel(Consistency):
    """A net learns the class that it is sure of, from the same view.  Lee, ICML workshop 2013."""

    paper = "Lee, ICML workshop 2013"
    labellers = {"current"}
    labels_how = "labels with the net in training"
    defaults = {"labeller": "current"}
    views = {"weak": "weak"}

    class Options(Consistency.Options):
        threshold: float = key(0.95, "confidence a pseudo-label needs", "tau", ge=0)

    o: Options

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        return super().automatic(facts) | {"threshold": facts.threshold}

    def holds(self) -> Held:
        return super().holds() | labelling.holds(self.o, self.classes)

    def begin(self, party: LabellerParty) -> dict[str, Tensor]:
        return labelling.begin(self.o, party)

    def unlabelled(self, s: ConsistencySlot, b: RampedBatch) -> Tensor:
        z = s.model(b.u.weak, stats="batch")
        target = labelling.logits(self.o, s, b.u, z)
        label, sure = labelling.hard(target, self.o.threshold)
        s.judge(b.u, label, sure, confidence=labelling.confidence(target))
        return masked_mean(ce(z, label), sure)                                           # over all of the batch
