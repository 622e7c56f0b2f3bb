"""A table as it is printed: methods by settings, and cell by cell beside the published figures; as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path

from fallow import disk
from fallow.report import written
from fallow.report.comparison import Comparison, Entry
from fallow.tables.grids import TABLES, Grids
from fallow.tables.lines import Line, with_std

COLUMNS = (
    "paper", "table", "data", "setting", "method", "statistic", "mean", "std", "n", "published", "published_std",
    "difference", "within_std", "last", "best", "note",
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    grids: Grids
    lines: list[Line]

    @property
    def statistic(self) -> str:
        return self.grids.grid.statistic

    @property
    def other(self) -> str:
        return "best" if self.statistic == "last" else "last"

    def title(self) -> tuple[str, ...]:
        return ("data", "setting", "method", f"ours ({self.statistic})", "n", "published", "difference", self.other, "note")

    def rows(self) -> list[tuple[str, ...]]:
        """As printed, without the title."""
        out: list[tuple[str, ...]] = []
        for line in self.lines:
            e, f, ours, other = line.entry, line.entry.figure, line.ours(self.statistic), line.ours(self.other)
            gap = self.difference(line)
            out.append((
                e.cell.data, e.cell.setting, e.row, with_std(*ours) if ours else "", str(len(line.runs)) if ours else "", with_std(f.mean, f.std) if f else "",
                "" if gap is None else f"{gap:+.2f}{' *' if self.near(line) else ''}", with_std(*other) if other else "", line.note or ("" if ours else "not run"),
            ))  # fmt: skip
        return out

    def difference(self, line: Line) -> float | None:
        ours, f = line.ours(self.statistic), line.entry.figure
        return None if ours is None or f is None else ours[0] - f.mean

    def near(self, line: Line) -> bool:
        """Within one standard deviation: the published one or, where none is printed, ours."""
        gap, ours, f = self.difference(line), line.ours(self.statistic), line.entry.figure
        std = None if f is None or ours is None else ours[1] if f.std is None else f.std
        return gap is not None and std is not None and abs(gap) <= std + 1e-9

    def caption(self) -> str:
        more = f", with {' '.join(self.grids.more)}" if self.grids.more else ""
        return f"{self.grids.recipe}: test accuracy in %, {self.statistic} round, mean ± std over n seeds{more}"

    FOOT = "* within one standard deviation of the published figure (the published one or, where none is printed, ours)."

    @property
    def has_figures(self) -> bool:
        return any(line.entry.figure for line in self.lines)

    def matrix(self) -> Comparison:
        """Methods by settings."""
        rows = list(dict.fromkeys(line.entry.row for line in self.lines))
        columns = list(dict.fromkeys((line.entry.cell.data, line.entry.cell.setting) for line in self.lines))
        cells, figures, notes = {}, {}, []
        for line in self.lines:
            at = rows.index(line.entry.row), columns.index((line.entry.cell.data, line.entry.cell.setting))
            if line.runs:
                cells[at] = Entry(dict(zip(line.seeds, line.scores(self.statistic))))
            if line.entry.figure:
                figures[at] = with_std(line.entry.figure.mean, line.entry.figure.std)
            if line.note:
                notes.append(f"{line.entry.name}: {line.note}.")
        alone = [rows.index(line.entry.row) for line in self.lines if line.entry.keys.get("method") == "fedavg"]
        heads: list[tuple[str, ...]] = [*columns]
        return Comparison(self.statistic, True, rows, heads, cells, notes, alone[0] if len(set(alone)) == 1 else 0, figures)

    def printed(self) -> list[list[tuple[str, ...]]]:
        """What a terminal shows: tables, each with a title row."""
        matrix = self.matrix()
        if self.has_figures:
            return [[self.title(), *self.rows()]]
        return [table for table in (written.printed(matrix), written.differences(matrix)) if table]

    def below(self) -> list[str]:
        if not self.has_figures:
            return [sentence.replace("Marked", "Marked *", 1) for sentence in self.matrix().below()]
        return [self.FOOT] if any(self.near(line) for line in self.lines) else []

    def markdown(self) -> str:
        matrix = written.markdown(self.matrix()).partition("\n\n")[2].replace(f"\n\n<!-- {written.MADE} -->", "").rstrip()
        if not self.has_figures:
            return f"{self.caption()}\n\n{matrix}\n"
        lines = [self.title(), ("---", "---", "---", "---:", "---:", "---:", "---:", "---:", "---"), *self.rows()]
        body = "\n".join("| " + " | ".join(re.sub(r"([|*])", r"\\\1", c) for c in cells) + " |" for cells in lines)
        return f"{self.caption()}\n\n{matrix}\n\n{body}\n\n\\{self.FOOT}\n"

    def latex(self) -> str:
        """A tabular for the booktabs package."""
        return f"% {self.caption()}\n{written.latex(self.matrix())}"

    def csv(self) -> str:
        text = io.StringIO()
        write = csv.writer(text, lineterminator="\n").writerow
        write(COLUMNS)
        for line in self.lines:
            e, f = line.entry, line.entry.figure
            mean, std = line.ours(self.statistic) or (None, None)
            last, best = (line.ours(s) or (None,) for s in ("last", "best"))
            write((
                e.paper, e.table, e.cell.data, e.cell.setting, e.row, self.statistic, _plain(mean), _plain(std),
                len(line.runs), f.mean if f else "", "" if f is None or f.std is None else f.std, _plain(self.difference(line)),
                str(self.near(line)).lower(), _plain(last[0]), _plain(best[0]), line.note,
            ))  # fmt: skip
        return text.getvalue()

    FORMATS = {"md": markdown, "tex": latex, "csv": csv}

    def write(self, place: Path) -> Path:
        """table.md, table.tex and table.csv beside the table's runs."""
        folder = self.grids.folder(place)
        with disk.errors_as_user_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for name, text in zip(TABLES, (self.markdown(), self.latex(), self.csv())):
            disk.write(folder / name, text)
        return folder


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
