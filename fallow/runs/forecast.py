"""`--dry-run` of a grid or a table: what is there, what each run would be, its memory and time; nothing is run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fallow.config import validate
from fallow.durations import format_duration
from fallow.methods import find
from fallow.runs import make_federation, rehearsal
from fallow.runs.automatic import amounts
from fallow.runs.estimate import Measure
from fallow.runs.jobs import Job, per_round
from fallow.runs.settled import Settled
from fallow.runs.speed import speed

SEED = "seed="


@dataclass(frozen=True)
class Alike:
    """Runs that differ only in their seed."""

    name: str
    seeds: tuple[int, ...]
    states: tuple[str, ...]
    work: str
    gib: float  # of one run
    seconds: float  # that are left of all
    pairs: tuple[str, ...]  # settings as one types them


def foresee(jobs: Sequence[Job], settled: Settled, measure: Measure | None = None) -> list[Alike]:
    """What these runs would be. Their data are read, and one step of each model is measured (once on a machine)."""
    groups: dict[tuple[str, tuple[str, ...]], list[Job]] = {}
    for job in jobs:
        pairs = rehearsal.pairs(validate(find(str(job.expected["method"])).Options, job.expected))
        groups.setdefault((_name(job), tuple(pair for pair in pairs if not pair.startswith(SEED))), []).append(job)
    return [_alike(name, pairs, members, settled, measure or speed) for (name, pairs), members in groups.items()]


def _name(job: Job) -> str:
    """The run's, without its seed."""
    return re.sub(r"(^|/)seed-\d+$", "", job.name) or str(job.expected["method"])


def _alike(name: str, pairs: tuple[str, ...], jobs: list[Job], settled: Settled, measure: Measure) -> Alike:
    kind = find(str(jobs[0].expected["method"]))
    options = validate(kind.Options, jobs[0].expected)
    method, source, states = kind.algorithm(options), settled.of(options), tuple(map(_state, jobs))
    by_speed = rehearsal.seconds(method, options, source, measure) / options.rounds
    seen = [found[0] if (found := per_round(job)) else by_speed for job in jobs]
    left = sum(each * job.left for each, job, state in zip(seen, jobs, states) if state != "finished")
    work = amounts(options, make_federation(options, source))
    return Alike(name, tuple(job.expected["seed"] for job in jobs), states, work, rehearsal.memory(method, options, source), left, pairs)


def _state(job: Job) -> str:
    if not job.folder.config.is_file():
        return "new"
    return "finished" if job.folder.concluded() == "finished" else "begun"


def _counted(states: Sequence[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in Counter(states).items())


def rows(found: Sequence[Alike]) -> list[tuple[str, ...]]:
    """A line for runs that differ only in their seed."""
    title = ("run", "seeds", "state", "work", "memory", "time left")
    lines = ((f.name, ",".join(map(str, f.seeds)), _counted(f.states), f.work, f"{f.gib:.1f} GiB", format_duration(f.seconds) if f.seconds else "-") for f in found)
    return [title, *lines]


def lines(found: Sequence[Alike]) -> list[str]:
    """The settings of all runs and of each, and what is to be done in all."""
    shared = [pair for pair in found[0].pairs if all(pair in f.pairs for f in found)]
    told = [f"settings of all: {' '.join(shared)}"]
    told += [f"settings of {f.name}: {' '.join(own)}" for f in found if (own := [pair for pair in f.pairs if pair not in shared])]
    states, seconds = [state for f in found for state in f.states], sum(f.seconds for f in found)
    told.append(f"{len(states)} run{'s' if len(states) != 1 else ''}: {_counted(sorted(states))}")
    told.append(f"memory: about {max(f.gib for f in found):.1f} GiB for the largest run")
    took = f"about {format_duration(seconds)}, one run after another (within a factor of two, if the machine does nothing else)"
    return [*told, f"time: {took if seconds else 'none, all runs are finished'}"]
