"""FedRGD: consistency on the clients' unlabelled data, group normalisation, grouping-based averaging."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from pydantic import model_validator
from torch import Tensor

from fallow.config import Keys, key
from fallow.errors import UserError
from fallow.methods.base import Found, Plan
from fallow.methods.fixmatch import Columns, FixMatch
from fallow.methods.parts import labelling
from fallow.methods.parts.batching import paired
from fallow.methods.parts.fitting import Facts, common
from fallow.methods.parts.labelling import LabellerParty, LabellerSlot
from fallow.models import default_norm


class FedRGD(FixMatch):
    """Server and clients train at the same time, T steps each; the server is one more member of every group's mean.

    Zhang et al., "Improving semi-supervised federated learning by reducing the gradient diversity of models", IEEE
    BigData 2021. Three switches: `objective` (CRL), `norm` (GN), `average` (grouping).
    """

    paper = "Zhang et al., IEEE BigData 2021"
    sends = "model (down: its group's); with optimizer_state=travel also the optimiser's state"
    scenarios = {"server", "clients", "some", "all"}
    defaults = {
        "steps": 16, "epochs": None, "batch": 64, "unlabelled_batch": "equal", "weight_decay": 1e-4, "schedule": "cosine-7-16",
        "weights": "uniform", "average": "grouped", "empty_step": "take",
    }  # fmt: skip
    readings = {
        "paper": {
            "group_assignment": "history",
            "lr": 0.146,
            "schedule": "cosine-7-16,warmup=5120,turns=2.3,floor=1e-4",
        },
        "released": {"group_split": "ceil-blocks", "first_round_extra_step": True, "optimizer_state": "travel", "server_replicas": "per-group"},
    }

    class Options(FixMatch.Options):
        objective: Literal["crl", "self-training", "supervised"] = key(
            "crl", "clients: strong views learn from weak ones, weak views from themselves, or labels only"
        )
        first_round_extra_step: bool = key(False, "T+1 steps in the first round of an epoch, as in the released code")
        epoch_samples: int = key(65536, "samples per party that make up one of those epochs", "M", ge=1)

        @model_validator(mode="before")
        @classmethod
        def _group_norm(cls, values: object) -> object:
            """GN takes the place of every BN; a model without batch norm stays as it is."""
            if isinstance(values, dict) and values.get("norm") is None and default_norm(str(values.get("model"))) == "bn":
                return values | {"norm": "gn"}
            return values

        def refuse(self) -> None:
            super().refuse()
            if self.objective == "supervised" and self.labels == "server":
                raise UserError("objective=supervised, but the clients have no labels", "use labels=all or clients")
            if self.objective == "supervised" and self.debias:
                raise UserError("objective=supervised leaves nothing to label, so debias=true has no place", "leave debias out")

    o: Options

    @classmethod
    def scenario_defaults(cls, labels: str) -> Keys:
        return {"statistics": "server"} if labels == "server" else {}

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        """Group norm stays. Without a server's labels in every group the groups' models would part, and their mean be worth little."""
        own: Keys = {} if facts.o.labels == "server" else {"optimizer_state": "travel", "group_models": False}
        return super().automatic(facts) | common(facts) | {"norm": facts.o.norm} | own

    def plan(self, party: LabellerParty, found: Found) -> Plan:
        """T full batches, from a fresh shuffled pass (and further ones) over the party's own data."""
        views = ("weak",) if self.o.objective == "self-training" else ("weak", "strong")
        x, u = paired(party, "labelled", views, z=found.get("z"))
        first, stop = self._made(party, party.round), self._made(party, party.round + 1)
        if party.steps:
            x, u = (replace(stream, steps=stop - first, tail="drop") for stream in (x, u))
        plan = Plan(self.supervised, x=x) if self.o.objective == "supervised" else Plan(x=x, u=u)
        if self.o.first_round_extra_step and party.steps:
            return plan.having(lr=party.rates(first, stop - first))
        return plan

    def _made(self, party: LabellerParty, rounds: int) -> int:
        """Steps a party has made after so many rounds: T each, perhaps one more in the first round of an epoch."""
        T = party.steps or 0
        if not self.o.first_round_extra_step:
            return rounds * T
        per_epoch = max(1, self.o.epoch_samples // int(party.batch or 1) // max(1, T))
        return rounds * T + math.ceil(rounds / per_epoch)

    def forward(self, s: LabellerSlot, b: Columns) -> tuple[Tensor, Tensor | None, Tensor]:
        """The step (Eqs. 3, 4) is FixMatch's; self-training labels and learns on one view."""
        if self.o.objective == "crl" or not b.u:
            return super().forward(s, b)
        z = labelling.logits(self.o, s, b.u)                                    # Eq. 5: in eval mode
        zx, zs = s.model.together(b.x.labelled, b.u.weak)
        return zx, z, zs
