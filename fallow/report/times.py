"""What the recipes ask of this machine, in words: `fallow list recipes`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fallow.config import Config
from fallow.errors import UserError
from fallow.methods.base import Method
from fallow.report.grid import Grids
from fallow.runs.estimate import Measure, seconds
from fallow.runs.settings import recipe, resolve


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


def format_duration(s: float) -> str:
    """A time in words, to two digits.

    >>> [format_duration(s) for s in (4.2, 50, 100, 5400, 90_000, 3e6)]
    ['4.2 s', '50 s', '1.7 min', '1.5 h', '25 h', '35 days']
    """
    for unit, size, limit in (("s", 1, 90), ("min", 60, 90), ("h", 3600, 36), ("days", 86_400, float("inf"))):
        if s < limit * size:
            value = s / size
            return f"{value:.1f} {unit}" if value < 9.5 else f"{float(f'{value:.2g}'):g} {unit}"
    raise ValueError(s)


def span(shortest: float, longest: float) -> str:
    """From one time to another.

    >>> span(60, 60), span(3600 * 2, 3600 * 5), span(3000, 7200)
    ('60 s', '2.0 to 5.0 h', '50 min to 2.0 h')
    """
    low, high = format_duration(shortest), format_duration(longest)
    if low == high:
        return low
    return f"{low.split()[0] if low.split()[1] == high.split()[1] else low} to {high}"
