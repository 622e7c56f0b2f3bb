"""What a model is worth: on the labels held out for validation at each test, on all there is at a run's end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fallow.measure import scores
from fallow.methods.state import State

if TYPE_CHECKING:
    from fallow.engine.round import Federated

SERVER_NAME, NOBODY = "server", ""


@dataclass
class Best:
    """The best round so far: the most right, of those the least loss, of those the first."""

    round: int
    accuracy: float
    loss: float
    state: State | None  # None: in the run's folder

    def noted(self) -> dict[str, Any]:
        return {"round": self.round, "accuracy": self.accuracy, "loss": self.loss}

    def beats(self, other: Best | None) -> bool:
        return other is None or (self.accuracy, -self.loss) > (other.accuracy, -other.loss)


class Validation:
    """The model tried on what parties hold out. The best round counts once its round is in effect."""

    def __init__(self, federated: Federated):
        self.f, f = federated, federated.simulation.federation
        self.parties = [(SERVER_NAME, f.server.validation), *zip(f.names, (c.validation for c in f.clients))]
        self.rows = np.concatenate([rows for _, rows in self.parties])
        self.truth = federated.simulation.truth[federated.kit.put(self.rows)]
        self.best: Best | None = None
        self._found: Best | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def logits(self, state: State) -> Tensor:
        """Party after party, the server's first."""
        plain = self.f.simulation.plain
        return self.f.logits(state, lambda start, stop: plain(self.rows[start:stop]), len(self.rows))

    def forget(self) -> None:
        """Before a round, which may be begun again."""
        self._found = None

    def test(self, number: int, state: State) -> dict[str, float]:
        """Accuracy and loss, as columns."""
        if not len(self):
            return {}
        z = self.logits(state)
        loss, right = float(F.cross_entropy(z.double(), self.truth)), float((z.argmax(1) == self.truth).double().mean())
        if math.isnan(loss):
            raise self.f.no_prediction("of the validation set")
        found = Best(number, right, loss, state)
        if found.beats(self.best):
            found.state = state.clone()
            self._found = found
        return {"validation_accuracy": right, "validation_loss": loss}

    def settle(self) -> None:
        """The round is in effect."""
        self.best, self._found = self._found or self.best, None


def columns(federated: Federated) -> tuple[str, ...]:
    """What each test gives."""
    own = ("validation_accuracy", "validation_loss") if len(federated.validation) else ()
    return ("accuracy", "test_loss", *scores.EACH_TEST, *own)


def best_round(best: Best, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For the summary: the best round by validation, and what the test set said of it."""
    tested = next((row for row in rows if row["round"] == best.round), {})
    return {
        "best": best.accuracy,
        "best_round": best.round,
        "loss": best.loss,
        "test": {name: tested.get(name) for name in ("accuracy", *scores.EACH_TEST)},
    }


def in_full(federated: Federated) -> dict[str, Any]:
    """All scores of the server's model as it is now, and the accuracy at each site where one can tell it."""
    simulation, v, model = federated.simulation, federated.validation, federated.model()
    logits, sites = federated.test_logits(model), simulation.source.test.clients
    out: dict[str, Any] = {"test": scores.full(logits, simulation.test_labels)}
    if sites is not None:
        out["sites"] = {"of": "test"} | _by_site(logits, simulation.test_labels, sites, sorted(set(sites) - {NOBODY}))
    if len(v):
        held = v.logits(model)
        out["validation"] = scores.full(held, v.truth)
        if sites is None:
            held_by = [name for name, rows in v.parties for _ in rows]
            out["sites"] = {"of": "validation"} | _by_site(held, v.truth, held_by, [name for name, rows in v.parties if len(rows)])
    return out


def _by_site(logits: Tensor, truth: Tensor, sites: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """By name of site; a sample of nobody does not count."""
    place = {name: k for k, name in enumerate(names)}
    group = torch.tensor([place.get(name, len(names)) for name in sites], device=truth.device)
    count, accuracy = scores.by_group(logits.argmax(1) == truth, group, len(names) + 1)
    return {"names": list(names), "samples": count.tolist()[:-1], "accuracy": scores.listed(accuracy)[:-1]}
