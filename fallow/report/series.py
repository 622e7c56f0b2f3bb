"""Runs as curves: those that differ only in their seed together, with mean and spread by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fallow.errors import UserError
from fallow.methods import REGISTERED, find
from fallow.report.naming import named
from fallow.report.reading import Run, counting, families, readable
from fallow.tables.cells import places

Floats = np.ndarray


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    label: str
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Curve:
    """A figure by round: mean and standard deviation (over n) of a group's runs, at the rounds that all of them have."""

    rounds: Floats
    mean: Floats
    std: Floats
    count: int


def groups(paths: Sequence[str | Path], names: Sequence[str] | None = None, tell: Callable[[str], None] = lambda sentence: None) -> list[Group]:
    """The runs in groups, in the order given; named by the settings in which the groups differ, or as `names` says.

    Each seed counts once, and runs that did not end do not count, unless none did. What is left out is told.
    """
    there, notes = readable(paths)
    counted = counting(there, notes, alone=not any(run.status == "finished" for run in there))
    runs = counted.runs
    for sentence in counted.notes:
        tell(sentence)
    together = [tuple(members) for members in families(runs).values()]
    first = [members[0] for members in together]
    labels = [_capital(name) for name in named([r.config for r in first], [places(r.config, r.path) for r in first])]
    if names and len(names) != len(labels):
        raise UserError(f"{len(names)} names for {len(labels)} groups of runs", f"name each of: {'; '.join(labels)}")
    return [Group(*pair) for pair in zip(names or labels, together)]


def _capital(name: str) -> str:
    """A method as its paper spells it."""
    word, space, rest = name.partition(" ")
    return (find(word).__name__ if word in REGISTERED else word) + space + rest


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


def has(run: Run, column: str) -> bool:
    return any(row.get(column) is not None for row in run.rows)


def _values(run: Run, column: str, part: str | None) -> dict[int, float]:
    out = {}
    for row in run.rows:
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
            names = list(dict.fromkeys(name for row in run.rows for name in row.get(column) or ()))
            if not names:
                raise lacking(run, column)
            found.append(names)
    return [name for name in found[0] if all(name in other for other in found)]


def last_list(run: Run, column: str) -> list[float]:
    """The last list that a column holds; NaN for an entry that is not known."""
    for row in reversed(run.rows):
        if row.get(column):
            return [float("nan") if v is None else float(v) for v in row[column]]
    raise lacking(run, column)


WHY = {
    "accuracy": "wait for its first test (eval_every), or leave it out",
    "label_ratio": "leave it out: its method gives no pseudo-labels",
    "label_accuracy": "leave it out: no pseudo-label was accepted, its method gives none, or true ones are not known",
    "class_accuracy": "run it with measure=classes, or leave it out",
    "prior_js": "run it with measure=prior, or leave it out",
    "diversity": "run it with measure=diversity, or leave it out",
    "label_accuracy_global": "run it with measure=labels, or leave it out",
    "label_accuracy_local": "run a method whose clients keep a net, such as fedloke, with measure=labels, or leave it out",
}


def lacking(run: Run, column: str) -> UserError:
    if any(row.get(column) is not None for row in run.rows):  # the column is there, this part of it never had a value
        return UserError(f"the run {run.path} has no value of {column} that could be drawn", "choose others with --parts, or leave it out")
    return UserError(f"the run {run.path} has no {column} in its metrics", WHY[column])
