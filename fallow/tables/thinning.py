"""Runs into `results/PAPER/TABLE/CELL/seed-N`: settings, thinned metrics and summary, no weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fallow import disk, targets
from fallow.errors import UserError
from fallow.runs.folder import RunFolder
from fallow.runs.metrics import laid_out, written

ROWS = 200  # of metrics that are kept at most


def thin(run_folder: str | Path, target: str | Path) -> Path:
    """Copies what a result needs: config.yaml (without the machine's data folder), metrics.jsonl, summary.json.

    Of more than 200 rounds the metrics of 200 stay: evaluated ones before others, evenly spaced, first, best and last
    among them.
    """
    folder = RunFolder.existing(Path(run_folder))
    target = targets.thinned(Path(target), folder.path)
    if not folder.summary.is_file():
        raise UserError(f"the run {folder.path} has not ended", f"finish it with `fallow resume {folder.path}`")
    try:
        summary = dict(json.loads(folder.verified(folder.summary.name)))
    except (ValueError, TypeError):
        raise UserError(f"the summary of the run {folder.path} is damaged", f"write it anew with `fallow resume {folder.path}`") from None
    rows = folder.rows()
    summary.setdefault("mean_last_30", mean_of_last(rows, 30))  # while all rounds are there
    if len(rows) > ROWS:
        rows = _kept(rows, summary.get("best_round"))
    with disk.errors_as_user_errors(target):
        target.mkdir(parents=True, exist_ok=True)
    disk.write(target / "config.yaml", re.sub(r"(?m)^data_dir: .*$", "data_dir: null", disk.read(folder.config).decode()))
    disk.write(target / "metrics.jsonl", "".join(written(r) for r in rows))
    disk.write(target / "summary.json", laid_out(summary) + "\n")
    return target


def mean_of_last(rows: list[dict[str, Any]], rounds: int) -> float | None:
    """The mean accuracy of the tests in the last so many rounds."""
    tested = [r["accuracy"] for r in rows if r["round"] > rows[-1]["round"] - rounds and r.get("accuracy") is not None]
    return sum(tested) / len(tested) if tested else None


def _kept(rows: list[dict[str, Any]], best: int | None) -> list[dict[str, Any]]:
    ends = {i for i, r in enumerate(rows) if r["round"] == best} | {0, len(rows) - 1}
    tested = [i for i, r in enumerate(rows) if i not in ends and r.get("accuracy") is not None]
    others = [i for i in range(len(rows)) if i not in ends and rows[i].get("accuracy") is None]
    kept = ends | set(_spaced(tested, ROWS - len(ends)))
    return [rows[i] for i in sorted(kept | set(_spaced(others, ROWS - len(kept))))]


def _spaced(places: list[int], count: int) -> list[int]:
    """At most so many of these places, evenly spaced."""
    if len(places) <= count:
        return places
    return [places[(2 * k + 1) * len(places) // (2 * count)] for k in range(count)]
