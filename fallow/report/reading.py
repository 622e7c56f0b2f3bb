"""Run folders: which there are, what lies in one, which of them are a group, and which count."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from fallow.errors import UserError
from fallow.keys.section import Keys
from fallow.methods import REGISTERED, find
from fallow.runs.finding import found
from fallow.runs.folder import RunFolder
from fallow.runs.metrics import Row
from fallow.runs.settings import UNHASHED
from fallow.trees import merge, read_yaml, shown

LARGEST = sys.float_info.max
OF_SPLIT = ("steps",)  # keys that are fitted to how many images the clients have


@dataclass
class Run:
    """A run folder as it is now."""

    path: Path
    config: Keys
    rows: list[Row]
    summary: Keys = field(default_factory=dict)

    @staticmethod
    def at(path: Path) -> Run:
        folder = RunFolder.existing(path)
        config = _worded(read_yaml(folder.config))
        config.pop("version", None)
        for name in ("data", "method"):
            if not isinstance(config.get(name, ""), str):
                raise UserError(f"{folder.config} has {name}={shown(config[name])}, which is no name", "restore the file")
        if not isinstance(config.get("seed", 0), int):
            raise UserError(f"{folder.config} has seed={config['seed']!r}, which is no whole number", "restore the file")
        folder.check_settings()
        rows = folder.rows()
        if not all(isinstance(r, dict) and isinstance(r.get("round"), int) for r in rows):
            raise UserError(f"{folder.metrics} has a line that is no round", "restore the file, or start the run again")
        try:
            summary = json.loads(folder.verified(folder.summary.name)) if folder.summary.is_file() else {}
        except (ValueError, RecursionError):
            summary = {}
        return Run(path, config, rows, summary if isinstance(summary, dict) else {})

    @property
    def seed(self) -> int:
        return self.config.get("seed", 0)

    @property
    def done(self) -> int:
        return self.rows[-1]["round"] if self.rows else 0

    @property
    def status(self) -> str:
        """What the summary says, if it is of the last round; else the run goes on, or was killed."""
        return str(self.summary.get("status")) if self.summary.get("rounds", self.done) == self.done and self.summary else "running"

    def scores(self) -> list[tuple[float, int]]:
        return [(r["accuracy"], r["round"]) for r in self.rows if finite(r.get("accuracy"))]

    @property
    def family(self) -> str:
        """Equal for runs that differ only in seed, or in what does not change a result."""
        return self._without(UNHASHED | {"seed"})

    @property
    def kin(self) -> str:
        """Equal for runs that also differ in what is fitted to the split of their seed."""
        return self._without(UNHASHED | {"seed", *OF_SPLIT})

    def _without(self, keys: set[str]) -> str:
        return json.dumps({k: v for k, v in completed(self.config).items() if k not in keys}, sort_keys=True, default=str)


def families(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ only in their seed together.

    Steps that nobody gave are fitted to how many images a client has, which the split's seed decides. So runs of other seeds
    that differ in nothing else are one family all the same.
    """
    strict: dict[str, list[Run]] = {}
    loose: dict[str, list[str]] = {}
    for run in runs:
        if run.family not in strict:
            loose.setdefault(run.kin, []).append(run.family)
        strict.setdefault(run.family, []).append(run)
    out: dict[str, list[Run]] = {}
    for family, members in strict.items():
        alike = loose[members[0].kin]
        seeds = [seed for name in alike for seed in {run.seed for run in strict[name]}]
        first = alike[0] if len(set(seeds)) == len(seeds) else family
        out.setdefault(first, []).extend(members)
    return out


@dataclass(frozen=True)
class Gathered:
    """Finished runs, one for each seed of the same settings, and sentences about those that are left out."""

    runs: list[Run]
    notes: list[str]


def gathered(paths: Iterable[str | Path]) -> Gathered:
    """The runs that count: who takes a mean over seeds takes it over these."""
    runs, notes = readable(paths)
    counted = counting(runs, notes)
    if not counted.runs:
        raise UserError(f"none of these runs is finished, {runs[0].path} for one", f"go on with it by `fallow resume {runs[0].path}`, or wait for it")
    return counted


def readable(paths: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """The runs that can be read, and a sentence about the others; a damaged run costs no other run."""
    runs, complaints = [], []
    for path in found(paths):
        try:
            runs.append(Run.at(path))
        except UserError as e:
            complaints.append(e)
    if not runs and complaints:
        raise complaints[0]
    return runs, [f"Left out: {e.cause}." for e in complaints]


def counting(runs: Sequence[Run], notes: Sequence[str] = (), going: bool = False, alone: bool = False) -> Gathered:
    """Of these runs the finished ones, each seed of the same settings once.

    With `going` those that go on count as well, and with `alone` those that did not end, where no other has their settings.
    """
    ended = {run.family for run in runs if run.status == "finished"}
    kept: dict[tuple[str, int], Run] = {}
    same, other, cut = list[str](), list[str](), list[str]()
    for run in sorted(runs, key=lambda run: run.status != "finished"):  # a finished run before one of the same seed that is not
        if run.status != "finished" and not (going and run.status == "running") and not (alone and run.family not in ended):
            cut.append(f"{run.path} ({run.status}, round {run.done} of {run.config.get('rounds', '?')})")
            continue
        first = kept.setdefault((run.family, run.seed), run)
        if first is not run:
            alike = run.done == first.done and [s for s, _ in run.scores()[-1:]] == [s for s, _ in first.scores()[-1:]]
            (same if alike else other).append(f"{run.path} ({'as' if alike else 'unlike'} {first.path})")
    told = list(notes)
    if cut:
        told.append(f"Left out, not finished: {_listed(cut)}.")
    if same:
        told.append(f"The same settings and seed again count once: {_listed(same)}.")
    if other:
        told.append(f"The same settings and seed again, with another result; the first counts: {_listed(other)}.")
    chosen = {id(run) for run in kept.values()}
    return Gathered([run for run in runs if id(run) in chosen], told)


def _listed(words: Sequence[str], most: int = 6) -> str:
    return "; ".join(words[:most]) + (f"; and {len(words) - most} more" if len(words) > most else "")


def _worded(keys: Keys) -> Keys:
    """YAML may have keys that are no text."""
    return {str(name): _worded(value) if isinstance(value, dict) else value for name, value in keys.items()}


def completed(config: Keys) -> Keys:
    """The settings with defaults for keys that a run of an older version does not have; a user's own method is not looked at."""
    method = str(config.get("method"))
    return merge(_defaults(method), config) if method in REGISTERED else config


@lru_cache
def _defaults(method: str) -> Keys:
    return find(method).Options().model_dump(mode="json")


def finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
