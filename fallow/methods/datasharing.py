"""DataSharing: a small labelled set for everyone, against clients that differ."""

from __future__ import annotations

from fallow.config import key
from fallow.errors import UserError
from fallow.methods.base import Found, Party, Plan
from fallow.methods.fedavg import FedAvg


class DataSharing(FedAvg):
    """FedAvg in which the server hands every client part of a labelled set of its own.  Zhao et al., arXiv 1806.00582.

    The set is even over the classes and nobody else's; a model that the server trains on it is what the clients start from.
    """

    paper = "Zhao et al., 2018"
    group = "supervised"
    scenarios = {"clients", "some", "all"}
    sends = "model; down once also the shared images and labels"
    defaults = {"server_turn": "before", "server_epochs": 5, "server_optimizer_state": "reset"}

    class Options(FedAvg.Options):
        share_beta: float = key(0.1, "size of the shared set, as a share of what the clients hold", "beta", ge=0, le=10)
        share_alpha: float = key(0.5, "share of it that each client gets, drawn for itself", "alpha", ge=0, le=1)
        share_warmup: bool = key(True, "the server trains on it before the first round, `server_epochs` passes")

        def refuse(self) -> None:
            super().refuse()
            if self.server_turn != "before":
                cause = f"server_turn={self.server_turn}, but the server of {self.method} trains before the first round only"
                raise UserError(cause, "leave server_turn out")

    o: Options

    def plan(self, party: Party, found: Found) -> Plan:
        if party.is_server and (party.round or not self.o.share_warmup):
            return Plan()
        return super().plan(party, found)
