"""Mean Teacher: the average of a net's weights teaches it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fallow.config import key
from fallow.methods.parts.consistency import Consistency


class MeanTeacher(Consistency):
    """A net learns to answer as the average of its own weights does to another view.  Tarvainen and Valpola, NeurIPS 2017."""

    paper = "Tarvainen and Valpola, NeurIPS 2017"
    labels_how = "learns from its teacher's whole answers, and makes no pseudo-labels"

    class Options(Consistency.Options):
        weight: float = key(50.0, "of the unlabelled loss at the end of its ramp", "w", ge=0)

    @classmethod
    def refuse(cls, options: Any) -> str | None:
        return None if options.ema else "ema=0 leaves meanteacher without a teacher; use pimodel, or an ema such as 0.999"

    def unlabelled(self, s: Any, b: Any) -> Tensor:
        with torch.no_grad():
            q = s.ema(b.u.weak, stats="batch").softmax(1)                                # the teacher's
        return (s.model(b.u.other, stats="batch").softmax(1) - q).square().mean()
