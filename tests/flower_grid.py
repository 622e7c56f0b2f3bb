"""A Grid without processes or sockets: nodes answer here, messages that went through Flower's own encoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Error, Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

import fallow
from fallow.flower import deployed, share
from fallow.flower.node import Node
from fallow.flower.porter import answered
from fallow.runs import prepare
from fallow.runs.result import Result

Fault = Callable[[Message], str | None]
SMALL: dict[str, Any] = {"clients": 3, "active": 3, "method": "fedloke", "norm": "gn", "steps": 1}


class Killed(BaseException):
    """As by kill -9: nobody in the process can do anything about it."""


@contextmanager
def identity(node: int = 1) -> Iterator[None]:
    """Flower's messages want to know whose task they are made in."""
    old = TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, node, 1
    try:
        yield
    finally:
        TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = old


def over_the_wire(message: Message) -> Message:
    """Deflated and inflated, as the transport does it."""
    message.metadata.__dict__["_message_id"] = message.object_id
    get_object_tree(message)
    contents = {number: thing.deflate() for number, thing in get_all_nested_objects(message).items()}
    copy = inflate_object_from_contents(message.object_id, contents)
    copy.metadata.__dict__["_message_id"] = message.metadata.message_id
    return copy


def simulated(folder: Path, **keys: Any) -> Path:
    return fallow.run(out=folder, name="simulated", quiet=True, **keys).path


class HereGrid(Grid):
    """Nodes by id. A fault, asked for each message, may say drop, dead, half, or slow:N (that many looks for the answer)."""

    def __init__(self, nodes: dict[int, Path], fault: Fault | None = None, altered: Callable[[Message, Message], Message] | None = None):
        self.fault, self.altered = fault or (lambda _: None), altered or (lambda _, reply: reply)
        self.folders, self.nodes = dict(nodes), dict[Path, Node]()
        self.live = set(nodes)
        self.pending: dict[str, list[Any]] = {}
        self.half: set[str] = set()
        self.kinds: list[tuple[str, int]] = []  # what was asked of whom
        self.bytes = 0

    run = property(lambda self: None)

    def set_run(self, run: Any) -> None: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return sorted(self.live)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        numbers = []
        for message in messages:
            got, node = over_the_wire(message), message.metadata.dst_node_id
            number = message.object_id
            numbers.append(number)
            self.kinds.append((got.metadata.message_type, node))
            what = self.fault(got) or ""
            if what == "drop":
                continue
            if what == "half":  # announced, never uploaded
                self.half.add(number)
                continue
            if what == "dead" or node not in self.live:
                reply = Message(Error(5, "Error: Node Unavailable"), reply_to=got)
                reply.metadata.__dict__["_src_node_id"] = 1
            else:
                with identity(node):
                    try:
                        there = self.nodes.setdefault(self.folders[node], Node(self.folders[node]))
                        reply = self.altered(got, answered(got, lambda order, until, there=there: there.answer(order)))
                    except Killed:
                        del self.nodes[self.folders[node]]
                        reply = Message(Error(5, "Error: Node Unavailable"), reply_to=got)
            self.pending[number] = [int(what[5:]) if what.startswith("slow:") else 0, over_the_wire(reply)]
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        out = []
        for number in list(message_ids):
            while number in self.half:
                time.sleep(0.05)
            if number in self.pending:
                if self.pending[number][0] > 0:
                    self.pending[number][0] -= 1
                    continue
                out.append(self.pending.pop(number)[1])
        return out

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        raise NotImplementedError


class Deployed:
    """A federation in this process, whose parties hold what those of a simulated run hold."""

    def __init__(self, root: Path, keys: dict[str, Any]):
        self.root, self.keys = root, keys
        _, self.options, source, federation = prepare(None, keys)
        self.clients = self.options.clients
        for client in range(self.clients):
            share.write_client(root / f"node-{client}", client, source, federation)
        share.write_server(root / "server", source, federation)
        self.grid = HereGrid(self.nodes())

    def nodes(self, first: int = 2**63 + 11) -> dict[int, Path]:
        return {first + 7 * k: self.root / f"node-{k}" for k in range(self.clients)}

    def begin(self, config: Path, **terms: Any) -> Path:
        return deployed.begin(self.root / "runs", "deployed", str(config), {}, {"round_timeout": 60, "node_timeout": 5} | terms, self.root / "server" / "server.yaml", self.clients)

    def go(self, run: Path, tell: Callable[[str], None] = print, stop_after: int | None = None) -> Result:
        from fallow.flower.exchange import FlowerExchange

        with identity():
            return deployed.carry_out(run, FlowerExchange(self.grid, 0.005), tell, stop_after=stop_after)
