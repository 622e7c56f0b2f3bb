"""What a method's hooks are given, as an editor and mypy see it: the party, the slot, the batch, the server, a net.

The engine's own classes fit these; nothing here runs. What a method holds besides `model`, and columns of its plan besides
the streams `x` and `u`, it declares in a subclass, so that a misspelt name is found before anything runs:

    class Teaching(Slot):
        teacher: NetHandle

    class MyMethod(Method[Teaching]): ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, Self, TypeAlias, TypedDict, overload

import numpy as np
from torch import Tensor

from fallow.config import Config
from fallow.data.samples import Array, Samples
from fallow.methods.state import State

Stats = Literal["update", "batch", "running"]
Rows = Sequence[Tensor | None]
Number = float | Tensor
Logged = Number | tuple[Tensor, Tensor]
Message = dict[str, State | Tensor]  # what travels, by name
Found = dict[str, Array]  # what `begin` has returned, on the host
Entry: TypeAlias = Any  # of a message, an update or the server: a State, a tensor, ...; only the method knows which


class Work(TypedDict):
    """How much a party trains in a round; of the two one is None."""

    epochs: float | None
    steps: int | None


class NetHandle(Protocol):
    """A net that a party holds. Each call is a batch of its own for batch norm."""

    def __call__(self, x: Tensor, weights: Mapping[str, Tensor] | None = None, stats: Stats = "update", rows: Tensor | None = None) -> Tensor:
        """Logits, float32. `stats`: update (running ones move), batch (they stay), running (eval mode)."""

    def together(self, *parts: Tensor | None, stats: Stats = "update", rows: Rows = ()) -> list[Tensor]:
        """One call on the concatenation; an absent part stays None (ask the batch which are there)."""

    def with_features(self, x: Tensor, stats: Stats = "update", rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits, and the features before the last layer, of one call."""

    def together_with_features(self, *parts: Tensor | None, stats: Stats = "update", rows: Rows = ()) -> tuple[list[Tensor], list[Tensor]]:
        """Logits, and the features that they were made of, part by part."""

    def apart(self, *parts: Tensor | None, stats: Stats = "update", rows: Rows = ()) -> list[Tensor]:
        """The same in one pass, but each part is a batch of its own for batch norm."""

    @property
    def weights(self) -> dict[str, Tensor]: ...

    @property
    def head(self) -> str:
        """The name of the last layer's weight."""

    @property
    def state(self) -> State:
        """What travels: parameters, and running statistics where they are tracked."""

    @property
    def flat(self) -> State:
        """All it has, running statistics too."""

    def load(self, state: State) -> None: ...

    def follow(self, other: Self, decay: float | Tensor) -> None:
        """EMA: self <- decay * self + (1 - decay) * other; statistics are copied."""


class Received(Protocol):
    """The message as it came."""

    @overload
    def __getitem__(self, name: Literal["model"], /) -> State: ...
    @overload
    def __getitem__(self, name: str, /) -> Entry: ...
    def __contains__(self, name: object, /) -> bool: ...


class Party(Protocol):
    """A client, or the server: what `begin`, `plan` and `end` get, with what is held by name."""

    model: NetHandle
    received: Received
    labelled: Samples
    unlabelled: Samples
    validation: Samples  # not to train on
    unused: int  # how many unlabelled samples `unlabelled_ratio` leaves out
    round: int  # from 0
    is_server: bool
    made: int  # steps made, in `end`
    options: Config

    @property
    def batch(self) -> int | None:
        """Labelled batch; None is the whole set."""

    @property
    def epochs(self) -> float | None:
        """Of these and `steps` one is None."""

    @property
    def steps(self) -> int | None: ...

    @property
    def uneven(self) -> bool:
        """Whether clients have different numbers of labels."""

    def predict(self, net: NetHandle | State, samples: Samples, view: str = "plain", batch: int = 250, stats: Stats = "running") -> Tensor:
        """Logits of all samples in stored order."""

    def rng(self, stream: str) -> np.random.Generator:
        """A host generator for the few draws that stay there."""

    def judge(self, samples: Samples, label: Tensor, sure: Tensor | None = None, confidence: Tensor | None = None) -> None:
        """Compares labels with the hidden true ones, for the metrics."""

    def log(self, **values: Logged) -> None: ...


class BatchPart(Protocol):
    """One stream's share of a batch: false and all None if the stream is absent."""

    plain: Tensor
    labelled: Tensor
    weak: Tensor
    strong: Tensor
    y: Tensor
    index: Tensor  # positions in the party's own set

    @property
    def rows(self) -> Tensor | None:
        """Which rows are real; None if nothing was padded."""

    def __bool__(self) -> bool: ...


class Batch(Protocol):
    """What a step gets: a part for each stream of the plan, a 0-dim tensor for each column of numbers."""

    x: BatchPart
    u: BatchPart


class Slot(Protocol):
    """What a step works with: held things by name, and nothing that tells one party from another."""

    model: NetHandle
    lr: dict[str, Tensor]  # this step's learning rate of each trained net

    def descend(self, loss: Number, *nets: NetHandle, when: Tensor | None = None, retain: bool = False) -> None:
        """Gradient of the loss for these nets (default: all trained ones), then prox, clip, the optimiser's step."""

    def gradient(self, loss: Tensor, net: NetHandle, create_graph: bool = False, retain: bool = False) -> dict[str, Tensor]:
        """The gradient by name, with a graph on request; `retain` keeps the loss's own for another one."""

    def apply(self, net: NetHandle, grads: dict[str, Tensor], when: Tensor | None = None) -> None:
        """The optimiser's step with given gradients."""

    def log(self, rows: Tensor | None = None, **values: Logged) -> None:
        """Sums numbers, or (values, mask), on the device; the metrics have the means."""

    def judge(self, part: BatchPart, label: Tensor, sure: Tensor | None = None, name: str = "label", confidence: Tensor | None = None) -> None:
        """Compares labels with the hidden true ones, for the metrics."""


class Pool(Protocol):
    """What the server has of each client: named States, tensors and plain values."""

    def __getitem__(self, client: int, /) -> dict[str, Entry]: ...
    def __setitem__(self, client: int, record: dict[str, Entry], /) -> None: ...
    def __contains__(self, client: int, /) -> bool: ...
    def __iter__(self) -> Iterator[int]: ...


class Server(Protocol):
    """`server["name"]` is all that lasts at the server: States, tensors, numbers, texts, lists and dicts of them."""

    active: list[int]  # this round's clients, in the order drawn
    round: int  # from 0

    @property
    def pool(self) -> Pool:
        """By client, in effect with its round."""

    @overload
    def __getitem__(self, name: Literal["model"], /) -> State: ...
    @overload
    def __getitem__(self, name: str, /) -> Entry: ...
    def __setitem__(self, name: str, value: object, /) -> None: ...
    def __contains__(self, name: str, /) -> bool: ...

    @property
    def model(self) -> State: ...

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that nets see."""

    def predict(self, state: State, images: Tensor) -> Tensor:
        """Logits of images of its own, uint8 [n, *image_shape], in their plain view."""

    def rng(self, stream: str) -> np.random.Generator: ...

    def initial(self, name: str = "model") -> State:
        """A held net's first weights."""

    @property
    def head(self) -> str:
        """The name of the weight of the model's last layer."""

    def rate(self, round: int | None = None) -> float:
        """The local learning rate that the schedule has at a round's start, by default this one's."""

    def log(self, **values: float | Sequence[float] | Tensor | Array) -> None:
        """Numbers, or lists of them, for this round's metrics."""

    def move(self, target: State, base: State | None = None) -> None:
        """The server's optimiser: from `base` (the model that was sent) towards `target`."""
