"""Makes runs, several at a time where there is room: skips what is finished, goes on with what was cut, survives failures.

There is no state but the run folders: after a kill at any moment the same runner goes on from the last checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from fallow import disk
from fallow.errors import UserError
from fallow.runs.jobs import Job, came_to, state
from fallow.runs.room import Going
from fallow.runs.workers import PATIENCE, POLL, Hands, Work

TRIES = 3


class Fits(Protocol):
    def fits(self, going: Sequence[Going]) -> bool: ...


@dataclass(frozen=True)
class Event:
    """What happens: to a job, unless `what` is how it stands."""

    what: str  # was finished, started, goes on, finished, failed, cut, waits, stands, fewer
    job: Job | None = None
    said: str = ""
    round: int = 0
    seconds: float = 0.0
    begun: bool = False


@dataclass(frozen=True)
class Failure:
    job: Job
    why: str


Tell = Callable[[Event], Any]


class TimeOver(Exception):
    """The runner was given so much time and no more."""


class Runner:
    """Starts what is waiting, as memory allows, until all is done."""

    def __init__(self, jobs: Sequence[Job], at_once: int, room: Fits, hands: Hands, tell: Tell, limit: float = float("inf")):
        self.jobs, self.at_once, self.room, self.hands, self.tell = list(jobs), at_once, room, hands, tell
        self.ends = time.monotonic() + limit
        self.waiting: list[Job] = []
        self.running: list[Work] = []
        self.done: list[Job] = []
        self.failed: list[Failure] = []
        self._mine: dict[str, ExitStack] = {}
        self._held: set[str] = set()

    def go(self) -> list[Failure]:
        """What failed; an interrupt has all runs write a checkpoint first, and is raised again."""
        self.waiting = list(self.jobs)
        try:
            while self.waiting or self.running:
                if time.monotonic() > self.ends:
                    raise TimeOver
                for work in list(self.running):
                    if (ended := work.poll()) is not None:
                        self._ended(work, ended.code, ended.said)
                while len(self.running) < self.at_once and self.waiting and self.room.fits(self.running) and self._start():
                    pass
                self.tell(Event("stands"))
                if self.running or self.waiting:
                    time.sleep(self.hands.pause if self.running else POLL)
        except BaseException:
            self._stop()
            raise
        finally:
            for mine in self._mine.values():
                mine.close()
            self.hands.rest()
        return self.failed

    def _start(self) -> bool:
        """Takes up the first that nobody else holds; whether there was one."""
        for job in list(self.waiting):
            try:
                how = state(job) if self._claim(job) else "held"
            except UserError as e:
                self._fail(job, str(e))
                return True
            if how == "held":
                self._release(job)
                if job.name not in self._held:
                    self._held.add(job.name)
                    self.tell(Event("waits", job))
                continue
            self.waiting.remove(job)
            if how == "done":
                self._release(job)
                self.done.append(job)
                self.tell(Event("was finished", job, came_to(job.folder)))
                return True
            job.tries += 1
            begun = how == "begun"
            self.tell(Event("goes on" if begun else "started", job, round=job.folder.committed(), begun=begun))
            self.running.append(self.hands.take(job, begun))
            return True
        return False

    def _claim(self, job: Job) -> bool:
        """Whether no other runner is at it."""
        with disk.errors_as_user_errors(job.path):
            job.path.parent.mkdir(parents=True, exist_ok=True)
        mine = self._mine[job.name] = ExitStack()
        return mine.enter_context(disk.only_one(job.path))

    def _release(self, job: Job) -> None:
        self._mine.pop(job.name).close()

    def _ended(self, work: Work, code: int, said: str) -> None:
        self.running.remove(work)
        self._release(work.job)
        job, seconds = work.job, time.monotonic() - work.started
        if code == 0 and job.folder.concluded() == "finished":
            self.done.append(job)
            self.tell(Event("finished", job, came_to(job.folder), seconds=seconds, begun=work.begun))
            return
        said = said or f"exit code {code}"
        memory = "memory" in said
        if job.folder.committed() > work.before:
            job.tries = 1
        if (code == 2 and not memory and "another process" not in said) or job.tries >= TRIES:
            self._fail(job, said)
            return
        if memory and self.running:
            self.at_once = max(1, len(self.running))
            self.tell(Event("fewer", said=str(self.at_once)))
        self.tell(Event("cut", job, said))
        self.waiting.append(job)

    def _fail(self, job: Job, why: str) -> None:
        if job in self.waiting:
            self.waiting.remove(job)
        if job.name in self._mine:
            self._release(job)
        self.failed.append(Failure(job, why))
        self.tell(Event("failed", job, why))

    def _stop(self) -> None:
        """Interrupts all runs, so that they write a checkpoint; those that do not end are killed, at once if one insists."""
        patience = time.monotonic() + PATIENCE
        for work in self.running:
            work.interrupt()
        for work in self.running:
            try:
                work.end(max(0.0, patience - time.monotonic()))
            except BaseException:
                patience = 0.0
                work.end(0.0)
