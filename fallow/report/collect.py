"""Runs into `results/PAPER/TABLE/CELL/seed-N`: settings, thinned metrics and summary, no weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fallow import disk
from fallow.errors import UserError
from fallow.runs.folder import RunFolder

ROWS = 200  # of metrics that are kept at most


def thin(run_folder: str | Path, target: str | Path) -> Path:
    """Copies what a result needs: config.yaml (without the machine's data folder), metrics.jsonl, summary.json.

    Of more than 200 rounds the metrics of 200 evenly spaced ones stay, first, best and last among them.
    """
    folder, target = RunFolder.existing(Path(run_folder)), Path(target)
    if not folder.summary.is_file():
        raise UserError(f"the run {folder.path} has not ended", f"finish it with `fallow resume {folder.path}`")
    summary = folder.summary.read_text()
    best = json.loads(summary).get("best_round")
    rows = folder.rows()
    if len(rows) > ROWS:
        rows = [rows[i] for i in _kept(len(rows), next((i for i, r in enumerate(rows) if r["round"] == best), 0))]
    with disk.told(target):
        target.mkdir(parents=True, exist_ok=True)
    disk.write(target / "config.yaml", re.sub(r"(?m)^data_dir: .*$", "data_dir: null", folder.config.read_text()))
    disk.write(target / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    disk.write(target / "summary.json", summary)
    return target


def _kept(count: int, best: int) -> list[int]:
    """Which of so many rows stay."""
    spaced = {round(i * (count - 1) / (ROWS - 2)) for i in range(ROWS - 1)}
    return sorted(spaced | {best})
