"""Finds the table cells that a run reproduces, by its settings or by its folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fallow.keys.section import Keys
from fallow.names import recipes
from fallow.runs.settings import differences
from fallow.tables.grids import Entry, Grids
from fallow.tables.published import Figure

BESIDE = {"eval_every", "deterministic", "precision", "measure"}  # a run with others of these is still the cell's


@dataclass(frozen=True)
class Place:
    """A published figure that a run can stand beside, and the settings in which the run is not as published."""

    entry: Entry
    figure: Figure
    statistic: str
    other: Keys


def places(config: Keys, path: Path) -> list[Place]:
    """The published figures of a run's settings; of a run in PAPER/TABLE/CELL/seed-N that cell's, whatever they are."""
    found = []
    for grids in _tables():
        for entry in grids.entries:
            if entry.figure is None or entry.missing:
                continue
            named = path.parent.parts[-3:] == entry.folder.parts
            alike = (entry.keys.get("method"), entry.keys.get("data")) == (config.get("method"), config.get("data"))
            if not named and not alike:
                continue
            other = differences({**config, "seed": 0}, _expected(grids, entry))
            if named or not set(other) - BESIDE:
                found.append(Place(entry, entry.figure, grids.grid.statistic, other))
    return found


@cache
def _tables() -> list[Grids]:
    found = []
    for name in recipes():
        paper, slash, table = name.partition("/")
        if slash and table != "base":
            found.append(Grids(paper, table))
    return found


_settings: dict[tuple[str, ...], Keys] = {}


def _expected(grids: Grids, entry: Entry) -> Keys:
    """An entry's complete settings, made once."""
    name = (entry.paper, entry.table, entry.row, entry.cell.name)
    if name not in _settings:
        _settings[name] = grids.expected(entry, 0)
    return _settings[name]
