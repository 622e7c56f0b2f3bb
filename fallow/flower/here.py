"""Nodes in this process, over no network at all: to see what travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fallow.flower.node import Node
from fallow.flower.parcel import Parcel

Heard = Callable[[str, str, Parcel], None]  # down or up, the kind of message, the message


class Here:
    """An exchange (nodes.py) with nodes that answer at once."""

    def __init__(self, nodes: Mapping[int, Node], heard: Heard = lambda *_: None):
        self.nodes, self.heard = nodes, heard

    def online(self) -> set[int]:
        return set(self.nodes)

    def send(self, orders: Mapping[int, Parcel], kind: str, patience: float) -> Answers:
        found = []
        for number, order in orders.items():
            self.heard("down", kind, order)
            answer = self.nodes[number].answer(order)
            self.heard("up", kind, answer)
            found.append((number, answer))
        return Answers(found)


class Answers:
    def __init__(self, found: list[tuple[int, Parcel]]):
        self.found = found

    def next(self, until: float) -> tuple[int, Parcel | str] | None:
        return self.found.pop(0) if self.found else None

    def close(self) -> None: ...
