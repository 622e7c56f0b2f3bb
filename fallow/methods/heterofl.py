"""FedAvg with the server's momentum and static batch norm: HeteroFL at full width."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fallow.config import key
from fallow.methods.base import Batch, Held, Method, Net, Party, Server, Slot, Update, Updates, Value
from fallow.methods.parts.averaging import mean
from fallow.methods.parts.heads import last_layer
from fallow.methods.parts.losses import cross_entropy


class OwnerSlot(Slot):
    own: Tensor  # which classes the party has labels of


class OwnerParty(Party):
    own: Tensor


class HeteroFL(Method[OwnerSlot, OwnerParty, Batch]):
    """FedAvg with server momentum and batch norm whose statistics are made for each test.  Diao et al., ICLR 2021.

    Clients of one width, as SemiFL's table has it; `reading=released` is what HeteroFL's own code does at that width.
    """

    paper = "Diao et al., ICLR 2021"
    group = "supervised"
    keeps = "optimiser state"
    scenarios = {"clients", "some", "all"}
    labels_how = "makes no pseudo-labels"
    defaults = {"weights": "uniform", "server_momentum": 0.5, "statistics": "static", "optimizer_state": "keep"}
    readings = {
        "paper": {},
        "released": {
            "masked_ce": True, "label_aware_head": True, "server_momentum": 0.0, "optimizer_state": "reset", "nesterov": False,
            "sbn_order": "shuffled",
        },
    }  # fmt: skip

    class Options(Method.Options):
        masked_ce: bool = key(False, "logits of classes that a client has no label of are 0 in its loss")
        label_aware_head: bool = key(False, "a client counts only for its own classes' rows of the last layer")

    o: Options

    def holds(self) -> Held:
        own = self.o.masked_ce or self.o.label_aware_head
        return {"model": Net()} | ({"own": Value(self.classes)} if own else {})

    def begin(self, party: OwnerParty) -> dict[str, Tensor]:
        y = party.labelled.y
        if y is not None and (self.o.masked_ce or self.o.label_aware_head):
            party.own.copy_(torch.from_numpy(np.isin(np.arange(self.classes), y)))
        return {}

    def supervised(self, s: OwnerSlot, b: Batch) -> None:
        z = s.model(b.x.labelled)
        loss = cross_entropy(torch.where(s.own > 0, z, 0.0) if self.o.masked_ce else z, b.x.y)
        s.descend(loss)
        s.log(loss=loss)

    def end(self, party: OwnerParty) -> Update | None:
        update = super().end(party)
        if update is not None and self.o.label_aware_head:
            update["own"] = party.own
        return update

    def merge(self, server: Server, updates: Updates) -> None:
        target = mean(updates, weights=self.averager.weights(updates))
        if self.o.label_aware_head:
            target = target.clone()
            for name in last_layer(server.head, target.layout.names("parameters")):
                owned = torch.stack([u["own"] for u in updates]) > 0
                rows = torch.stack([u["model"][name] for u in updates])
                target[name].copy_(mean_of_owners(rows, owned, server.model[name]))
        self.averager.move(server, updates, target)


def mean_of_owners(rows: Tensor, owned: Tensor, old: Tensor) -> Tensor:
    """Each class's row as the mean over the clients that own the class; without any it stays as it was."""
    which = owned.reshape(*owned.shape, *[1] * (rows.dim() - 2))
    count = which.sum(0)
    total = torch.where(which, rows, 0.0).double().sum(0)
    return torch.where(count > 0, total / count.clamp_min(1), old.double()).to(old.dtype)
