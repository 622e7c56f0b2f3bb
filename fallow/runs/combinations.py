"""Several values of a key make a grid: `method=fedavg,fixmatch seed=0,1,2` is six runs.

A value with commas is several values where the whole is no value of its key, and where its parts are. So
`measure=classes,prior` is one list and `partition=dirichlet-capped:0.3,min_size=1` one split: what is an option of the
value before it stays with it. A list in brackets is several values of a key that takes no list.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from fallow import models
from fallow.config import Config, Section, takes
from fallow.data import partitions, sources
from fallow.data.views import view_names
from fallow.errors import UserError
from fallow.keys.section import Keys
from fallow.methods import REGISTERED, find, is_own
from fallow.paths import user_path
from fallow.recipes.grid import Grid, slug
from fallow.runs.settings import UNHASHED
from fallow.schedule import Schedule
from fallow.trees import flat, merge, parse_pairs

MOST = 10_000  # runs of a grid
PATHS = ("folder", "csv", "numpy")
LISTS = {name for name, field in Config.model_fields.items() if isinstance(field.default, tuple)}  # keys that take several values
WITH_OPTIONS = ("partition", "unlabelled_partition", "schedule")


@dataclass(frozen=True)
class Axis:
    """A key with several values."""

    key: str  # as it is typed
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Combinations:
    """What is the same for all runs of a grid, and the keys that have several values."""

    common: Keys
    axes: tuple[Axis, ...]

    def __len__(self) -> int:
        count = 1
        for axis in self.axes:
            count *= len(axis.values)
        return count

    def __iter__(self) -> Iterator[tuple[Keys, Keys]]:
        """What each run varies (key -> value) and all its keys; the first seed of everything comes first."""
        slow = sorted(self.axes, key=lambda axis: axis.key != "seed")
        for values in itertools.product(*(axis.values for axis in slow)):
            varied = dict(zip((axis.key for axis in slow), values))
            varied = {axis.key: varied[axis.key] for axis in self.axes}
            yield varied, merge(self.common, *(nested(key, value) for key, value in varied.items()))


def combinations(given: Keys, recipe: Keys) -> Combinations | None:
    """The grid that these keys span; None where each has one value."""
    common, axes = dict(given), []
    for name, value in flat(given).items():
        several = _several(name, value, given, recipe)
        if several is None:
            continue
        if name in UNHASHED:
            raise UserError(f"{name} changes no result, so several values of it make no runs", f"give {name} one value")
        double = next((v for i, v in enumerate(several) if v in several[:i]), None)
        if double is not None:
            raise UserError(f"{name} has the value {double} twice", "give each value once")
        axes.append(Axis(name, tuple(several)))
        common = _without(common, name.split("."))
    found = Combinations(common, tuple(axes))
    if len(found) > MOST:
        raise UserError(f"that would be {len(found):,} runs", f"give fewer values; a grid has at most {MOST:,} runs")
    return found if axes else None


def nested(name: str, value: Any) -> Keys:
    """`augment.strong` as a section with one entry."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def _without(keys: Keys, path: list[str]) -> Keys:
    head, *rest = path
    if not rest:
        return {k: v for k, v in keys.items() if k != head}
    return {k: _without(v, rest) if k == head else v for k, v in keys.items()}


# -- one value, or several ---------------------------------------------------------------------------------------------
def _several(name: str, value: Any, given: Keys, recipe: Keys) -> list[Any] | None:
    """The values that one value stands for; None where it is one."""
    if name in LISTS:
        return None
    if isinstance(value, str) and "," in value:
        valid = _judge(name, given, recipe)
        words = [word.strip() for word in value.split(",")]
        if valid is None or not all(words) or valid(value):
            return None
        parts = [parse_pairs([f"value={word}"])["value"] for word in _joined(name, words)]
        right = [valid(part) for part in parts]
        sure = all(right) if name.split(".")[0] in WITH_OPTIONS else any(right)  # a wrong part is then told by its run
        return parts if sure and len(parts) > 1 else None
    if isinstance(value, list) and value:
        valid = _judge(name, given, recipe)
        return value if valid is not None and not valid(value) else None
    return None


def _joined(name: str, words: list[str]) -> list[str]:
    """Words with options at the value before them."""
    if name not in WITH_OPTIONS:
        return words
    out = words[:1]
    for word in words[1:]:
        if "=" in word:
            out[-1] += f",{word}"
        else:
            out.append(word)
    return out


def _judge(name: str, given: Keys, recipe: Keys) -> Callable[[Any], bool] | None:
    """Tells whether a value is one of a key; None for a key that nobody knows."""
    head, _, rest = name.partition(".")
    grid = Grid.of(recipe)
    if name == "setting" and grid:
        return lambda value: any(slug(str(value)) in (slug(c.setting), c.slug) for c in grid.cells)
    if name == "method":
        rows = {slug(row) for row in grid.rows} if grid else set()
        return lambda value: value in [*REGISTERED] or slug(str(value)) in rows or _is_code(value, is_own)
    judges: dict[str, Callable[[Any], bool]] = {
        "data": _is_data,
        "model": lambda value: value in [*models.names()] or _is_code(value, models.is_own),
        "partition": lambda value: _accepted(partitions.parse, value),
        "unlabelled_partition": lambda value: _accepted(partitions.parse, value),
        "schedule": lambda value: _accepted(Schedule.parse, value),
        "unlabelled_batch": lambda value: not isinstance(value, str) or "," not in value,
    }
    if head in judges and not rest:
        return judges[head]
    if name in ("augment.labelled", "augment.weak", "augment.strong"):
        return lambda value: value in view_names()
    field = _field(head, rest, given, recipe)
    if field is None:
        return None
    if takes(field.annotation) == "text":
        return lambda value: isinstance(value, str)
    adapter: TypeAdapter[Any] = TypeAdapter(field.rebuild_annotation())

    def fits(value: Any) -> bool:
        try:
            adapter.validate_python(str(value).lower() if isinstance(value, bool) and "true" not in takes(field.annotation) else value)
        except ValidationError:
            return False
        return True

    return fits


def _field(head: str, rest: str, given: Keys, recipe: Keys) -> Any:
    """What is known of a key: of every run's, else of one of the methods'."""
    kinds: list[type[BaseModel]] = [Config, *(find(name).Options for name in _methods(given, recipe))]
    for kind in kinds:
        field = kind.model_fields.get(head)
        if field is not None and rest and isinstance(field.default, Section):
            return type(field.default).model_fields.get(rest)
        if field is not None:
            return None if rest else field
    return None


def _methods(given: Keys, recipe: Keys) -> list[str]:
    """The methods that may have a key: those that are named, and a table's rows; a recipe's own code is not run for it."""
    said = given.get("method", Config.model_fields["method"].default)
    words = [word.strip() for word in said.split(",")] if isinstance(said, str) else said if isinstance(said, list) else []
    rows = (recipe.get("rows") or {}).values()
    known = [recipe.get("method"), *(row.get("method") for row in rows)]
    return [w for w in words if w in REGISTERED or _is_code(w, is_own)] + [name for name in known if name in REGISTERED]


def _accepted(parse: Callable[[str], Any], value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        parse(value)
    except UserError:
        return False
    return True


def _is_code(value: Any, is_named: Callable[[str], bool]) -> bool:
    """Whether a text names code outside the package; a file with a comma in its name is told from two by being there."""
    if not isinstance(value, str) or not is_named(value):
        return False
    where = value.rpartition(":")[0]
    return "," not in value or user_path(where).is_file()


def _is_data(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    kind, colon, rest = value.partition(":")
    if colon and kind in PATHS:
        return "," not in rest or user_path(rest).exists()
    return any(value == listed.name for listed in sources.names()) or Path(value).is_dir()
