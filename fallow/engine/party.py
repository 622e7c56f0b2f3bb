"""A client, or the server, as a method sees it; and its work in a round, from the message down to the update up."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fallow import draws
from fallow.config import Config
from fallow.data.samples import Samples
from fallow.engine import feed, judging
from fallow.engine.clients import SERVER, Reply, Request
from fallow.engine.clients import Samples as Counts
from fallow.engine.finite import sound
from fallow.engine.held import check_names
from fallow.engine.hooks import at
from fallow.engine.kit import Kit
from fallow.engine.nets import NetHandle
from fallow.engine.site import Site
from fallow.engine.slot import Slot
from fallow.errors import UserError
from fallow.methods.base import Net, Update
from fallow.methods.plan import column, on_host
from fallow.methods.state import State
from fallow.schedule import Schedule

LARGE = 2500  # images per inference batch on CUDA, where batches do not enter the result
DROPOUT = "dropout/key"  # the column of its keys; a method's own columns are plain names
SHAPES = 8  # of predictions that are captured for each net of a slot


@dataclass
class Job(Request):
    """A request where it is carried out: with what the party had kept."""

    record: dict[str, Any] = field(default_factory=dict)  # held things by name; optimisers by "name/optimizer"


@dataclass
class Outcome(Reply):
    """A reply where it was made: with what the party keeps."""

    record: dict[str, Any] = field(default_factory=dict)


class Sized:
    """What a plan asks of a party: its samples, and how much it works, already the server's or the client's."""

    options: Config
    round: int
    received: dict[str, Any]
    is_server: bool
    labelled: Samples
    unlabelled: Samples
    validation: Samples
    unused: int
    uneven: bool  # whether clients have different numbers of labels

    def key(self, *parts: int | str) -> int:
        raise NotImplementedError

    def rng(self, stream: str) -> np.random.Generator:
        """A host generator for the few draws that stay there (Beta, choices)."""
        return draws.rng(self.key("rng", stream))

    @property
    def batch(self) -> int | None:
        o = self.options
        size = o.server_batch if self.is_server and o.server_batch else o.batch
        return None if size == "full" else int(size)

    @property
    def epochs(self) -> float | None:
        o = self.options
        if self.steps is not None:
            return None
        return o.server_epochs if self.is_server and o.server_epochs else o.epochs

    @property
    def steps(self) -> int | None:
        o = self.options
        if self.is_server:
            if o.server_steps:
                return o.server_steps
            if o.server_epochs:
                return None
        if o.steps == "match-unlabelled":
            return max(1, len(self.unlabelled) // (self.batch or self._full_batch))
        return o.steps

    @property
    def _full_batch(self) -> int:
        """How many samples batch=full takes where steps are counted: all labelled ones, as a rule."""
        labelled = 0 if self.options.unlabelled_batch == "full" else len(self.labelled)
        return max(1, labelled or len(self.unlabelled))


class Party(Sized):
    """What `begin`, `plan` and `end` get."""

    def __init__(self, site: Site, slot: Slot, job: Job):
        self.site, self.kit, self.slot, self.options = site, site.kit, slot, site.kit.options
        self.id, self.round, self.received = job.party, job.round, job.message
        self.is_server, self.turn = site.is_server, job.turn
        self.labelled, self.unlabelled, self.validation, self.unused = site.labelled, site.unlabelled, site.validation, site.unused
        self.uneven = site.kit.declared.uneven
        self.made = 0
        self.lr: list[float] = []  # of each step
        self._predictions = 0
        check_names(self.kit.held, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["slot"], name)

    def key(self, *parts: int | str) -> int:
        again = ("turn", self.turn) if self.turn else ()
        return self.kit.key("party", self.round, self.id, *again, *parts)

    @torch.no_grad()
    def predict(
        self, net: NetHandle | State, samples: Samples, view: str = "plain", batch: int = 250, stats: str = "running"
    ) -> Tensor:
        """Logits of all samples in stored order, in batches of a fixed size that never cross parties."""
        self._predictions += 1
        if isinstance(net, State):
            net = self.slot.scratch(net)
        if stats == "running" and net.modes.has_running and self.kit.device.type == "cuda":
            batch = max(batch, LARGE)
        call: Callable[[Tensor], Tensor] = partial(net, stats=stats)
        if self.slot.pool is not None and stats == "running":
            call = net.replayed(stats, pool=self.slot.pool, most=SHAPES)
        key = self.key("predict", view, self._predictions)
        out = []
        for start in range(0, len(samples), batch):
            rows = samples.rows[start : start + batch]
            keys = torch.from_numpy(draws.host_bits(key, np.arange(start, start + len(rows))))
            out.append(call(self.site.view(view, rows, keys)).clone())  # a replay's result lasts until the next one
        return torch.cat(out) if out else torch.zeros(0, self.kit.classes, device=self.kit.device)

    def judge(self, samples: Samples, label: Tensor, sure: Tensor | None = None, confidence: Tensor | None = None) -> None:
        """Logs the label ratio, the labels' classes and, where true labels are known, label accuracy."""
        truth = self.site.truth(samples.rows)
        self.slot.judge(feed.Part({} if truth is None else {"_truth": truth}), label, sure, confidence=confidence)

    def log(self, **values: Any) -> None:
        self.slot.log(**values)


def work(site: Site, slot: Slot, job: Job) -> Generator[feed.Step | torch.cuda.Event, None, Outcome]:
    """One party's round as a generator: yields the steps to make, in order; its return value is the Outcome.

    A step that fails is thrown back into it, which says whose step it was. Where a host read must wait for the device, an event is yielded first, so that other slots can go on meanwhile.
    """
    kit = site.kit
    slot.load(*start_of(kit, job))
    party = Party(site, slot, job)
    begin_calls(slot, party.key("begin"))
    with at("begin", kit, job.round, job.party):
        found, wait = _read_back(kit.method.begin(party))
    if wait is not None:
        yield wait
    with at("plan", kit, job.round, job.party):
        plan = kit.method.plan(party, as_found(found))
    for step in feed.steps(site, plan, party.key("plan"), partial(numbers, party)):
        party.made += 1
        with at("step", kit, job.round, job.party, party.made):
            yield step
    begin_calls(slot, party.key("end"))
    kit.finished += not site.is_server
    return _finish(kit, slot, party)


def begin_calls(slot: Slot, key: int) -> None:
    """Dropout in calls outside of steps is the party's own, not what the slot's last party left."""
    for net in slot.nets.values():
        net.begin_step()
        net.modes.key.fill_(key)


def start_of(kit: Kit, job: Job) -> tuple[dict[str, Any], dict[str, dict[str, Any]], float]:
    """What the slot is filled with: the client's record if kept, else the message, else fresh weights."""
    things: dict[str, Any] = {}
    for name, spec in kit.held.items():
        if name in job.record:
            things[name] = job.record[name]
        elif not isinstance(spec, Net):
            things[name] = torch.full(kit.value_shape(spec), float(spec.start), device=kit.device)
        elif spec.start == "initial":
            things[name] = kit.initial(name)
        elif spec.start == "random":
            things[name] = kit.fresh(name, kit.key("random", name, job.party))
        else:
            things[name] = _sent(job.message, name, spec.start)
    optimizers = {n.removesuffix("/optimizer"): t for n, t in job.record.items() if n.endswith("/optimizer")}
    optimizers |= {n.removesuffix("/optimizer"): t for n, t in job.message.items() if n.endswith("/optimizer")}
    return things, optimizers, 0.0 if job.party <= SERVER else kit.options.prox


def _sent(message: dict[str, Any], name: str, start: str | None) -> State:
    """The entry that a net starts from: the one that it names, else that of its own name, else `model`."""
    entry = start or (name if name in message else "model")
    if entry not in message:
        raise UserError(f"the net {name!r} starts from {entry!r}, which this message does not have; it has {', '.join(message)}", "send it in `down`, or give Net another `start`")
    if not isinstance(message[entry], State):
        raise UserError(f"the net {name!r} starts from {entry!r}, which is a {type(message[entry]).__name__} and no State in this message", "send a State in `down`")
    return message[entry]


def _read_back(found: dict[str, Any]) -> tuple[dict[str, Any], torch.cuda.Event | None]:
    """What `begin` found, on the host; on CUDA through pinned memory with an event to wait for."""
    tensors = {k: v for k, v in found.items() if isinstance(v, Tensor)}
    if not any(t.is_cuda for t in tensors.values()):
        return found, None
    host = {k: torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for k, t in tensors.items()}
    event = torch.cuda.Event()
    event.record()
    return found | host, event


def as_found(answer: dict[str, Any]) -> dict[str, Any]:
    """What `begin` found, as `plan` takes it."""
    return {k: on_host(v) if isinstance(v, Tensor) else v for k, v in answer.items()}


def numbers(party: Party, made: int, length: int, total: int, given: Any) -> dict[str, Tensor]:
    """The engine's own columns: a learning rate per trained net and step, and the key of dropout."""
    o = party.options
    schedule = Schedule.parse(o.schedule)
    factors = [schedule.factor(party.round, made + k, total, o.rounds) for k in range(length)]
    rates = np.array([o.lr * f for f in factors])
    out = {}
    for name in party.slot.optimizers:
        own = given.get(name) if isinstance(given, dict) else given
        used = rates if own is None else _given_rates(own, length)
        out[f"lr/{name}"] = torch.from_numpy(used).float()  # infinite rates make weights that are told of
        if name == ("model" if "model" in party.slot.optimizers else next(iter(party.slot.optimizers))):
            party.lr += used.tolist()
    key = party.key("dropout")
    out[DROPOUT] = torch.tensor([draws.key(key, made + k) for k in range(length)], dtype=torch.int64)
    return out


def _given_rates(own: Any, length: int) -> np.ndarray:
    """A plan's own column `lr`: a number, or one for each step."""
    rates = column("lr", own, length, np.float64).numpy().astype(np.float64)
    if rates.ndim > 1:
        raise UserError(f"column 'lr' of a plan has the shape {rates.shape}", "give a number, or one for each step")
    return rates


def mean_rate(rates: list[float], steps: list[int] | None = None) -> float | None:
    """The mean of learning rates, each of so many steps; exactly the one there is if they are all the same."""
    if len(set(rates)) <= 1:
        return rates[0] if rates else None
    counts = steps or [1] * len(rates)
    return math.fsum(r * n for r, n in zip(rates, counts)) / sum(counts)


def _finish(kit: Kit, slot: Slot, party: Party) -> Outcome:
    with at("end", kit, party.round, party.id):
        update = kit.method.end(party)
        entries = update.entries if update is not None else {}
        if update is not None:
            update.entries = {k: v.clone() for k, v in update.entries.items()}
            sent_by(update, party.id)
    record: dict[str, Any] = {}
    optimizers: dict[str, dict[str, State | Tensor]] = {}
    for name, spec in kit.held.items():
        if spec.keep:
            record[name] = slot.record(name)
        if isinstance(spec, Net) and spec.train:
            how = kit.options.server_optimizer_state if party.is_server else spec.optimizer or kit.options.optimizer_state
            if how != "reset" and party.made:
                layout = slot.nets[name].layout
                state = {
                    k: State(layout, {"parameters": t.clone()}) if t.dim() else t.clone()
                    for k, t in slot.optimizers[name].tensors.items()
                }
                if how == "travel":
                    optimizers[name] = state
                else:
                    record[f"{name}/optimizer"] = state
    finite = sound([net.state for net in slot.nets.values()], entries, record, optimizers)
    logs = {k: t.clone() for k, t in slot.logs.items()}
    counts = Counts(len(party.labelled), len({*party.labelled.rows.tolist(), *party.unlabelled.rows.tolist()}))
    return Outcome(
        party.id, party.made, update, counts, optimizers, logs, finite, mean_rate(party.lr),
        slot.descended, sorted(slot.looked_at), party.round, record,
    )  # fmt: skip


def sent_by(update: Update, party: int) -> None:
    update.client, update.replica = (None, SERVER - party) if party <= SERVER else (party, 0)


def run_step(slot: Slot, step: feed.Step) -> None:
    """Makes one step eagerly."""
    for name in slot.optimizers:
        slot.lr[name].copy_(step.numbers[f"lr/{name}"])
    for net in slot.nets.values():
        net.begin_step()
        net.modes.key.copy_(step.numbers[DROPOUT])
    step.function(slot, step.batch())


@dataclass
class Tally:
    """Sums the logs of a round's parties into means."""

    totals: dict[str, list[float]] = field(default_factory=dict)
    rates: tuple[list[float], list[int]] = field(default_factory=lambda: ([], []))  # learning rates, and of how many steps

    def add(self, parties: Iterable[dict[str, Tensor]]) -> None:
        """Reads all of them from the device at once."""
        pairs = [pair for logs in parties for pair in logs.items()]
        values = iter(torch.cat([log.double() for _, log in pairs]).tolist() if pairs else ())
        for name, log in pairs:
            found = list(islice(values, log.numel()))
            old = self.totals.setdefault(name, [0.0] * len(found))
            old[:] = map(add, old, found)

    def add_rates(self, parties: Iterable[tuple[float | None, int]]) -> None:
        for rate, steps in parties:
            if rate is not None:
                self.rates[0].append(rate)
                self.rates[1].append(steps)

    def columns(self) -> dict[str, Any]:
        """Means of what was logged, by name; nothing of what a party before in the slot has left, whose counts are 0."""
        found: dict[str, Any] = {}
        for name, values in self.totals.items():
            if judging.is_counted(name):
                found |= judging.columns(name, values)
            elif values[1]:
                found[name] = values[0] / values[1]
        return dict(sorted(found.items()))
