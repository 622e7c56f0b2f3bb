"""Names of groups of runs: short, and different where the groups are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fallow.keys.section import Keys
from fallow.report.reading import completed
from fallow.runs.settings import UNHASHED
from fallow.tables.cells import BESIDE, Place
from fallow.trees import flat

WORDS = 3  # keys in a group's name


def typed(config: Keys) -> dict[str, str]:
    """Keys and values as they are written on the command line."""
    return {name: _shown(value) for name, value in flat(config).items()}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_shown, value))
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)


def named(configs: Sequence[Keys], cells: Sequence[Sequence[Place]]) -> list[str]:
    """Short names of groups: the row of a paper's table where that tells them apart, else method and differing keys."""
    plain_names, printed = _by_keys(configs), [_printed(found) for found in cells]
    rows, several = [row for row, *_ in printed], len({c.get("data") for c in configs}) > 1
    out = []
    for name, config, (row, data, setting, varied) in zip(plain_names, configs, printed):
        words = [row] if rows.count(row) == 1 else [row, *([data] if several else []), setting]
        told = config.get("data") == data and printed.count((row, data, setting, varied)) == 1
        out.append(" ".join(words + ["(varied)"] * varied) if told else name)
    return out if len(set(out)) == len(out) else plain_names


def _printed(found: Sequence[Place]) -> tuple[str, str, str, bool]:
    """What a paper calls a group's method, data and setting, and whether the group's settings are not quite those."""
    exact = [p.figure for p in found if not set(p.other) - BESIDE]
    figures = exact or [p.figure for p in found]
    return (figures[0].method, figures[0].data, figures[0].setting, not exact) if figures else ("", "", "", False)


def _by_keys(configs: Sequence[Keys]) -> list[str]:
    """The method, the data if they differ, and what else tells runs of a method apart."""
    several = len({c.get("data") for c in configs}) > 1
    flats = [typed({k: v for k, v in completed(c).items() if k not in UNHASHED}) for c in configs]
    out = []
    for mine in flats:
        alike = [f for f in flats if (f.get("method"), f.get("data")) == (mine.get("method"), mine.get("data"))]
        other = [k for k in mine if k != "seed" and len({f.get(k) for f in alike}) > 1]
        words = [f"{k}={shortened(mine[k])}" for k in other[:WORDS]] + ["…"] * (len(other) > WORDS)
        out.append(" ".join([method_name(mine), *([mine.get("data", "?")] if several else []), *words]))
    return out


def method_name(config: Keys) -> str:
    return str(config.get("method", "?")).rsplit(":", 1)[-1]


def shortened(text: str, most: int = 24) -> str:
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return (text or "none") if len(text) <= most else text[: most - 1] + "…"
