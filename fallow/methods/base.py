"""The interface of a method: eight hooks in the order of a round, and what they speak of.

Everything particular to a paper is in one class derived from `Method`; everything else (batching, views, devices,
randomness, transport, checkpoints) is not. Each hook has a default, and FedAvg overrides one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias

from torch import Tensor, nn
from typing_extensions import TypeVar

from fallow.config import Config
from fallow.keys.section import Keys, with_defaults
from fallow.methods.interface import Batch, BatchPart, Found, Message, NetHandle, Party, Server, Slot, Work
from fallow.methods.parts.averagers import AVERAGERS
from fallow.methods.parts.averaging import Averager
from fallow.methods.parts.fitting import Facts, common
from fallow.methods.parts.losses import cross_entropy
from fallow.methods.plan import Plan
from fallow.methods.state import State
from fallow.methods.update import Update, Updates

__all__ = [
    "AnyMethod", "Batch", "BatchPart", "Found", "Held", "Message", "Method", "Net", "NetHandle", "Party", "Plan", "Server", "Slot", "State", "Update",
    "Updates", "Value", "Work",
]  # fmt: skip

Make = Callable[..., nn.Module]


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
    "initial" (the run's first weights), or "random" (an own seed per client). `options` are keys of its optimiser and its
    clipping that hold for this net alone.
    """

    make: Make | None = None
    start: str | None = None
    keep: bool = False
    train: bool = True
    optimizer: Literal["reset", "keep", "travel"] | None = None
    autocast: bool = True
    options: Keys | None = None
    fits: bool = False  # `make` is given the run's model, too


class Value:
    """A small tensor that a party holds. Shape "unlabelled" is one entry per unlabelled sample.

    >>> from fallow import Value
    >>> Value("unlabelled", 10, keep=True).shape  # ten numbers for each, which stay with the client
    ('unlabelled', 10)
    """

    def __init__(self, *shape: int | str, start: float = 0.0, keep: bool = False):
        self.shape, self.start, self.keep = shape, start, keep


Held = dict[str, Net | Value]
AnyMethod: TypeAlias = "Method[Any, Any, Any]"  # for those who run it
S = TypeVar("S", bound=Slot, default=Slot)
P = TypeVar("P", bound=Party, default=Party)
B = TypeVar("B", bound=Batch, default=Batch)


class Method(Generic[S, P, B]):
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
    defaults: Keys = {}  # common keys that have another default here
    scenarios: frozenset[str] | set[str] = frozenset({"server", "clients", "some", "all"})
    readings: dict[str, Keys] = {}
    labellers: frozenset[str] | set[str] = frozenset()  # values of `labeller` that it honours; none: `debias` neither
    labels_how = "labels in its own way, or not at all"  # why others are refused, after the method's name
    accepts_by = "threshold"  # the key that says how sure a pseudo-label must be
    captured = True
    paper = ""  # one line for `fallow list methods`
    group = "federated"  # under which it is listed there: founding, federated, supervised, central
    keeps = "-"  # what a client keeps between rounds, in words
    sends = "model"  # what travels, in words
    o: Config  # the options; `o: Options` says in a method of which type
    classes: int
    averager: Averager  # what the key `average` says

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "defaults" in cls.__dict__:
            setattr(cls, "Options", with_defaults(cls.Options, cls.defaults))  # noqa: B010

    def __init__(self, options: Config, classes: int):
        self.__dict__.update(o=options, classes=classes, averager=AVERAGERS[options.average](options))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a method never changes; {name!r} belongs into a held thing, a column or server[...]")

    @classmethod
    def algorithm(cls, options: Config) -> type[AnyMethod]:
        """The class for these settings: where a paper and its authors' code have two algorithms, each is a class of its own."""
        return cls

    @classmethod
    def scenario_defaults(cls, labels: str) -> Keys:
        """Keys whose default depends on where labels are."""
        return {}

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        """Values for keys that nobody gave, from what is there; where the method has its own default, that stays."""
        return {k: v for k, v in common(facts).items() if cls.Options.model_fields[k].default == Config.model_fields[k].default}

    # -- the hooks, in the order of a round --------------------------------------------------------------------------
    def holds(self) -> Held:
        return {"model": Net()}

    def start(self, server: Server) -> None:
        self.averager.start(server)

    def down(self, server: Server, client: int) -> Message:
        return {"model": self.averager.down(server, client)}

    def begin(self, party: P) -> dict[str, Tensor]:
        return {}

    def plan(self, party: P, found: Found) -> Plan:
        x = party.labelled.batches(party.batch, "labelled", epochs=party.epochs, steps=party.steps)
        return Plan(self.supervised, x=x)

    def step(self, s: S, b: B) -> None:
        self.supervised(s, b)

    def supervised(self, s: S, b: B) -> None:
        """Cross-entropy on the labelled batch."""
        loss = cross_entropy(s.model(b.x.labelled), b.x.y)
        s.descend(loss)
        s.log(loss=loss)

    def end(self, party: P) -> Update | None:
        return Update(model=party.model.state, **self.averager.end(party)) if party.made else None

    def merge(self, server: Server, updates: Updates) -> None:
        self.averager.merge(server, updates)
