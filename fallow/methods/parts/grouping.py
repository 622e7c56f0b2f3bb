"""Grouping-based averaging: S group models, each the mean of its members and the server (methods chapter 11.4).

A method takes it up by deriving its `Options` from `GroupedOptions` and calling `Grouping(self.o)` in `start`, `down`
and `merge`. `average=mean` is the case of one group: FedAvg.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, Literal

from fallow.config import Config, key
from fallow.methods.parts.averaging import mean
from fallow.methods.state import State

Split = Literal["balanced", "ceil-blocks"]


class GroupedOptions(Config):
    average: Literal["mean", "grouped"] = key("grouped", "one mean of all, or group models and their mean")
    groups: int | Literal["auto"] = key("auto", "groups; auto: one per ten active clients, at least 2", "S")
    group_assignment: Literal["slot", "history", "fixed"] = key(
        "slot", "a client starts from the model of the group it is drawn into, was in last, or is in for good"
    )
    group_split: Split = key("balanced", "group sizes differ by at most 1, or blocks of ceil(C/S) with the rest last")
    group_models: bool = key(True, "clients start from a group's model; false: all from the mean of the groups")
    server_copies: int = key(1, "how often the server counts in a mean", ge=1)


def group_sizes(active: int, groups: int, split: Split = "balanced") -> list[int]:
    """How many clients each group has; `ceil-blocks` may make fewer groups than asked for.

    >>> group_sizes(47, 5), group_sizes(47, 5, "ceil-blocks"), group_sizes(9, 4, "ceil-blocks")
    ([10, 10, 9, 9, 9], [10, 10, 10, 10, 7], [3, 3, 3])
    """
    if split == "ceil-blocks":
        block = math.ceil(active / groups)
        return [min(block, active - start) for start in range(0, active, block)]
    return [active // groups + (i < active % groups) for i in range(groups)]


class Grouping:
    """Who is in which group, from which model a client starts, and the means (Eqs. 7, 8)."""

    def __init__(self, options: Any):
        self.o = options
        self.sizes = group_sizes(options.active_count, self._count(options), options.group_split)
        self._stops = list(accumulate(self.sizes))
        trains = options.labels == "server"  # the server; before or after the clients it would undo the groups' models
        self.lineages = options.group_models and not (trains and options.server_turn != "beside")

    @staticmethod
    def _count(o: Any) -> int:
        if o.average == "mean":
            return 1
        return min(o.active_count, max(2, math.ceil(o.active_count / 10))) if o.groups == "auto" else int(o.groups)

    @staticmethod
    def refuse(o: Any) -> str | None:
        """Why these settings cannot be grouped."""
        if o.average == "mean":
            return None
        if isinstance(o.groups, int) and not 1 <= o.groups <= o.active_count:
            return f"groups={o.groups} for {o.active_count} active clients; use 1 to {o.active_count} groups"
        if o.group_assignment == "fixed" and o.active_count != o.clients:
            return f"group_assignment=fixed with {o.active_count} of {o.clients} clients active; use slot, or let all take part"
        if o.weights == "half":
            return "weights=half has no meaning inside a group; use weights=uniform, or average=mean"
        return None

    def group(self, server: Any, client: int) -> int:
        """The group a client is averaged in. `active` is in random order, so blocks of it are random groups."""
        place = client if self.o.group_assignment == "fixed" else server.active.index(client)
        return next(i for i, stop in enumerate(self._stops) if place < stop)

    def start(self, server: Any) -> None:
        if self.lineages:
            server["groups"] = [server.model.clone() for _ in self.sizes]

    def down(self, server: Any, client: int) -> State:
        """w_avg,i of the client's group; w_avg for a client without one (`history`)."""
        if not self.lineages:
            return server.model
        if self.o.group_assignment != "history":
            return server["groups"][self.group(server, client)]
        last = server["group_of"].get(client) if "group_of" in server else None
        return server.model if last is None else server["groups"][last]

    def merge(self, server: Any, updates: Any) -> None:
        own = [updates.server] if updates.server else []
        groups = dict(enumerate(server["groups"])) if self.lineages else {}
        for i in range(len(self.sizes)):
            members = own + [u for u in updates.clients if self.group(server, u.client) == i]
            if members:
                weights = [u.weight * (1 if u.client is not None else self.o.server_copies) for u in members]
                groups[i] = mean(members, weights=weights)  # Eq. 7; Eq. 8 with one group
        server.move(mean(list(groups.values())))  # w_avg = 1/S sum_i w_avg,i
        if self.lineages:
            server["groups"] = list(groups.values())
            if self.o.group_assignment == "history":
                server["group_of"] = {client: self.group(server, client) for client in server.active}
