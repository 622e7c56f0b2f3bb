"""The server: what it holds from round to round, what it has of each client, its optimiser, its look at a model."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fallow import draws
from fallow.config import Config
from fallow.engine import logs
from fallow.engine.keep import Keep, Record
from fallow.engine.kit import Kit
from fallow.engine.nets import NetHandle
from fallow.errors import UserError
from fallow.limits import is_whole
from fallow.methods.sparse import Sparse
from fallow.methods.state import Layout, State
from fallow.schedule import Schedule


class Pool:
    """What the server has of each client, `server.pool[client]`: records that are stored as clients' are, and take effect as a round does."""

    def __init__(self, keep: Keep, options: Config):
        self._keep, self._options = keep, options
        self.new: dict[int, Record] = {}  # of a round that has not taken effect

    def __getitem__(self, client: int) -> Record:
        if client not in self:
            raise KeyError(f"the pool has nothing of client {client}")
        return self._keep.read(f"pool-{client}") | self.new.get(client, {})

    def __setitem__(self, client: int, record: Record) -> None:
        """Further entries of the record; those of the same names are replaced."""
        if not is_whole(client) or client >= self._options.clients:
            raise UserError(f"server.pool has no place for {client!r}", f"its places are the clients, 0 to {self._options.clients - 1}")
        if not isinstance(record, dict) or not all(isinstance(name, str) for name in record):
            raise UserError(f"server.pool[{client}] is given a {type(record).__name__}", "give a dict of named entries")
        whole = {k: State(v.layout, v.groups) if isinstance(v, Sparse) else v for k, v in record.items()}
        self.new[client] = self.new.get(client, {}) | whole

    def __contains__(self, client: int) -> bool:
        return client in self.new or f"pool-{client}" in self._keep.version

    def __iter__(self) -> Iterator[int]:
        """The clients of whom there is something, in their order."""
        known = (int(o.removeprefix("pool-")) for o in self._keep.version if isinstance(o, str))
        return iter(sorted({*known, *self.new}))

    @property
    def layouts(self) -> dict[str, Layout]:
        """Of the nets whose States the server can keep."""
        return self._keep.layouts

    def settle(self, round: int) -> None:
        """The round takes effect."""
        if self.new:
            self._keep.write({f"pool-{client}": record for client, record in self.new.items()}, round)
        self.new = {}


class Server:
    """`server["name"]` is everything that lasts at the server, and with `server.pool` it is the checkpoint."""

    def __init__(self, kit: Kit, keep: Keep):
        self.kit, self.options = kit, kit.options
        self.pool = Pool(keep, kit.options)
        self._net: NetHandle | None = None
        self.entries: dict[str, Any] = {}
        self.active: list[int] = []
        self.more = 0  # clients drawn beyond those that a round needs
        self.round = 0
        self.sent: State | None = None
        self.logs: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self.entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.entries[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    @property
    def model(self) -> State:
        return self.entries["model"]

    def initial(self, name: str = "model") -> State:
        """A held net's first weights."""
        return self.kit.initial(name)

    @property
    def head(self) -> str:
        """The name of the weight of the model's last layer."""
        return self.kit.head

    def draw(self, round: int, among: Container[int] | None = None) -> None:
        """This round's clients, in the order drawn: the first of a permutation of all, or of those `among` which they are to be."""
        self.round = round
        o = self.options
        count = min(o.clients, o.active_count + self.more)
        order = draws.first(draws.key(o.seed_of("active"), "active", round), o.clients, count if among is None else o.clients)
        self.active = [c for c in order.tolist() if among is None or c in among][:count]

    def rng(self, stream: str) -> np.random.Generator:
        return draws.rng(self.kit.key("server", self.round, stream))

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that the nets see."""
        d = self.kit.declared
        return d.channels, d.size, d.size

    @torch.no_grad()
    def predict(self, state: State, images: Tensor) -> Tensor:
        """Logits of images of its own, uint8 [n, *image_shape], in their plain view."""
        self._net = self._net or self.kit.net()
        self._net.load(state)
        return self._net(self.kit.plain(images.to(self.kit.device)), stats="running")

    def rate(self, round: int | None = None) -> float:
        """The local learning rate that the schedule has at a round's start, by default this one's."""
        o = self.options
        steps = o.steps if isinstance(o.steps, int) else 1
        return o.lr * Schedule.parse(o.schedule).factor(self.round if round is None else round, 0, steps, o.rounds)

    def log(self, **values: Any) -> None:
        """Numbers (or texts, lists and dicts of them) for this round's metrics."""
        self.logs |= {name: logs.at_server(name, value) for name, value in values.items()}

    @torch.no_grad()
    def move(self, target: State, base: State | None = None) -> None:
        """The server's optimiser: parameters move from `base` (the model that was sent) towards `target`.

        d = base - target; buffer = momentum * buffer + d; model = base - server_lr * buffer.
        """
        o = self.options
        if o.server_lr == 1.0 and o.server_momentum == 0.0:
            self["model"] = target
            return
        base = base or self.sent or self.model
        d = base.groups["parameters"] - target.groups["parameters"]
        if o.server_momentum:
            d = o.server_momentum * self["momentum"] + d if "momentum" in self else d
            self["momentum"] = d
        moved = base.groups["parameters"] - o.server_lr * d
        self["model"] = State(target.layout, target.groups | {"parameters": moved})
