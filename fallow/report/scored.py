"""A run's scores as the page shows them; what has not the shape of scores is left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fallow.measure.told import NAMES

Found = dict[str, Any]
CLASSES, SITES = 64, 400  # in a confusion matrix and in a list of sites that a page can show


def scores(summary: Mapping[str, Any]) -> Found:
    """`test` and `validation` (numbers, `by_class`, `confusion`, `calibration`), `sites`, `best` by validation."""
    found = _dict(summary.get("scores"))
    parts = {side: _side(_dict(found.get(side))) for side in ("test", "validation")}
    out: Found = {side: part for side, part in parts.items() if part}
    if sites := _sites(_dict(found.get("sites"))):
        out["sites"] = sites
    if best := _best(_dict(summary.get("validation"))):
        out["best"] = best
    return out


def _side(found: Found) -> Found:
    out = {name: value for name in ("accuracy", *NAMES) if (value := number(found.get(name))) is not None}
    by_class = _numbers(found.get("class_accuracy"))
    if not out or not by_class:
        return {}
    matrix = _matrix(found.get("confusion"), len(by_class))
    return out | {"by_class": by_class, "confusion": matrix, "calibration": _bins(_dict(found.get("calibration")))}


def _matrix(value: Any, classes: int) -> list[list[int]] | None:
    """Counts, square, of no more classes than can be looked at."""
    if not isinstance(value, list) or not 2 <= classes <= CLASSES or len(value) != classes:
        return None
    fits = all(isinstance(row, list) and len(row) == classes and all(isinstance(n, int) and 0 <= n < 2**53 for n in row) for row in value)
    return value if fits else None


def _bins(found: Found) -> Found | None:
    columns = {name: _numbers(found.get(name)) for name in ("samples", "confidence", "accuracy")}
    lengths = {len(values or ()) for values in columns.values()}
    return columns if len(lengths) == 1 and 0 not in lengths else None


def _sites(found: Found) -> Found | None:
    names, accuracy, samples = found.get("names"), _numbers(found.get("accuracy")), _numbers(found.get("samples"))
    if not isinstance(names, list) or not names or not accuracy or not samples or not len(names) == len(accuracy) == len(samples):
        return None
    step = math.ceil(len(names) / SITES)
    told = {"names": [str(n) for n in names[::step]], "accuracy": accuracy[::step], "samples": samples[::step]}
    return told | {"of": "validation" if found.get("of") == "validation" else "test", "all": len(names)}


def _best(found: Found) -> Found | None:
    score, at, test = number(found.get("best")), number(found.get("best_round")), number(_dict(found.get("test")).get("accuracy"))
    return None if score is None or at is None else {"accuracy": score, "round": at, "test": test}


def number(value: Any) -> float | int | None:
    """A finite number in six digits."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _numbers(value: Any) -> list[float | int | None] | None:
    return [number(v) for v in value] if isinstance(value, list) else None


def _dict(value: Any) -> Found:
    return value if isinstance(value, dict) else {}
