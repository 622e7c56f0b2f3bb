"""What every party of a run works with: the settings and the method, the device, nets, views and keyed draws."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fallow import draws, machine, models
from fallow.config import Config
from fallow.data.federate import Federation
from fallow.data.normalisation import normalisation
from fallow.data.sources import Source
from fallow.data.views import Views
from fallow.engine.held import check_module, held
from fallow.engine.nets import NetHandle
from fallow.engine.policies import policy_of
from fallow.methods.base import AnyMethod, Net, Value
from fallow.methods.state import Layout, State
from fallow.models.heads import head_of
from fallow.schedule import Schedule


@dataclass(frozen=True)
class Declared:
    """What the server declares to every party: facts of the data and the federation that no party could know of itself."""

    classes: int
    channels: int
    size: int
    mean: tuple[float, ...]  # of an image's channels, after /255
    std: tuple[float, ...]
    flip: bool  # whether a mirror image is of the same class
    most_unlabelled: int = 0  # the largest number of unlabelled samples that a client has
    uneven: bool = False  # whether clients have different numbers of labels

    @staticmethod
    def of(options: Config, source: Source, federation: Federation) -> Declared:
        mean, std = normalisation(options.image.normalise, source.name, source.channels)
        return Declared(
            len(source.classes), source.channels, source.size, mean, std, source.flip, federation.most_unlabelled, federation.uneven
        )

    @staticmethod
    def read(told: Mapping[str, Any]) -> Declared:
        """What `asdict` made of one, after a journey as JSON."""
        facts: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in told.items()}
        return Declared(**facts)


class Kit:
    """Read-only for everyone but for `finished` and `sharing`. Parties of one process share it; it tells none from another."""

    def __init__(self, options: Config, method: AnyMethod, declared: Declared):
        self.options, self.method, self.declared = options, method, declared
        self.device = machine.device_of(options.device)
        Schedule.parse(options.schedule)  # complains now, not in the first round
        self.classes = declared.classes
        self.policy = policy_of(options.norm, options.statistics)
        a = options.augment
        self.views = Views(
            size=declared.size,
            channels=declared.channels,
            mean=declared.mean,
            std=declared.std,
            flip=declared.flip if a.flip == "auto" else a.flip == "always",
            labelled=a.labelled,
            weak=a.weak,
            strong=a.strong,
            cutout=None if a.cutout == "none" else a.cutout,
        )
        self.debug = options.backend == "debug"
        self.held: dict[str, Net | Value] = held(method)
        self.precision = options.precision
        if self.precision == "auto":
            self.precision = "bf16" if self.device.type == "cuda" else "fp32"
        self.sharing = 1  # parties that share the memory for views
        self.finished = 0  # clients that have ended in this round, for who watches
        self._initial: dict[str, State] = {}
        self._building = threading.Lock()  # torch's generator, which modules are initialised from, is one for all threads
        machine.set_up(self.device, self.precision, options.deterministic)

    # -- nets ------------------------------------------------------------------------------------------------------------
    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def _build(self, spec: Net) -> nn.Module:
        if spec.make is not None:
            module = spec.make(self.classes, model=self._build(Net())) if spec.fits else spec.make(self.classes)
            check_module(module)
            return module
        o = self.options
        return models.build(o.model, self.classes, self.declared.channels, norm=o.norm, size=self.declared.size)

    @cached_property
    def head(self) -> str:
        """The name of the weight of the model's last layer."""
        with self._building, torch.random.fork_rng(devices=[]):
            return head_of(self._build(Net()))

    def net(self, spec: Net | None = None) -> NetHandle:
        """A net of its own, uninitialised (the weights of torch's generator, which nothing depends on)."""
        spec = spec or Net()
        half = self.precision == "bf16" and spec.autocast
        with self._building, torch.random.fork_rng(devices=[]):
            module = self._build(spec)
        net = NetHandle(module, self.device, self.policy, self.autocast if half else None)
        o = self.options
        net.capture = o.capture and not self.debug
        net.compile = o.compile and spec.autocast and not self.debug  # without autocast: differentiated twice
        net.modes.fused = o.fused and not net.compile
        return net

    def fresh(self, name: str, key: int) -> State:
        """Newly initialised weights of a held net, by a key of their own; the same on every device."""
        spec = self.held.get(name)
        spec = spec if isinstance(spec, Net) else Net()
        with self._building, torch.random.fork_rng(devices=[]):
            torch.manual_seed(key)
            module = self._build(spec)
        return State.of(module).to(self.device)

    def initial(self, name: str = "model") -> State:
        """The run's first weights, rebuilt from the seed."""
        spec = self.held.get(name)
        shared = "model" if isinstance(spec, Net) and spec.make is None else name
        if shared not in self._initial:
            self._initial[shared] = self.fresh(name, self.key("initial", shared))
        return self._initial[shared]

    def layouts(self) -> dict[str, Layout]:
        """The layout of each held net, by which stored tensors are named."""
        return {n: self.fresh(n, 0).layout for n, spec in {"model": Net(), **self.held}.items() if isinstance(spec, Net)}

    def value_shape(self, spec: Value) -> tuple[int, ...]:
        return tuple(self.declared.most_unlabelled if n == "unlabelled" else int(n) for n in spec.shape)

    # -- draws and images ------------------------------------------------------------------------------------------------
    def key(self, *parts: int | str) -> int:
        return draws.key(self.options.seed, *parts)

    def view(self, role: str, images: Tensor, keys: Tensor) -> Tensor:
        """Views of images, made on the device."""
        return self.views(role, images, keys).contiguous(memory_format=torch.channels_last)

    def plain(self, images: Tensor) -> Tensor:
        return self.view("plain", images, torch.zeros(len(images), dtype=torch.int64))

    def blank(self, count: int) -> Tensor:
        """Images, of which only the shape counts."""
        d = self.declared
        return torch.zeros(count, d.channels, d.size, d.size, device=self.device).contiguous(memory_format=torch.channels_last)

    def put(self, values: np.ndarray | Tensor) -> Tensor:
        """Host values on the device, without waiting for it."""
        tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor
