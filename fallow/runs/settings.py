"""From a recipe and key=value to one complete, typed setting.

The later wins: default, method, reading, recipe, its row, its cell, command line. A table's recipe has `rows` (printed
method name -> keys) and `cells` (data -> printed setting -> keys); see docs/recipes.md.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fallow.config import VERSION, Config, merge, read_yaml, validate
from fallow.errors import UserError, suggest
from fallow.methods import REGISTERED, find
from fallow.methods.base import Method
from fallow.methods.combining import refused

Keys = dict[str, Any]
GRID = ("own", "by", "rows", "cells", "statistic", "seeds", "missing")  # of a recipe, beside the keys of a run
MEASURING = {"measure", "measure_every", "diversity_scale", "diversity_scope", "diversity_norms"}
KERNELS = ("compile", "fused")  # other ones than usual round otherwise
UNHASHED = {"data_dir", "device", "slots", "capture", *KERNELS, "keep_memory", "view_memory", "checkpoint_every", "track"} | MEASURING


def recipes() -> dict[str, Path]:
    """The recipes by name, `paper/table1`."""
    root = Path(str(resources.files("fallow") / "recipes"))
    return {str(p.relative_to(root).with_suffix("")): p for p in sorted(root.rglob("*.yaml"))}


def recipe(name: str, heirs: tuple[str, ...] = ()) -> Keys:
    """The keys of a recipe: a name, or a path to a YAML file. `inherit: OTHER` takes another one's keys first."""
    known = recipes()
    path = known.get(name) or (Path(name) if name.endswith((".yaml", ".yml")) else None)
    if path is None:
        raise UserError(f"there is no recipe {name!r}", suggest(name, known) + " (or give a path to a .yaml file)")
    if name in heirs:
        raise UserError(f"the recipe {name} inherits from itself", "name another one in its `inherit`, or none")
    keys = read_yaml(path)
    parent = keys.pop("inherit", None)
    keys.pop("about", None)
    if not parent:
        return keys
    own = {"rows", "cells"} & set(keys)  # take the place of the parent's
    return merge({k: v for k, v in recipe(str(parent), (*heirs, name)).items() if k not in own}, keys)


# -- tables ------------------------------------------------------------------------------------------------------------
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
        shared = {k: v for k, v in keys.items() if k not in GRID}
        rows = keys.get("rows") or {str(keys.get("method")): {}}
        cells = []
        for data, settings in _mappings(keys["cells"], "cells", "data: {setting: {key: value}}").items():
            for setting, has in _mappings(settings, f"cells of {data}", "setting: {key: value}").items():
                has = {"data": data, **has}
                cells.append(Cell(str(data), str(setting), has, has.pop("rows", {})))
        rows = {str(name): dict(row) for name, row in _mappings(rows, "rows", "NAME: {method: ...}").items()}
        own, statistic, seeds = keys.get("own", next(iter(rows))), keys.get("statistic", "last"), keys.get("seeds", 1)
        if own not in rows or statistic not in ("last", "best") or not isinstance(seeds, int) or seeds < 1:
            said = f"own={own!r} statistic={statistic!r} seeds={seeds!r}"
            raise UserError(f"the table's recipe says {said}", "own is one of its rows, statistic last or best, seeds a count")
        by = ("data", *(k for k in keys.get("by", ()) if k != "data"))
        return Grid(shared, own, by, rows, tuple(cells), statistic, seeds)

    def missing(self, row: str) -> str | None:
        """What to print for a row that cannot be run."""
        why = self.rows[row].get("missing")
        return None if not why else "not yet" if why is True else str(why)

    def keys(self, row: str, cell: Cell) -> Keys:
        """The keys of one entry of the table."""
        return merge(self.shared, self.rows.get(row, {}), cell.keys, cell.rows.get(row, {}))

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
            if name in REGISTERED or ":" in str(name):
                return ""  # a method that the table does not have, in the table's settings
            raise UserError(f"the table has no row {name!r}", suggest(str(name), [*self.rows, *REGISTERED]))
        if why := self.missing(rows[0]):
            raise UserError(f"the row {rows[0]} cannot be run ({why})", "choose another method")
        del given["method"]
        return rows[0]

    def _listed(self, cells: Iterable[Cell]) -> str:
        def words(c: Cell) -> str:
            has = self.keys(self.own, c)
            return " ".join(f"{k}={has[k]}" for k in self.by if k in has) + f" (setting={c.setting!r})"

        return "; ".join(words(c) for c in cells)


def _mappings(value: Any, what: str, form: str) -> Mapping[Any, Mapping[Any, Any]]:
    if not isinstance(value, Mapping) or not all(isinstance(v, Mapping) for v in value.values()):
        raise UserError(f"the {what} of the recipe cannot be read", f"write {form}")
    return value


def slug(text: str) -> str:
    """A name that can be a folder and is easily typed.

    >>> slug("cifar10 labels=5% alpha=0.1"), slug("FedAvg+Fixmatch"), slug("FedAvg*")
    ('cifar10-labels-5-alpha-0.1', 'fedavg-fixmatch', 'fedavg')
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def without(keys: Mapping[str, Any], others: Mapping[str, Any]) -> Keys:
    """Keys that others do not have; sections key by key."""
    out: Keys = {}
    for name, value in keys.items():
        if name not in others:
            out[name] = value
        elif isinstance(value, Mapping) and isinstance(others[name], Mapping):
            out[name] = without(value, others[name])
    return out


def resolve(recipe_keys: Keys, given: Keys) -> tuple[type[Method], Config]:
    """The method and its settings. A recipe never sets a key that a reading of its method sets.

    `readings` in a recipe (reading -> keys) adds to the method's, where a data set has its own.
    """
    recipe_keys, given = dict(recipe_keys), dict(given)
    if grid := Grid.of(recipe_keys):
        recipe_keys, given = grid.chosen(given)
    else:
        recipe_keys = {k: v for k, v in recipe_keys.items() if k not in GRID}
    name = given.get("method", recipe_keys.get("method", Config.model_fields["method"].default))
    if not isinstance(name, str):
        raise UserError(f"method={name!r} is no name", "write for example method=fixmatch")
    method = find(name)
    labels = given.get("labels", recipe_keys.get("labels", Config.model_fields["labels"].default))
    reading = given.get("reading", recipe_keys.get("reading", "recommended"))
    more = recipe_keys.pop("readings", {})
    read = merge(method.readings.get(reading, {}), more.get(reading, {})) if isinstance(reading, str) else {}
    recipe_keys = without(recipe_keys, read)
    defaults = merge(method.scenario_defaults(str(labels)), read)
    options = validate(method.Options, merge(defaults, recipe_keys, _with_counts(given, recipe_keys)))
    if options.labels not in method.scenarios:
        able = ", ".join(sorted(method.scenarios))
        raise UserError(f"method {name} is not defined for labels={options.labels}", f"it works with labels={able}")
    if why := refused(method, options):
        raise UserError(*why.split("; ", 1))
    return method, options


def _with_counts(given: Keys, recipe_keys: Keys) -> Keys:
    """A way of counting labels, or of measuring local work, that is given replaces the recipe's."""
    for group in (("label_count", "label_ratio", "label_per_class"), ("steps", "epochs")):
        if any(given.get(k) is not None for k in group):
            for other in group:
                recipe_keys.pop(other, None)
    given = dict(given)
    for keys in (given, recipe_keys):  # one measure of local work puts aside a method's default in the other
        for one, other in (("steps", "epochs"), ("epochs", "steps")):
            if keys.get(one) is not None:
                keys.setdefault(other, None)
    return given


def stored(path: Path) -> tuple[type[Method], Config]:
    """The settings of a run folder."""
    keys = read_yaml(path)
    version = keys.pop("version", None)
    if version != VERSION:
        raise UserError(
            f"{path} was written by another version of Fallow (config version {version}, this one reads {VERSION})",
            "continue the run with the version that began it, or start it again",
        )
    method = find(str(keys.get("method")))
    return method, validate(method.Options, keys)


def config_hash(options: Config) -> str:
    """Equal for runs that must give equal results on one kind of device."""
    usual = {k: type(options).model_fields[k].default for k in KERNELS}
    keys = {k: v for k, v in options.model_dump(mode="json").items() if k not in UNHASHED or v != usual.get(k, v)}
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:16]
