"""About how long a run takes here: the images a typical party's plan draws, times what one costs on this machine.

Counted are the views that the plans of a round's parties make, each once through the net and back, and the images that are
only predicted: the test set, what is labelled before the steps, static batch norm's pass. Every pseudo-label is taken to
be accepted, sizes of parties to be equal. Good to about a factor of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from fallow import draws
from fallow.config import Config
from fallow.data import sources
from fallow.data.samples import Samples
from fallow.engine.party import Sized
from fallow.engine.policies import STATIC, policy_of
from fallow.methods.base import AnyMethod, Method
from fallow.methods.datasharing import DataSharing
from fallow.models import default_norm
from fallow.runs.speed import Speed

IMAGES = {  # of training, of test
    "digits": (1500, 297), "cifar10": (50_000, 10_000), "cifar100": (50_000, 10_000), "svhn": (73_257, 26_032),
    "mnist": (60_000, 10_000), "fashion-mnist": (60_000, 10_000), "emnist:balanced": (112_800, 18_800),
    "emnist:byclass": (697_932, 116_323), "stl10": (105_000, 8000), "cinic10": (90_000, 90_000), "tinyimagenet": (100_000, 10_000),
}  # fmt: skip

Measure = Callable[..., Speed]


@dataclass(frozen=True)
class Work:
    """Images of one round: through the net and back, and predicted."""

    trained: float
    predicted: float


class _Typical(Sized):
    """A party of so many images, for plans that are only counted."""

    uneven = False

    def __init__(self, options: Config, is_server: bool, labelled: int, unlabelled: int):
        self.options, self.is_server = options, is_server
        self.round, self.received = 1 + options.warmup_rounds, {}
        self.labelled = Samples.of(np.arange(labelled), np.zeros(labelled, np.int64))
        self.unlabelled, self.validation, self.unused = Samples.of(np.arange(unlabelled)), Samples.of(np.arange(0)), 0

    def key(self, *parts: int | str) -> int:
        return draws.key(*parts)

    @property
    def found(self) -> dict[str, np.ndarray]:
        """What `begin` finds where every pseudo-label is accepted and no rate has fallen."""
        n = len(self.unlabelled)
        labels = {"label": np.zeros(n, np.int64), "sure": np.ones(n, bool), "kept": np.ones(n, bool)} if n else {}
        return {"falls": np.zeros(()), **labels}


def work(method: type[Method], o: Config, train: int, test: int, classes: int) -> Work:
    """What a round of these settings asks for, one after those in which a method warms up."""
    shared = round(o.share_beta / (1 + o.share_beta) * train) if isinstance(o, DataSharing.Options) else 0
    train -= shared
    labels = _labels(o, train, classes)
    at_server = labels if o.labels == "server" else 0
    hidden = 0 if o.labels == "all" else train - labels + (labels if o.labelled_as_unlabelled and not at_server else 0)
    own, unlabelled = round((labels - at_server) / o.clients), round(o.unlabelled_ratio * hidden / o.clients)
    own += round(o.share_alpha * shared) if isinstance(o, DataSharing.Options) else 0
    made = method(o, classes)
    trained = float(o.active_count * _views(made, _Typical(o, False, own, unlabelled)))
    predicted = test / o.eval_every
    if at_server:
        trained += made.averager.replicas * _views(made, _Typical(o, True, at_server, 0))
    if method.begin is not Method.begin:
        predicted += o.active_count * unlabelled
    if policy_of(o.norm, o.statistics) is STATIC and (o.norm or default_norm(o.model)) in ("bn", "sbn"):
        predicted += {"all": train, "server": at_server}.get(o.sbn_data, o.active_count * (own + unlabelled))
    return Work(trained, predicted)


def _labels(o: Config, train: int, classes: int) -> int:
    if o.labels == "all":
        return train
    if o.label_per_class is not None:
        return min(train, o.label_per_class * classes * (1 if o.labels == "server" else o.clients))
    return o.label_count or round((o.label_ratio or 0.05) * train)


def _views(method: AnyMethod, party: _Typical) -> int:
    """The views a party's plan makes."""
    plan = method.plan(party, party.found)
    return sum(sum(s.sizes(len(segment))) * len(s.views) for segment in plan.segments for s in segment.streams.values() if s)


def largest_step(method: type[Method], o: Config, train: int, classes: int) -> int:
    """Images, views counted, of the largest step that a client of typical size makes, or the server."""
    labels = _labels(o, train, classes)
    at_server = labels if o.labels == "server" else 0
    own, unlabelled = round((labels - at_server) / o.clients), round(o.unlabelled_ratio * (train - labels) / o.clients)
    parties = [_Typical(o, False, own, 0 if o.labels == "all" else unlabelled), *([_Typical(o, True, at_server, 0)] if at_server else [])]
    return max((sum(step) for party in parties for step in _steps(method(o, classes), party)), default=0)


def _steps(method: AnyMethod, party: _Typical) -> list[tuple[int, ...]]:
    """Of each step of a party the images of each stream, times its views."""
    plan = method.plan(party, party.found)
    return [
        step for segment in plan.segments
        for step in zip(*([n * len(s.views) for n in s.sizes(len(segment))] for s in segment.streams.values() if s))
    ]  # fmt: skip


@cache
def _listed() -> dict[str, sources.Listed]:
    return {d.name: d for d in sources.names()}


def seconds(method: type[Method], o: Config, measure: Measure) -> float | None:
    """Of a whole run; None where the data set's size is not known before it is read."""
    listed = _listed().get(o.data)
    if listed is None or o.data not in IMAGES or listed.size is None or listed.channels is None or listed.classes is None:
        return None
    one = measure(o.model, o.image.channels or listed.channels, o.image.size or listed.size, o.device)
    todo = work(method, o, *IMAGES[o.data], listed.classes)
    return o.rounds * (todo.trained * one.train + todo.predicted * one.infer)
