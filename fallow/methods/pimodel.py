"""The Pi-model: two views of an image, one answer."""

from __future__ import annotations

import torch
from torch import Tensor

from fallow.config import key
from fallow.methods.parts.consistency import Consistency, ConsistencySlot, RampedBatch


class PiModel(Consistency):
    """A net learns that its answers to two views of an image agree.  Laine and Aila, ICLR 2017."""

    paper = "Laine and Aila, ICLR 2017"
    labels_how = "compares two answers of its own, and makes no pseudo-labels"

    class Options(Consistency.Options):
        weight: float = key(10.0, "of the unlabelled loss at the end of its ramp", "w", ge=0)

    o: Options

    def unlabelled(self, s: ConsistencySlot, b: RampedBatch) -> Tensor:
        with torch.no_grad():
            q = s.model(b.u.weak, stats="batch").softmax(1)
        return (s.model(b.u.other, stats="batch").softmax(1) - q).square().mean()
