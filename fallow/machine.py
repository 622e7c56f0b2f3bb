"""The machine: which device, how many cores, how its memory and its threads are used."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch

from fallow import launched
from fallow.errors import UserError

Item = TypeVar("Item")


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is not None and device.type == "mps":
        raise UserError("Apple's GPU has no 64-bit floats, and Fallow takes its averages and its metrics in them", "use device=cpu")
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index) or str(device) != name:
        raise UserError(f"device={name!r} cannot be used", "use cpu, cuda, cuda:N or auto")
    if device.type == "cuda" and launched.of_this_machine() > 1:
        device = torch.device("cuda")  # each process of this machine has its own (ranks.py)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={name} was asked for, but torch sees no CUDA device", "use device=cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"there is no device {name}", f"torch sees {torch.cuda.device_count()}, the first is cuda:0")
    return device


def set_up(device: torch.device, precision: str, deterministic: bool) -> None:
    """Has this process compute as a run does."""
    torch.set_num_threads(1)  # other thread counts give other gradients; parties run side by side instead
    if device.type == "cpu":
        reuse_memory()
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)  # streams, graphs and free memory are asked of the current one
        torch.backends.cudnn.benchmark = False
        tf32 = precision != "fp32"  # bf16: what stays in float32 (FedDure's regulators) may use it too
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.use_deterministic_algorithms(deterministic and device.type == "cuda")


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


def cores() -> int:
    """Cores of this machine for this process, which may share it with other ranks."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, here // launched.of_this_machine())


@cache
def pool() -> ThreadPoolExecutor:
    """One pool of threads for the process; it outlives a run."""
    return ThreadPoolExecutor(cores(), thread_name_prefix="fallow")


def spread(function: Callable[[Item], Any], items: Iterable[Item], workers: int) -> list[Any]:
    """Maps over items on the pool's threads (results in order), or plainly if one worker is enough."""
    items = list(items)
    if workers <= 1 or len(items) <= 1:
        return [function(i) for i in items]
    futures = [pool().submit(function, i) for i in items]
    try:
        return [f.result() for f in futures]
    except BaseException:
        for f in futures:
            f.cancel()
        raise
