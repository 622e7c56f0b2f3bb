"""A table's recipe: `rows` (printed method name -> keys) in `cells` (data -> printed setting -> keys); docs/recipes.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fallow.errors import UserError, suggest
from fallow.keys.section import Keys
from fallow.names import METHODS
from fallow.recipes.reading import checked
from fallow.trees import merge

GRID = ("own", "by", "rows", "cells", "statistic", "seeds", "missing", "stands_for", "published", "defaults")  # of a recipe, beside the keys of a run


@dataclass(frozen=True)
class Cell:
    """A printed (data, setting) of a table and the keys it stands for; `rows` has further keys for single rows."""

    data: str
    setting: str
    keys: Keys
    rows: dict[str, Keys]

    @property
    def name(self) -> str:
        return f"{self.data} {self.setting}"

    @property
    def slug(self) -> str:
        return slug(self.name)


@dataclass(frozen=True)
class Grid:
    """A table's recipe: what all its runs share, its rows, its cells, and the statistic and seeds it reports."""

    shared: Keys
    own: str
    by: tuple[str, ...]
    rows: dict[str, Keys]
    cells: tuple[Cell, ...]
    statistic: str
    seeds: int

    @staticmethod
    def of(keys: Keys) -> Grid | None:
        """The grid that a recipe's keys describe; None where they are those of a single run."""
        if "cells" not in keys:
            return None
        shared = {k: v for k, v in keys.items() if k not in GRID or k == "defaults"}
        checked(keys, "of the table")
        rows = _named(keys.get("rows") or {str(keys.get("method")): {}})
        cells = []
        for data, settings in (keys["cells"] or {}).items():
            for setting, has in settings.items():
                has = {"data": data, **has}
                cells.append(Cell(str(data), str(setting), has, _named(has.pop("rows", None) or {})))
        own, statistic, seeds = keys.get("own") or next(iter(rows)), keys.get("statistic") or "last", keys.get("seeds") or 1
        if own not in rows:
            raise UserError(f"the table's recipe says own: {own}", f"own is one of its rows: {', '.join(rows)}")
        by = ("data", *(k for k in keys.get("by") or () if k != "data"))
        return Grid(shared, own, by, rows, tuple(cells), statistic, seeds)

    def missing(self, row: str) -> str | None:
        """What to print for a row that cannot be run."""
        why = self.rows[row].get("missing")
        return None if not why else "not yet" if why is True else str(why)

    def keys(self, row: str, cell: Cell) -> Keys:
        """The keys of one entry of the table."""
        found = merge(self.shared, self.rows.get(row, {}), cell.keys, cell.rows.get(row, {}))
        return {k: v for k, v in found.items() if k != "stands_for"}

    def chosen(self, given: Keys) -> tuple[Keys, Keys]:
        """The keys of the one row and cell that agree with what is given, and what else is given."""
        row, cell, rest = self.place(given)
        return self.keys(row, cell), rest

    def place(self, given: Keys) -> tuple[str, Cell, Keys]:
        """The one row (none of the table's: "") and cell that agree with what is given, and what else is given."""
        given = dict(given)
        row = self._row(given)
        setting = given.pop("setting", None)
        wanted = {k: given[k] for k in self.by if k in given}

        def agrees(cell: Cell, keys: Keys) -> bool:
            has = self.keys(row, cell)
            named = setting is None or slug(str(setting)) == slug(cell.setting)
            return named and all(k in has and has[k] == v for k, v in keys.items())

        cells = [c for c in self.cells if setting is not None and slug(str(setting)) == c.slug]  # by its whole name
        cells = cells or [c for c in self.cells if agrees(c, wanted)]
        if len(cells) != 1:
            asked = " ".join(f"{k}={v}" for k, v in [*wanted.items(), *([("setting", setting)] if setting else [])])
            cause = "several cells of the table agree" if cells else "no cell of the table agrees"
            listed = cells or [c for c in self.cells if c.data == wanted.get("data")] or self.cells
            raise UserError(f"{cause} with {asked or 'no keys'}", f"choose one: {self._listed(listed)}")
        return row, cells[0], given

    def _row(self, given: Keys) -> str:
        """The row that `method` names, by its printed name or by a method that one row has; taken out of `given`."""
        name = given.get("method")
        if name is None:
            return self.own
        named = [r for r in self.rows if slug(r) == slug(str(name))]
        having = [r for r, keys in self.rows.items() if keys.get("method") == name]
        rows = named or ([self.own] if self.own in having else having)
        if len(rows) > 1:
            listed = ", ".join(f"method={r!r}" for r in rows)
            raise UserError(f"several rows have method={name}", f"choose one: {listed}")
        if not rows:
            if name in METHODS or ":" in str(name):
                return ""  # a method that the table does not have, in the table's settings
            raise UserError(f"the table has no row {name!r}", suggest(str(name), [*self.rows, *METHODS]))
        if why := self.missing(rows[0]):
            raise UserError(f"the row {rows[0]} cannot be run ({why})", "choose another method")
        del given["method"]
        return rows[0]

    def _listed(self, cells: Iterable[Cell]) -> str:
        def words(c: Cell) -> str:
            has = self.keys(self.own, c)
            return " ".join(f"{k}={has[k]}" for k in self.by if k in has) + f" (setting={c.setting!r})"

        return "; ".join(words(c) for c in cells)


def _named(rows: Mapping[Any, Keys]) -> dict[str, Keys]:
    return {str(name): dict(row) for name, row in rows.items()}


def slug(text: str) -> str:
    """A name that can be a folder and is easily typed.

    >>> slug("cifar10 labels=5% alpha=0.1"), slug("FedAvg+Fixmatch"), slug("FedAvg*")
    ('cifar10-labels-5-alpha-0.1', 'fedavg-fixmatch', 'fedavg')
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
