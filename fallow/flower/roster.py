"""Which node is which client: node ids come from Flower and change, clients' numbers are ours and stay."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fallow.errors import UserError
from fallow.flower.checks import is_count, words
from fallow.flower.messages import VERSION, Tree, Unreadable, packed, unpacked
from fallow.flower.parcel import Parcel
from fallow.runs.origin import versions

if TYPE_CHECKING:
    from fallow.flower.nodes import Exchange

WHO = 60.0  # seconds in which a node says who it is
LATER = 300.0  # seconds after which one that did not say is asked again, so that it does not hold up every round


class Roster:
    """Asks every node that appears who it is; one that does not fit is told why, and left alone."""

    def __init__(self, exchange: Exchange, about: Tree, clients: int, tell: Callable[[str], None] = print):
        self.exchange, self.about, self.clients, self.tell = exchange, json.dumps(about), clients, tell
        self.node: dict[int, int] = {}  # client -> node
        self.info: dict[int, Tree] = {}  # client -> what its node said
        self._left: dict[int, str] = {}  # node -> why it is refused
        self._silent: dict[int, float] = {}  # node -> until when it is not asked again
        self._lost: dict[int, str] = {}  # node -> why its answer did not come
        self._seen: dict[int, float] = {}

    def here(self) -> set[int]:
        """The clients that were there when last looked for."""
        return set(self._seen)

    def refresh(self, patient: bool = False) -> dict[int, int]:
        """The clients that are there, and their nodes; `patient`: who did not say who he is is asked again at once."""
        live = self.exchange.online()
        silent = set() if patient else {node for node, until in self._silent.items() if until > time.monotonic()}
        fresh = sorted(live - set(self.node.values()) - self._left.keys() - silent)
        self._left = {node: why for node, why in self._left.items() if node in live}
        if fresh:
            self._ask(fresh, live)
        there = {client: node for client, node in self.node.items() if node in live}
        self._seen = dict.fromkeys(there, time.time())
        return there

    def wait(self, count: int, patience: float) -> dict[int, int]:
        """The same, once there are so many."""
        until = time.monotonic() + patience
        while len(there := self.refresh(patient=True)) < count:
            if time.monotonic() > until:
                missing = ", ".join(map(str, sorted(set(range(self.clients)) - set(there))[:10]))
                refused = "".join(f"; node {node} is refused: {why}" for node, why in sorted(self._left.items())[:10])
                lost = "".join(f"; node {node} has not said who it is: {why}" for node, why in sorted(self._lost.items())[:10] if node not in there.values())
                told = f"{len(there)} of {self.clients} nodes came within {patience:g} s (clients {missing} did not{refused}{lost})"
                raise UserError(told, "mend what is told" if refused else "start the nodes, or raise node_timeout")
            time.sleep(0.2)
        return there

    def _ask(self, fresh: list[int], live: set[int]) -> None:
        sent = self.exchange.send(dict.fromkeys(fresh, packed({}, {}, self.about)), "who", WHO)
        until, waiting, lost = time.monotonic() + WHO, set(fresh), set[int]()
        try:
            while waiting and (came := sent.next(until)) is not None:
                node, answer = came
                if isinstance(answer, str):  # on the way, which says nothing of the node
                    if self._lost.get(node) != answer:
                        self.tell(f"node {node} has not said who it is: {answer}")
                    self._lost[node] = answer
                    lost.add(node)
                elif why := self._take(node, answer, live):
                    self._refuse(node, why)
                waiting.discard(node)
        finally:
            sent.close()
        self._silent.update(dict.fromkeys(waiting | lost, time.monotonic() + LATER))

    def _take(self, node: int, answer: Parcel, live: set[int]) -> str | None:
        """Notes a node that fits; else why not."""
        try:
            tree: dict[str, Any] = unpacked(answer, {})
            if "refused" in tree:
                return words(tree["refused"])
            client = tree["client"]
            if tree["protocol"] != VERSION:
                return f"it speaks version {words(tree['protocol'])} of the protocol, not {VERSION}"
            for name, version in versions().items():
                if name != "Python" and tree["versions"].get(name) != version:
                    return f"it has {name} {words(tree['versions'].get(name))}, and the server {version}"
            if type(client) is not int or not 0 <= client < self.clients:
                return f"it says it is client {words(client)}, and the run has clients 0 to {self.clients - 1}"
            if not all(is_count(tree["samples"][side]) for side in ("labelled", "unlabelled")):
                return "its counts of samples are none"
        except (Unreadable, KeyError, TypeError, AttributeError):
            return "its answer is no message of this protocol"
        if self.node.get(client, node) != node and self.node[client] in live:
            return f"it says it is client {client}, as another node does; give every node its own client in node.yaml"
        self.node[client], self.info[client] = node, tree
        return None

    def _refuse(self, node: int, why: str) -> None:
        """Both sides are told."""
        self._left[node] = why
        self.tell(f"node {node} is refused: {why}")
        self.tell_node(node, f"this node is refused: {why}")

    def tell_node(self, node: int, sentence: str) -> None:
        """A sentence for the node's own log."""
        self.exchange.send({node: packed({"tell": sentence}, {}, self.about)}, "who", WHO).close()
