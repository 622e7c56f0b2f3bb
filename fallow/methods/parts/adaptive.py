"""FixMatch's step in which a rule says what each pseudo-label weighs: the frame of FlexMatch, FreeMatch and SoftMatch."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from typing_extensions import TypeVar

from fallow.config import key
from fallow.methods.base import Found, Held, Plan, Value
from fallow.methods.parts import labelling
from fallow.methods.parts.averaged import CENTRAL, Averaged
from fallow.methods.parts.batching import paired
from fallow.methods.parts.labelling import LabellerBatch, LabellerParty, LabellerSlot
from fallow.methods.parts.losses import ce, cross_entropy

A = TypeVar("A", bound=LabellerSlot, default=LabellerSlot)


class SizedBatch(LabellerBatch):
    size: Tensor  # how many unlabelled samples the party has


class Adaptive(Averaged[A, LabellerParty, SizedBatch]):
    """What a rule remembers stays with the party that learnt it."""

    group = "central"
    keeps = "optimiser state, its threshold's memory"
    sends = "two models: the trained one and its average"
    scenarios = {"server", "clients", "some"}
    labellers = {"current"}
    labels_how = "labels with the net in training"
    defaults = CENTRAL | {"unlabelled_batch": "ratio:7", "labeller": "current"}

    class Options(Averaged.Options):
        weight: float = key(1.0, "of the unlabelled loss", "lambda_u", ge=0)

    o: Options

    def memory(self) -> dict[str, Value]:
        """What the rule goes by."""
        raise NotImplementedError

    def weigh(self, s: A, b: SizedBatch, z: Tensor) -> tuple[Tensor, Tensor]:
        """Each sample's label, and what it weighs; the memory moves on."""
        raise NotImplementedError

    def more(self, s: A, zs: Tensor, weights: Tensor) -> Tensor | float:
        """A further loss."""
        return 0.0

    def holds(self) -> Held:
        return super().holds() | labelling.holds(self.o, self.classes) | self.memory()

    def begin(self, party: LabellerParty) -> dict[str, Tensor]:
        return labelling.begin(self.o, party)

    def plan(self, party: LabellerParty, found: Found) -> Plan:
        x, u = paired(party, "labelled", ("weak", "strong"))
        return Plan(x=replace(x, tail="chain"), u=replace(u, tail="chain"), size=float(len(party.unlabelled)))

    def step(self, s: A, b: SizedBatch) -> None:
        zx, zw, zs = s.model.together(b.x.labelled, b.u.weak, b.u.strong)
        loss: Tensor | float = cross_entropy(zx, b.x.y) if b.x else 0.0
        if b.u:
            z = labelling.logits(self.o, s, b.u, zw)
            label, weights = self.weigh(s, b, z)
            loss = loss + self.o.weight * (weights * ce(zs, label)).mean() + self.more(s, zs, weights)
            s.judge(b.u, label, weights > 0, confidence=labelling.confidence(z))
        self.descend(s, loss)
