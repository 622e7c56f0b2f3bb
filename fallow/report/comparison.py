"""Runs as a table of methods by settings: mean and standard deviation over seeds, the best marked, differences tested.

What differs between the runs decides what is a row and what a column: data, labels and federation are settings, the method
and what else one varies of it are rows. A setting that every run of a method has, and that another method has otherwise,
makes no row of its own; it is told below the table.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fallow.errors import UserError, suggest
from fallow.keys.section import Keys
from fallow.measure.told import of_summary
from fallow.methods import REGISTERED, find
from fallow.report.naming import method_name, shortened, typed
from fallow.report.paired import LEAST, WORDS, Difference, difference
from fallow.report.reading import OF_SPLIT, Run, completed, families, finite, gathered
from fallow.runs.settings import UNHASHED
from fallow.tables.lines import with_std

SETTINGS = (
    "data", "labels", "label_count", "label_ratio", "label_per_class", "labelled_clients", "partition", "unlabelled_partition",
    "clients", "active",
)  # fmt: skip
SOFT = ("unlabelled_ratio", "label_balance", "label_pick", "labelled_as_unlabelled", "image", "model", "norm", "rounds")  # columns, unless a method's own
PLAIN = ("loss", "seconds", "nll", "brier", "bytes", "round", "seed", "classes", "channels", "size")  # no share, though it may lie between 0 and 1
LOWER = ("loss", "seconds", "nll", "brier", "bytes", "error", "ece")  # the least is the best
STATISTICS = {"last": "test accuracy after the last round", "best": "test accuracy of the best round", "mean_last_10": "mean test accuracy of the last ten tests"}

Flat = dict[str, str]


@dataclass(frozen=True)
class Entry:
    """A cell: a value for each seed."""

    values: dict[int, float]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def std(self) -> float | None:
        """Over n, as papers print it."""
        return statistics.pstdev(self.values.values()) if self.n > 1 else None

    @property
    def error(self) -> float:
        """The mean's standard error; 0 where one seed tells nothing of it."""
        return statistics.stdev(self.values.values()) / math.sqrt(self.n) if self.n > 1 else 0.0

    def __str__(self) -> str:
        return with_std(self.mean, self.std)


Place = tuple[int, int]  # row, column


@dataclass(frozen=True)
class Comparison:
    """A table of methods by settings."""

    statistic: str
    share: bool  # values are in per cent
    rows: list[str]
    columns: list[tuple[str, ...]]  # a line of the head for each part
    cells: dict[Place, Entry]
    notes: list[str] = field(default_factory=list)
    against: int = 0  # the row that others are compared with
    published: dict[Place, str] = field(default_factory=dict)  # figures to stand beside ours

    def best(self) -> set[Place]:
        """In each column with several rows the best mean, and those within its standard error."""
        sign = -1 if any(word in self.statistic for word in LOWER) else 1
        out: set[Place] = set()
        for column in range(len(self.columns)):
            found = {at: entry for at, entry in self.cells.items() if at[1] == column}
            if len(found) < 2:
                continue
            top = max(found.values(), key=lambda entry: sign * entry.mean)
            out |= {at for at, entry in found.items() if sign * entry.mean >= sign * top.mean - top.error - 1e-9}
        return out

    def differences(self) -> dict[Place, Difference]:
        """Of each cell to the row that is compared with."""
        out = {}
        for (row, column), entry in self.cells.items():
            other = self.cells.get((self.against, column))
            if row != self.against and other and (found := difference(entry.values, other.values)):
                out[row, column] = found
        return out

    def seeds(self) -> str:
        counts = sorted({entry.n for entry in self.cells.values()})
        return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"

    def caption(self) -> str:
        what = STATISTICS.get(self.statistic, self.statistic.replace("_", " "))
        several = any(entry.n > 1 for entry in self.cells.values())
        spread = f", mean ± standard deviation over {self.seeds()} seeds" if several else ", one seed"
        return f"{what[:1].upper()}{what[1:]}{' in %' if self.share else ''}{spread}"

    def shown(self, at: Place) -> str:
        """A cell's text: ours, with n where cells have different ones."""
        entry = self.cells.get(at)
        return "" if entry is None else str(entry) + (f" (n {entry.n})" if "to" in self.seeds() else "")

    def below(self) -> list[str]:
        """What is said below the table."""
        out = list(self.notes)
        if self.best():
            out.insert(0, "Marked is the best of a column, and what lies within the best's standard error.")
        if self.published:
            out.append("In brackets: the published figure.")
        if self.differences():
            out.append(self._tested())
        return out

    def _tested(self) -> str:
        found = self.differences().values()
        if all(one.p is None for one in found):
            return f"Differences are to {self.rows[self.against]}, over the seeds that both have; they are tested from {LEAST} seeds on."
        return (
            f"Differences are to {self.rows[self.against]}, over the seeds that both have; p is that of a {WORDS}, for each difference by itself: "
            "of twenty comparisons of equal methods one has p below 0.05."
        )


def compared(
    paths: Iterable[str | Path], statistic: str = "last", rows: Sequence[str] = (), columns: Sequence[str] = (), against: str | None = None
) -> Comparison:
    """The table of these runs, or of those in these folders."""
    found = gathered(paths)
    groups = list(families(found.runs).values())
    flats = [_settings(members[0].config) for members in groups]
    split = Split.of(flats, rows, columns)
    values, share, without = _values(found.runs, statistic)
    names, heads = split.row_names(flats), split.column_names(flats)
    kept = [i for i, members in enumerate(groups) if any(run.path in values for run in members)]
    row_order = list(dict.fromkeys(names[i] for i in kept))
    column_order = sorted(dict.fromkeys(heads[i] for i in kept), key=_natural)
    cells = {}
    for i in kept:
        entry = Entry({run.seed: values[run.path] for run in groups[i] if run.path in values})
        cells[row_order.index(names[i]), column_order.index(heads[i])] = entry
    notes = [*split.also(flats), *_by_split(groups), *without, *found.notes]
    return Comparison(statistic, share, row_order, column_order, cells, notes, _against(against, row_order, [flats[i] for i in kept], names, kept))


def _by_split(groups: Sequence[Sequence[Run]]) -> list[str]:
    """What was fitted to each seed's split, and so differs within a cell."""
    out = []
    for key in OF_SPLIT:
        several = [found for members in groups if len(found := sorted({str(run.config.get(key)) for run in members})) > 1]
        if several:
            out.append(f"The seeds of a cell differ in {key} ({', '.join(several[0])}), fitted to the split of each.")
    return out


def _settings(config: Keys) -> Flat:
    return typed({k: v for k, v in completed(config).items() if k not in UNHASHED | {"seed"}})


def _against(name: str | None, rows: list[str], flats: list[Flat], names: list[str], kept: list[int]) -> int:
    """The row that is named, else the one of labels alone, if there is one, else the first."""
    if name is not None:
        if name not in rows:
            raise UserError(f"there is no row {name!r} to compare with", suggest(name, rows))
        return rows.index(name)
    alone = list(dict.fromkeys(rows.index(names[i]) for i, one in zip(kept, flats) if one.get("method") == "fedavg"))
    return alone[0] if len(alone) == 1 else 0


# -- rows and columns ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Split:
    """Which keys tell rows apart, and which columns."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]

    @staticmethod
    def of(flats: Sequence[Flat], rows: Sequence[str] = (), columns: Sequence[str] = ()) -> Split:
        differing = _differing(flats)
        for key in (*rows, *columns):
            known = {name for one in flats for name in one}
            if key not in known:
                raise UserError(f"no run has a key {key!r}", suggest(key, known))
        if both := [key for key in rows if key in columns]:
            raise UserError(f"{both[0]} cannot tell rows and columns apart at once", "give it to --rows or to --columns")
        free = [key for key in differing if key not in (*rows, *columns)]
        settings = _needed(flats, [key for key in SETTINGS if key in free], columns)
        method = ["method"] if "method" in free else []
        chosen_rows, chosen_columns = [*rows, *method], [*columns, *settings]
        for key in sorted((k for k in free if k not in (*method, *settings)), key=lambda k: not _is_soft(k)):
            if _count(flats, [*chosen_rows, *chosen_columns, key]) > _count(flats, [*chosen_rows, *chosen_columns]):
                (chosen_columns if _is_soft(key) else chosen_rows).append(key)
        return Split(tuple(chosen_rows) or ("method",), tuple(chosen_columns) or ("data",))

    def row_names(self, flats: Sequence[Flat]) -> list[str]:
        names = []
        for one in flats:
            words = [f"{key}={shortened(one[key], 40)}" for key in self.rows if key != "method" and one.get(key)]
            names.append(" ".join([*([_method(one)] if "method" in self.rows else []), *words]) or _method(one))
        return names

    def column_names(self, flats: Sequence[Flat]) -> list[tuple[str, ...]]:
        return [tuple(_shown(key, one.get(key, "")) for key in self.columns) for one in flats]

    def also(self, flats: Sequence[Flat]) -> list[str]:
        """What differs with a row or column besides what names it."""
        keys = [key for key in _differing(flats) if key not in (*self.rows, *self.columns) and sum(key in one for one in flats) == len(flats)]
        return [f"These keys differ as well: {', '.join(keys)}."] if keys else []


def _differing(flats: Sequence[Flat]) -> list[str]:
    keys = list(dict.fromkeys(key for one in flats for key in one))
    return [key for key in keys if len({one.get(key) for one in flats}) > 1]


def _needed(flats: Sequence[Flat], keys: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """Those of the keys that tell apart what the ones before them do not."""
    out: list[str] = []
    for key in keys:
        if _count(flats, [*chosen, *out, key]) > max(1, _count(flats, [*chosen, *out])):
            out.append(key)
    return out


def _count(flats: Sequence[Flat], keys: Sequence[str]) -> int:
    return len({tuple(one.get(key) for key in keys) for one in flats})


def _is_soft(key: str) -> bool:
    return key.split(".")[0] in SOFT


def _method(one: Flat) -> str:
    name = method_name(one)
    return find(name).__name__ if name in REGISTERED else name


def _shown(key: str, value: str) -> str:
    return shortened(value, 60) if key == "data" else f"{key}={shortened(value, 40)}"


def _natural(head: tuple[str, ...]) -> list[tuple[str, float, str]]:
    """Numbers by their size."""
    out = []
    for text in head:
        key, _, value = text.rpartition("=")
        try:
            out.append((key, float(value), ""))
        except ValueError:
            out.append((key, math.inf, value))
    return out


# -- values --------------------------------------------------------------------------------------------------------------
def _values(runs: Sequence[Run], statistic: str) -> tuple[dict[Path, float], bool, list[str]]:
    """A number of each run's summary, whether it is shown in per cent, and which runs have none."""
    found = {run.path: value for run in runs if finite(value := of_summary(run.summary, statistic))}
    if not found:
        known = sorted({name for run in runs for name in numbers(run.summary)})
        raise UserError(f"no summary has a number {statistic!r}", suggest(statistic, known))
    lacking = [run for run in runs if run.path not in found]
    share = not any(word in statistic for word in PLAIN) and all(0 <= value <= 1 for value in found.values())
    notes = [f"{_listed([str(run.path) for run in lacking])} without {statistic}, left out."] if lacking else []
    return {path: 100 * value if share else value for path, value in found.items()}, share, notes


def numbers(summary: Keys, prefix: str = "") -> list[str]:
    """The names of a summary's numbers."""
    out = []
    for name, value in summary.items():
        if isinstance(value, dict):
            out += numbers(value, f"{prefix}{name}.")
        elif finite(value):
            out.append(f"{prefix}{name}".removeprefix("scores."))
    return out


def _listed(words: Sequence[str], most: int = 5) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
