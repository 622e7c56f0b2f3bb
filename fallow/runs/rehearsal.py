"""`fallow run ... --dry-run`: what a run would be, who would hold what, about how much memory and time it would take."""

from __future__ import annotations

from typing import Any

import torch

from fallow import models
from fallow.config import Config
from fallow.data.federate import Federation
from fallow.data.sources import Source
from fallow.durations import format_duration
from fallow.engine.held import held
from fallow.machine import cores, device_of
from fallow.methods.base import Method, Net
from fallow.runs import Watcher, prepare
from fallow.runs.automatic import amounts, kept_for_gradients
from fallow.runs.estimate import Measure, largest_step, work
from fallow.runs.portrait import changed
from fallow.runs.speed import speed

GIB = 2**30
BASE = 0.45  # GiB that Python, torch and this package take before anything is done


def lines(
    recipe: Any, keys: dict[str, Any], download: bool = False, trust: bool = False, watch: Watcher | None = None, measure: Measure = speed
) -> list[str]:
    """What a dry run says. The data are read, and one step of the model is measured (once on a machine); nothing is written."""
    method, options, source, federation = prepare(recipe, keys, download=download, trust=trust, watch=watch)
    device = device_of(options.device)
    return [
        "settings: " + " ".join(pairs(options)),
        "work: " + amounts(options, federation),
        "federation: " + holdings(federation),
        f"memory: about {memory(method, options, source):.1f} GiB" + ("" if device.type == "cpu" else f" if one party trains at a time on {device}"),
        f"time: about {format_duration(seconds(method, options, source, measure))} on {device} (within a factor of two, if the machine does nothing else)",
    ]


def seconds(method: type[Method], options: Config, source: Source, measure: Measure) -> float:
    """Of the whole run, by what one step of its model takes here."""
    one = measure(options.model, source.channels, source.size, options.device)
    todo = work(method, options, len(source.train), len(source.test), len(source.classes))
    return options.rounds * (todo.trained * one.train + todo.predicted * one.infer)


def pairs(options: Config) -> list[str]:
    """The keys that are not at their defaults, as one types them."""
    found = {"method": options.method, "data": options.data} | changed(options)
    return [f"{key}={_typed(value)}" for key, value in found.items()]


def _typed(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def holdings(federation: Federation) -> str:
    """Who holds what, in a line."""
    labelled, unlabelled = ([len(getattr(c, side)) for c in federation.clients] for side in ("labelled", "unlabelled"))
    server = f"the server has {len(federation.server.labelled):,} labelled images; " if len(federation.server.labelled) else ""
    return f"{server}{len(federation.clients)} clients with {_span(labelled)} labelled and {_span(unlabelled)} unlabelled images each"


def _span(counts: list[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def memory(method: type[Method], options: Config, source: Source) -> float:
    """GiB: images, views made ahead, and of every party that trains at once its nets, gradients and largest step."""
    images = source.train.images.nbytes + source.test.images.nbytes
    step = largest_step(method, options, len(source.train), len(source.classes))
    on_cpu = device_of(options.device).type == "cpu"
    together = min(options.active_count, options.slots if isinstance(options.slots, int) else cores() if on_cpu else 1)
    with torch.random.fork_rng(devices=[]):
        net = models.build(options.model, len(source.classes), source.channels, norm=options.norm, size=source.size)
    weights = sum(p.nbytes for p in net.parameters())
    count = sum(isinstance(thing, Net) for thing in held(method(options, len(source.classes))).values())
    nets = weights * (count + 2)  # gradients and momentum beside them
    party = step * kept_for_gradients(options, source) + nets
    todo = work(method, options, len(source.train), len(source.test), len(source.classes))
    ahead = min(options.view_memory * GIB, 4 * todo.trained * source.channels * source.size**2)
    return BASE + (images + ahead + together * party + weights * (2 + options.active_count)) / GIB
