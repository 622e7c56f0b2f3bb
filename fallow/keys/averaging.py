"""How the server averages: one mean, groups, or weights that undo the classes' bias."""

from __future__ import annotations

from typing import Literal

from fallow.keys.section import Section, key

Average = Literal["mean", "grouped", "dma"]
GroupSplit = Literal["balanced", "ceil-blocks"]


class AveragingKeys(Section):
    average: Average = key("mean", "one mean by `weights`; group models and their mean; or weights that undo the classes' bias")
    groups: int | Literal["auto"] = key("auto", "grouped: how many groups; auto: one per ten active clients, at least 2", "S")
    group_assignment: Literal["slot", "history", "fixed"] = key(
        "slot", "grouped: a client starts from the model of the group it is drawn into, was in last, or is in for good"
    )
    group_split: GroupSplit = key("balanced", "grouped: sizes differ by at most 1, or blocks of ceil(C/S) with the rest last")
    group_models: bool = key(True, "grouped: clients start from a group's model; false: all from the mean of the groups")
    server_replicas: Literal["shared", "per-group"] = key(
        "shared", "grouped, server_turn=beside: one trained server model in all groups, or one for each, of its own batches and state"
    )
    server_copies: int = key(1, "mean, grouped: how often the server counts in a mean", ge=1)
    dma: Literal["code", "paper-post", "paper-loop", "simplex"] = key(
        "code", "dma: weights as released, as printed (softmax after or in the loop), or exact"
    )
    dma_steps: int = key(100, "dma: descent steps of the released and the printed forms", "E_aggr", ge=0, le=10**6)
    dma_lr: float = key(1.0, "dma: their step size", "eta_aggr", gt=0)
    dma_momentum: float = key(0.0, "dma: heavy-ball momentum of the printed forms", ge=0, lt=1)
    dma_ridge: float = key(1e-8, "dma=simplex: pull towards equal weights, which makes the minimum unique", "rho", gt=0)
    dma_floor: float = key(0.0, "dma=simplex: least weight of a client, as a share of 1/S", "f", ge=0, lt=1)
