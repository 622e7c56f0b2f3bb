"""Orders and answers as Flower's messages: the only place, beside server_app.py and porter.py, that knows Flower."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fallow.flower.looks import Looks
from fallow.flower.parcel import Parcel

KINDS = {"who": "query.who", "ask": "query.ask", "train": "train"}
POLL, SLOWEST = 0.2, 1.0  # seconds between looks for answers, soon after the last one and later
WIDTH = 8  # answers fetched side by side
UNAVAILABLE = 5
WORDS = {
    2: "it failed (its own log has more)", 3: "its message expired", 4: "its answer expired", UNAVAILABLE: "it has gone offline",
    8: "its worker stopped in the middle",
}  # fmt: skip


def to_records(parcel: Parcel) -> RecordDict:
    arrays = ArrayRecord({kind: Array(array) for kind, array in parcel.arrays.items()})
    return RecordDict({"fallow": ConfigRecord({"about": parcel.about, "head": parcel.head}), "arrays": arrays})


def from_records(records: RecordDict) -> Parcel:
    told = records.config_records["fallow"]
    arrays = {kind: array.numpy() for kind, array in records.array_records["arrays"].items()}
    return Parcel(str(told["head"]), arrays, str(told["about"]))


class FlowerExchange:
    """Over the Grid that Flower gives a ServerApp."""

    def __init__(self, grid: Any, poll: float = POLL):
        self.grid, self.poll = grid, poll

    def online(self) -> set[int]:
        return set(self.grid.get_node_ids())

    def send(self, orders: Mapping[int, Parcel], kind: str, patience: float) -> FlowerSent:
        made = [Message(to_records(order), node, KINDS[kind], ttl=patience, group_id=kind) for node, order in orders.items()]
        numbers = list(self.grid.push_messages(made)) if made else []
        return FlowerSent(self.grid, dict(zip(numbers, orders)), self.poll)


class FlowerSent:
    """Answers are fetched one by one on threads: a node that stops in the middle of its upload must not hold up the others."""

    def __init__(self, grid: Any, nodes: dict[str, int], poll: float):
        self.grid, self.nodes, self.looks = grid, nodes, Looks(poll, SLOWEST)
        self.came: queue.Queue[Any] = queue.Queue()
        self._todo: queue.Queue[str] = queue.Queue()
        self._stop = threading.Event()
        for number in nodes:
            self._todo.put(number)
        for _ in range(min(len(nodes), WIDTH)):
            threading.Thread(target=self._fetch, name="fallow-fetch", daemon=True).start()

    def _fetch(self) -> None:
        while not self._stop.is_set():
            try:
                number = self._todo.get_nowait()
            except queue.Empty:
                return
            try:
                found = list(self.grid.pull_messages([number]))
            except Exception as e:  # the SuperLink is gone for a while; the round's time decides
                print(f"fetching an answer failed: {type(e).__name__}", flush=True)
                found = []
            if found:
                self.came.put(found[0])
                self.looks.found()
            else:
                self._todo.put(number)
                self._stop.wait(self.looks.wait())

    def next(self, until: float) -> tuple[int, Parcel | str] | None:
        try:
            message = self.came.get(timeout=max(0.001, until - time.monotonic()))
        except queue.Empty:
            return None
        node = self.nodes[message.metadata.reply_to_message_id]  # an error that the SuperLink made names the SuperLink as its sender
        if message.has_error():
            return node, WORDS.get(message.error.code, f"its message ended with Flower's error {message.error.code}")
        try:
            return node, from_records(message.content)
        except Exception:
            return node, "its answer is no message of this protocol"

    def close(self) -> None:
        self._stop.set()
