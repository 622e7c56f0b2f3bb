"""FedAvg and FedProx on labelled data."""

from __future__ import annotations

from fallow.config import Weights, key
from fallow.methods.base import Method


class FedAvg(Method):
    """Clients train on their labelled samples, the server averages.  McMahan et al., AISTATS 2017.

    With labels=all it is FedAvg-SL, the supervised upper reference; with labels at the server only the server trains.
    """

    paper = "McMahan et al., AISTATS 2017"

    class Options(Method.Options):
        weights: Weights = key("labelled", "what a client weighs in the mean")


class FedProx(FedAvg):
    """FedAvg with a pull towards the received model.  Li et al., MLSys 2020."""

    paper = "Li et al., MLSys 2020"

    class Options(FedAvg.Options):
        prox: float = key(0.01, "pull towards the received model", "mu", ge=0)
