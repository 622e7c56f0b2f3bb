"""Fits the settings that nobody gave to the data and the federation, once, before a run begins.

The rule is `methods/parts/fitting.py` and each method's `automatic`. What comes out are plain values: they are stored,
and a resumed run or another rank sees nothing but them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fallow import config as configuration
from fallow import models
from fallow.config import Config
from fallow.data.federate import Federation
from fallow.data.sources import Source
from fallow.machine import device_of
from fallow.methods.base import Method
from fallow.methods.parts import fitting
from fallow.methods.parts.fitting import Facts
from fallow.trees import merge

MEMORY = {"cpu": 2**29, "cuda": 2**31}  # bytes that a step may keep for its gradients; many steps run at once
TOGETHER = ({"steps": None, "epochs": None}, {"server_steps": None, "server_epochs": None})  # who gives one has given both

Keys = dict[str, Any]


def given(options: Config) -> Keys:
    """What the user, a recipe, a reading or the scenario has said, sections key by key."""
    said = options.model_dump(mode="json", exclude_unset=True)
    for group in TOGETHER:
        if any(said.get(k) is not None for k in group):
            said = group | said
    return said


def fitted(method: type[Method], options: Config, said: Mapping[str, Any], source: Source, federation: Federation) -> Config:
    """The options, with the method's automatic value for every key of which nothing is `said`; the model first, all else goes by it."""
    if "model" not in said:
        gpu = device_of(options.device).type == "cuda"
        options = options.model_copy(update={"model": fitting.model(options, source.size, source.channels, gpu)})
    facts = look(method, options, said, source, federation)
    values = without(method.automatic(facts), said)
    if values.get("steps") is not None:
        values["epochs"] = None
    return configuration.validate(method.Options, merge(options.model_dump(), values))


def look(method: type[Method], options: Config, said: Mapping[str, Any], source: Source, federation: Federation) -> Facts:
    """What is there."""
    parties = [*federation.clients, federation.server]
    return Facts(
        o=options,
        classes=len(source.classes),
        size=source.size,
        channels=source.channels,
        labelled=_middle(len(p.labelled) for p in parties),
        unlabelled=_middle(len(p.unlabelled) for p in federation.clients),
        rounds=options.rounds if "rounds" in said else fitting.rounds(options),
        room=room(options, source),
        given=frozenset(said),
        on_cpu=device_of(options.device).type == "cpu",
    )


def _middle(sizes: Iterable[int]) -> int:
    """The median of those that are not 0."""
    some = [n for n in sizes if n]
    return round(statistics.median(some)) if some else 0


def room(options: Config, source: Source) -> int:
    """Images that a step may hold."""
    return MEMORY[device_of(options.device).type] // max(1, kept_for_gradients(options, source))


def kept_for_gradients(options: Config, source: Source) -> int:
    """Bytes that the model keeps of one image from the forward to the backward pass, seen by a pass of two images."""
    sizes: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.random.fork_rng(devices=[]):
        net = models.build(options.model, len(source.classes), source.channels, norm=options.norm, size=source.size)
        own = {p.untyped_storage().data_ptr() for p in net.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            z = net(torch.zeros(2, source.channels, source.size, source.size))
    del z
    return sum(n for place, n in sizes.items() if place not in own) // 2


def without(values: Mapping[str, Any], said: Mapping[str, Any]) -> Keys:
    """The values of which nothing is said, sections key by key."""
    out: Keys = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            if left := without(value, said.get(name) or {}):
                out[name] = left
        elif name not in said:
            out[name] = value
    return out


def amounts(o: Config, federation: Federation) -> str:
    """What a run is about to do, in a line: `30 rounds of 20 steps of 16 + 48 images, lr 0.1 (cosine), threshold 0.595, small-cnn with bn`."""
    parts = [f"{_counted(o.rounds, 'round')} of {_amount(o, federation)}", f"lr {o.lr:g} ({o.schedule.split(',')[0]})"]
    parts += [f"{name} {getattr(o, name):g}" for name in ("threshold", "entropy") if hasattr(o, name)]
    norm = o.norm or models.default_norm(o.model)
    return ", ".join([*parts, o.model if norm in (None, "none") else f"{o.model} with {norm}"])


def _amount(o: Config, federation: Federation) -> str:
    unlabelled = any(len(c.unlabelled) for c in federation.clients)
    batch = f"{o.batch} + {o.unlabelled_batch} images" if unlabelled else f"{o.batch} images"
    return f"{_counted(o.steps, 'step')} of {batch}" if o.steps is not None else f"{_counted(o.epochs, 'pass', 'passes')} in steps of {batch}"


def _counted(count: Any, one: str, more: str = "") -> str:
    return f"{count:g} {one}" if count == 1 else f"{count} {more or one + 's'}"
