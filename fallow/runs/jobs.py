"""Runs that are to be made: which are done, cut or new, and what those that are left will take."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from fallow import disk
from fallow.durations import format_duration
from fallow.errors import UserError
from fallow.keys.section import Keys
from fallow.runs.folder import Busy, RunFolder
from fallow.runs.settings import differences
from fallow.trees import read_yaml

State = Literal["done", "begun", "new", "held"]
OURS = r"\.lock|logs|\.config\.yaml\.([0-9]+\.)?part"  # what a run leaves that was cut off before it began


@dataclass
class Job:
    """A run that is to be made, and how often it was tried."""

    name: str  # for people
    path: Path  # the run's folder
    recipe: str | Keys | None
    keys: Keys
    expected: Keys  # its complete settings
    more: Keys = field(default_factory=dict)  # arguments of `fallow.run`
    tries: int = 0

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)

    @property
    def rounds(self) -> int:
        return int(self.expected["rounds"])

    @property
    def left(self) -> int:
        """Rounds."""
        return self.rounds - len(self.folder.rows())


def state(job: Job) -> State:
    """done, begun, new, or held: by a process that is no child of ours."""
    folder = job.folder
    if not folder.path.exists():
        return "new"
    try:
        with folder.locked():
            begun = folder.config.is_file()
    except Busy:
        return "held"
    if not begun:
        clear(folder.path)
        return "new"
    other = differences(read_yaml(folder.config), job.expected)
    if other:
        said = ", ".join(f"{k}={v}" for k, v in other.items())
        raise UserError(f"{folder.path} was run with other settings ({said})", "choose another folder with --out, or remove it")
    return "done" if folder.concluded() == "finished" else "begun"


def clear(path: Path) -> None:
    """Removes what a run left that was cut off before it began, and nothing else."""
    if not path.exists():
        return
    left = [p.name for p in path.iterdir()] if path.is_dir() else [path.name]
    foreign = [name for name in left if not re.fullmatch(OURS, name)]
    if foreign:
        raise UserError(f"{path} is no run, but {foreign[0]} lies there", "choose another folder with --out, or move it away")
    shutil.rmtree(path)


def came_to(folder: RunFolder) -> str:
    """A finished run's accuracy, for people."""
    summary = folder.read_summary()
    return ", ".join(f"{k} {100 * summary[k]:.2f}" for k in ("last", "best") if summary.get(k) is not None) or "finished"


# -- what it will take -------------------------------------------------------------------------------------------------
Known = dict[str, tuple[float, str]]  # a job's name -> seconds, and what they are known from


def per_round(job: Job, alike: Iterable[Path] = ()) -> tuple[float, str] | None:
    """Seconds of a round and where they are from: the run itself, or other seeds, which lie beside it."""
    rows = job.folder.rows()
    if rows:
        return statistics.median(r["seconds"]["round"] for r in rows[-20:]), "its own rounds"
    for place in (job.path.parent, *alike):
        found = []
        for summary in place.glob("seed-*/summary.json"):
            with suppress(UserError, ValueError, KeyError, TypeError, RecursionError):
                found.append(float(json.loads(disk.read(summary))["seconds_per_round"]))
        if found:
            return statistics.fmean(found), "other seeds"
    return None


def measured(jobs: Sequence[Job]) -> Known:
    """Seconds that each of these will still take, where rounds were measured."""
    return {job.name: (one[0] * job.left, one[1]) for job in jobs if (one := per_round(job))}


def guessed(configs: Sequence[Keys]) -> list[float | None]:
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
    """Until the last has ended, if each starts where one is done first.

    >>> makespan([10, 12, 4, 1], 2)
    14.0
    """
    ends = [0.0] * at_once
    for one in seconds:
        ends.sort()
        ends[0] += one
    return max(ends)


def time_left(jobs: Sequence[Job], known: Known, at_once: int) -> float | None:
    """Seconds until all have ended, one of unknown length taken as the mean of a round of the others; None where nothing is known."""
    rounds = sum(job.left for job in jobs if job.name in known)
    if not rounds:
        return None
    mean = sum(seconds for seconds, _ in known.values()) / rounds
    return makespan([known[job.name][0] if job.name in known else mean * job.left for job in jobs], at_once)


def outlook(jobs: Sequence[Job], known: Known, at_once: int) -> str:
    told = [known[j.name][0] for j in jobs if j.name in known]
    text = f"about {format_duration(makespan(told, at_once))}"
    text += f" with {at_once} at a time ({format_duration(sum(told))} one by one)" if at_once > 1 and len(told) > 1 else ""
    return text + (f" for {len(told)} of them, the others are of unknown length" if len(told) < len(jobs) else "")
