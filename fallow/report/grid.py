"""The grid of a paper's table: rows in cells, run cell by cell, read back.

Runs lie in `DIR/PAPER/TABLE/CELL/seed-N` for the paper's own method and in `DIR/PAPER/TABLE/CELL--ROW/seed-N` for the
other rows; thinned results (`collect`) have the same layout, and `read` takes either.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fallow import disk, targets
from fallow.config import merge, parse_pairs, read_yaml, shown
from fallow.data import sources
from fallow.errors import UserError, suggest
from fallow.report import published
from fallow.report.collect import thin
from fallow.report.published import Figure, table_name
from fallow.runs.settings import UNHASHED, Cell, Grid, Keys, recipe, recipes, resolve, slug

Tell = Callable[[str], None]
TABLES = ("table.md", "table.tex", "table.csv")
CHILD = "import ctypes; ctypes.CDLL(None).prctl(1, 9); from fallow.cli import main; main()"  # dies with its parent


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
    """A table of a paper: its entries, what it reports, further keys that every run gets."""

    def __init__(self, paper: str, table: str, only: Iterable[str] = (), more: Iterable[str] = ()):
        self.paper, self.table, self.more = paper, table_name(table), list(more)
        self.recipe = f"{paper}/{self.table}"
        known = {name.split("/")[0] for name in recipes() if "/" in name}
        if paper not in known:
            raise UserError(f"there is no paper {paper!r} with tables", suggest(paper, known))
        if self.recipe not in recipes():
            raise UserError(f"{paper} has no recipe for its table {table}", f"there are: {', '.join(_tables(paper))}")
        grid = Grid.of(recipe(self.recipe))
        if grid is None:
            raise UserError(f"{self.recipe} is no table", f"there are: {', '.join(_tables(paper))}")
        self.grid, self.given = grid, parse_pairs(self.more)
        for key in ("method", "setting", "seed"):
            if key in self.given:
                raise UserError(
                    f"{key} cannot be set for a whole table", "choose entries with --only, seeds with --seeds"
                )
        wanted = _wanted(list(only))
        self.entries = [e for e in self._all() if all(any(_agrees(e, name, *v) for v in values) for name, values in wanted.items())]
        if not self.entries:
            raise UserError(f"nothing in the table agrees with {shown(' '.join(only))}", f"its cells are: {self._cells()}")

    def _all(self) -> Iterator[Entry]:
        """The printed entries; of a table without published figures all rows in all cells."""
        figures = published.of_table(self.paper, self.table)
        for cell in self.grid.cells:
            for row in self.grid.rows:
                figure = figures.get((cell.data, cell.setting, row))
                if figure is None and figures:
                    continue
                keys = self.grid.keys(row, cell)
                yield Entry(
                    self.paper, self.table, row, cell, keys, row == self.grid.own, self.grid.missing(row), figure
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
        """The complete settings of an entry."""
        return resolve(entry.keys, merge(self.given, {"seed": seed}))[1].model_dump(mode="json")


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
    count = grids.grid.seeds if seeds is None else seeds
    todo = [(e, s) for s in range(count) for e in grids.entries if not e.missing]  # one seed everywhere first
    there: dict[tuple[str, str | None], bool] = {}
    looking = threading.Lock()

    def has_data(entry: Entry) -> bool:
        """Whether the entry's data set can be read; where it cannot, that is told once."""
        o = resolve(entry.keys, grids.given)[1]
        with looking:
            if (o.data, o.data_dir) not in there:
                try:
                    sources.load(o.data, o.data_dir, download, size=o.image.size if o.image.fit == "resize" else None)
                except UserError as e:
                    tell(f"{e} Its runs are left out.")
                    there[o.data, o.data_dir] = False
                else:
                    there[o.data, o.data_dir] = True
            return there[o.data, o.data_dir]

    def one(work: tuple[Entry, int], wait: bool = False) -> Failure | None:
        entry, seed = work
        try:
            with _only_here(out / entry.folder / f"seed-{seed}", wait) as mine:
                if not mine:
                    busy.append(work)
                    return None
                said = _done(grids, entry, seed, out)
                if said is None and not has_data(entry):
                    return Failure(entry, seed, "no data")
                said = said or _run(grids, entry, seed, out, apart=jobs > 1)
        except KeyboardInterrupt:
            raise
        except Exception as e:  # a bug in one cell must not cost the others
            why = str(e) if isinstance(e, UserError) else f"{type(e).__name__}: {e}"
            tell(f"{entry.name}, seed {seed}: failed: {why}")
            return Failure(entry, seed, why)
        tell(f"{entry.name}, seed {seed}: {said}")
        return None

    def waiting() -> Iterator[tuple[Entry, int]]:
        """What others were at when its turn came: they may have finished it by now, or been killed over it."""
        for entry, seed in busy:
            tell(f"{entry.name}, seed {seed}: another process runs it, which is waited for")
            yield entry, seed

    busy: list[tuple[Entry, int]] = []
    with ThreadPoolExecutor(jobs) if jobs > 1 else nullcontext() as pool:
        failures = [f for f in (pool.map(one, todo) if pool else map(one, todo)) if f]
    return failures + [f for f in (one(work, wait=True) for work in waiting()) if f]


@contextmanager
def _only_here(path: Path, wait: bool) -> Iterator[bool]:
    """Whether no other `fallow table` is at a run."""
    with disk.told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with disk.only_one(path, wait) as mine:
        yield mine


def _done(grids: Grids, entry: Entry, seed: int, out: Path) -> str | None:
    """What a finished run came to; None if there is something left to do."""
    path = out / entry.folder / f"seed-{seed}"
    if not (path / "config.yaml").is_file():
        _clear(path)
        return None
    other = differences(read_yaml(path / "config.yaml"), grids.expected(entry, seed))
    if other:
        raise UserError(
            f"{path} was run with other settings ({_told(other)})", "choose another folder with --out, or remove it"
        )
    summary = _summary(path)
    return f"{_percent(summary)} (was finished)" if summary and summary["status"] == "finished" else None


def _clear(path: Path) -> None:
    """Removes what a run left that was cut off before it began, and nothing else."""
    if not path.exists():
        return
    left = [p.name for p in path.iterdir()] if path.is_dir() else [path.name]
    foreign = [name for name in left if name != ".lock" and not re.fullmatch(r"\.config\.yaml\.([0-9]+\.)?part", name)]
    if foreign:
        raise UserError(f"{path} is no run, but {foreign[0]} lies there", "choose another folder with --out, or move it away")
    shutil.rmtree(path)


def _run(grids: Grids, entry: Entry, seed: int, out: Path, apart: bool) -> str:
    place, name = out / entry.folder, f"seed-{seed}"
    there = (place / name / "config.yaml").is_file()
    words = {"method": entry.row, "setting": entry.cell.name, "seed": seed}
    if apart:
        if there:
            command = ["resume", str(place / name), "--quiet"]
        else:
            pairs = [f"{k}={v}" for k, v in words.items()]
            command = ["run", grids.recipe, *pairs, *grids.more, "--out", str(place), "--name", name, "--quiet"]
        ended = subprocess.run([sys.executable, "-c", CHILD, *command], capture_output=True, text=True)
        if ended.returncode:
            lines = (ended.stderr or ended.stdout).strip().splitlines() or [f"exit code {ended.returncode}"]
            raise UserError(lines[-1].removeprefix("error: ").rstrip("."), f"see `fallow run {grids.recipe}`")
    else:
        from fallow import runs

        if there:
            runs.resume(place / name)
        else:
            runs.run(grids.recipe, out=place, name=name, **merge(grids.given, words))
    summary = _summary(place / name)
    assert summary is not None
    return f"{_percent(summary)} in {summary['seconds']:.0f} s" + (" (resumed)" if there else "")


def _summary(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(disk.read(path / "summary.json"))
    except (UserError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and {"status", "last", "best"} <= set(found) else None


def _percent(summary: dict[str, Any]) -> str:
    return f"last {_two(summary['last'])}, best {_two(summary['best'])}"


def _two(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.2f}"


def differences(stored: Keys, expected: Keys) -> Keys:
    """Settings of a run that are not the expected ones and change results, as key -> value."""
    from_data = (
        {"clients"}
        if expected["partition"] == "natural"
        else {"label_ratio"}
        if expected["label_ratio"] is None
        else set()
    )
    return {
        k: stored[k] for k, v in expected.items() if k in stored and k not in UNHASHED | from_data and stored[k] != v
    }


def _told(keys: Keys) -> str:
    return ", ".join(f"{k}={v}" for k, v in keys.items())


# -- reading -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Line:
    """An entry of the table as it is printed; accuracies in per cent."""

    entry: Entry
    last: list[float]
    best: list[float]
    note: str

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
    last, best, notes = [], [], []
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
        if other and _told(other) not in notes:
            notes.append(_told(other))
        last.append(100 * summary["last"])
        best.append(100 * summary["best"])
    notes += [f"seed {seed} failed: {why}" for (name, seed), why in failed.items() if name == entry.name]
    return Line(entry, last, best, "; ".join(notes))


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
