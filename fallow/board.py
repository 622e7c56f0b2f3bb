"""How many runs go, on one display: a bar for all of them and one for each that is being made; lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from fallow.durations import format_duration
from fallow.runs.jobs import Job, measured, outlook, time_left
from fallow.runs.runner import Event, Runner
from fallow.said import Speaker

TOLD = 60.0  # seconds between two lines on how it stands
FRESH = 5.0  # seconds that an estimate on the display stays


class Board:
    """Told by a runner what happens."""

    def __init__(self, console: Speaker, quiet: bool = False, named: Callable[[Job], str] = lambda job: job.name):
        self.console, self.quiet, self.named = console, quiet, named
        self.runner: Runner | None = None
        self.ended = 0
        self._rows: dict[str, TaskID] = {}
        self._told = self._guessed = time.monotonic()
        self._all: TaskID | None = None
        self._bar = Progress(
            TextColumn("{task.fields[name]}", table_column=Column(overflow="ellipsis", no_wrap=True, ratio=1)),
            BarColumn(bar_width=10),
            TextColumn("{task.completed:.0f}/{task.total:.0f}", table_column=Column(no_wrap=True, min_width=7)),
            TextColumn("{task.fields[words]}", table_column=Column(no_wrap=True, min_width=18)),
            console=console,
            transient=True,
            expand=True,
            disable=quiet or not console.is_terminal,
        )

    def watch(self, runner: Runner) -> None:
        self.runner = runner
        self._all = self._bar.add_task("", total=len(runner.jobs), name="all runs", words="")

    def __enter__(self) -> Board:
        self._bar.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._bar.__exit__(kind, error, trace)
        if kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit):
            self.console.say(f"stopped with {self.ended} of {self._count} runs at their end; the same command goes on from the last checkpoints")

    @property
    def _count(self) -> int:
        return len(self.runner.jobs) if self.runner else 0

    def __call__(self, event: Event) -> None:
        if event.what == "stands":
            self._stand()
            return
        job = event.job
        if job is not None and event.what in ("started", "goes on"):
            self._rows[job.name] = self._bar.add_task("", total=job.rounds, completed=event.round, name=self.named(job), words="")
        elif job is not None and (row := self._rows.pop(job.name, None)) is not None:
            self._bar.remove_task(row)
        if event.what in ("finished", "was finished", "failed"):
            self.ended += 1
        if self._all is not None:
            self._bar.update(self._all, completed=self.ended)
            if self.ended == self._count:
                self._bar.update(self._all, words="")
        if not self.quiet and (text := self._text(event)):
            self.console.say(text)

    def _text(self, event: Event) -> str:
        if event.job is None:
            return f"memory ran out: {event.said} at a time from now on" if event.what == "fewer" else ""
        words = {
            "was finished": f"{event.said} (was finished, {event.job.path})",
            "finished": f"{event.said} after {format_duration(event.seconds)}{' (went on)' if event.begun else ''}",
            "goes on": f"goes on from round {event.round}",
            "started": "" if self.console.is_terminal else "started",
            "failed": f"failed: {event.said}",
            "cut": f"was cut ({event.said}); it will go on",
            "waits": "another process is at it, which is waited for",
        }[event.what]
        return f"{self.named(event.job)}: {words}" if words else ""

    def _stand(self) -> None:
        """Rounds of what runs, every time; what is left, now and then."""
        if self.runner is None or self.quiet:
            return
        now = time.monotonic()
        if self.console.is_terminal:
            for work in self.runner.running:
                rounds, last = work.tail.read(), work.tail.last.get("accuracy")
                words = "" if last is None else f"accuracy {100 * last:5.2f} %"
                self._bar.update(self._rows[work.job.name], completed=rounds, words=words)
            if now - self._guessed > FRESH and self._all is not None:
                self._guessed = now
                jobs = self._jobs()
                left = time_left(jobs, measured(jobs), self.runner.at_once)
                self._bar.update(self._all, words=f"about {format_duration(left)}" if left else "")
        elif now - self._told > TOLD:
            self._told = now
            waiting = f"{len(self.runner.running)} running, {len(self.runner.waiting)} waiting"
            self.console.say(": ".join(filter(None, [waiting, self._left()])))

    def _jobs(self) -> list[Job]:
        assert self.runner is not None
        return [work.job for work in self.runner.running] + self.runner.waiting

    def _left(self) -> str:
        assert self.runner is not None
        jobs = self._jobs()
        known = measured(jobs)
        return outlook(jobs, known, self.runner.at_once) if known else ""
