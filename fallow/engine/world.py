"""What a run stands on: the data on the device, the federation, the model, the method and the settings."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fallow import draws, models
from fallow.config import Config
from fallow.data.federate import Federation
from fallow.data.sources import Source
from fallow.data.views import Views, normalisation
from fallow.engine.memory import out_of_memory, too_little
from fallow.engine.nets import NetHandle, head_of
from fallow.engine.schedule import Schedule
from fallow.errors import UserError
from fallow.methods.base import AnyMethod, Net, Value
from fallow.methods.state import Layout, State

NORM_MEANS = {"bn-batch": "batch", "sbn": "static"}


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index) or str(device) != name:
        raise UserError(f"device={name!r} cannot be used", "use cpu, cuda, cuda:N or auto")
    if device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1:
        device = torch.device("cuda")  # each process of this machine has its own (ranks.py)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={name} was asked for, but torch sees no CUDA device", "use device=cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"there is no device {name}", f"torch sees {torch.cuda.device_count()}, the first is cuda:0")
    return device


def reuse_memory() -> None:
    """Large tensors' memory is kept for the next ones: glibc would give it back and pay for its pages anew each time.

    A CPU step on large batches takes 0.6 times as long (bench of batches of 1219 CIFAR images); elsewhere it does nothing.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mmap_threshold, trim_threshold, arena_max = -3, -1, -8
    mallopt(mmap_threshold, 2**30)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(arena_max, 1)  # threads' own arenas are too small for such tensors


class World:
    """Read-only for everyone but for `finished` and `sharing`; the engine's parties, slots and server all look at this."""

    def __init__(self, options: Config, method: AnyMethod, source: Source, federation: Federation):
        self.options, self.method, self.source, self.federation = options, method, source, federation
        self.device = device_of(options.device)
        Schedule.parse(options.schedule)  # complains now, not in the first round
        self.classes = len(source.classes)
        self.statistics = NORM_MEANS.get(options.norm or "", options.statistics)
        a = options.augment
        mean, std = normalisation(options.image.normalise, source.name, source.channels)
        self.views = Views(
            size=source.size,
            channels=source.channels,
            mean=mean,
            std=std,
            flip=source.flip if a.flip == "auto" else a.flip == "always",
            labelled=a.labelled,
            weak=a.weak,
            strong=a.strong,
            cutout=None if a.cutout == "none" else a.cutout,
        )
        self.held: dict[str, Net | Value] = method.holds()
        self.precision = options.precision
        if self.precision == "auto":
            self.precision = "bf16" if self.device.type == "cuda" else "fp32"
        self.sharing = 1  # parties that share the memory for views
        self.finished = 0  # clients that have ended in this round, for who watches
        self._initial: dict[str, State] = {}
        self._building = threading.Lock()  # torch's generator, which modules are initialised from, is one for all threads
        self._set_up_device()
        self._put_data(source)

    def _set_up_device(self) -> None:
        torch.set_num_threads(1)  # other thread counts give other gradients; parties run side by side instead
        if self.device.type == "cpu":
            reuse_memory()
        if self.device.type == "cuda":
            if self.device.index is not None:
                torch.cuda.set_device(self.device)  # streams, graphs and free memory are asked of the current one
            torch.backends.cudnn.benchmark = False
            tf32 = self.precision != "fp32"  # bf16: what stays in float32 (FedDure's regulators) may use it too
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        torch.use_deterministic_algorithms(self.options.deterministic and self.device.type == "cuda")

    def _put_data(self, source: Source) -> None:
        self.labels = source.train.labels.numpy()
        if source.later is not None:  # only settings are to be checked
            return
        try:
            self.images, self.truth = source.train.images.to(self.device), source.train.labels.to(self.device)
            self.test_images, self.test_labels = source.test.images.to(self.device), source.test.labels.to(self.device)
        except RuntimeError as e:
            if not out_of_memory(e):
                raise
            size = (source.train.images.nbytes + source.test.images.nbytes) / 2**30
            raise too_little(f" already with the images, {size:.1f} GiB", "make them smaller (image.size)") from None

    # -- nets ------------------------------------------------------------------------------------------------------------
    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def _build(self, spec: Net) -> nn.Module:
        if spec.make is not None:
            return spec.make(self.classes, model=self._build(Net())) if spec.fits else spec.make(self.classes)
        o = self.options
        return models.build(o.model, self.classes, self.source.channels, norm=o.norm, size=self.source.size)

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
        net = NetHandle(module, self.device, self.statistics, self.autocast if half else None)
        o = self.options
        net.capture, net.compile = o.capture, o.compile and spec.autocast  # without autocast: differentiated twice
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
        return tuple(self.federation.most_unlabelled if n == "unlabelled" else int(n) for n in spec.shape)

    # -- draws and images ------------------------------------------------------------------------------------------------
    def key(self, *parts: int | str) -> int:
        return draws.key(self.options.seed, *parts)

    def view(self, role: str, rows: np.ndarray, keys: Tensor) -> Tensor:
        """Views of training images, made on the device."""
        return self.normal(self.views(role, self.images.index_select(0, self.put(rows)), keys))

    def put(self, values: np.ndarray | Tensor) -> Tensor:
        """Host values on the device, without waiting for it."""
        tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def normal(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)

    def test_batch(self, start: int, stop: int) -> Tensor:
        images = self.test_images[start:stop]
        return self.normal(self.views("plain", images, torch.zeros(len(images), dtype=torch.int64)))
