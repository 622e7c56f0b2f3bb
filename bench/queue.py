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
      - {run: "method=fixmatch data=digits", name: digits-fixmatch}      # no table's: needs a name

The order is that of the file. There is no state but the run folders: after a kill of the queue or the loss of the
machine the same command goes on from the last checkpoints. Runs end with the queue, and write a checkpoint if they can.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fallow import disk
from fallow.config import Config, parse_pairs, read_yaml
from fallow.errors import UserError
from fallow.report.collect import thin
from fallow.report.grid import Grids, differences
from fallow.runs.folder import RunFolder
from fallow.runs.settings import Grid, recipe, recipes, resolve

KNOWN = {"out": "runs", "collect": None, "jobs": None, "free_gib": None, "settle": 90, "set": [], "cells": []}
FREE = {"gpu": 24.0, "cpu": 2.0}  # GiB
TRIES = 3
POLL = 0.5  # seconds
TOLD = 60  # seconds between two words on how it stands
CHILD = (  # is interrupted when the queue dies, also where a shell put it into the background
    "import ctypes, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "getattr(ctypes.CDLL(None), 'prctl', lambda *_: 0)(1, signal.SIGINT); from fallow.cli import main; main()"
)
Tell = Callable[[str], None]


# -- what is to be run -------------------------------------------------------------------------------------------------
@dataclass
class Job:
    """A cell with one seed, and how often it was tried."""

    words: list[str]
    seed: int
    place: Path  # below the folders of runs and results
    options: Config
    tries: int = 0

    @property
    def name(self) -> str:
        return f"{self.place}"


@dataclass
class Queue:
    """The file of jobs, read and checked."""

    out: Path
    collect: Path | None
    at_once: int
    free_gib: float
    settle: float
    jobs: list[Job] = field(default_factory=list)

    def folder(self, job: Job) -> RunFolder:
        return RunFolder(self.out / job.place)


def load(path: Path, given: dict[str, Any], more: Iterable[str] = ()) -> Queue:
    """The queue of a file; `given` wins over what the file says."""
    said = read_yaml(path)
    if unknown := sorted(set(said) - set(KNOWN)):
        raise UserError(f"{path} has {unknown[0]!r}, which a queue does not know", f"it knows {', '.join(KNOWN)}")
    said = KNOWN | said | {k: v for k, v in given.items() if v is not None}
    if not isinstance(said["cells"], list) or not said["cells"]:
        raise UserError(f"{path} has no cells", "write `cells:` and a list of what follows `fallow run`")
    device = "gpu" if free_of_gpu() is not None else "cpu"
    at_once = said["jobs"] or (6 if device == "gpu" else 1)
    free = FREE[device] if said["free_gib"] is None else said["free_gib"]
    if not isinstance(at_once, int) or at_once < 1 or not all(isinstance(n, int | float) for n in (free, said["settle"])):
        raise UserError(f"{path}: jobs={at_once!r} free_gib={free!r} settle={said['settle']!r}", "jobs is a count, the others are numbers")
    queue = Queue(Path(said["out"]), said["collect"] and Path(said["collect"]), at_once, free, said["settle"])
    for cell in said["cells"]:
        queue.jobs += _jobs(cell, [*said["set"], *more])
    for number, job in enumerate(queue.jobs):
        if job.place in [other.place for other in queue.jobs[:number]]:
            raise UserError(f"two cells of {path} are {job.place}", "give one of them a `reading`, or leave it out")
    return queue


def _jobs(cell: Any, more: list[str]) -> list[Job]:
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
    words = [*([name] if name else []), *pairs, *more]
    return [Job(words, s, place / f"seed-{s}", resolve(recipe(name) if name else {}, keys | {"seed": s})[1]) for s in seeds]


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
    folder = queue.folder(job)
    if not folder.path.exists():
        kept = RunFolder(queue.collect / job.place) if queue.collect else folder
        same = kept.config.is_file() and not differences(read_yaml(kept.config), job.options.model_dump(mode="json"))
        return "done" if same and kept.concluded() == "finished" else "new"
    try:
        with folder.locked():
            if not folder.config.is_file():
                shutil.rmtree(folder.path)  # cut off before it began
                return "new"
    except UserError:
        return "held"
    other = differences(read_yaml(folder.config), job.options.model_dump(mode="json"))
    if other:
        said = ", ".join(f"{k}={v}" for k, v in other.items())
        raise UserError(f"{folder.path} was run with other settings ({said})", "choose another `out` or a `reading`, or remove it")
    return "done" if folder.concluded() == "finished" else "begun"


def keep(queue: Queue, job: Job) -> None:
    """A finished run goes to the results, unless it is there."""
    if queue.collect is None or not queue.folder(job).path.exists():
        return
    target, summary = queue.collect / job.place, queue.folder(job).summary.read_text()
    with suppress(OSError, ValueError, AttributeError):
        if json.loads((target / "summary.json").read_text()).items() >= json.loads(summary).items():
            return
    thin(queue.folder(job).path, target)


def free_of_gpu() -> float | None:
    """GiB of the first visible GPU that nobody holds; None where there is none."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "-i", first]
    with suppress(OSError, ValueError, IndexError, subprocess.SubprocessError):
        return float(subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]) / 1024
    return None


def free_of_machine() -> float:
    """GiB of memory that are not in use; without end where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        return next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("MemAvailable")) / 2**20
    return float("inf")


# -- what it will take -------------------------------------------------------------------------------------------------
def per_round(queue: Queue, job: Job) -> tuple[float, str] | None:
    """Seconds of a round and where they are from: the run itself, or one of the same settings but for the seed."""
    rows = queue.folder(job).rows()
    if rows:
        return statistics.median(r["seconds"]["round"] for r in rows[-20:]), "its own rounds"
    for place in filter(None, (queue.out, queue.collect)):
        found = []
        for summary in (place / job.place).parent.glob("seed-*/summary.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                found.append(float(json.loads(summary.read_text())["seconds_per_round"]))
        if found:
            return statistics.fmean(found), "other seeds"
    return None


def left(queue: Queue, job: Job) -> int:
    return int(job.options.rounds) - len(queue.folder(job).rows())


def estimates(queue: Queue, jobs: list[Job]) -> dict[str, tuple[float, str]]:
    """Seconds that each of these will still take, and what that is known from."""
    out, unknown = {}, []
    for job in jobs:
        measured = per_round(queue, job)
        if measured is None:
            unknown.append(job)
        else:
            out[job.name] = measured[0] * left(queue, job), measured[1]
    for job, seconds in zip(unknown, guessed([j.options.model_dump(mode="json") for j in unknown])):
        if seconds is not None:
            out[job.name] = seconds * left(queue, job) / int(job.options.rounds), "this machine's speed"
    return out


def guessed(configs: list[dict[str, Any]]) -> list[float | None]:
    """By the speed of this machine, to a factor of two; measured by another process, since a GPU's memory stays taken."""
    if not configs:
        return []
    with suppress(Exception), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return list(pool.map(_guess, configs))
    return [None] * len(configs)


def _guess(config: dict[str, Any]) -> float | None:
    from fallow.config import validate
    from fallow.methods import find
    from fallow.runs import estimate, speed

    method = find(config["method"])
    return estimate.seconds(method, validate(method.Options, config), speed.speed)


def makespan(seconds: Iterable[float], at_once: int) -> float:
    """Until the last has ended, if each starts where one is done first."""
    ends = [0.0] * at_once
    for one in seconds:
        ends.sort()
        ends[0] += one
    return max(ends)


def outlook(queue: Queue, jobs: list[Job], known: dict[str, tuple[float, str]]) -> str:
    told = [known[j.name][0] for j in jobs if j.name in known]
    text = f"about {clock(makespan(told, queue.at_once))} with {queue.at_once} at a time ({clock(sum(told))} one by one)"
    return text + (f", and {len(jobs) - len(told)} of unknown length" if len(told) < len(jobs) else "")


def clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


# -- running -----------------------------------------------------------------------------------------------------------
@dataclass
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    started: float
    rounds: int
    log: Path


class Stopped(Exception):
    """The queue was told to stop, or its time is over."""


class Runner:
    """Starts what is waiting, as memory allows, until all is done."""

    def __init__(self, queue: Queue, tell: Tell, limit: float):
        self.queue, self.tell, self.ends = queue, tell, time.monotonic() + limit
        self.waiting: list[Job] = []
        self.running: list[Running] = []
        self.failed: list[str] = []
        self.told = time.monotonic()

    def go(self) -> list[str]:
        """What failed."""
        self.waiting = [job for job in self.queue.jobs if not self.was_done(job)]
        try:
            while self.waiting or self.running:
                if time.monotonic() > self.ends:
                    raise Stopped("its time is over")
                for one in [r for r in self.running if r.process.poll() is not None]:
                    self.ended(one)
                while self.room() and self.start():
                    pass
                self.stand()
                time.sleep(POLL)
        except (KeyboardInterrupt, Stopped) as why:
            self.stop()
            self.tell(f"stopped ({str(why) or 'interrupted'}); the same command goes on from the last checkpoints")
            raise SystemExit(130 if isinstance(why, KeyboardInterrupt) else 3) from None
        return self.failed

    def was_done(self, job: Job) -> bool:
        done = state(self.queue, job) == "done"
        if done:
            keep(self.queue, job)
            self.tell(f"{job.name}: was finished")
        return done

    def room(self) -> bool:
        """Whether one more may start: the newest has shown how much memory it takes, and enough is left."""
        if not self.waiting or len(self.running) >= self.queue.at_once:
            return False
        if not self.running:
            return True
        newest, gpu = max(self.running, key=lambda r: r.started), free_of_gpu()
        rounds = len(self.queue.folder(newest.job).rows()) - newest.rounds
        if gpu is not None and rounds < 2 and time.monotonic() - newest.started < self.queue.settle:
            return False
        return (free_of_machine() if gpu is None else gpu) >= self.queue.free_gib

    def start(self) -> bool:
        """Starts the first that nobody else holds."""
        for job in self.waiting:
            how = state(self.queue, job)
            if how == "held":
                continue
            self.waiting.remove(job)
            if how == "done":  # by another process, meanwhile
                keep(self.queue, job)
                return True
            folder = self.queue.folder(job)
            command = ["resume", str(folder.path)] if how == "begun" else [
                "run", *job.words, f"seed={job.seed}", "--out", str(folder.path.parent), "--name", folder.path.name]  # fmt: skip
            log = self.queue.out / "logs" / f"{str(job.place).replace('/', '--')}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            with open(log, "ab") as file:
                process = subprocess.Popen(
                    [sys.executable, "-c", CHILD, *command, "--quiet"], stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
                )
            job.tries += 1
            self.running.append(Running(job, process, time.monotonic(), folder.committed(), log))
            self.tell(f"{job.name}: " + (f"goes on from round {folder.committed()}" if how == "begun" else "started"))
            return True
        return False

    def ended(self, one: Running) -> None:
        self.running.remove(one)
        job, folder = one.job, self.queue.folder(one.job)
        if one.process.returncode == 0 and folder.concluded() == "finished":
            keep(self.queue, job)
            self.tell(f"{job.name}: {accuracy(folder)} after {clock(time.monotonic() - one.started)}")
            return
        said = last_line(one.log) or f"exit code {one.process.returncode}"
        mistake = one.process.returncode == 2 and "memory" not in said and "another process" not in said
        if folder.committed() > one.rounds:
            job.tries = 1
        if mistake or job.tries >= TRIES:
            self.failed.append(job.name)
            self.tell(f"{job.name}: failed: {said}")
            return
        if "memory" in said and self.running:
            self.queue.at_once = max(1, len(self.running))
            self.tell(f"memory ran out: {self.queue.at_once} at a time from now on")
        self.tell(f"{job.name}: was cut ({said}); it will go on")
        self.waiting.append(job)

    def stand(self) -> None:
        if time.monotonic() - self.told < TOLD:
            return
        self.told = time.monotonic()
        jobs = [r.job for r in self.running] + self.waiting
        known = {j.name: (one[0] * left(self.queue, j), one[1]) for j in jobs if (one := per_round(self.queue, j))}
        self.tell(f"{len(self.running)} running, {len(self.waiting)} waiting: {outlook(self.queue, jobs, known)}")

    def stop(self) -> None:
        """Interrupts all runs, so that they write a checkpoint; those that do not end are killed."""
        for one in self.running:
            one.process.send_signal(signal.SIGINT)
        for one in self.running:
            try:
                one.process.wait(60)
            except subprocess.TimeoutExpired:
                one.process.kill()


def accuracy(folder: RunFolder) -> str:
    summary = json.loads(folder.summary.read_text())
    return ", ".join(f"{k} {100 * summary[k]:.2f}" for k in ("last", "best") if summary.get(k) is not None) or "finished"


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else ""


def alone(out: Path) -> Any:
    """A lock of the folder of runs; the lock of a dead queue is no lock."""
    with disk.told(out):
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / ".queue", "w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another queue works in {out}", "wait for it, or choose another folder with --out") from None
    return file


def _terminated(*_: Any) -> None:
    raise Stopped("terminated")


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
            tell(f"{job.name}: {left(queue, job)} rounds, {'unknown' if seconds is None else clock(seconds)} ({source})")
        tell(f"{len(queue.jobs) - len(todo)} done, {len(todo)} to do: {outlook(queue, todo, known)}")
        if args.dry:
            return
        signal.signal(signal.SIGTERM, _terminated)
        failed = Runner(queue, tell, args.limit).go()
        lock.close()
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    if failed:
        tell(f"{len(failed)} failed: {', '.join(failed)}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
