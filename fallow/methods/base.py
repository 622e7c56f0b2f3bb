"""The interface of a method: eight hooks in the order of a round, and what they speak of.

Everything particular to a paper is in one class derived from `Method`; everything else (batching, views, devices,
randomness, transport, checkpoints) is not. Each hook has a default, and FedAvg overrides none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from fallow.config import Config, with_defaults
from fallow.methods.parts.averaging import Averager
from fallow.methods.parts.dma import DMA
from fallow.methods.parts.fitting import Facts, common
from fallow.methods.parts.grouping import Grouping
from fallow.methods.parts.losses import cross_entropy
from fallow.methods.plan import Plan
from fallow.methods.state import State

__all__ = ["Method", "Net", "Plan", "State", "Update", "Updates", "Value"]

Make = Callable[..., nn.Module]
AVERAGERS: dict[str, type[Averager]] = {"mean": Averager, "grouped": Grouping, "dma": DMA}


@dataclass(frozen=True)
class Net:
    """A net that a party holds while it works.

    >>> from fallow import Method, Net
    >>> class Teacher(Method):
    ...     def holds(self):
    ...         return {"model": Net(), "teacher": Net(keep=True, train=False)}
    >>> Net(keep=True).optimizer is None  # the key `optimizer_state` says
    True

    It starts from the client's record if kept, else from the message entry `start` (its own name, else "model"), or
    "initial" (the run's first weights), or "random" (an own seed per client).
    """

    make: Make | None = None
    start: str | None = None
    keep: bool = False
    train: bool = True
    optimizer: Literal["reset", "keep", "travel"] | None = None
    autocast: bool = True


class Value:
    """A small tensor that a party holds. Shape "unlabelled" is one entry per unlabelled sample.

    >>> from fallow import Value
    >>> Value("unlabelled", 10, keep=True).shape  # ten numbers for each, which stay with the client
    ('unlabelled', 10)
    """

    def __init__(self, *shape: int | str, start: float = 0.0, keep: bool = False):
        self.shape, self.start, self.keep = shape, start, keep


class Update:
    """What a client sends up: named States and tensors.

    >>> import torch
    >>> from fallow import Update
    >>> up = Update(prior=torch.tensor([0.25, 0.75]))  # in a method's `end`: Update(model=party.model.state, prior=...)
    >>> "prior" in up, float(up["prior"].sum())
    (True, 1.0)
    """

    def __init__(self, entries: dict[str, State | Tensor] | None = None, **named: State | Tensor):
        self.entries: dict[str, Any] = dict(entries or {}) | named
        self.client: int | None = None  # None: the server
        self.replica = 0  # of a server that trains several (average=grouped)
        self.weight = 1.0

    def __getitem__(self, name: str) -> Any:
        return self.entries[name]

    def __setitem__(self, name: str, value: State | Tensor) -> None:
        self.entries[name] = value

    def get(self, name: str, default: Any = None) -> Any:
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


class Method:
    """FedAvg on labelled data: the hooks' defaults. A method of one's own derives from it, in a file of its own.

    >>> from fallow import Method, key
    >>> class Slow(Method):
    ...     defaults = {"lr": 0.003}
    ...     class Options(Method.Options):
    ...         patience: int = key(3, "rounds that it waits", ge=1)
    >>> Slow.Options().lr, Slow.Options(patience=5).patience
    (0.003, 5)

    `fallow.run(method="./slow.py:Slow")` runs it where the file slow.py has the class.
    """

    Options: TypeAlias = Config
    defaults: dict[str, Any] = {}  # common keys that have another default here
    scenarios: frozenset[str] | set[str] = frozenset({"server", "clients", "some", "all"})
    readings: dict[str, dict[str, Any]] = {}
    labellers: frozenset[str] | set[str] = frozenset()  # values of `labeller` that it honours; none: `debias` neither
    labels_how = "labels in its own way, or not at all"  # why others are refused, after the method's name
    accepts_by = "threshold"  # the key that says how sure a pseudo-label must be
    captured = True
    paper = ""  # one line for `fallow list methods`
    group = "federated"  # under which it is listed there: founding, federated, supervised, central
    keeps = "-"  # what a client keeps between rounds, in words
    sends = "model"  # what travels, in words
    o: Any  # the options
    classes: int
    averager: Averager  # what the key `average` says

    def __init_subclass__(cls) -> None:
        if "defaults" in cls.__dict__:
            setattr(cls, "Options", with_defaults(cls.Options, cls.defaults))  # noqa: B010

    def __init__(self, options: Config, classes: int):
        self.__dict__.update(o=options, classes=classes, averager=AVERAGERS[options.average](options))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a method never changes; {name!r} belongs into a held thing, a column or server[...]")

    @classmethod
    def scenario_defaults(cls, labels: str) -> dict[str, Any]:
        """Keys whose default depends on where labels are."""
        return {}

    @classmethod
    def automatic(cls, facts: Facts) -> dict[str, Any]:
        """Values for keys that nobody gave, from what is there; where the method has its own default, that stays."""
        return {k: v for k, v in common(facts).items() if cls.Options.model_fields[k].default == Config.model_fields[k].default}

    @classmethod
    def refuse(cls, options: Config) -> str | None:
        """Why these options make no sense for this method, in one sentence with a remedy after a semicolon."""
        return None

    # -- the hooks, in the order of a round --------------------------------------------------------------------------
    def holds(self) -> dict[str, Net | Value]:
        return {"model": Net()}

    def start(self, server: Any) -> None:
        self.averager.start(server)

    def down(self, server: Any, client: int) -> dict[str, State | Tensor]:
        return {"model": self.averager.down(server, client)}

    def begin(self, party: Any) -> dict[str, Any]:
        return {}

    def plan(self, party: Any, found: dict[str, Any]) -> Plan:
        x = party.labelled.batches(party.batch, "labelled", epochs=party.epochs, steps=party.steps)
        return Plan(self.supervised, x=x)

    def step(self, s: Any, b: Any) -> None:
        self.supervised(s, b)

    def supervised(self, s: Any, b: Any) -> None:
        """Cross-entropy on the labelled batch."""
        loss = cross_entropy(s.model(b.x.labelled), b.x.y)
        s.descend(loss)
        s.log(loss=loss)

    def end(self, party: Any) -> Update | None:
        return Update(model=party.model.state, **self.averager.end(party)) if party.made else None

    def merge(self, server: Any, updates: Updates) -> None:
        self.averager.merge(server, updates)
