"""The keys of a recipe, with those that it inherits; each of the shape that it must have."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fallow.config import Config
from fallow.errors import UserError, close
from fallow.keys.section import Keys
from fallow.names import METHODS, recipes
from fallow.trees import merge, read_yaml, shown

SEEDS = 10_000  # at most


def recipe(name: str, heirs: tuple[str, ...] = ()) -> Keys:
    """The keys of a recipe: a name, or a path to a YAML file. `inherit: OTHER` takes another one's keys first; a path is from this file."""
    known, path = recipes(), place(name)
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


def place(name: str) -> Path:
    """Where a recipe lies: one that has this name, or the file of it."""
    known = recipes()
    path = known.get(name) or (Path(name) if name.endswith((".yaml", ".yml")) else None)
    if path is None:
        raise UserError(f"there is no recipe {name!r}", _instead(name, known))
    return path


def _instead(name: str, known: Iterable[str]) -> str:
    """What a word that is no recipe may have meant: a method, a key, a folder of images, a recipe of nearly that name."""
    plain = name.rstrip(":")
    if plain in METHODS:
        return f"it is a method: write method={plain}"
    if plain in Config.model_fields:
        return f"it is a key: write {plain}=VALUE"
    if os.path.exists(name):
        return f"if these are your images, write {shlex.quote(f'data={name}')}"
    if near := close(name, [*known, *(f"method={method}" for method in METHODS)]):
        return f"did you mean {near}?"
    if "/" in name or "." in name:
        return "give the path of a .yaml file, data=PATH for your images, or one of `fallow list recipes`"
    return "write method=NAME, data=NAME, or one of `fallow list recipes`"


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
