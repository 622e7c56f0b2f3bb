"""Runs cells beside each other, as many as memory allows, goes on with what was cut, and keeps each result at once.

    python -m bench.queue JOBS.yaml [--jobs 6] [--limit 1200] [--out DIR] [--collect DIR] [--set key=value ...] [--dry]

    out: runs            # whole runs: DIR/PAPER/TABLE/CELL/seed-N, or DIR/NAME/seed-N
    collect: results     # finished ones, thinned, in the same layout; leave it out for none
    jobs: 6              # at a time at most
    free_gib: 24         # of the GPU's memory (without a GPU: the machine's) before one more is started
    settle: 90           # seconds after which a start counts as settled if it has not made two rounds before
    set: [checkpoint_every=25]
    cells:
      - feddb/table1 'setting=cifar10 iid'                               # what follows `fallow run`; seed 0
      - {run: "feddure/table1 'setting=cifar10 dir,dir'", seeds: [0, 1, 2]}
      - {run: "feddure/table1 'setting=cifar10 dir,dir' statistics=static", reading: static}   # DIR/readings/static/...
      - {run: "method=fixmatch data=digits", name: digits-fixmatch}      # no table's: needs a name, and has the method's paper's defaults

The order is that of the file. There is no state but the run folders: after a kill of the queue or the loss of the
machine the same command goes on from the last checkpoints. Runs end with the queue, and write a checkpoint if they can.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fallow import disk
from fallow.durations import format_duration
from fallow.errors import UserError
from fallow.names import recipes
from fallow.recipes.grid import Grid
from fallow.recipes.reading import recipe
from fallow.runs import jobs as kept
from fallow.runs import room
from fallow.runs.folder import RunFolder
from fallow.runs.jobs import Job, Known, guessed, outlook, per_round
from fallow.runs.runner import Event, Runner, TimeOver
from fallow.runs.settings import differences, resolve
from fallow.runs.workers import Workers
from fallow.tables.grids import Grids
from fallow.tables.thinning import thin
from fallow.trees import parse_pairs, read_yaml

KNOWN = {"out": "runs", "collect": None, "jobs": None, "free_gib": None, "settle": 90, "set": [], "cells": []}
FREE = {"gpu": 24.0, "cpu": 2.0}  # GiB
TOLD = 60  # seconds between two words on how it stands
Tell = Callable[[str], None]


# -- what is to be run -------------------------------------------------------------------------------------------------
@dataclass
class Queue:
    """The file of jobs, read and checked."""

    out: Path
    collect: Path | None
    at_once: int
    free_gib: float
    settle: float
    jobs: list[Job] = field(default_factory=list)

    def kept(self, job: Job) -> Path | None:
        """Where a job's result goes."""
        return self.collect and self.collect / job.name


def load(path: Path, given: dict[str, Any], more: Iterable[str] = ()) -> Queue:
    """The queue of a file; `given` wins over what the file says."""
    said = read_yaml(path)
    if unknown := sorted(set(said) - set(KNOWN)):
        raise UserError(f"{path} has {unknown[0]!r}, which a queue does not know", f"it knows {', '.join(KNOWN)}")
    said = KNOWN | said | {k: v for k, v in given.items() if v is not None}
    if not isinstance(said["cells"], list) or not said["cells"]:
        raise UserError(f"{path} has no cells", "write `cells:` and a list of what follows `fallow run`")
    device = "gpu" if room.free_of_gpu() is not None else "cpu"
    at_once = said["jobs"] or (6 if device == "gpu" else 1)
    free = FREE[device] if said["free_gib"] is None else said["free_gib"]
    if not isinstance(at_once, int) or at_once < 1 or not all(isinstance(n, int | float) for n in (free, said["settle"])):
        raise UserError(f"{path}: jobs={at_once!r} free_gib={free!r} settle={said['settle']!r}", "jobs is a count, the others are numbers")
    queue = Queue(Path(said["out"]), said["collect"] and Path(said["collect"]), at_once, free, said["settle"])
    for cell in said["cells"]:
        queue.jobs += _jobs(queue.out, cell, [*said["set"], *more])
    for number, job in enumerate(queue.jobs):
        if job.name in [other.name for other in queue.jobs[:number]]:
            raise UserError(f"two cells of {path} are {job.name}", "give one of them a `reading`, or leave it out")
    return queue


def _jobs(out: Path, cell: Any, more: list[str]) -> list[Job]:
    cell = {"run": cell} if isinstance(cell, str) else cell
    if not isinstance(cell, dict) or not isinstance(cell.get("run"), str) or set(cell) - {"run", "seeds", "reading", "name"}:
        raise UserError(f"the cell {cell!r} cannot be read", "write what follows `fallow run`, or {run: ..., seeds: [0, 1], reading: NAME}")
    words = shlex.split(cell["run"].removeprefix("fallow run "))
    name, pairs = (None, words) if not words or "=" in words[0] else (words[0], words[1:])
    keys, seeds = parse_pairs([*pairs, *more]), cell.get("seeds", [0])
    if "seed" in keys or not isinstance(seeds, list) or not all(isinstance(s, int) for s in seeds):
        raise UserError(f"the seeds of the cell {cell['run']!r} cannot be read", "write seeds: [0, 1, 2] beside its `run`")
    reading = Path("readings", cell["reading"]) if cell.get("reading") else Path()
    place = reading / (cell.get("name") or _folder(name, keys, cell["run"], reading != Path()))
    return [_job(out, place / f"seed-{seed}", name, keys | {"seed": seed}) for seed in seeds]


def _job(out: Path, place: Path, name: str | None, keys: dict[str, Any]) -> Job:
    keys = keys if name else {"defaults": "paper"} | keys  # what is fitted to data is not known before the run
    options = resolve(recipe(name) if name else {}, keys)[1]
    return Job(str(place), out / place, name, keys, options.model_dump(mode="json"))


def _folder(name: str | None, keys: dict[str, Any], said: str, is_reading: bool) -> Path:
    """Where a table's cell lies; a run of another split than its cell's is a reading of it."""
    grid = Grid.of(recipe(name)) if name else None
    if name is None or grid is None or name not in recipes():
        raise UserError(f"{said!r} is no cell of a table", "give it a `name`, which is its folder's")
    row, found, _ = grid.place(keys)
    table = Grids(*name.split("/"))
    for entry in table.entries:
        if (entry.row, entry.cell) == (row, found):
            options = resolve(recipe(name), keys)[1].model_dump(mode="json")
            if not is_reading and set(differences(options, table.expected(entry, options["seed"]))) & set(grid.by):
                raise UserError(f"{said!r} has another split than its cell", "give it a `reading` or a `name`")
            return entry.folder
    raise UserError(f"{said!r} is no printed entry of its table", "give it a `name`, which is its folder's")


# -- how it stands -----------------------------------------------------------------------------------------------------
def state(queue: Queue, job: Job) -> str:
    """done (also where only its result is left), begun, new, or held: by a process that is no child of ours."""
    result = queue.kept(job)
    if not job.path.exists() and result is not None:
        folder = RunFolder(result)
        same = folder.config.is_file() and not differences(read_yaml(folder.config), job.expected)
        return "done" if same and folder.concluded() == "finished" else "new"
    return kept.state(job)


def keep(queue: Queue, job: Job) -> None:
    """A finished run goes to the results, unless it is there."""
    target = queue.kept(job)
    if target is None or not job.path.exists():
        return
    summary = job.folder.summary.read_text()
    with suppress(OSError, ValueError, AttributeError):
        if json.loads((target / "summary.json").read_text()).items() >= json.loads(summary).items():
            return
    thin(job.path, target)


def estimates(queue: Queue, jobs: Sequence[Job]) -> Known:
    """Seconds that each of these will still take, and what that is known from."""
    out: Known = {}
    unknown = []
    for job in jobs:
        measured = per_round(job, [(queue.collect / job.name).parent] if queue.collect else [])
        if measured is None:
            unknown.append(job)
        else:
            out[job.name] = measured[0] * job.left, measured[1]
    for job, seconds in zip(unknown, guessed([j.expected for j in unknown])):
        if seconds is not None:
            out[job.name] = seconds * job.left / job.rounds, "this machine's speed"
    return out


# -- running -----------------------------------------------------------------------------------------------------------
class Told:
    """Says what happens, keeps what is finished."""

    def __init__(self, queue: Queue, tell: Tell):
        self.queue, self.tell, self.told = queue, tell, time.monotonic()
        self.runner: Runner | None = None

    def __call__(self, event: Event) -> None:
        job = event.job
        if job is None:
            self.tell(f"memory ran out: {event.said} at a time from now on") if event.what == "fewer" else self.stand()
            return
        if event.what in ("was finished", "finished"):
            keep(self.queue, job)
        words = {
            "was finished": "was finished",
            "started": "started",
            "goes on": f"goes on from round {event.round}",
            "finished": f"{event.said} after {format_duration(event.seconds)}",
            "failed": f"failed: {event.said}",
            "cut": f"was cut ({event.said}); it will go on",
            "waits": "another process runs it, which is waited for",
        }
        self.tell(f"{job.name}: {words[event.what]}")

    def stand(self) -> None:
        if self.runner is None or time.monotonic() - self.told < TOLD:
            return
        self.told = time.monotonic()
        jobs = [work.job for work in self.runner.running] + self.runner.waiting
        text = outlook(jobs, kept.measured(jobs), self.queue.at_once)
        self.tell(f"{len(self.runner.running)} running, {len(self.runner.waiting)} waiting: {text}")


def go(queue: Queue, tell: Tell, limit: float = float("inf")) -> list[str]:
    """Makes what is not done; the names of what failed."""
    told = Told(queue, tell)
    todo = []
    for job in queue.jobs:
        if state(queue, job) == "done":
            told(Event("was finished", job))
        else:
            todo.append(job)
    runner = told.runner = Runner(todo, queue.at_once, room.Spare(queue.free_gib, queue.settle), Workers(queue.out / "logs"), told, limit)
    try:
        return [failure.job.name for failure in runner.go()]
    except (KeyboardInterrupt, TimeOver) as why:
        over = isinstance(why, TimeOver)
        tell(f"stopped ({'its time is over' if over else 'interrupted'}); the same command goes on from the last checkpoints")
        raise SystemExit(3 if over else 130) from None


def alone(out: Path) -> Any:
    """A lock of the folder of runs; the lock of a dead queue is no lock."""
    with disk.errors_as_user_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / ".queue", "w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another queue works in {out}", "wait for it, or choose another folder with --out") from None
    return file


def _terminated(*_: Any) -> None:
    raise TimeOver


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs_file", type=Path, metavar="JOBS.yaml")
    parser.add_argument("--jobs", type=int, help="runs at a time")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds; what runs then is interrupted")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--collect", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further key for every run")
    parser.add_argument("--dry", action="store_true", help="say what it will take, and run nothing")
    args = parser.parse_args()
    tell = lambda text: print(time.strftime("%H:%M:%S"), text, flush=True)
    try:
        queue = load(args.jobs_file, {"jobs": args.jobs, "out": args.out, "collect": args.collect}, args.set)
        lock = alone(queue.out)
        todo = [job for job in queue.jobs if state(queue, job) != "done"]
        known = estimates(queue, todo)
        for job in todo:
            seconds, source = known.get(job.name, (None, "no measurement"))
            tell(f"{job.name}: {job.left} rounds, {'unknown' if seconds is None else format_duration(seconds)} ({source})")
        tell(f"{len(queue.jobs) - len(todo)} done, {len(todo)} to do: {outlook(todo, known, queue.at_once)}")
        if args.dry:
            return
        signal.signal(signal.SIGTERM, _terminated)
        failed = go(queue, tell, args.limit)
        lock.close()
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    if failed:
        tell(f"{len(failed)} failed: {', '.join(failed)}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
