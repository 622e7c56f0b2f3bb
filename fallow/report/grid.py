"""The grid of a paper's table, or of one's own in a file: rows in cells, run cell by cell, read back.

Runs lie in `DIR/PAPER/TABLE/CELL/seed-N` for the paper's own method and in `DIR/PAPER/TABLE/CELL--ROW/seed-N` for the
other rows, those of a table of one's own in `DIR/NAME/...`; thinned results (`collect`) have the same layout, and `read` takes either.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fallow import disk, targets
from fallow.data import sources
from fallow.errors import UserError, suggest
from fallow.report import published
from fallow.report.collect import thin
from fallow.report.published import Figure, table_name
from fallow.runs.jobs import Job
from fallow.runs.room import Room
from fallow.runs.runner import Event, Runner
from fallow.runs.settings import SHAPES, Cell, Grid, Keys, differences, recipe, recipes, resolve, slug
from fallow.runs.settled import Settled
from fallow.runs.workers import Hands, Here, Workers
from fallow.trees import merge, parse_pairs, read_yaml, shown

Tell = Callable[[str], None]
TABLES = ("table.md", "table.tex", "table.csv")


@dataclass(frozen=True)
class Entry:
    """One figure of a table: a row in a cell."""

    paper: str
    table: str
    row: str
    cell: Cell
    keys: Keys
    own: bool
    missing: str | None
    figure: Figure | None

    @property
    def folder(self) -> Path:
        name = self.cell.slug if self.own else f"{self.cell.slug}--{slug(self.row)}"
        return Path(self.paper) / self.table / name

    @property
    def name(self) -> str:
        return f"{self.cell.name}, {self.row}"


class Grids:
    """A table of a paper, or of a file: its entries, what it reports, further keys that every run gets."""

    def __init__(self, paper: str, table: str | None = None, only: Iterable[str] = (), more: Iterable[str] = (), *, trust: bool = False):
        self.more, self.trust = list(more), trust
        self.is_own = paper.endswith((".yaml", ".yml"))
        if self.is_own:
            self.paper, self.table, self.recipe = "", slug(table or Path(paper).stem) or "table", paper
            self.grid = self._of_file()
        else:
            self.grid = self._of_paper(paper, table)
        self.given = parse_pairs(self.more)
        for key in ("method", "setting", "seed"):
            if key in self.given:
                raise UserError(
                    f"{key} cannot be set for a whole table", "choose entries with --only, seeds with --seeds"
                )
        wanted = _wanted(list(only))
        self.entries = [e for e in self._all() if all(any(_agrees(e, name, *v) for v in values) for name, values in wanted.items())]
        if not self.entries:
            raise UserError(f"nothing in the table agrees with {shown(' '.join(only))}", f"its cells are: {self._cells()}")
        if self.is_own:
            self._check()

    def _of_file(self) -> Grid:
        keys = recipe(self.recipe)
        for key in ("rows", "cells"):
            if not keys.get(key):
                raise UserError(f"{self.recipe} has no {key}, which a table has", f"write {key}: {SHAPES[key][1]}, or use `fallow run {self.recipe}`")
        try:
            grid = Grid.of(keys)
        except UserError as e:
            raise UserError(f"{self.recipe}: {e.cause}", e.remedy) from None
        assert grid is not None
        self._figures = {key: figure for key, figure in _own_figures(self.table, keys.get("published") or {}, grid.statistic)}
        for data, setting, row in self._figures:
            cells = [f"{cell.data}, {cell.setting}" for cell in grid.cells]
            if f"{data}, {setting}" not in cells:
                raise UserError(f"{self.recipe} has published: figures of the cell {data}, {setting}, which it has not", suggest(f"{data}, {setting}", cells))
            if row not in grid.rows:
                raise UserError(f"{self.recipe} has published: a figure of the row {row}, which it has not", suggest(row, grid.rows))
        return grid

    def _check(self) -> None:
        """A mistake in a file is told with the file and the place in it, before anything is run."""
        for entry in self.entries:
            if entry.missing:
                continue
            try:
                self.expected(entry, 0)
            except UserError as e:
                raise UserError(f"{self.recipe}, row {entry.row} in cell {entry.cell.data}, {entry.cell.setting}: {e.cause}", e.remedy) from None

    def _of_paper(self, paper: str, table: str | None) -> Grid:
        self.paper, self.table = paper, table_name(table or "")
        self._figures = published.of_table(self.paper, self.table)
        self.recipe = f"{paper}/{self.table}"
        known = {name.split("/")[0] for name in recipes() if "/" in name}
        if paper not in known:
            raise UserError(f"there is no paper {paper!r} with tables", suggest(paper, known))
        if table is None:
            raise UserError(f"which table of {paper} is meant", f"there are: {', '.join(_tables(paper))}")
        if self.recipe not in recipes():
            raise UserError(f"{paper} has no recipe for its table {table}", f"there are: {', '.join(_tables(paper))}")
        grid = Grid.of(recipe(self.recipe))
        if grid is None:
            raise UserError(f"{self.recipe} is no table", f"there are: {', '.join(_tables(paper))}")
        return grid

    def _all(self) -> Iterator[Entry]:
        """The printed entries; of a table without published figures all rows in all cells."""
        for cell in self.grid.cells:
            for row in self.grid.rows:
                figure = self._figures.get((cell.data, cell.setting, row))
                if figure is None and self._figures and not self.is_own:
                    continue
                keys = self.grid.keys(row, cell)
                yield Entry(
                    self.paper, self.table, row, cell, keys, row == self.grid.own and not self.is_own, self.grid.missing(row), figure
                )

    def folder(self, place: Path) -> Path:
        """Where the table's runs and the table itself lie."""
        return place / self.paper / self.table

    def check_targets(self, place: Path, out: Path | None, collected: Path | None, seeds: int | None, force: bool = False) -> None:
        """Refuses, before anything is run in `place`, what would write over somebody else's files."""
        if out is not None:
            targets.no_run(out, "--out")
            for name in TABLES:
                targets.file(self.folder(out) / name, "table", force, "--out")
        if collected is None:
            return
        if collected.resolve() == place.resolve():
            raise UserError(f"the runs lie in {place} themselves", "name another folder with --collect")
        targets.no_run(collected, "--collect")
        for entry in self.entries:
            for seed in range(self.grid.seeds if seeds is None else seeds):
                path = Path(entry.folder) / f"seed-{seed}"
                targets.thinned(collected / path, place / path)

    def _cells(self) -> str:
        return "; ".join(f"data={c.data} setting={c.setting!r}" for c in self.grid.cells)

    def expected(self, entry: Entry, seed: int) -> Keys:
        """The complete settings of an entry; in a file of one's own those that it names, since the data decide on others."""
        complete = resolve(entry.keys, merge(self.given, {"seed": seed}), self.trust)[1].model_dump(mode="json")
        if not self.is_own:
            return complete
        return {name: complete[name] for name in merge(entry.keys, self.given) if name in complete and not isinstance(complete[name], dict)}


def _own_figures(table: str, said: Keys, statistic: str) -> Iterator[tuple[tuple[str, str, str], Figure]]:
    """What a file says was published."""
    for data, settings in said.items():
        for setting, rows in settings.items():
            for row, figure in rows.items():
                mean, std = figure if isinstance(figure, list) else (figure, None)
                names = str(data), str(setting), str(row)
                yield names, Figure("", table, *names, float(mean), None if std is None else float(std), statistic, "", "")


def _tables(paper: str) -> list[str]:
    return [n.split("/")[1] for n in recipes() if n.startswith(f"{paper}/") and not n.endswith("/base")]


def _wanted(only: list[str]) -> dict[str, list[tuple[str, Any]]]:
    """What an entry is to agree with: of each key one of the values, as it was typed and as it is read."""
    wanted: dict[str, list[tuple[str, Any]]] = {}
    for pair in only:
        name, equals, text = pair.partition("=")
        if not equals:
            raise UserError(f"--only {pair!r} is not key=value", "write for example --only data=cifar10")
        wanted.setdefault(name, []).append((text, parse_pairs([f"value={text}"])["value"]))
    return wanted


def _agrees(entry: Entry, name: str, text: str, value: Any) -> bool:
    if name == "method":
        return slug(text) == slug(entry.row) or entry.keys.get("method") == text
    if name == "setting":
        return slug(text) in (slug(entry.cell.setting), entry.cell.slug)
    if name == "data" and text == entry.cell.data:
        return True
    found: Any = entry.keys
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return bool(found == value)


# -- running -----------------------------------------------------------------------------------------------------------
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
                self.tell(f"{e} Its runs are left out.")
                self.known[name] = False
            else:
                self.known[name] = True
        return self.known[name]


def _job(grids: Grids, entry: Entry, seed: int, out: Path, settled: Settled) -> Job:
    keys = merge(grids.given, {"method": entry.row, "setting": entry.cell.name, "seed": seed})
    path = out / entry.folder / f"seed-{seed}"
    expected = settled.settings(grids.recipe, keys, grids.trust).model_dump(mode="json") if grids.is_own else grids.expected(entry, seed)
    return Job(str(path.relative_to(out)), path, grids.recipe, keys, expected, {"trust": True} if grids.trust else {})


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


def _summary(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(disk.read(path / "summary.json"))
    except (UserError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and {"status", "last", "best"} <= set(found) else None


def _format_keys(keys: Keys) -> str:
    return ", ".join(f"{k}={v}" for k, v in keys.items())


# -- reading -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Line:
    """An entry of the table as it is printed; accuracies in per cent."""

    entry: Entry
    last: list[float]
    best: list[float]
    note: str
    seeds: tuple[int, ...] = ()

    def ours(self, statistic: str) -> tuple[float, float | None] | None:
        """Mean and standard deviation (over n, ddof 0) of `last` or `best`."""
        values = self.last if statistic == "last" else self.best
        if not values:
            return None
        return statistics.fmean(values), statistics.pstdev(values) if len(values) > 1 else None


def read(grids: Grids, place: Path, seeds: int | None = None, failures: Iterable[Failure] = ()) -> list[Line]:
    """What the runs under `place` came to; `seeds`: the first so many only."""
    failed = {(f.entry.name, f.seed): f.why for f in failures}
    return [_line(grids, e, place, seeds, failed) for e in grids.entries]


def _line(grids: Grids, entry: Entry, place: Path, seeds: int | None, failed: dict[tuple[str, int], str]) -> Line:
    if entry.missing:
        return Line(entry, [], [], entry.missing)
    last, best, notes, seen = [], [], [], []
    for path in sorted((place / entry.folder).glob("seed-*"), key=lambda p: (len(p.name), p.name)):
        number = path.name.removeprefix("seed-")
        if not re.fullmatch("[0-9]{1,9}", number) or (seeds is not None and int(number) >= seeds):
            continue
        summary = _summary(path)
        if summary is None or summary.get("status") != "finished" or summary["last"] is None:
            notes.append(f"seed {number} unfinished")
            continue
        other = differences(read_yaml(path / "config.yaml"), grids.expected(entry, int(number)))
        if other and (entry.name, int(number)) in failed:
            continue  # of another grid in the same folder
        if other and _format_keys(other) not in notes:
            notes.append(_format_keys(other))
        last.append(100 * summary["last"])
        best.append(100 * summary["best"])
        seen.append(int(number))
    notes += [f"seed {seed} failed: {why}" for (name, seed), why in failed.items() if name == entry.name]
    return Line(entry, last, best, "; ".join(notes), tuple(seen))


# -- collecting --------------------------------------------------------------------------------------------------------
def collect(grids: Grids, place: Path, target: Path) -> list[Path]:
    """Thins the finished runs of a table under `place` into the same layout under `target`."""
    out = []
    for entry in grids.entries:
        for path in sorted((place / entry.folder).glob("seed-*")):
            summary = _summary(path)
            if summary and summary.get("status") == "finished":
                out.append(thin(path, target / entry.folder / path.name))
    return out


def place_of(grids: Grids, run: Path) -> tuple[Entry, int, Keys]:
    """The entry and seed that a run is of, wherever it lies, and in which settings it differs from the recipe."""
    stored = read_yaml(run / "config.yaml")
    seed = int(stored["seed"])
    found = []
    for entry in grids.entries:
        if not entry.missing and entry.keys.get("method") == stored.get("method"):
            expected = grids.expected(entry, seed)
            found.append((differences(stored, expected), entry))
    told = [f for f in found if not set(f[0]) & set(grids.grid.by)]
    if not told:
        raise UserError(f"{run} is no run of {grids.recipe}", "name the table it belongs to")
    fewest = min(len(d) for d, _ in told)
    nearest = [f for f in told if len(f[0]) == fewest]
    if len(nearest) > 1:
        raise UserError(
            f"{run} may be any of {', '.join(e.name for _, e in nearest)}", "say which with --only method=ROW"
        )
    return nearest[0][1], seed, nearest[0][0]
