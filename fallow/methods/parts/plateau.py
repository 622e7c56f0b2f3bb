"""A learning rate that falls where the loss no longer does, each party's by itself: FedMatch's adaptive decay.

The rule after each of a party's rounds: a loss below the lowest so far is the new lowest and restores the patience; another costs
one, and where none is left the rate is divided by `lr_factor` and the patience restored.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fallow.config import Config, key
from fallow.data.samples import Samples
from fallow.errors import UserError
from fallow.methods.base import Held, Party, Value

Rule = Literal["validation", "training", "constant"]


class Plateau(Config):
    """The keys."""

    lr_rule: Rule = key("validation", "the rate falls by the loss on held-out labels, where a party has some; on its training labels; or by `schedule` alone")
    lr_factor: float = key(3.0, "what the rate is divided by", gt=1)
    lr_patience: int = key(5, "rounds without a lower loss until it is", ge=1)
    lr_floor: float = key(1e-20, "lowest rate", ge=0)

    def refuse(self) -> None:
        super().refuse()
        judged = self.lr_rule == "training" or (self.lr_rule == "validation" and self.validation is not None)
        if judged and self.schedule.split(",")[0] != "constant":
            cause = f"lr_rule={self.lr_rule} says how the rate falls, so schedule={self.schedule} has no place"
            raise UserError(cause, "use schedule=constant, or lr_rule=constant")


class PlateauParty(Party):
    falls: Tensor
    lowest: Tensor
    patience: Tensor


def holds(o: Plateau) -> Held:
    """How often the rate fell, the lowest loss, how many more rounds it waits."""
    if o.lr_rule == "constant":
        return {}
    return {"falls": Value(keep=True), "lowest": Value(start=torch.inf, keep=True), "patience": Value(start=o.lr_patience, keep=True)}


def judges(o: Plateau, party: Party) -> Samples | None:
    """The samples whose loss says whether a party's rate falls; None if its rate is the schedule's."""
    if o.lr_rule == "constant":
        return None
    samples = party.validation if o.lr_rule == "validation" else party.labelled
    return samples if len(samples) else None


def rate(o: Plateau, falls: float) -> float:
    return max(o.lr_floor, o.lr / float(o.lr_factor**falls))


def observe(o: Plateau, party: PlateauParty, loss: Tensor) -> None:
    """After a round of the party's: what its loss on `judges` was."""
    lower = loss < party.lowest
    left = torch.where(lower, torch.full_like(party.patience, o.lr_patience), party.patience - 1)
    party.lowest.copy_(torch.minimum(party.lowest, loss))
    party.falls.add_(left <= 0)
    party.patience.copy_(torch.where(left <= 0, torch.full_like(left, o.lr_patience), left))
