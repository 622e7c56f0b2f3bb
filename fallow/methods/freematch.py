"""FreeMatch: thresholds that follow how sure the net is, and a loss for even classes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fallow.config import key
from fallow.methods.base import Value
from fallow.methods.parts import thresholds
from fallow.methods.parts.adaptive import Adaptive, SizedBatch
from fallow.methods.parts.labelling import LabellerSlot, one_hot


class FreeSlot(LabellerSlot):
    tau: Tensor  # the mean confidence
    mean_p: Tensor  # the mean prediction
    shares: Tensor  # of classes among the labels


class FreeMatch(Adaptive[FreeSlot]):
    """FixMatch whose threshold is the net's average confidence, lowered for classes it says less of.  Wang et al., ICLR 2023."""

    paper = "Wang et al., ICLR 2023"

    class Options(Adaptive.Options):
        momentum_of_thresholds: float = key(0.999, "what the averages behind the thresholds keep of themselves", "lambda", ge=0, lt=1)
        fairness: float = key(0.01, "weight of the loss for even classes", "w_f", ge=0)
        threshold_range: Literal["free", "global", "final"] = key(
            "free", "SVHN: the global threshold is at most 0.95 (USB), or each class's lies between 0.9 and 0.95 (TorchSSL)"
        )

    o: Options

    def memory(self) -> dict[str, Value]:
        return {name: Value(n, start=1 / self.classes, keep=True) for name, n in (("tau", 1), ("mean_p", self.classes), ("shares", self.classes))}

    @torch.no_grad()
    def weigh(self, s: FreeSlot, b: SizedBatch, z: Tensor) -> tuple[Tensor, Tensor]:
        p, m = z.softmax(1), self.o.momentum_of_thresholds
        confidence, label = p.max(1)
        thresholds.moved(s.tau, confidence.mean(), m)
        thresholds.moved(s.mean_p, p.mean(0), m)
        thresholds.moved(s.shares, one_hot(label, p).mean(0), m)
        if self.o.threshold_range == "global":
            s.tau.clamp_(max=0.95)
        needed = thresholds.by_class(s.tau, s.mean_p)
        needed = needed.clamp(0.9, 0.95) if self.o.threshold_range == "final" else needed
        return label, (confidence >= needed[label]).to(p.dtype)

    def more(self, s: FreeSlot, zs: Tensor, weights: Tensor) -> Tensor | float:
        return self.o.fairness * thresholds.fairness(zs.softmax(1), weights > 0, s.mean_p, s.shares)
