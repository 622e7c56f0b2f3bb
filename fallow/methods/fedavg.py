"""FedAvg and FedProx on labelled data."""

from __future__ import annotations

from typing import Any

from fallow.methods.base import Method


class FedAvg(Method):
    """Clients train on their labelled samples, the server averages.  McMahan et al., AISTATS 2017.

    With labels=all it is FedAvg-SL, the supervised upper reference; with labels at the server only the server trains.
    """

    paper = "McMahan et al., AISTATS 2017"
    group = "supervised"
    labels_how = "makes no pseudo-labels"
    defaults = {"weights": "labelled"}

    @classmethod
    def refuse(cls, options: Any) -> str | None:
        if options.labels == "server" and options.average != "mean":
            return f"{options.method} with labels=server trains the server alone, so average={options.average} has nothing to weigh; leave average out"
        return None


class FedProx(FedAvg):
    """FedAvg with a pull towards the received model.  Li et al., MLSys 2020."""

    paper = "Li et al., MLSys 2020"
    defaults = {"prox": 0.01}
