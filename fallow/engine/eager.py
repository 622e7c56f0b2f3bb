"""Runs parties' steps one after another, parties side by side on threads: the reference every faster way must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from fallow import machine
from fallow.engine.feed import Step
from fallow.engine.kit import Kit
from fallow.engine.memory import too_little
from fallow.engine.party import Job, Outcome, run_step, work
from fallow.engine.site import Sites
from fallow.engine.slot import Slot


def over_ranges(kit: Kit, function: Callable[[int, int], Tensor], count: int, size: int) -> Tensor:
    """Concatenated results of `function(start, stop)` over consecutive ranges; on a CPU some at once."""
    workers = kit.sharing if kit.device.type == "cpu" else 1
    return torch.cat(machine.spread(lambda r: function(*r), [(s, min(s + size, count)) for s in range(0, count, size)], workers))


class Eager:
    """Carries out a round's jobs eagerly. On CPU as many at once as there are slots; on CUDA one by one."""

    def __init__(self, sites: Sites):
        self.sites, self.kit = sites, sites.kit
        wanted = self.kit.options.slots
        most = machine.cores() if self.kit.device.type == "cpu" else 1
        self.workers = most if wanted == "auto" else min(int(wanted), most)
        self.kit.sharing = self.workers
        self._free: SimpleQueue[Slot] = SimpleQueue()  # the pool may have more threads than there are slots
        self._made = 0
        self._stop = False

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        while self._made < min(self.workers, len(jobs)):
            self._free.put(Slot(self.kit))
            self._made += 1
        self._stop = False
        try:
            return machine.spread(self._one, jobs, self.workers)
        except BaseException:
            self._stop = True
            raise

    def _one(self, job: Job) -> Outcome:
        slot = self._free.get()
        try:
            steps = work(self.sites.site(job.party), slot, job)
            while True:
                try:
                    step = next(steps)
                except StopIteration as end:
                    return end.value
                if not isinstance(step, Step):
                    step.synchronize()
                    continue
                try:
                    self.make(slot, step)
                except Exception as e:
                    steps.throw(e)
                if self._stop:
                    raise InterruptedError
        finally:
            self._free.put(slot)

    def make(self, slot: Slot, step: Step) -> None:
        run_step(slot, step)

    def shrink(self) -> None:
        raise too_little()
