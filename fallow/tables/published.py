"""The papers' own figures, by paper, table, printed method and printed setting."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

ROMAN = {"I": 1, "V": 5, "X": 10}


@dataclass(frozen=True)
class Figure:
    """A published accuracy in per cent."""

    paper: str
    table: str  # as in the names of recipes: table2, fig7, app-i
    data: str
    setting: str
    method: str
    mean: float
    std: float | None
    statistic: str
    runs: str
    note: str


def table_name(text: str) -> str:
    """How a table is called in the names of recipes.

    >>> [table_name(t) for t in ("1", "II", "table2", "Fig7", "App.I")]
    ['table1', 'table2', 'table2', 'fig7', 'app-i']
    """
    text = text.strip()
    bare = re.sub(r"(?i)^table[ -]?", "", text)
    if re.fullmatch("[0-9]{1,9}", bare):
        return f"table{int(bare)}"
    if bare and set(bare.upper()) <= set(ROMAN):
        return f"table{_roman(bare.upper())}"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _roman(text: str) -> int:
    values = [ROMAN[c] for c in text]
    return sum(-v if v < max(values[i:]) else v for i, v in enumerate(values))


@cache
def figures() -> tuple[Figure, ...]:
    """All of them, in the order of the file; a figure printed twice comes once."""
    text = (resources.files("fallow.tables") / "published.csv").read_text(encoding="utf-8")
    out: dict[tuple[str, ...], Figure] = {}
    for line in csv.DictReader(text.splitlines()):
        std = float(line["std"]) if line["std"] else None
        names = line["paper"], table_name(line["table"]), line["data"], line["setting"], line["method"]
        one = Figure(*names, float(line["mean"]), std, line["statistic"], line["runs"], line["note"])
        out.setdefault(names, one)
    return tuple(out.values())


def of_table(paper: str, table: str) -> dict[tuple[str, str, str], Figure]:
    """The figures of one table by (data, setting, method).

    >>> of_table("feddure", "1")["cifar10", "iid,iid", "FedDure"].mean
    67.69
    """
    name = table_name(table)
    return {(f.data, f.setting, f.method): f for f in figures() if (f.paper, f.table) == (paper, name)}
