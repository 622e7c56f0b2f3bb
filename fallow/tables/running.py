"""Runs a table, cell by cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fallow.data import sources
from fallow.data.official import official
from fallow.errors import UserError
from fallow.runs.jobs import Job
from fallow.runs.room import Room
from fallow.runs.runner import Event, Runner
from fallow.runs.settings import resolve
from fallow.runs.settled import Settled
from fallow.runs.workers import Hands, Here, Workers
from fallow.tables.grids import Entry, Grids
from fallow.trees import merge

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Failure:
    entry: Entry
    seed: int
    why: str


def run(
    grids: Grids, out: Path, seeds: int | None = None, jobs: int = 1, tell: Tell = print, download: bool = False
) -> list[Failure]:
    """Runs what is not finished; a run that was cut goes on, one that fails is told and the others go on."""
    todo, made, failures = planned(grids, out, seeds, tell, Settled(download))
    apart = jobs > 1
    hands: Hands = Workers(grids.folder(out) / "logs") if apart else Here()
    runner = Runner(todo, jobs, Room(), hands, lambda event: _say(event, made, tell))
    return failures + [Failure(*made[failure.job.name], failure.why) for failure in runner.go()]


def planned(grids: Grids, out: Path, seeds: int | None, tell: Tell, settled: Settled) -> tuple[list[Job], dict[str, tuple[Entry, int]], list[Failure]]:
    """All runs of the table, whose they are by name, and those that cannot be run, which is told."""
    count = grids.grid.seeds if seeds is None else seeds
    made: dict[str, tuple[Entry, int]] = {}
    todo, failures, there = [], [], _Data(grids, settled.download, tell)
    for entry in grids.entries if grids.is_own else ():
        there.has(entry)  # a mistake in a name ends the table before it begins
    for seed in range(count):  # one seed everywhere first
        for entry in grids.entries:
            if entry.missing:
                continue
            try:
                if grids.is_own and not there.has(entry):  # of which the settings take what suits them
                    failures.append(Failure(entry, seed, "no data"))
                    continue
                job = _job(grids, entry, seed, out, settled)
                if job.folder.concluded() != "finished" and not there.has(entry):
                    failures.append(Failure(entry, seed, "no data"))
                    continue
            except UserError as e:
                tell(f"{entry.name}, seed {seed}: failed: {e}")
                failures.append(Failure(entry, seed, str(e)))
                continue
            todo.append(job)
            made[job.name] = (entry, seed)
    return todo, made, failures


class _Data:
    """Whether an entry's data set can be read; where it cannot, that is told once."""

    def __init__(self, grids: Grids, download: bool, tell: Tell):
        self.grids, self.download, self.tell = grids, download, tell
        self.known: dict[tuple[str, str | None], bool] = {}

    def has(self, entry: Entry) -> bool:
        o = resolve(entry.keys, self.grids.given, self.grids.trust)[1]
        name = (o.data, o.data_dir)
        if name not in self.known:
            try:
                sources.opened(o.data, o.data_dir, self.download, layout=o.layout, skip_bad=o.skip_bad)
            except UserError as e:
                if official(o.data) is None:  # a mistake, not a set that this machine has not
                    raise UserError(f"{entry.name}: {e.cause}", e.remedy) from None
                self.tell(f"{e} Its runs are left out.")
                self.known[name] = False
            else:
                self.known[name] = True
        return self.known[name]


def _job(grids: Grids, entry: Entry, seed: int, out: Path, settled: Settled) -> Job:
    keys = merge(grids.given, {"seed": seed})
    path = out / entry.folder / f"seed-{seed}"
    expected = settled.settings(entry.keys, keys, grids.trust).model_dump(mode="json") if grids.is_own else grids.expected(entry, seed)
    return Job(str(path.relative_to(out)), path, entry.keys, keys, expected, {"trust": True} if grids.trust else {})


def _say(event: Event, made: dict[str, tuple[Entry, int]], tell: Tell) -> None:
    if event.job is None or event.what in ("started", "goes on"):
        return
    entry, seed = made[event.job.name]
    words = {
        "was finished": f"{event.said} (was finished)",
        "finished": f"{event.said} in {event.seconds:.0f} s{' (resumed)' if event.begun else ''}",
        "failed": f"failed: {event.said}",
        "cut": f"was cut ({event.said}); it will go on",
        "waits": "another process runs it, which is waited for",
    }
    tell(f"{entry.name}, seed {seed}: {words[event.what]}")
