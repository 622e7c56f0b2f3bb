"""Questions to parties: each gets a message and answers; what that changes in its slot is thrown away."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from fallow import draws
from fallow.engine import feed, statistics
from fallow.engine.hooks import at
from fallow.engine.kit import Kit
from fallow.engine.nets import NetHandle
from fallow.engine.party import Job, Party, as_found, begin_calls, numbers, run_step, start_of
from fallow.engine.site import Sites
from fallow.engine.slot import Slot
from fallow.machine import spread
from fallow.methods.state import State


class Gathering(Slot):
    """A slot whose `descend` adds gradients for `model` up and changes nothing."""

    def __init__(self, kit: Kit):
        super().__init__(kit)
        for net in self.nets.values():
            net.modes.updates_running = False  # running statistics stay, too
        self.total = torch.zeros_like(self.nets["model"].flat.groups["parameters"])
        self.weight: Tensor | float = 0.0  # samples of the step at hand

    @torch.no_grad()
    def _apply(self, net: NetHandle, grads: Sequence[Tensor | None], when: Tensor | None) -> None:
        if net is self.nets["model"]:
            g = net.flatten(*net.pieces(grads))
            self.total += self.weight * (g if when is None else torch.where(when, g, torch.zeros_like(g)))


class Asked(Party):
    """A party that is asked something: one pass over its data, draws of its own."""

    steps = None  # type: ignore[assignment]
    epochs = 1.0  # type: ignore[assignment]
    slot: Gathering

    def key(self, *parts: int | str) -> int:
        return self.kit.key("question", self.round, self.id, *parts)


class Questions:
    """Asks parties, some of them at once on a CPU. Its slots are its own."""

    def __init__(self, sites: Sites):
        self.sites, self.kit = sites, sites.kit
        self._free: SimpleQueue[Gathering] = SimpleQueue()
        self._made = 0

    def ask(self, parties: Iterable[Job], question: str, **about: Any) -> list[Any]:
        """What each party answers to a question by its name, in their order."""
        answer = QUESTIONS[question]
        workers = self.kit.sharing if self.kit.device.type == "cpu" else 1
        while self._made < workers:
            self._free.put(Gathering(self.kit))
            self._made += 1

        def one(job: Job) -> Any:
            slot = self._free.get()
            try:
                slot.load(*start_of(self.kit, job))
                party = Asked(self.sites.site(job.party), slot, job)
                begin_calls(slot, party.key("begin"))
                return answer(party, **about)
            finally:
                self._free.put(slot)

        jobs, answers = iter(parties), []
        while chunk := list(islice(jobs, workers)):
            answers += spread(one, chunk, workers)
        return answers


# -- questions ---------------------------------------------------------------------------------------------------------
def gradient(party: Asked) -> State | None:
    """The gradient of the method's own loss at the weights received: the mean over one pass of its plan; None without a step."""
    method, slot = party.kit.method, party.slot
    with at("begin", party.kit, party.round, party.id):
        found = as_found(method.begin(party))
    with at("plan", party.kit, party.round, party.id):
        plan = method.plan(party, found)
    slot.total.zero_()
    samples: Tensor | float = 0.0
    for number, step in enumerate(feed.steps(party.site, plan, party.key("plan"), partial(numbers, party)), start=1):
        slot.weight = _samples(step)
        with at("step", party.kit, party.round, party.id, number):
            run_step(slot, step)
        samples = samples + slot.weight
    return State(slot.model.layout, {"parameters": slot.total / samples}) if len(plan) else None


def _samples(step: feed.Step) -> Tensor | float:
    """How many samples a step's batches have, those that fill up not counted."""
    counts: dict[str, Tensor | float] = {stream: len(t) for (stream, name), t in step.tensors.items() if name == "index"}
    counts |= {stream: t.sum() for (stream, name), t in step.tensors.items() if name == "rows"}
    return sum(counts.values())


@torch.no_grad()
def mean_prediction(party: Asked) -> Tensor | None:
    """APP-U of the model sent, over the party's unlabelled samples; None if it has none."""
    u = party.unlabelled
    return party.predict(party.received["model"], u, "weak").softmax(1).mean(0).cpu() if len(u) else None


@torch.no_grad()
def label_accuracies(party: Asked, nets: tuple[str, ...]) -> list[float] | None:
    """How many unlabelled samples with a known class each net labels rightly, as they are; None without any."""
    truth = party.site.truth(party.unlabelled.rows)
    if truth is None or not bool((known := truth >= 0).any()):
        return None
    labels = (party.predict(getattr(party, net), party.unlabelled, "plain").argmax(1) for net in nets)
    return [float((label == truth)[known].double().mean()) for label in labels]


@torch.no_grad()
def moments(party: Asked, done: int, end: int) -> statistics.Found | None:
    """Of the inputs of some batch norm layers of the model sent, over all samples of the party; None without any."""
    rows, key = party.site.rows, party.kit.key("sbn", party.received["number"])
    if not len(rows):
        return None
    net = party.slot.scratch(party.received["model"])
    batches = statistics.Batches(party.site.plain, rows[draws.permutation(key, len(rows)).numpy()])
    return statistics.moments_between(net, statistics.order(net, party.kit.blank(2)), done, end, batches)


QUESTIONS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (gradient, mean_prediction, label_accuracies, moments)}
