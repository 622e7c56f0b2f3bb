"""Run folders as plain data for the page: runs in columns, groups of runs that differ only in seed, federations."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from fallow.data.holdings import ClassCounts, measured
from fallow.errors import UserError
from fallow.keys.section import Keys
from fallow.methods import REGISTERED, find
from fallow.paths import user_path
from fallow.report.scored import scores as scores_of
from fallow.runs.folder import Row, RunFolder, runs_below
from fallow.runs.nodes import nodes
from fallow.runs.settings import UNHASHED
from fallow.runs.warned import stored
from fallow.tables.cells import BESIDE, Place, places
from fallow.trees import flat, merge, read_yaml, shown

ROUNDS, VECTOR_ROUNDS, CLIENTS = 1000, 60, 400  # drawn at most, of each run and federation
LARGEST = sys.float_info.max
WORDS = 3  # keys in a group's name
OF_SPLIT = ("steps",)  # keys that are fitted to how many images the clients have

Columns = dict[str, list[Any]]


def found(paths: Iterable[str | Path]) -> list[Path]:
    """The runs of these folders; a folder that is no run but has some below it stands for all of them."""
    out: dict[Path, Path] = {}
    named = [user_path(p) for p in paths]
    given = [p if p.exists() or len(p.parts) > 1 or not (Path("runs") / p).exists() else Path("runs") / p for p in named]
    for path in given:
        below = [*runs_below(path)]
        if not below and (len(given) == 1 or not path.exists()):  # `runs/*` may hold other things
            below = [RunFolder.existing(path).path]
        for run in below:
            out.setdefault(run.resolve(), run)
    if not out:
        raise UserError("none of these folders is a run", "give folders of runs, such as runs/NAME")
    return list(out.values())


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


def payload(paths: Sequence[Path], live: bool = False) -> Keys:
    """All that the page shows; `aside` are the runs that enter no mean, unless one switches them on."""
    runs, damaged = readable(paths)
    counted = counting(runs, damaged, going=live, alone=True)
    in_means = {run.path for run in counted.runs}
    together = list(families(runs).values())
    groups = [members[0] for members in together]
    number_of = {run.path: number for number, members in enumerate(together) for run in members}
    federations: dict[str, Keys] = {}
    told, left_out = [], [sentence.removesuffix(".") for sentence in damaged]
    for run in runs:
        try:
            held = federation(run.path)
        except UserError as e:
            held = None
            left_out.append(f"{e.cause}; the page says nothing of who held what in that run")
        if held:
            federations.setdefault(held["fingerprint"], held)
        told.append(_run_summary(run) | {"group": number_of[run.path], "federation": held and held["fingerprint"], "aside": run.path not in in_means})
    names = named([g.config for g in groups], [places(g.config, g.path) for g in groups])
    return {
        "runs": told,
        "groups": [{"name": n, "method": method_name(g.config), "config": typed(g.config)} for n, g in zip(names, groups)],
        "federations": list(federations.values()),
        "left_out": left_out,
        "notes": counted.notes,
    }


def _run_summary(run: Run) -> Keys:
    scores, s = run.scores(), run.summary
    best = max(scores, key=lambda x: (x[0], -x[1]), default=(None, None))
    columns, vectors = columned(run.rows)
    scored = scores_of(run.summary) if run.status != "running" else {}
    if scored.get("test") and "class_accuracy" not in vectors:  # with the key `measure` it is there for rounds before, too
        vectors["class_accuracy"] = {"round": [run.done], "values": [scored["test"]["by_class"]]}
    return {
        "path": str(run.path),
        "seed": run.seed,
        "status": run.status,
        "done": run.done,
        "rounds": plain(run.config.get("rounds")),
        "last": scores[-1][0] if scores else None,
        "best": best[0],
        "best_round": best[1],
        "seconds": plain(sum(_seconds(row) for row in run.rows)),
        "columns": columns,
        "vectors": vectors,
        "scores": scored,
        "warnings": stored(run.path, s, run.status != "running"),
        "nodes": nodes(run.path),
        "published": [_published(p) for p in places(run.config, run.path)],
        "made": {k: str(s[k]) for k in ("device", "commit", "config_hash", "fingerprint") if s.get(k)} | _versions(s),
    }


def _versions(summary: Keys) -> Keys:
    versions = summary.get("versions")
    return {k: str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}


def _seconds(row: Row) -> float:
    seconds = row.get("seconds")
    return seconds["round"] if isinstance(seconds, dict) and finite(seconds.get("round")) else 0.0


def _published(place: Place) -> Keys:
    f = place.figure
    table = f.table.removeprefix("table") if f.table.startswith("table") else f.table
    return {
        "paper": f.paper, "table": table, "data": f.data, "setting": f.setting, "row": f.method, "mean": f.mean,
        "std": f.std, "statistic": place.statistic, "other": ", ".join(f"{k}={v}" for k, v in place.other.items()),
    }  # fmt: skip


# -- columns -----------------------------------------------------------------------------------------------------------
def finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def plain(value: Any) -> Any:
    """A number in six digits, or None where there is none."""
    if not finite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def columned(rows: Sequence[Row]) -> tuple[Columns, dict[str, Columns]]:
    """Rows as columns of numbers, `seconds.test` for what is in sections; lists of numbers by class apart."""
    kept = thinned(rows, ROUNDS)
    columns: Columns = {"round": [row["round"] for row in kept]}
    for i, row in enumerate(kept):
        for name, value in numbers(row):
            columns.setdefault(name, [None] * len(kept))[i] = plain(value)
    vectors: dict[str, Columns] = {}
    for name in ("class_accuracy", "prior"):
        having = [row for row in rows if isinstance(row.get(name), list)]
        if having:
            having = thinned(having, VECTOR_ROUNDS)
            values = [[plain(v) for v in row[name]] for row in having]
            vectors[name] = {"round": [row["round"] for row in having], "values": values}
    return {k: v for k, v in columns.items() if any(x is not None for x in v)}, vectors


def thinned(rows: Sequence[Row], most: int) -> list[Row]:
    """At most so many rows and one: evenly spaced rounds, the same ones for runs of one length, and the last."""
    if len(rows) <= most:
        return list(rows)
    step = math.ceil(rows[-1]["round"] / most)
    return [row for row in rows[:-1] if row["round"] % step == 0] + [rows[-1]]


def numbers(row: Row) -> Iterable[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{k}", v) for k, v in value.items())
        elif name != "round":
            yield name, value


# -- names -------------------------------------------------------------------------------------------------------------
def typed(config: Keys) -> dict[str, str]:
    """Keys and values as they are written on the command line."""
    return {name: _shown(value) for name, value in flat(config).items()}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_shown, value))
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)


def named(configs: Sequence[Keys], cells: Sequence[Sequence[Place]]) -> list[str]:
    """Short names of groups: the row of a paper's table where that tells them apart, else method and differing keys."""
    plain_names, printed = _by_keys(configs), [_printed(found) for found in cells]
    rows, several = [row for row, *_ in printed], len({c.get("data") for c in configs}) > 1
    out = []
    for name, config, (row, data, setting, varied) in zip(plain_names, configs, printed):
        words = [row] if rows.count(row) == 1 else [row, *([data] if several else []), setting]
        told = config.get("data") == data and printed.count((row, data, setting, varied)) == 1
        out.append(" ".join(words + ["(varied)"] * varied) if told else name)
    return out if len(set(out)) == len(out) else plain_names


def _printed(found: Sequence[Place]) -> tuple[str, str, str, bool]:
    """What a paper calls a group's method, data and setting, and whether the group's settings are not quite those."""
    exact = [p.figure for p in found if not set(p.other) - BESIDE]
    figures = exact or [p.figure for p in found]
    return (figures[0].method, figures[0].data, figures[0].setting, not exact) if figures else ("", "", "", False)


def _by_keys(configs: Sequence[Keys]) -> list[str]:
    """The method, the data if they differ, and what else tells runs of a method apart."""
    several = len({c.get("data") for c in configs}) > 1
    flats = [typed({k: v for k, v in completed(c).items() if k not in UNHASHED}) for c in configs]
    out = []
    for mine in flats:
        alike = [f for f in flats if (f.get("method"), f.get("data")) == (mine.get("method"), mine.get("data"))]
        other = [k for k in mine if k != "seed" and len({f.get(k) for f in alike}) > 1]
        words = [f"{k}={shortened(mine[k])}" for k in other[:WORDS]] + ["…"] * (len(other) > WORDS)
        out.append(" ".join([method_name(mine), *([mine.get("data", "?")] if several else []), *words]))
    return out


def method_name(config: Keys) -> str:
    return str(config.get("method", "?")).rsplit(":", 1)[-1]


def shortened(text: str, most: int = 24) -> str:
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return (text or "none") if len(text) <= most else text[: most - 1] + "…"


# -- federations -------------------------------------------------------------------------------------------------------
def federation(run: Path) -> Keys | None:
    """Who holds what in a run, or None where no file says so; a UserError where it is not the run's, or damaged."""
    path = run / "federation.npz"
    if not path.exists():
        return None
    return _federation(path, path.stat().st_mtime_ns)


@lru_cache(64)
def _federation(path: Path, _: int) -> Keys:
    RunFolder(path.parent).verified(path.name)
    held, fingerprint = ClassCounts.load(path)
    step = math.ceil(len(held.clients) / CLIENTS)
    sides = {"labelled": held.labelled, "unlabelled": held.unlabelled}
    known = len(held.classes) - (held.classes[-1] == "unknown")
    return {
        "fingerprint": fingerprint,
        "clients": list(held.clients[::step]),
        "all_clients": len(held.clients),
        "classes": list(held.classes),
        "server": held.server.tolist(),
        **{side: counts[::step].tolist() for side, counts in sides.items()},
        "totals": {side: int(counts.sum()) for side, counts in sides.items()},
        "skew": {side: plain(measured(counts[:, :known])) for side, counts in sides.items() if known > 1},
    }
