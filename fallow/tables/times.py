"""What the recipes ask of this machine, in words: `fallow list recipes`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fallow.config import Config
from fallow.errors import UserError
from fallow.methods.base import Method
from fallow.recipes.reading import recipe
from fallow.runs.estimate import Measure, seconds
from fallow.runs.settings import resolve
from fallow.tables.grids import Grids


@dataclass(frozen=True)
class Estimate:
    runs: int
    shortest: float
    longest: float
    total: float


def of_recipe(name: str, measure: Measure) -> Estimate | None:
    """A run of the recipe's own method, over its cells, and all that `fallow table` would run; None if not to be told."""
    if name.endswith("/base"):  # a protocol, for any data set
        return None
    if "/" not in name:
        one = _one(lambda: resolve(recipe(name), {}), measure)
        return None if one is None else Estimate(1, one, one, one)
    grids, own, total, runs = Grids(*name.split("/")), [], 0.0, 0
    for entry in grids.entries:
        taken = None if entry.missing else _one(lambda: resolve(entry.keys, {}), measure)
        if taken is not None:
            own += [taken] if entry.own else []
            total, runs = total + grids.grid.seeds * taken, runs + grids.grid.seeds
    return Estimate(runs, min(own), max(own), total) if own else None


def _one(settings: Callable[[], tuple[type[Method], Config]], measure: Measure) -> float | None:
    try:
        method, options = settings()
        return seconds(method, options, measure)
    except UserError:  # a base that is no whole setting
        return None
