"""From a recipe and key=value to one complete, typed setting.

The later wins: default, method, reading, recipe, its row, its cell, command line. A table's recipe has `rows` (printed
method name -> keys) and `cells` (data -> printed setting -> keys); see docs/recipes.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from fallow import models, own
from fallow.config import VERSION, Config, validate
from fallow.errors import UserError, suggest
from fallow.methods import REGISTERED, combining, find, is_own
from fallow.methods.base import Method
from fallow.names import recipes
from fallow.runs import lacking
from fallow.runs.origin import located, own_code, started_in
from fallow.trees import merge, read_yaml, shown

Keys = dict[str, Any]
GRID = ("own", "by", "rows", "cells", "statistic", "seeds", "missing", "stands_for", "published", "defaults")  # of a recipe, beside the keys of a run
DEFAULTS = ("fitted", "paper")  # what a key gets that nobody gave: what suits the data, or the method's paper
MEASURING = {"measure", "measure_every", "diversity_scale", "diversity_scope", "diversity_norms"}
KERNELS = ("compile", "fused")  # other ones than usual round otherwise
NEWER = {  # keys that older runs have not; as given here they change nothing
    "layout": "auto", "skip_bad": False, "validation": None, "weight_ema": 0.0, "warmup_rounds": 0, "labelled_pick": "random",
    "first_weights": "model", "label_time": "round", "consistency_stats": "update", "evaluate": "anchor",
}  # fmt: skip
SEEDS = 10_000  # at most
UNHASHED = {"data_dir", "device", "slots", "backend", "capture", *KERNELS, "keep_memory", "view_memory", "checkpoint_every", "track", "rank_timeout"} | MEASURING
EDITABLE = UNHASHED - MEASURING - set(KERNELS)  # in a run's folder, by hand, without another result


def recipe(name: str, heirs: tuple[str, ...] = ()) -> Keys:
    """The keys of a recipe: a name, or a path to a YAML file. `inherit: OTHER` takes another one's keys first; a path is from this file."""
    known = recipes()
    path = known.get(name) or (Path(name) if name.endswith((".yaml", ".yml")) else None)
    if path is None:
        raise UserError(f"there is no recipe {name!r}", suggest(name, known) + " (or give a path to a .yaml file)")
    if name in heirs:
        raise UserError(f"the recipe {name} inherits from itself", "name another one in its `inherit`, or none")
    keys = checked(read_yaml(path), name)
    parent = keys.pop("inherit", None)
    keys.pop("about", None)
    if not parent:
        return keys
    own = {"rows", "cells"} & set(keys)  # take the place of the parent's
    if parent not in known and parent.endswith((".yaml", ".yml")):
        parent = os.path.normpath(path.parent / parent)
    return merge({k: v for k, v in recipe(parent, (*heirs, name)).items() if k not in own}, keys)


def checked(keys: Keys, name: str) -> Keys:
    """A recipe's keys, if each has the shape that it must have, whatever the keys of a run may then say to its value."""
    for key, (fits, form) in SHAPES.items():
        if keys.get(key) is not None and not fits(keys[key]):
            raise UserError(f"the recipe {name} has {key}: {shown(keys[key])}", f"write {key}: {form}")
    for key in keys:
        if not isinstance(key, str):
            raise UserError(f"the recipe {name} has a key {shown(key)}", "a key is a word, such as rounds")
    _check_texts(keys, name)
    return keys


def _check_texts(keys: Keys, name: str) -> None:
    """No text has a NUL, at any depth."""
    waiting: list[Any] = [keys]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, str) and "\0" in value:
            raise UserError(f"the recipe {name} has a NUL character in {shown(value)}", "leave it out")
        if not isinstance(value, Mapping | list) or id(value) in seen:
            continue
        seen.add(id(value))
        waiting += value.values() if isinstance(value, Mapping) else value


def _published(value: Any) -> bool:
    """Figures of rows in cells: a mean, or a mean and a deviation, in per cent."""
    if not isinstance(value, Mapping) or not all(map(_of_mappings, value.values())):
        return False
    figures = [figure for settings in value.values() for rows in settings.values() for figure in rows.values()]
    return all(_number(f) or (isinstance(f, list) and len(f) == 2 and all(map(_number, f))) for f in figures)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 100


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _of_mappings(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(v, Mapping) for v in value.values())


def _rows(value: Any) -> bool:
    """Rows, or cells of one data set: by name, each with its keys; what has `readings` has them by name, too."""
    return _of_mappings(value) and all(_of_mappings(row.get("readings") or {}) for row in value.values())


def _cells(value: Any) -> bool:
    if not isinstance(value, Mapping) or not all(map(_rows, value.values())):
        return False
    return all(_rows(cell.get("rows") or {}) for settings in value.values() for cell in settings.values())


SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "inherit": (lambda v: isinstance(v, str), "the name of a recipe, or a path"),
    "own": (lambda v: isinstance(v, str), "one of the rows"),
    "by": (_words, "[data, partition], a list of keys"),
    "statistic": (lambda v: v in ("last", "best"), "last or best"),
    "published": (_published, "{data: {setting: {ROW: 70.1}}}, a row's mean or [mean, deviation]"),
    "seeds": (lambda v: type(v) is int and 1 <= v <= SEEDS, f"a count from 1 to {SEEDS}"),
    "rows": (_rows, "{NAME: {method: ...}}"),
    "cells": (_cells, "{data: {setting: {key: value}}}"),
    "readings": (_of_mappings, "{reading: {key: value}}"),
}


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


def _named(rows: Mapping[Any, Keys]) -> dict[str, Keys]:
    return {str(name): dict(row) for name, row in rows.items()}


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


def resolve(recipe_keys: Keys, given: Keys, trust: bool = False) -> tuple[type[Method], Config]:
    """The method and its settings. A recipe never sets a key that a reading of its method sets.

    Code that is given is the user's word; code that the recipe names is run only if he `trust`s it.

    `readings` in a recipe (reading -> keys) adds to the method's, where a data set has its own.
    """
    recipe_keys, given = dict(recipe_keys), {k: v for k, v in given.items() if k != "defaults"}
    said = {given.get("method"), given.get("model")} - {None} if _plain(given) else set()
    if grid := Grid.of(recipe_keys):
        recipe_keys, given = grid.chosen(given)
    else:
        recipe_keys = {k: v for k, v in recipe_keys.items() if k not in GRID}
    name = given.get("method", recipe_keys.get("method", Config.model_fields["method"].default))
    if not isinstance(name, str):
        raise UserError(f"method={shown(name)} is no name", "write for example method=fixmatch")
    if is_own(name):
        own.named(name, "method") if name in said else own.check(name, "method", "the recipe", trust)
    method = find(name)
    recipe_keys = without_foreign(recipe_keys, given, method)
    labels = given.get("labels", recipe_keys.get("labels", Config.model_fields["labels"].default))
    reading = given.get("reading", recipe_keys.get("reading", "recommended"))
    more = recipe_keys.pop("readings", None) or {}
    read = merge(method.readings.get(reading, {}), more.get(reading) or {}) if isinstance(reading, str) else {}
    recipe_keys = without(recipe_keys, read)
    scenario = method.scenario_defaults(str(labels))
    defaults = merge(scenario, read)
    lacking.check(recipe_keys | given, method, name)
    options = validate(method.Options, merge(defaults, recipe_keys, _with_counts(given, recipe_keys)))
    options.model_fields_set.difference_update(scenario.keys() - read.keys() - recipe_keys.keys() - given.keys())  # nobody has said these
    if options.labels not in method.scenarios:
        able = ", ".join(sorted(method.scenarios))
        raise UserError(f"method {name} is not defined for labels={options.labels}", f"it works with labels={able}")
    if models.is_own(options.model):
        from_recipe = options.model not in said and options.model in (recipe_keys.get("model"), read.get("model"), *_said(more))
        own.check(options.model, "model", "the recipe", trust) if from_recipe else own.named(options.model, "model")
    combining.check(method, options)
    return method.algorithm(options), options


def without_foreign(recipe_keys: Keys, given: Keys, method: type[Method]) -> Keys:
    """A recipe's keys; under another method than its own without those that only its own has."""
    if given.get("method") in (None, recipe_keys.get("method")):
        return recipe_keys
    foreign = lacking.lacking(recipe_keys, method)
    return {k: v for k, v in recipe_keys.items() if k not in foreign}


def are_fitted(recipe_keys: Keys, given: Keys) -> bool:
    """Whether keys that nobody gave are fitted to the data; `defaults` says so, and the recipes of papers say otherwise."""
    word = given.get("defaults", recipe_keys.get("defaults", DEFAULTS[0]))
    if word not in DEFAULTS:
        raise UserError(f"defaults={shown(word)} is not known", f"give one of {', '.join(DEFAULTS)}")
    return bool(word == DEFAULTS[0])


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


def _plain(given: Keys) -> bool:
    return all(isinstance(given.get(k), str | None) for k in ("method", "model"))


def _said(readings: Any) -> list[Any]:
    """The models that a recipe's readings name."""
    return [v.get("model") for v in readings.values() if isinstance(v, Mapping)] if isinstance(readings, Mapping) else []


class Stated(Config):
    """Settings of a method whose code is not looked at: its own keys are there as they were written."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=(), validate_default=False)


def stated(path: Path) -> Config:
    """The settings of a run folder, without running code that it names."""
    keys = _stored_keys(path)
    if not is_own(str(keys.get("method"))):
        return validate(find(str(keys.get("method"))).Options, keys)
    common = validate(Config, {k: v for k, v in keys.items() if k in Config.model_fields})
    return Stated.model_construct(**{k: getattr(common, k) for k in Config.model_fields}, **{k: v for k, v in keys.items() if k not in Config.model_fields})


def stored(path: Path, trust: bool = False) -> tuple[type[Method], Config]:
    """The method and settings of a run folder; code that it names is run only if it is the user's, or he trusts it."""
    keys, o = _stored_keys(path), stated(path)
    start = started_in(path.parent)
    for what, name in own_code(located(o, start) if start else o).items():
        own.check(name, what, f"the run {path.parent}", trust)
    method = find((located(o, start) if start else o).method)
    options = validate(method.Options, keys)
    return method.algorithm(options), options


def _stored_keys(path: Path) -> Keys:
    keys = read_yaml(path)
    version = keys.pop("version", None)
    if version != VERSION:
        raise UserError(
            f"{path} was written by another version of Fallow (config version {version}, this one reads {VERSION})",
            "continue the run with the version that began it, or start it again",
        )
    return keys


def config_hash(options: Config) -> str:
    """Equal for runs that must give equal results on one kind of device."""
    usual = {k: type(options).model_fields[k].default for k in KERNELS}
    told = {k: v for k, v in options.model_dump(mode="json").items() if NEWER.get(k, ...) != v}
    keys = {k: v for k, v in told.items() if k not in UNHASHED or v != usual.get(k, v)}
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:16]


def _worded(tree: Any) -> bool:
    """Whether all keys are text, also of what is inside."""
    if isinstance(tree, Mapping):
        return all(isinstance(k, str) for k in tree) and all(map(_worded, tree.values()))
    return all(map(_worded, tree)) if isinstance(tree, list) else True


def settings_sha256(path: Path) -> str:
    """Of the keys in a config.yaml, but for those that may be edited there."""
    keys = {k: v for k, v in read_yaml(path).items() if k not in EDITABLE}
    if not _worded(keys):
        raise UserError(f"{path} has a key that is no word", "restore the file")
    return keys_sha256(keys)


def keys_sha256(stored_keys: Keys) -> str:
    """Of such keys."""
    keys = {k: v for k, v in stored_keys.items() if k not in EDITABLE}
    return hashlib.sha256(json.dumps(keys, sort_keys=True, default=str).encode()).hexdigest()


def differences(stored: Keys, expected: Keys) -> Keys:
    """Settings of a run that are not the expected ones and change results, as key -> value."""
    from_data = (
        {"clients"}
        if expected.get("partition") == "natural"
        else {"label_ratio"}
        if expected.get("label_ratio") is None
        else set()
    )
    return {
        k: stored[k] for k, v in expected.items() if k in stored and k not in UNHASHED | from_data and stored[k] != v
    }
