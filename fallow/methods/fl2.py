"""(FL)2: few labels at the server; thresholds by client and class, and pseudo-labels that must hold nearby in weights, too."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fallow.config import key
from fallow.keys.section import Keys
from fallow.methods.base import Batch, BatchPart, Found, Held, Method, Net, Party, Plan, Server, Slot, Update, Updates, Value
from fallow.methods.parts.averaging import mean
from fallow.methods.parts.fitting import Facts
from fallow.methods.parts.losses import ce, cross_entropy, kl, masked_mean
from fallow.methods.parts.sharpness import ascent
from fallow.methods.parts.thresholds import by_class


class StatusParty(Party):
    tau: Tensor  # the client's mean confidence


class KeptPart(BatchPart):
    sure: Tensor


class Columns(Batch):
    u: KeptPart


class FL2(Method[Slot, StatusParty, Columns]):
    """SemiFL's frame; what is kept depends on how well a client and a class are learnt, and so does a client's weight.

    With labels at clients there is no server turn and no static batch norm, and each step has a labelled batch too.
    "(FL)2: Overcoming few labels in federated semi-supervised learning", NeurIPS 2024. CAT, SACR and LSAA in the paper.
    """

    paper = "Lee et al., NeurIPS 2024"
    keeps = "optimiser state"
    sends = "parameters; down also static BN statistics, up the mean confidence"
    scenarios = {"server", "clients", "some"}
    labels_how = "labels once a round, by thresholds of its own for each class"
    defaults = {
        "server_turn": "after", "statistics": "static", "optimizer_state": "keep", "weights": "uniform", "server_momentum": 0.5,
    }  # fmt: skip
    readings = {
        "paper": {"server_turn": "before", "warmup_rounds": 0, "consistency": "sum", "schedule": "cosine"},
        "released": {},
    }

    class Options(Method.Options):
        threshold: float = key(0.95, "confidence with which a label makes the step up (SACR)", "tau", ge=0)
        rho: float = key(0.1, "how far up, in units of the weights' size; 0: no consistency", "rho", ge=0)
        rho_floor: float = key(0.01, "added to the weights' size", ge=0)
        consistency: Literal["mean", "sum"] = key("mean", "over the sure samples by the batch's size, or the sum over all (Eq. 13)")

    o: Options

    @classmethod
    def scenario_defaults(cls, labels: str) -> Keys:
        return {} if labels == "server" else {"statistics": "batch"}

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        server = {"server_batch": facts.batch} if facts.o.labels == "server" else {}
        return super().automatic(facts) | server | {
            "threshold": facts.threshold, "batch": facts.unlabelled_batch, "warmup_rounds": facts.rounds // 8,
        }  # fmt: skip

    def holds(self) -> Held:
        return {"model": Net(), "tau": Value(1)}

    def begin(self, party: StatusParty) -> dict[str, Tensor]:
        data = party.unlabelled if len(party.unlabelled) else party.labelled
        if party.is_server or not len(data):
            return {}
        q = party.predict(party.model, data, "weak").softmax(1)
        confidence, label = q.max(1)
        tau = confidence.mean().clamp_max(confidence.amax())                            # Eq. 8; rounding may not lift it above all
        party.tau.copy_(tau)
        if not len(party.unlabelled):
            return {}
        kept = confidence >= by_class(tau, q.mean(0)).index_select(0, label)            # Eqs. 9, 10
        party.judge(party.unlabelled, label, kept)
        return {"label": label, "kept": kept, "sure": confidence >= self.o.threshold}

    def plan(self, party: StatusParty, found: Found) -> Plan:
        if "label" not in found or party.round < self.o.warmup_rounds:
            return super().plan(party, found)
        kept = party.unlabelled.label(found["label"], sure=found["sure"]).where(found["kept"])
        u = kept.batches(party.batch, "strong", epochs=party.epochs, steps=party.steps)
        return Plan(x=party.labelled.batches(party.batch, "labelled"), u=u)             # labels go round while u lasts

    def step(self, s: Slot, b: Columns) -> None:
        z, sure = s.model(b.u.strong), b.u.sure
        up = s.gradient(masked_mean(ce(z, b.u.y), sure, "selected"), s.model, retain=True)     # of L_p
        near = s.model(b.u.strong, weights=ascent(s.model.weights, up, self.o.rho, self.o.rho_floor))
        apart = kl(z.detach().softmax(1), near)
        consistency = masked_mean(apart, sure) if self.o.consistency == "mean" else apart.sum()    # L_cs, Eq. 13
        loss = cross_entropy(z, b.u.y) + consistency
        if b.x:
            loss = loss + cross_entropy(s.model(b.x.labelled), b.x.y)
        s.descend(loss)
        s.log(loss=loss, consistency=consistency)

    def end(self, party: StatusParty) -> Update | None:
        update = super().end(party)
        if update is not None and not party.is_server:
            update["tau"] = party.tau
        return update

    def merge(self, server: Server, updates: Updates) -> None:
        """Clients that are less sure have more to say; a server that trains beside them keeps its share by `weights`."""
        if not updates.clients:
            return super().merge(server, updates)
        beta = shares(torch.cat([u["tau"] for u in updates.clients]))
        self.averager.move(server, updates, mean(updates, weights=self.averager.beside_server(updates, beta)))


def shares(tau: Tensor) -> Tensor:
    """beta: what each client weighs by its mean confidence; alike if all are certain."""
    doubt = (1 - tau.detach().double().cpu()).clamp(0, 1)
    return doubt / doubt.sum() if doubt.sum() > 0 else torch.full_like(doubt, 1 / len(doubt))
