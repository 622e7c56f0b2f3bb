"""A table's runs read back, line by line, wherever they lie; finished ones thinned and kept."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fallow.keys.section import Keys
from fallow.runs.folder import RunFolder
from fallow.runs.settings import differences
from fallow.tables.grids import Entry, Grids
from fallow.tables.running import Failure
from fallow.tables.thinning import thin
from fallow.trees import read_yaml


@dataclass(frozen=True)
class Line:
    """An entry of the table as it is printed; accuracies in per cent."""

    entry: Entry
    runs: dict[Path, Keys]  # the summaries of finished ones, by folder, in order of seed
    note: str

    def scores(self, statistic: str) -> list[float]:
        """`last` or `best` of each run."""
        return [100 * summary[statistic] for summary in self.runs.values()]

    @property
    def seeds(self) -> list[int]:
        return [int(path.name.removeprefix("seed-")) for path in self.runs]

    def ours(self, statistic: str) -> tuple[float, float | None] | None:
        return mean_std(self.scores(statistic)) if self.runs else None


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation (over n, ddof 0; of one value none)."""
    return statistics.fmean(values), statistics.pstdev(values) if len(values) > 1 else None


def with_std(mean: float, std: float | None) -> str:
    """As papers print them."""
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def read(grids: Grids, place: Path, seeds: int | None = None, failures: Iterable[Failure] = ()) -> list[Line]:
    """What the runs under `place` came to; `seeds`: the first so many only."""
    failed = {(f.entry.name, f.seed): f.why for f in failures}
    return [_line(grids, e, place, seeds, failed) for e in grids.entries]


def _line(grids: Grids, entry: Entry, place: Path, seeds: int | None, failed: dict[tuple[str, int], str]) -> Line:
    if entry.missing:
        return Line(entry, {}, entry.missing)
    runs, notes = dict[Path, Keys](), list[str]()
    for path in sorted((place / entry.folder).glob("seed-*"), key=lambda p: (len(p.name), p.name)):
        number = path.name.removeprefix("seed-")
        if not re.fullmatch("[0-9]{1,9}", number) or (seeds is not None and int(number) >= seeds):
            continue
        try:
            summary = _summary(path)
        except ValueError:
            notes.append(f"seed {number} is damaged")
            continue
        if summary is None or summary["status"] != "finished" or summary["last"] is None:
            notes.append(f"seed {number} unfinished")
            continue
        other = differences(read_yaml(path / "config.yaml"), grids.expected(entry, int(number)))
        if other and (entry.name, int(number)) in failed:
            continue  # of another grid in the same folder
        if other and _format_keys(other) not in notes:
            notes.append(_format_keys(other))
        runs[path] = summary
    notes += [f"seed {seed} failed: {why}" for (name, seed), why in failed.items() if name == entry.name]
    return Line(entry, runs, "; ".join(notes))


def collect(grids: Grids, place: Path, target: Path) -> list[Path]:
    """Thins the finished runs of a table under `place` into the same layout under `target`."""
    out = []
    for entry in grids.entries:
        for path in sorted((place / entry.folder).glob("seed-*")):
            if RunFolder(path).concluded() == "finished":
                out.append(thin(path, target / entry.folder / path.name))
    return out


def _summary(path: Path) -> Keys | None:
    """What a run came to, as its manifest vouches for it; None where it has not ended, ValueError where that cannot be read."""
    try:
        return RunFolder(path).read_summary()
    except FileNotFoundError:
        return None


def _format_keys(keys: Keys) -> str:
    return ", ".join(f"{k}={v}" for k, v in keys.items())
