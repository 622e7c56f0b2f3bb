"""FlexMatch: lower thresholds for classes that are learnt less well."""

from __future__ import annotations

import torch
from torch import Tensor

from fallow.config import key
from fallow.keys.section import Keys
from fallow.methods.base import Value
from fallow.methods.parts import thresholds
from fallow.methods.parts.adaptive import Adaptive, SizedBatch
from fallow.methods.parts.fitting import Facts
from fallow.methods.parts.labelling import LabellerSlot


class FlexSlot(LabellerSlot):
    last: Tensor  # each sample's last accepted label


class FlexMatch(Adaptive[FlexSlot]):
    """FixMatch with a threshold for each class, by how many samples it has won so far.  Zhang et al., NeurIPS 2021."""

    paper = "Zhang et al., NeurIPS 2021"
    keeps = "optimiser state, each sample's last accepted label"

    class Options(Adaptive.Options):
        threshold: float = key(0.95, "confidence that the best learnt class needs", "tau", ge=0)
        threshold_warmup: bool = key(True, "samples without an accepted label count in the maximum that classes are compared with")

    o: Options

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        return super().automatic(facts) | {"threshold": facts.threshold}

    def memory(self) -> dict[str, Value]:
        return {"last": Value("unlabelled", start=-1, keep=True)}

    @torch.no_grad()
    def weigh(self, s: FlexSlot, b: SizedBatch, z: Tensor) -> tuple[Tensor, Tensor]:
        confidence, label = z.softmax(1).max(1)
        beta = thresholds.learnt(s.last, b.size, self.classes, self.o.threshold_warmup)
        mask = confidence >= thresholds.convex(beta, self.o.threshold)[label]
        s.last.scatter_(0, b.u.index, thresholds.latest(s.last[b.u.index], label, confidence >= self.o.threshold, b.u.index))
        return label, mask.to(z.dtype)
