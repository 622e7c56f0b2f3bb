"""FedAvg and FedProx on labelled data."""

from __future__ import annotations

from fallow.errors import UserError
from fallow.methods.base import Method


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


class FedProx(FedAvg):
    """FedAvg with a pull towards the received model.  Li et al., MLSys 2020."""

    paper = "Li et al., MLSys 2020"
    defaults = {"prox": 0.01}
