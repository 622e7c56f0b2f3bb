"""How fast this machine trains a model: one measured step, kept in the user's cache."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fallow import disk, models
from fallow.data.views import Views
from fallow.errors import UserError
from fallow.machine import cores, device_of
from fallow.paths import user_path

BATCHES = {"cpu": (4, 32), "cuda": (256, 256)}  # images; on CUDA as many as the slots of a round have together
LONGEST = 1e6  # seconds that an image can be said to take
SLOW = 0.25  # seconds of a step after which no larger batch is tried
SLOTS = 1.5  # a step of a round's slots against one step on all their images (results/bench/engine-h200.json: 0.8 to 2)


@dataclass(frozen=True)
class Speed:
    """Seconds per image on the whole machine: a training step, views included, and inference."""

    train: float
    infer: float


def speed(model: str, channels: int, size: int, device: str = "auto") -> Speed:
    """What was measured here before, or a measurement; norm and number of classes matter little."""
    where = device_of(device)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else f"cpu x{cores()}"
    key = f"{name}, torch {torch.__version__}: {model} {channels}x{size}x{size}"
    known = _read()
    if key not in known:
        measured = _measured(model, channels, size, where)
        known = _read() | {key: [measured.train, measured.infer]}
        _write(known)
    return Speed(*known[key])


def _measured(model: str, channels: int, size: int, device: torch.device) -> Speed:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a run, where parties run side by side
    try:
        with torch.random.fork_rng(devices=[]):
            net = models.build(model, 10, channels, size=size).to(device)
        optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
        views = Views(size=size, channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels, flip=True)

        def view(count: int) -> None:
            images = torch.zeros(count, channels, size, size, dtype=torch.uint8, device=device)
            views("strong", images, torch.arange(count))

        def train(count: int) -> None:
            optimizer.zero_grad()
            x = torch.zeros(count, channels, size, size, device=device)
            F.cross_entropy(net(x), torch.zeros(count, dtype=torch.int64, device=device)).backward()
            optimizer.step()

        @torch.no_grad()
        def infer(count: int) -> None:
            net(torch.zeros(count, channels, size, size, device=device))

        share, batches = SLOTS if device.type == "cuda" else 1 / cores(), BATCHES[device.type]
        made = _seconds(view, (256, 256), device)  # views are made ahead, of many steps at a time
        return Speed(share * (made + _seconds(train, batches, device)), share * _seconds(infer, batches, device))
    finally:
        torch.set_num_threads(before)


def _seconds(call: Callable[[int], None], batches: tuple[int, ...], device: torch.device) -> float:
    """Per image, of the last batch that was tried; the first is also there to warm up."""
    taken, count = 0.0, 1
    for batch in batches:
        if taken > SLOW:
            break
        start = time.perf_counter()
        call(batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken, count = time.perf_counter() - start, batch
    return taken / count


def _file() -> Path:
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fallow" / "speed.json"


def _read() -> dict[str, list[float]]:
    try:
        found = json.loads(disk.read(_file()))
    except (UserError, ValueError, RecursionError):
        return {}
    return {key: pair for key, pair in found.items() if _is_pair(pair)} if isinstance(found, dict) else {}


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(n, float) and 0 < n < LONGEST for n in value)


def _write(known: dict[str, list[float]]) -> None:
    """A cache that cannot be written is no error: it is measured again."""
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        disk.write(_file(), json.dumps(known, indent=1))
    except Exception:
        return
