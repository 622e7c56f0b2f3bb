"""Mean Teacher: the average of a net's weights teaches it."""

from __future__ import annotations

import torch
from torch import Tensor

from fallow.config import key
from fallow.errors import UserError
from fallow.keys.section import Keys
from fallow.methods.parts.consistency import Consistency, ConsistencySlot, RampedBatch
from fallow.methods.parts.fitting import Facts


class MeanTeacher(Consistency):
    """A net learns to answer as the average of its own weights does to another view.  Tarvainen and Valpola, NeurIPS 2017."""

    paper = "Tarvainen and Valpola, NeurIPS 2017"
    labels_how = "learns from its teacher's whole answers, and makes no pseudo-labels"

    class Options(Consistency.Options):
        weight: float = key(50.0, "of the unlabelled loss at the end of its ramp", "w", ge=0)

        def refuse(self) -> None:
            super().refuse()
            if not self.weight_ema:
                raise UserError("weight_ema=0 leaves meanteacher without a teacher", "use pimodel, or a weight_ema such as 0.999")

    o: Options

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        """Its weight is for long runs: in a short one nets agree before they have learnt. It goes by the share of labels (Laine and Aila)."""
        if facts.o.labels == "server":
            return super().automatic(facts)
        images = facts.unlabelled if facts.o.labelled_as_unlabelled else facts.labelled + facts.unlabelled
        share = min(1.0, facts.labelled / max(1, images))
        return super().automatic(facts) | {"weight": round(cls.Options.model_fields["weight"].default * share, 3)}

    def unlabelled(self, s: ConsistencySlot, b: RampedBatch) -> Tensor:
        with torch.no_grad():
            q = s.ema(b.u.weak, stats="batch").softmax(1)                                # the teacher's
        return (s.model(b.u.other, stats="batch").softmax(1) - q).square().mean()
