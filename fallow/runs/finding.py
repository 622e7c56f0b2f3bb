"""Which run is meant, and which runs there are."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from fallow.errors import UserError
from fallow.paths import user_path
from fallow.runs.folder import RunFolder


def run_path(path: Path) -> Path:
    """The run that is meant: a run's name alone is that of one in runs/."""
    return path if path.exists() or len(path.parts) > 1 or not (Path("runs") / path).exists() else Path("runs") / path


def runs_below(folder: Path) -> Iterator[Path]:
    """The runs in a folder, itself or deeper, by name; inside a run there are no others."""
    for where, folders, files in os.walk(folder):
        folders.sort()
        if {"config.yaml", "metrics.jsonl"} <= set(files):
            folders.clear()
            yield Path(where)


def found(paths: Iterable[str | Path]) -> list[Path]:
    """The runs of these folders; a folder that is no run but has some below it stands for all of them."""
    out: dict[Path, Path] = {}
    given = [run_path(user_path(p)) for p in paths]
    for path in given:
        below = [*runs_below(path)]
        if not below and (len(given) == 1 or not path.exists()):  # `runs/*` may hold other things
            below = [RunFolder.existing(path).path]
        for run in below:
            out.setdefault(run.resolve(), run)
    if not out:
        raise UserError("none of these folders is a run", "give folders of runs, such as runs/NAME")
    return list(out.values())
