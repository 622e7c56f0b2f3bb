"""FedRGD: consistency on the clients' unlabelled data, group normalisation, grouping-based averaging."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from pydantic import model_validator
from torch import Tensor

from fallow.config import key
from fallow.errors import UserError
from fallow.keys.section import Keys
from fallow.methods.base import Found, Plan
from fallow.methods.fixmatch import Columns, FixMatch
from fallow.methods.parts import labelling
from fallow.methods.parts.batching import paired
from fallow.methods.parts.fitting import Facts, common
from fallow.methods.parts.labelling import LabellerParty, LabellerSlot
from fallow.methods.parts.losses import ce, cross_entropy, masked_mean
from fallow.models import default_norm
from fallow.schedule import Schedule


class FedRGD(FixMatch):
    """Server and clients train at the same time, T steps each; the server is one more member of every group's mean.

    Zhang et al., "Improving semi-supervised federated learning by reducing the gradient diversity of models", IEEE
    BigData 2021. Three switches: `objective` (CRL), `norm` (GN), `average` (grouping).
    """

    paper = "Zhang et al., IEEE BigData 2021"
    group = "founding"
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
        """Groups of ten, and one of all where there are fewer: a group of one client would weigh as much as one of many.

        Without a server's labels in every group the groups' models would part, and their mean be worth little. A server that
        has them trains beside the clients, slowly: faster, all images came to be labelled alike.
        """
        clients: Keys = {"groups": max(1, facts.o.active_count // 10), "group_models": False}
        at_server: Keys = {"server_turn": facts.o.server_turn, "lr": round(0.3 * facts.lr, 6)}
        own = at_server if facts.o.labels == "server" else clients
        return super().automatic(facts) | common(facts) | own

    def plan(self, party: LabellerParty, found: Found) -> Plan:
        """T full batches, from a fresh shuffled pass (and further ones) over the party's own data."""
        views = ("weak",) if self.o.objective == "self-training" else ("weak", "strong")
        x, u = paired(party, "labelled", views, z=found.get("z"))
        T, lr = party.steps, None
        if T and self.o.first_round_extra_step:
            T, lr = with_extra_steps(self.o, party.round, T, party.batch or 1)
        if T:
            x, u = (replace(stream, steps=T, tail="drop") for stream in (x, u))
        return (Plan(self.supervised, x=x) if self.o.objective == "supervised" else Plan(x=x, u=u)).having(lr=lr)

    def step(self, s: LabellerSlot, b: Columns) -> None:
        zx, z, zs = self.forward(s, b)                                          # labelled; by the labeller; to learn on
        loss: Tensor | float = cross_entropy(zx, b.x.y) if b.x else 0.0         # Eq. 3
        when: Tensor | None = None
        if z is not None:
            label, sure = labelling.hard(z, self.o.threshold)
            loss = loss + self.o.weight * masked_mean(ce(zs, label), sure, self.o.reduction)  # Eq. 4, of one view Eq. 5
            when = None if b.x or self.o.empty_step == "take" else sure.any()
            s.judge(b.u, label, sure, confidence=labelling.confidence(z))
        self.descend(s, loss, when)
        labelling.follow(self.o, s)

    def forward(self, s: LabellerSlot, b: Columns) -> tuple[Tensor, Tensor | None, Tensor]:
        if self.o.objective == "crl" or not b.u:
            return super().forward(s, b)
        z = labelling.logits(self.o, s, b.u)                                    # self-training: in eval mode, and one view
        zx, zs = s.model.together(b.x.labelled, b.u.weak)
        return zx, z, zs


def with_extra_steps(o: FedRGD.Options, round: int, T: int, batch: int) -> tuple[int, list[float]]:
    """Steps of a round of the released code, one more in the first of an epoch, and their rates: the schedule counts them."""
    per_epoch = max(1, o.epoch_samples // batch // max(1, T))
    first, stop = (n * T + math.ceil(n / per_epoch) for n in (round, round + 1))
    schedule = Schedule.parse(o.schedule)
    return stop - first, [o.lr * schedule.factor(round, k - round * T, T, o.rounds) for k in range(first, stop)]
