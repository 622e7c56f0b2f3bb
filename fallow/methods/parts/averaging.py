"""Means of updates, and averagers: what the key `average` chooses.

An averager is what a method's `start`, `down`, `end` and `merge` do by default, so a method has it without a line of its
own; one that overrides such a hook calls `super()`, or goes without.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fallow.config import Config
from fallow.methods.interface import Entry, Message, Party, Server
from fallow.methods.state import State
from fallow.methods.update import Update, Updates


def mean(items: Sequence[Update | State | Tensor], name: str = "model", weights: Sequence[float] | Tensor | None = None) -> Entry:
    """Weighted mean of updates' entries `name`, of States, or of tensors.

    Multiplies, then adds, in float64, one after the other in the given order, and rounds once. Counters: maximum.
    """
    values: list[Entry] = [item if isinstance(item, State | Tensor) else item[name] for item in items]
    if weights is None:
        weights = [1.0 if isinstance(item, State | Tensor) else item.weight for item in items]
    given = torch.as_tensor(weights, dtype=torch.float64)
    shares = (given / given.sum()).tolist()
    first = values[0]
    if isinstance(first, Tensor):
        return _mean(values, shares)
    groups = {}
    for group in first.groups:
        tensors = [v.groups[group] for v in values]
        groups[group] = torch.stack(tensors).amax(0) if group == "counters" else _mean(tensors, shares)
    return State(first.layout, groups)


def _mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    wide = torch.empty_like(total)  # one for all: new memory costs more than the sums
    for tensor, share in zip(tensors, shares):
        total += wide.copy_(tensor).mul_(share)
    return total.to(tensors[0].dtype)


class Averager:
    """`average=mean`: everyone gets the server's model, and one mean by the key `weights` takes its place."""

    replicas = 1  # models that a server trains beside the clients

    def __init__(self, options: Config):
        self.o = options

    @staticmethod
    def refuse(o: Config) -> None:
        """Raises a UserError where these settings cannot be averaged so."""

    def start(self, server: Server) -> None:
        return None

    def down(self, server: Server, client: int) -> State:
        return server.model

    def group(self, server: Server, client: int) -> int:
        """The group a client is averaged in."""
        return 0

    def end(self, party: Party) -> Message:
        """What a party sends beside its model."""
        return {}

    def merge(self, server: Server, updates: Updates) -> None:
        self.move(server, updates, mean(updates, weights=self.weights(updates)))

    def weights(self, updates: Sequence[Update]) -> list[float]:
        """What each update weighs by the key `weights`; the server counts `server_copies` times."""
        return [u.weight * (self.o.server_copies if u.client is None else 1) for u in updates]

    def beside_server(self, updates: Updates, shares: Tensor) -> Tensor:
        """Clients' shares that the method gives them, behind that of a server which trains beside them: its by `weights`."""
        if not updates.server:
            return shares
        given = self.weights(updates)
        own = given[0] / sum(given)
        return torch.cat([shares.new_tensor([own]), (1 - own) * shares])

    def move(self, server: Server, updates: Updates, target: State) -> None:
        """The server's optimiser, from the model that was sent or from what the server made of it beside the clients."""
        trained = updates.server if self.o.average_base == "trained" else None
        server.move(target, base=trained["model"] if trained else None)
