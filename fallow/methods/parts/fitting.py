"""Settings that nobody gave, from what is there: the rule that all methods share (docs/defaults.md has its reasons).

A method adds what it alone has, or sees otherwise, in its `automatic`; constants that are the method stay its paper's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fallow.config import Config, Kept
from fallow.keys.section import Keys
from fallow.models import default_norm

if TYPE_CHECKING:
    from fallow.methods.base import AnyMethod

ROUNDS = 40  # where all clients take part
LONGER = 4  # times as many at most, where few do
STEPS = (10, 40)  # of a client in a round: fewest, most
LABELLED = 16  # images with a label in a step
UNLABELLED = 32  # images without
LEAST = 4, 8  # of both, where memory is short
RATES = {"sgd": 0.1, "adam": 2e-3}
USUAL = 0.9  # the momentum that SGD's rate is for
SURE = 0.55  # of the way from a guess to certainty
RAMP = 1 / 3  # of the rounds
CLIP = 1.0  # norm of a gradient, for such rates
SMALLEST = 8  # side of images in pixels, for batch norm
RICH = 32  # side of images in pixels from which a step is work: on a GPU worth a larger model, on a CPU half as many


@dataclass(frozen=True)
class Facts:
    """What is there before the first round."""

    o: Config  # the settings as far as they were given; what was not is at its plain default
    classes: int
    size: int  # of the images, in pixels
    channels: int
    labelled: int  # samples with a label, of a party that has some (the median)
    unlabelled: int  # samples without, of a client (the median)
    rounds: int  # given, or by the rule
    room: int  # images that a step may hold
    given: frozenset[str] = frozenset()  # keys that are given
    on_cpu: bool = False

    @property
    def batch(self) -> int:
        """Labelled images of a step."""
        return max(LEAST[0], min(LABELLED, int(LABELLED * self.share)))

    @property
    def unlabelled_batch(self) -> int:
        """Unlabelled images of a step."""
        return max(LEAST[1], min(UNLABELLED, int(UNLABELLED * self.share)))

    @property
    def share(self) -> float:
        """Of a whole step's images, as many as there is room for; an unlabelled one is there in two views."""
        return self.room / (LABELLED + 2 * UNLABELLED)

    @property
    def steps(self) -> int:
        """A pass over a client's images, half of one where a step takes long; neither shorter nor longer than a round should be."""
        fewest, most = STEPS
        share = 0.5 if self.on_cpu and self.size >= RICH else 1.0
        passes = max(math.ceil(share * self.unlabelled / self.unlabelled_batch), math.ceil(share * self.labelled / self.batch))
        return min(most, max(fewest, passes))

    @property
    def norm(self) -> str | None:
        """Batch norm where a model has group norm: it learns faster, and a short run is short of steps.

        Not where it would have the statistics of whatever batch comes: folders are tested class by class.
        """
        quicker = default_norm(self.o.model) == "gn" and self.size >= SMALLEST and self.o.statistics != "batch"
        return "bn" if quicker else self.o.norm

    @property
    def optimizer_state(self) -> Kept:
        """A client's momentum stays with it where it trains in every round: ten steps are too few to gather it anew."""
        return "keep" if self.o.active_count == self.o.clients else self.o.optimizer_state

    @property
    def at_server(self) -> Keys:
        """Where only the server has labels it tunes the clients' mean on them: clients that begin beside it know nothing, and agree on one class."""
        beside = self.given & {"server_replicas", "average_base"}  # what only a server beside the clients has
        return {"server_turn": "after"} if self.o.labels == "server" and not beside else {}

    @property
    def lr(self) -> float:
        """With momentum m gradients add up to 1 / (1 - m) of themselves: with less of it SGD has as much higher a rate."""
        reach = (1 - self.o.momentum) / (1 - USUAL) if self.o.optimizer == "sgd" else 1
        return float(f"{RATES[self.o.optimizer] * reach:.3g}")

    @property
    def threshold(self) -> float:
        """A confidence as far from a guess among so many classes as is asked for."""
        return round((1 - SURE) / self.classes + SURE, 3)

    @property
    def ramp(self) -> int:
        """Rounds in which something comes into force."""
        return max(1, round(RAMP * self.rounds))

    def having(self, **keys: object) -> Facts:
        """These, had the keys not given been so."""
        return replace(self, o=self.o.model_copy(update={k: v for k, v in keys.items() if k not in self.given}))


def fits(method: type[AnyMethod]) -> frozenset[str]:
    """The keys that a method has fitted where they are not given."""
    return frozenset(method.automatic(Facts(method.Options(), 10, 32, 3, 10, 100, ROUNDS, 100)))


def model(o: Config, size: int, channels: int, gpu: bool) -> str:
    """A larger one than the default for colour images on a GPU; on a CPU a round of it would take minutes."""
    usual = o.model == Config.model_fields["model"].default
    return "resnet9" if usual and gpu and channels > 1 and size >= RICH else o.model


def rounds(o: Config) -> int:
    """More where only some clients take part in each."""
    return round(ROUNDS * min(LONGER, math.sqrt(o.clients / o.active_count)))


def common(f: Facts) -> Keys:
    """How much a party trains, and how fast."""
    return {
        "rounds": f.rounds, "steps": f.steps, "batch": f.batch, "unlabelled_batch": f.unlabelled_batch,
        "lr": f.lr, "schedule": "cosine", "clip": CLIP, "norm": f.norm,
        "optimizer_state": f.optimizer_state,
    } | f.at_server  # fmt: skip
