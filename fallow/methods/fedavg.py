"""FedAvg and FedProx on labelled data."""

from __future__ import annotations

from dataclasses import replace

from fallow.config import Config
from fallow.errors import UserError
from fallow.methods.base import Found, Method, Party, Plan
from fallow.models import default_norm


class FedAvg(Method):
    """Clients train on their labelled samples, the server averages.  McMahan et al., AISTATS 2017.

    With labels=all it is FedAvg-SL, the supervised upper reference; with labels at the server only the server trains.
    """

    paper = "McMahan et al., AISTATS 2017"
    group = "supervised"
    labels_how = "makes no pseudo-labels"
    defaults = {"weights": "labelled"}

    class Options(Method.Options):
        def refuse(self) -> None:
            super().refuse()
            if self.labels == "server" and self.average != "mean":
                cause = f"{self.method} with labels=server trains the server alone, so average={self.average} has nothing to weigh"
                raise UserError(cause, "leave average out")

    def plan(self, party: Party, found: Found) -> Plan:
        """Under batch norm without a pass's last batch where that is of one sample."""
        x = party.labelled.batches(party.batch, "labelled", epochs=party.epochs, steps=party.steps)
        alone = has_batch_norm(self.o) and len(sizes := x.sizes_of_pass()) > 1 and sizes[-1] == 1
        return Plan(self.supervised, x=replace(x, tail="drop") if alone else x)


def has_batch_norm(o: Config) -> bool:
    return (o.norm or default_norm(o.model)) in ("bn", "bn-batch", "sbn")


class FedProx(FedAvg):
    """FedAvg with a pull towards the received model.  Li et al., MLSys 2020."""

    paper = "Li et al., MLSys 2020"
    defaults = {"prox": 0.01}
