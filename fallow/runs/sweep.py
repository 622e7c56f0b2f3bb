"""`fallow run method=fedavg,fixmatch seed=0,1,2`: a grid of runs, of which those are made that are missing.

What is there is known by its settings, wherever below the folder for runs it lies and whatever it is called. New runs lie
in `OUT/NAME/KEY=VALUE,.../seed-N`.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fallow import launched
from fallow.config import Config
from fallow.errors import UserError
from fallow.keys.section import Keys
from fallow.methods import REGISTERED, find, is_own
from fallow.recipes.grid import Grid, slug
from fallow.recipes.reading import recipe
from fallow.runs.combinations import Combinations, combinations
from fallow.runs.finding import runs_below
from fallow.runs.folder import RunFolder
from fallow.runs.jobs import Job
from fallow.runs.origin import Origin, own_code
from fallow.runs.room import Room, usual
from fallow.runs.runner import Failure, Runner, Tell
from fallow.runs.settings import MEASURING, config_hash, stated
from fallow.runs.settled import Settled
from fallow.runs.workers import Workers

LONGEST = 120  # characters of a folder's name
Identity = tuple[str, str]


@dataclass(frozen=True)
class Sweep:
    """The runs of a grid."""

    place: Path  # the folder of new ones
    combinations: Combinations
    jobs: list[Job]
    notes: list[str]  # sentences about the data, and about what is left out
    settled: Settled

    def about(self) -> str:
        """How many runs there are, and how many of them are to be made."""
        axes = " × ".join(f"{len(axis.values)} of {axis.key}" for axis in self.combinations.axes)
        merged = len(self.combinations) - len(self.jobs)
        same = f", {merged} of them the same as others" if merged else ""
        begun = [job for job in self.jobs if job.folder.config.is_file()]
        done = [job for job in begun if job.folder.concluded() == "finished"]
        new = len(self.jobs) - len(begun)
        parts = [f"{len(done)} finished" if done else "", f"{len(begun) - len(done)} begun" if len(begun) > len(done) else "", f"{new} new, in {self.place}" if new else ""]
        return f"{len(self.jobs)} run{'s' if len(self.jobs) != 1 else ''} ({axes}{same}): {', '.join(filter(None, parts))}"


def grid(recipe_name: str | None, given: Keys) -> Combinations | None:
    """The combinations that these keys ask for; None for a single run."""
    return combinations(given, recipe(recipe_name) if recipe_name else {})


def plan(
    recipe_name: str | None, found: Combinations, out: Path, name: str | None = None, download: bool = False, trust: bool = False
) -> Sweep:
    """All runs of a grid with their complete settings; a mistake in any of them is told before one is made."""
    if launched.count() > 1:
        raise UserError("a grid of runs is no work for torchrun", "start it with plain `fallow run`, or give each key one value")
    sources, members, notes = Settled(download), list[tuple[str, Any, Keys, Config]](), list[str]()
    seen: set[Identity] = set()
    for varied, keys in found:
        base, keys, lacking = _fitting(recipe_name, keys, found)
        try:
            options = sources.settings(base, keys, trust)
        except UserError as e:
            told = _words(varied)
            raise UserError(e.cause if told in e.cause else f"{told}: {e.cause}", e.remedy) from None
        if (identity := _identity(options)) not in seen:
            seen.add(identity)
            members.append((_folder({k: v for k, v in varied.items() if k not in lacking}, options.seed), base, keys, options))
            notes += [note for key in lacking if (note := f"{options.method} has no {key}, so its runs go without it") not in notes]
    there, more = _there(out, {_identity(options) for *_, options in members}, sources), {"trust": trust} if trust else {}
    taken = [(folder, options) for folder, *_, options in members if _identity(options) not in there]
    place = _place(out, name or _name(recipe_name, {options.data for *_, options in members}), taken)
    jobs = []
    for folder, base, keys, options in members:
        path = there.get(_identity(options), place / folder)
        jobs.append(Job(folder, path, base, keys, options.model_dump(mode="json"), dict(more)))
    return Sweep(place, found, jobs, [*sources.said, *notes], sources)


# -- keys that only some of the methods have -----------------------------------------------------------------------------
def _fitting(recipe_name: str | None, keys: Keys, found: Combinations) -> tuple[str | Keys | None, Keys, list[str]]:
    """The recipe and keys without those that this run's method lacks and another one of the grid has; which these are."""
    methods = next((axis.values for axis in found.axes if axis.key == "method"), ())
    name = keys.get("method")
    if not methods or not _is_method(name):
        return recipe_name, keys, []
    known = set(find(str(name)).Options.model_fields)
    others = {key for other in methods if _is_method(other) for key in find(other).Options.model_fields}
    base: str | Keys | None = recipe_name
    own = recipe(recipe_name) if recipe_name else {}
    lacking = [key for key in dict.fromkeys([*(own if Grid.of(own) is None else ()), *keys]) if key in others - known]
    if set(lacking) & set(own):
        base = {k: v for k, v in own.items() if k not in lacking}
    return base, {k: v for k, v in keys.items() if k not in lacking}, lacking


def _is_method(name: Any) -> bool:
    return isinstance(name, str) and (name in REGISTERED or is_own(name))


# -- what is there -------------------------------------------------------------------------------------------------------
def _identity(options: Config) -> Identity:
    """Equal for runs of which one stands for the other: equal results, and as much measured."""
    has: Sequence[str] = getattr(options, "measure", ())
    measured = {name: getattr(options, name, None) for name in sorted(MEASURING)} if has else {}
    return config_hash(options), str(measured)


def _there(out: Path, wanted: set[Identity], sources: Settled) -> dict[Identity, Path]:
    """The runs below a folder that have one of these settings: finished ones before others."""
    found: dict[Identity, Path] = {}
    for path in runs_below(out):
        folder = RunFolder(path)
        try:
            options = stated(folder.config)
            identity = _identity(options)
            if identity not in wanted or not _as_begun(path, options, sources):
                continue
        except (UserError, ValueError, TypeError, AttributeError):
            continue  # a damaged run, or one of another version, stands for none
        if identity not in found or (folder.concluded() == "finished" and RunFolder(found[identity]).concluded() != "finished"):
            found[identity] = path
    return found


def _as_begun(path: Path, options: Config, sources: Settled) -> bool:
    """Whether the user's own images and code are still those of the run, which the settings cannot tell."""
    origin = Origin.read(path)
    if origin is None:
        return True
    if own_code(options):
        origin.check_code(options, path, anyway=False)
    if ":" in options.data:
        origin.check_data(sources.of(options), anyway=False)
    return True


# -- where new runs lie --------------------------------------------------------------------------------------------------
def _name(recipe_name: str | None, data: set[str]) -> str:
    """What a grid is called that nobody has named: as its recipe, or as the data if all its runs have the same."""
    if recipe_name:
        return slug(recipe_name.removesuffix(".yaml").removesuffix(".yml")) or "sweep"
    return slug(min(data)) or "sweep" if len(data) == 1 else "sweep"


def _folder(varied: Keys, seed: int) -> str:
    """`method=fixmatch,label_count=40/seed-0`: what is varied, seeds last."""
    folder = ",".join(f"{key}={_plain(value)}" for key, value in varied.items() if key != "seed")
    if len(folder) > LONGEST:
        folder = f"{folder[: LONGEST - 9]}-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"
    return f"{folder}/seed-{seed}" if folder else f"seed-{seed}"


def _plain(value: Any) -> str:
    """A value as part of a folder's name."""
    text = str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)
    return re.sub(r"[^A-Za-z0-9._:=+-]+", "-", text.replace(",", "+")).strip("-.") or "-"


def _place(out: Path, name: str, new: list[tuple[str, Config]]) -> Path:
    """`OUT/NAME`, or `NAME-2` and so on where runs of other settings have the names of new ones."""
    double = [folder for folder, count in Counter(folder for folder, _ in new).items() if count > 1]
    if double:
        raise UserError(f"two runs of the grid would lie in {double[0]}", "give values whose names differ in more than punctuation")
    number = 1
    while True:
        place = out / (name if number == 1 else f"{name}-{number}")
        if not any((place / folder / "config.yaml").exists() for folder, _ in new) and not (place / "config.yaml").exists():
            return place
        number += 1


def _words(varied: Keys) -> str:
    return " ".join(f"{key}={value}" for key, value in varied.items())




def run(
    sweep: Sweep, tell: Tell, watch: Callable[[Runner], Any] = lambda runner: None, jobs: int | None = None
) -> list[Failure]:
    """Makes what is missing, as many at a time as there is room for, at most `jobs`; what failed."""
    on_cpu = all(job.expected["device"] == "cpu" for job in sweep.jobs)
    runner = Runner(sweep.jobs, jobs or usual(on_cpu), Room(on_cpu), Workers(sweep.place / "logs"), tell)
    watch(runner)
    return runner.go()
