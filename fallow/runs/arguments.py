"""What `fallow.run`, `resume` and `load` are called with beside a run's keys: of its kind, or a sentence."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

from fallow.errors import UserError
from fallow.trees import shown


def folder(name: str, value: Any) -> Path:
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        raise UserError(f"{name}={shown(value)} is no path", "give the path of a folder, as a text or a Path")
    if "\0" in os.fspath(value):
        raise UserError(f"{name}={os.fspath(value)!r} has a NUL character in it, which no name can have", "leave it out")
    return Path(value)


def name_of_run(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UserError(f"name={shown(value)} is no name", "give a text, or leave it out")
    if value:
        folder("name", value)
    return value


def recipe(value: Any) -> str | Mapping[str, Any] | None:
    if value is None or isinstance(value, str | Mapping):
        return value
    if isinstance(value, os.PathLike):
        return str(folder("recipe", value))
    raise UserError(f"{shown(value)} is no recipe", "give a recipe's name, the path of a .yaml file, or a dict of keys")


def rounds(name: str, value: Any) -> int | None:
    """How many, as Python or numpy counts."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UserError(f"{name}={shown(value)} is no number of rounds", "give a whole number, 1 or more")
    if value < 1:
        raise UserError(f"{name} {shown(value)} is not a round", "rounds count from 1")
    return int(value)
