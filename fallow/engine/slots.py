"""Runs parties side by side on a CUDA device: a stream per slot, steps captured once and replayed.

A slot's step is a graph per (step function, batch signature), captured at its third use; one-off sizes run eagerly
with the same function, and a client whose sizes are its own goes back to a slot that has their graphs. Slots are driven
step-major, and a slot whose party is done takes the next one; parties are let in one after the other, so that the
device works for the first while the host prepares the next. Nothing a party computes depends on its slot, so the
result equals eager.py's.
"""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fallow.engine.feed import Step
from fallow.engine.kit import Kit
from fallow.engine.memory import out_of_memory, too_little
from fallow.engine.party import Job, Outcome, run_step, work
from fallow.engine.replay import CAPTURE_AT, Pool, complain
from fallow.engine.site import Sites
from fallow.engine.slot import Slot
from fallow.errors import first_line

log = logging.getLogger(__name__)

MOST_GRAPHS = 480  # kept in all slots together, but LEAST_GRAPHS in each: 96 with five slots
LEAST_GRAPHS = 24
MOST_SLOTS = 32
AHEAD = 8  # steps of the parties at work for each party that is let in: preparing one takes the host that long
PLENTY = 1000  # images in these steps at most: larger ones keep the device busy longer, and many would fill a stream's queue


@dataclass
class Graph:
    """A captured step, its input buffers, and which of them it reads."""

    graph: torch.cuda.CUDAGraph
    step: Step
    read: list[tuple[str, str]]
    descends: bool = True  # whether it trains a net

    def replay(self, step: Step) -> None:
        sources = [step.tensors[k] for k in self.read] + [step.numbers[k] for k in self.step.numbers]
        targets = [self.step.tensors[k] for k in self.read] + [self.step.numbers[k] for k in self.step.numbers]
        for kind in {t.dtype for t in targets}:
            chosen = [i for i, t in enumerate(targets) if t.dtype == kind]
            torch._foreach_copy_([targets[i] for i in chosen], [sources[i] for i in chosen])
        self.graph.replay()


class CapturedSlot:
    """A slot with a stream of its own and its graphs, which share one memory pool since they never run at once."""

    def __init__(self, kit: Kit, stream: torch.cuda.Stream, capture: bool = True):
        self.stream = stream
        self.slot = Slot(kit)
        self.capture = capture
        self.graphs: OrderedDict[Any, Graph] = OrderedDict()
        self.uses: dict[Any, int] = {}
        self.pool = self.slot.pool = Pool()

    def make(self, step: Step) -> None:
        signature = step.signature()
        if signature in self.graphs:
            self.graphs.move_to_end(signature)
            self._replay(signature, step)
            return
        uses = self.uses[signature] = self.uses.get(signature, 0) + 1
        if not self.capture or uses < CAPTURE_AT:
            run_step(self.slot, step)
            return
        try:
            self.graphs[signature] = self._captured(step)
        except RuntimeError as e:
            if out_of_memory(e):
                raise
            self.capture = False
            complain("a step", first_line(e))
            run_step(self.slot, step)
            return
        while len(self.graphs) > max(LEAST_GRAPHS, MOST_GRAPHS // self.slot.kit.sharing):
            gone, _ = self.graphs.popitem(last=False)
            del self.uses[gone]
        self._replay(signature, step)

    def _replay(self, signature: Any, step: Step) -> None:
        self.graphs[signature].replay(step)
        self.slot.descended |= self.graphs[signature].descends
        self._weights_moved()

    def _weights_moved(self) -> None:
        for net in self.slot.nets.values():
            net.touched()

    def _captured(self, step: Step) -> Graph:
        """Captures a step on copies of its inputs; nothing is executed, so nothing the slot holds changes."""
        own = Step(
            step.function,
            {k: t.clone(memory_format=torch.preserve_format) for k, t in step.tensors.items()},
            step.absent,
            {k: t.clone() for k, t in step.numbers.items()},
        )
        graph, before, self.slot.descended = torch.cuda.CUDAGraph(), self.slot.descended, False
        try:
            with self.pool.capturing(graph):
                run_step(self.slot, own)
            return Graph(graph, own, own.read(), self.slot.descended)
        finally:
            self.slot.descended = before
            for net in self.slot.nets.values():
                net.calls.clear()


@dataclass
class Working:
    """A party at work in a slot."""

    position: int
    party: int
    slot: CapturedSlot
    steps: Generator[Any, None, Outcome]
    waiting: torch.cuda.Event | None = None
    images: int = 0  # of its last step


def steps_before_next_party(images: int) -> int:
    """How many steps, if of so many images, parties make before the next one is let in."""
    return min(AHEAD, max(1, PLENTY // max(1, images)))


class Slots:
    """Carries out a round's jobs in slots on one CUDA device."""

    def __init__(self, sites: Sites):
        self.sites, self.kit = sites, sites.kit
        self.limit = MOST_SLOTS if self.kit.options.slots == "auto" else int(self.kit.options.slots)
        self.slots: list[CapturedSlot] = []
        self.streams: list[torch.cuda.Stream] = []  # outlive their slots: cuBLAS keeps work memory for each it has seen
        self.begins: dict[int, Any] = {}  # the signature of each party's first step; equal ones are one object
        self._signatures: dict[Any, Any] = {}
        self._most = 0  # slots there were, with one that was about to be
        self._taken = 0  # bytes torch has reserved while slots worked
        complain.cache_clear()

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        finished = self.kit.finished
        while True:
            try:
                return self._run(jobs)
            except RuntimeError as e:
                if not out_of_memory(e):
                    raise
            self.shrink()  # outside of `except`: the error's traceback holds on to what is to be freed
            self.kit.finished = finished  # all begin again

    def shrink(self) -> None:
        """Memory is short: no slot is left, and there will be half as many."""
        had, self._most, self._taken = self._most, 0, 0
        torch.cuda.synchronize()
        self.slots.clear()
        gc.collect()
        torch.cuda.empty_cache()
        if had <= 1:
            raise too_little(" with a single slot" * had)
        self.limit = had // 2
        log.warning("the device is out of memory with %d slots; going on with %d", had, self.limit)

    def _run(self, jobs: Sequence[Job]) -> list[Outcome]:
        queue: deque[tuple[int, Job]] = deque(enumerate(jobs))
        outcomes: dict[int, Outcome] = {}
        main, before = torch.cuda.current_stream(), torch.cuda.memory_reserved()
        self.kit.sharing = max(1, min(self.limit, len(jobs)))
        free = deque(self.slots)  # the one that has been free for longest comes next: a busier one's stream may have work left
        for slot in self.slots:
            slot.stream.wait_stream(main)
        working: list[Working] = []
        while queue or working:
            if queue and self._another(len(jobs), before):
                free.appendleft(self.slots[-1])
            if queue and free:
                position, job = queue.popleft()
                slot = next((s for s in free if self.begins.get(job.party) in s.graphs), free[0])
                free.remove(slot)
                working.append(Working(position, job.party, slot, work(self.sites.site(job.party), slot.slot, job)))
            more = queue and (free or len(self.slots) < min(self.limit, len(jobs)))
            turns = 0
            while turns < (steps_before_next_party(max(w.images for w in working)) if more and working else 1):
                turns += 1
                for w in list(working):
                    with torch.cuda.stream(w.slot.stream):
                        outcome = self._advance(w)
                    if outcome is not None:
                        outcomes[w.position] = outcome
                        working.remove(w)
                        free.append(w.slot)
        for slot in self.slots:
            main.wait_stream(slot.stream)
        self._taken += torch.cuda.memory_reserved() - before
        return [outcomes[k] for k in range(len(jobs))]

    def _another(self, wanted: int, before: int) -> bool:
        """Makes a slot, if memory has room for it; those that have made steps show what one takes."""
        if len(self.slots) >= min(self.limit, wanted):
            return False
        if self.slots and not (any(s.uses for s in self.slots) and self._room(before)):
            return False
        self._most = len(self.slots) + 1
        if len(self.streams) == len(self.slots):
            self.streams.append(torch.cuda.Stream())
        self.slots.append(CapturedSlot(self.kit, self.streams[len(self.slots)], self.kit.method.captured))
        self.slots[-1].stream.wait_stream(torch.cuda.current_stream())
        return True

    def _room(self, before: int) -> bool:
        """Whether another slot is likely to fit: twice what each has reserved so far, since some have not captured yet."""
        free, total = torch.cuda.mem_get_info()
        each = (self._taken + torch.cuda.memory_reserved() - before) / len(self.slots)
        return free > 2 * each and free > 0.05 * total

    def _advance(self, w: Working) -> Outcome | None:
        """One step of a party, if it need not wait; what its work came to, when it is done."""
        if w.waiting is not None:
            if not w.waiting.query():
                return None
            w.waiting = None
        try:
            item = next(w.steps)
        except StopIteration as end:
            return end.value
        if isinstance(item, Step):
            if w.party not in self.begins:
                signature = item.signature()
                self.begins[w.party] = self._signatures.setdefault(signature, signature)
            try:
                w.slot.make(item)
            except Exception as e:
                w.steps.throw(e)
            w.images = item.images
        else:
            w.waiting = item
        return None
