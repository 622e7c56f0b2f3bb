"""Where the clients are: the seam between the round and those who take part in it.

The round sends each client a message and gets a reply, or asks parties a question by its name and gets answers. Any of
them may be missing. What a client keeps, its data and its optimiser lie behind the seam.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from fallow.methods.base import Update

if TYPE_CHECKING:
    from fallow.engine.party import Job, Outcome

SERVER = -1  # the server's id as a party; its further replicas: -2, -3, ...


@dataclass
class Request:
    """A message down: to whom, in which round."""

    party: int
    round: int
    message: dict[str, Any]
    turn: int = 0  # the server may have a second turn in the last round, with draws of its own


@dataclass
class Samples:
    """How many samples a party holds; one that is labelled and serves as unlabelled, too, counts once."""

    labelled: int
    all: int


@dataclass
class Reply:
    """What comes up: a client's update, and what the round needs to know to merge and to tell of it."""

    party: int
    steps: int
    update: Update | None
    samples: Samples
    optimizers: dict[str, dict[str, Any]]  # those that travel
    logs: dict[str, Tensor]  # sums and counts
    finite: Tensor  # false if something of its work is NaN, or a weight infinite
    lr: float | None = None  # mean over its steps, of `model` (else of the first net it trains)
    descended: bool = True  # whether a step trained a net
    looked_at: list[str] = field(default_factory=list)  # held things that a hook used
    round: int = 0  # that of the request; a late reply may be of an earlier one than the round that takes it


class Executor(Protocol):
    """What carries out parties' work in this process, or on ranks: eager.py, slots.py, ranks.py."""

    def run(self, jobs: list[Job]) -> list[Outcome]: ...
    def shrink(self) -> None:
        """Gives up what memory it can, since the rest of the round needs it, or says that it cannot."""


class Clients(Protocol):
    """The clients of a federation, wherever they are."""

    def train(self, requests: Sequence[Request], here: Sequence[Job] = ()) -> tuple[list[Reply | None], list[Outcome]]:
        """To each request its client's reply, None where none came, or a late one to an earlier request; and what the server's own jobs, done meanwhile, came to."""

    def ask(self, question: str, requests: Iterable[Request], after: bool = False, **about: Any) -> list[Any]:
        """Each party's answer (questions.py), None where there is none. What it keeps is that of before this round, or after."""

    def settle(self, round: int) -> None:
        """The round takes effect: what the clients kept in it takes the place of what they had kept before."""
