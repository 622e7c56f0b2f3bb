"""Runs parties' steps one after another, parties side by side on threads: the reference every faster way must equal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from fallow.engine.feed import Step
from fallow.engine.memory import too_little
from fallow.engine.party import Job, Outcome, run_step, work
from fallow.engine.slot import Slot
from fallow.engine.world import World

_pool: ThreadPoolExecutor | None = None


def pool() -> ThreadPoolExecutor:
    """One pool of threads for the process; it outlives a run."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(cores(), thread_name_prefix="fallow")
    return _pool


def cores() -> int:
    """Cores of this machine for this process, which may share it with other ranks."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, here // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def spread(function: Callable[[Any], Any], items: Iterable[Any], workers: int) -> list[Any]:
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


def over_ranges(world: World, function: Callable[[int, int], Tensor], count: int, size: int) -> Tensor:
    """Concatenated results of `function(start, stop)` over consecutive ranges; on a CPU some at once."""
    workers = world.sharing if world.device.type == "cpu" else 1
    return torch.cat(spread(lambda r: function(*r), [(s, min(s + size, count)) for s in range(0, count, size)], workers))


class Eager:
    """Carries out a round's jobs eagerly. On CPU as many at once as there are slots; on CUDA one by one."""

    def __init__(self, world: World):
        self.world = world
        wanted = world.options.slots
        most = cores() if world.device.type == "cpu" else 1
        self.workers = most if wanted == "auto" else min(int(wanted), most)
        world.sharing = self.workers
        self._free: SimpleQueue[Slot] = SimpleQueue()  # the pool may have more threads than there are slots
        self._made = 0
        self._stop = False

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        while self._made < min(self.workers, len(jobs)):
            self._free.put(Slot(self.world))
            self._made += 1
        self._stop = False
        try:
            return spread(self._one, jobs, self.workers)
        except BaseException:
            self._stop = True
            raise

    def _one(self, job: Job) -> Outcome:
        slot = self._free.get()
        try:
            steps = work(self.world, slot, job)
            while True:
                try:
                    step = next(steps)
                except StopIteration as end:
                    return end.value
                if isinstance(step, Step):
                    self.make(slot, step)
                else:
                    step.synchronize()
                if self._stop:
                    raise InterruptedError
        finally:
            self._free.put(slot)

    def make(self, slot: Slot, step: Step) -> None:
        run_step(slot, step)

    def shrink(self) -> None:
        raise too_little()
