"""The grid of a paper's table, or of one's own in a file: rows in cells.

Runs lie in `DIR/PAPER/TABLE/CELL/seed-N` for the paper's own method and in `DIR/PAPER/TABLE/CELL--ROW/seed-N` for the
other rows, those of a table of one's own in `DIR/NAME/...`; thinned results have the same layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fallow import targets
from fallow.errors import UserError, suggest
from fallow.keys.section import Keys
from fallow.names import recipes
from fallow.recipes.grid import Cell, Grid, slug
from fallow.recipes.reading import SHAPES, recipe
from fallow.runs.settings import resolve
from fallow.tables import published
from fallow.tables.published import Figure, table_name
from fallow.trees import merge, parse_pairs, shown

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
