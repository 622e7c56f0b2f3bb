"""Grouping-based averaging: S group models, each the mean of its members and the server (FedRGD)."""

from __future__ import annotations

import math
from itertools import accumulate

from fallow.config import Config
from fallow.errors import UserError
from fallow.keys.averaging import GroupSplit
from fallow.methods.interface import Server
from fallow.methods.parts.averaging import Averager, mean
from fallow.methods.state import State
from fallow.methods.update import Updates


def group_sizes(active: int, groups: int, split: GroupSplit = "balanced") -> list[int]:
    """How many clients each group has; `ceil-blocks` may make fewer groups than asked for.

    >>> group_sizes(47, 5), group_sizes(47, 5, "ceil-blocks"), group_sizes(9, 4, "ceil-blocks")
    ([10, 10, 9, 9, 9], [10, 10, 10, 10, 7], [3, 3, 3])
    """
    if split == "ceil-blocks":
        block = math.ceil(active / groups)
        return [min(block, active - start) for start in range(0, active, block)]
    return [active // groups + (i < active % groups) for i in range(groups)]


class Grouping(Averager):
    """Who is in which group, from which model a client starts, and the means (Eqs. 7, 8)."""

    def __init__(self, options: Config):
        super().__init__(options)
        self.sizes = group_sizes(options.active_count, self._count(options), options.group_split)
        self._stops = list(accumulate(self.sizes))
        trains = options.labels == "server"  # the server; before or after the clients it would undo the groups' models
        if options.server_replicas == "per-group" and trains:
            self.replicas = len(self.sizes)
        self.keeps_group_models = options.group_models and not (trains and options.server_turn != "beside")

    @staticmethod
    def _count(o: Config) -> int:
        return min(o.active_count, max(2, math.ceil(o.active_count / 10))) if o.groups == "auto" else int(o.groups)

    @staticmethod
    def refuse(o: Config) -> None:
        """Raises a UserError where these settings cannot be grouped."""
        if isinstance(o.groups, int) and not 1 <= o.groups <= o.active_count:
            raise UserError(f"groups={o.groups} for {o.active_count} active clients", f"use groups={'1' if o.active_count == 1 else f'1 to {o.active_count}'}")
        if o.group_assignment == "fixed" and o.active_count != o.clients:
            raise UserError(f"group_assignment=fixed with {o.active_count} of {o.clients} clients active", "use slot, or let all take part")
        if o.server_replicas == "per-group" and o.labels == "server" and o.server_turn != "beside":
            raise UserError(f"server_replicas=per-group, but with server_turn={o.server_turn} the server is in no group", "use server_turn=beside")
        if o.server_replicas == "per-group" and o.average_base == "trained":
            raise UserError("average_base=trained starts from the server's model, and server_replicas=per-group has several", "use one of the two")
        if o.weights == "half":
            raise UserError("weights=half has no meaning inside a group", "use weights=uniform, or average=mean")

    def group(self, server: Server, client: int) -> int:
        """`active` is in random order, so blocks of it are random groups."""
        place = client if self.o.group_assignment == "fixed" else server.active.index(client)
        return next(i for i, stop in enumerate(self._stops) if place < stop)

    def start(self, server: Server) -> None:
        if self.keeps_group_models:
            server["groups"] = [server.model.clone() for _ in self.sizes]

    def down(self, server: Server, client: int) -> State:
        """w_avg,i of the client's group; w_avg for a client without one (`history`)."""
        if not self.keeps_group_models:
            return server.model
        groups: list[State] = server["groups"]
        if self.o.group_assignment != "history":
            return groups[self.group(server, client)]
        last = server["group_of"].get(client) if "group_of" in server else None
        return server.model if last is None else groups[last]

    def merge(self, server: Server, updates: Updates) -> None:
        groups = dict(enumerate(server["groups"])) if self.keeps_group_models else {}
        for i in range(len(self.sizes)):
            own = [u for u in updates if u.client is None and u.replica == (i if self.replicas > 1 else 0)]
            members = own + [u for u in updates.clients if u.client is not None and self.group(server, u.client) == i]
            if members:
                groups[i] = mean(members, weights=self.weights(members))  # Eq. 7; Eq. 8 with one group
        average = mean(list(groups.values()))  # w_avg = 1/S sum_i w_avg,i
        self.move(server, updates, average)
        if self.keeps_group_models:
            new_server_parameters = server.model.only("parameters")  # by the server's momentum and rate: the groups go along
            server_optimizer_is_identity = self.o.server_lr == 1.0 and self.o.server_momentum == 0.0
            server["groups"] = [g if server_optimizer_is_identity else g + (new_server_parameters - average) for g in groups.values()]
            if self.o.group_assignment == "history":
                server["group_of"] = {client: self.group(server, client) for client in server.active}
