"""Runs as curves: those that differ only in their seed together, with mean and spread by round."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fallow.config import read_yaml
from fallow.errors import UserError
from fallow.methods import REGISTERED, find
from fallow.runs import Result, load_result
from fallow.runs.settings import UNHASHED

Floats = np.ndarray


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    label: str
    runs: tuple[Result, ...]


@dataclass(frozen=True)
class Curve:
    """A figure by round: mean and standard deviation (over n) of a group's runs, at the rounds that all of them have."""

    rounds: Floats
    mean: Floats
    std: Floats
    count: int


def groups(paths: Sequence[str | Path], names: Sequence[str] | None = None) -> list[Group]:
    """The runs in groups, in the order given; named by the settings in which the groups differ, or as `names` says."""
    if len(paths) > 1:  # `runs/*` may hold other folders
        paths = [p for p in paths if not Path(p).is_dir() or (Path(p) / "config.yaml").is_file()]
    results = [load_result(p) for p in paths]
    if not results:
        raise UserError("none of these folders is a run", "give folders of runs, such as runs/NAME")
    settings = [_settings(r.path) for r in results]
    order = list(dict.fromkeys(_key(s) for s in settings))
    first = [next(s for s in settings if _key(s) == key) for key in order]
    if names and len(names) != len(order):
        listed = ", ".join(_labels(first))
        raise UserError(f"{len(names)} names for {len(order)} groups of runs", f"name each of: {listed}")
    members = [tuple(r for r, s in zip(results, settings) if _key(s) == key) for key in order]
    return [Group(*pair) for pair in zip(names or _labels(first), members)]


def _settings(path: Path) -> dict[str, Any]:
    """What makes a run what it is, by dotted key."""
    left_out = {*UNHASHED, "seed", "version"}
    return _flat({k: v for k, v in read_yaml(path / "config.yaml").items() if k not in left_out})


def _flat(keys: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in keys.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return out


def _key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def _labels(settings: list[dict[str, Any]]) -> list[str]:
    """By method, and by the settings in which those of the same method differ."""
    methods = [_method(s) for s in settings]
    out = []
    for name, own in zip(methods, settings):
        alike = [s for s, other in zip(settings, methods) if other == name]
        differing = [k for k in own if len({str(s.get(k)) for s in alike}) > 1]
        words = [name] if len(set(methods)) > 1 or not differing else []
        out.append(", ".join([*words, *(f"{k}={own[k]}" for k in differing)]))
    return out


def _method(settings: dict[str, Any]) -> str:
    name = str(settings.get("method"))
    return find(name).__name__ if name in REGISTERED else name.rpartition(":")[2]


def curve(group: Group, column: str, part: str | None = None) -> Curve:
    """A column of metrics.jsonl, or a part of it where it has several, over the rounds."""
    found = [_values(run, column, part) for run in group.runs]
    for run, values in zip(group.runs, found):
        if not values:
            raise lacking(run, column)
    rounds = sorted(set.intersection(*(set(v) for v in found)))
    if not rounds:
        raise UserError(f"the runs of {group.label} have no round in common", "give runs with the same rounds, or one of them")
    table = np.array([[v[r] for r in rounds] for v in found])
    return Curve(np.array(rounds), table.mean(0), table.std(0), len(found))


def has(run: Result, column: str) -> bool:
    return any(row.get(column) is not None for row in run.metrics)


def _values(run: Result, column: str, part: str | None) -> dict[int, float]:
    out = {}
    for row in run.metrics:
        value = row.get(column)
        if isinstance(value, dict):
            value = value.get(part)
        if value is not None:
            out[int(row["round"])] = float(value)
    return out


def parts(groups: Sequence[Group], column: str) -> list[str]:
    """The parts that a column has in all of the runs, in the order of the first."""
    found = []
    for group in groups:
        for run in group.runs:
            names = list(dict.fromkeys(name for row in run.metrics for name in row.get(column) or ()))
            if not names:
                raise lacking(run, column)
            found.append(names)
    return [name for name in found[0] if all(name in other for other in found)]


def last_list(run: Result, column: str) -> list[float]:
    """The last list that a column holds."""
    for row in reversed(run.metrics):
        if row.get(column):
            return [float(v) for v in row[column]]
    raise lacking(run, column)


WHY = {
    "accuracy": "wait for its first test (eval_every), or leave it out",
    "label_ratio": "leave it out: its method gives no pseudo-labels",
    "label_accuracy": "leave it out: its method gives no pseudo-labels, or true ones are not known",
}


def lacking(run: Result, column: str) -> UserError:
    return UserError(f"the run {run.path} has no {column} in its metrics", WHY.get(column, "run it with the key `measure`, or leave it out"))
