"""What parties send up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, overload

from torch import Tensor

from fallow.methods.interface import Entry
from fallow.methods.state import State


class Update:
    """What a client sends up: named States and tensors.

    >>> import torch
    >>> from fallow import Update
    >>> up = Update(prior=torch.tensor([0.25, 0.75]))  # in a method's `end`: Update(model=party.model.state, prior=...)
    >>> "prior" in up, float(up["prior"].sum())
    (True, 1.0)
    """

    def __init__(self, entries: dict[str, State | Tensor] | None = None, /, **named: State | Tensor):
        self.entries: dict[str, State | Tensor] = dict(entries or {}) | named
        self.client: int | None = None  # None: the server
        self.round = 0  # in which it was begun: an earlier one than the server's if it came late
        self.replica = 0  # of a server that trains several (average=grouped)
        self.weight = 1.0

    @overload
    def __getitem__(self, name: Literal["model"]) -> State: ...
    @overload
    def __getitem__(self, name: str) -> Entry: ...
    def __getitem__(self, name: str) -> Entry:
        return self.entries[name]

    def __setitem__(self, name: str, value: State | Tensor) -> None:
        self.entries[name] = value

    def get(self, name: str, default: State | Tensor | None = None) -> Entry:
        return self.entries.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)


class Updates(list[Update]):
    """A round's updates in order of party id, the server's (turn `beside`) first."""

    @property
    def server(self) -> Update | None:
        return next((u for u in self if u.client is None), None)

    @property
    def clients(self) -> list[Update]:
        return [u for u in self if u.client is not None]
