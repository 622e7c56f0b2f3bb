"""SoftMatch: every pseudo-label counts, the less sure ones less."""

from __future__ import annotations

import torch
from torch import Tensor

from fallow.config import key
from fallow.methods.base import Value
from fallow.methods.parts import thresholds
from fallow.methods.parts.adaptive import Adaptive, SizedBatch
from fallow.methods.parts.labelling import LabellerSlot


class SoftSlot(LabellerSlot):
    mean_p: Tensor  # the mean prediction
    mu: Tensor  # of the confidences
    var: Tensor


class SoftMatch(Adaptive[SoftSlot]):
    """FixMatch without a threshold: below the net's average confidence weights fall off as a Gaussian.  Chen et al., ICLR 2023."""

    paper = "Chen et al., ICLR 2023"

    class Options(Adaptive.Options):
        momentum_of_weights: float = key(0.999, "what the averages behind the weights keep of themselves", "m", ge=0, lt=1)
        flank: float = key(2.0, "the Gaussian's width is the confidences' deviation divided by it", "n_sigma", gt=0)

    o: Options

    def memory(self) -> dict[str, Value]:
        return {
            "mean_p": Value(self.classes, keep=True),  # zeros: the first batch's own
            "mu": Value(1, start=1 / self.classes, keep=True), "var": Value(1, start=1.0, keep=True),
        }  # fmt: skip

    @torch.no_grad()
    def weigh(self, s: SoftSlot, b: SizedBatch, z: Tensor) -> tuple[Tensor, Tensor]:
        p, m = z.softmax(1), self.o.momentum_of_weights
        thresholds.moved_from_first(s.mean_p, p.mean(0), m)
        confidence = thresholds.aligned(p, torch.full_like(s.mean_p, 1 / self.classes), s.mean_p).amax(1)
        thresholds.moved(s.mu, confidence.mean(), m)
        if len(p) > 1:
            thresholds.moved(s.var, confidence.var(), m)
        return p.argmax(1), thresholds.truncated(confidence, s.mu, s.var, self.o.flank)       # the label is the unaligned one
