"""Writes the tables of `results/README.md` anew from the runs that lie in `results/`.

    python -m bench.results [--dir results]

Runs of `DIR/PAPER/TABLE/...` are one table, other readings of the same cells, in `DIR/readings/NAME/PAPER/TABLE/...`,
a second one. What stands between the marks `<!-- cells -->`, `<!-- readings -->` and `<!-- end -->` is replaced.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fallow.names import recipes
from fallow.runs.folder import RunFolder
from fallow.runs.settings import differences
from fallow.tables.grids import Entry, Grids
from fallow.tables.lines import Line, mean_std, read, with_std
from fallow.tables.thinning import mean_of_last
from fallow.trees import flat, read_yaml

TITLE = ("cell", "last", "best", "last 30", "published", "difference", "within", "seeds", "s a round", "s in all", "commit", "command")
CLOSE = 1.5  # points from the published figure that count as within, where its std is smaller


def tables(place: Path) -> list[tuple[str, str]]:
    """Paper and table of every run under a folder."""
    there = {p.parts[-5:-3] for p in place.glob("*/*/*/seed-*/summary.json")}
    return [(paper, table) for paper, table in sorted(there) if f"{paper}/{table}" in recipes()]


def command(grids: Grids, entry: Entry, path: Path, seed: int) -> str:
    """What makes the line, in one command."""
    stored, expected = read_yaml(path / "config.yaml"), grids.expected(entry, seed)
    usual = flat(expected)
    other = {k: v for k, v in flat(differences(stored, expected)).items() if usual.get(k) != v}
    words = {"setting": entry.cell.name} | ({} if entry.own else {"method": entry.row}) | other
    said = " ".join(shlex.quote(f"{k}={'null' if v is None else str(v).lower() if isinstance(v, bool) else v}") for k, v in words.items())
    return f"`fallow run {grids.recipe} {said}`"


def commands(grids: Grids, entry: Entry, paths: list[Path]) -> str:
    """One command for all seeds, or each with its seeds."""
    made: dict[str, list[str]] = {}
    for path in paths:
        seed = path.name.removeprefix("seed-")
        made.setdefault(command(grids, entry, path, int(seed)), []).append(seed)
    return ", ".join(text + f" (seed {', '.join(seeds)})" * (len(made) > 1) for text, seeds in made.items())


def row(grids: Grids, line: Line) -> tuple[str, ...]:
    entry, figure = line.entry, line.entry.figure
    paths, summaries = list(line.runs), list(line.runs.values())
    published = difference = within = "-"
    if figure is not None:
        published = with_std(figure.mean, figure.std or None)
        apart = mean_std(line.scores(grids.grid.statistic))[0] - figure.mean
        difference = f"{apart:+.2f} ({grids.grid.statistic})"
        within = verdict(apart, figure.std)
    return (
        f"{entry.paper} {entry.table.removeprefix('table')}: {entry.name}",
        *(with_std(*mean_std(v)) for v in (line.scores("last"), line.scores("best"), thirty(line.runs))), published, difference, within,
        ", ".join(p.name.removeprefix("seed-") for p in paths),
        f"{statistics.fmean(s['seconds_per_round'] for s in summaries):.2f}",
        f"{statistics.fmean(s['seconds'] for s in summaries):.0f}",
        ", ".join(sorted({str(s.get("commit") or "-")[:7] for s in summaries})),
        commands(grids, entry, paths),
    )  # fmt: skip


def thirty(runs: dict[Path, Any]) -> list[float]:
    """Means of the tests in the last 30 rounds; of those that are left, where it was not made of all."""
    means = [s.get("mean_last_30") or mean_of_last(RunFolder(p).rows(), 30) for p, s in runs.items()]
    return [100 * m for m in means if m is not None]


def verdict(apart: float, std: float | None) -> str:
    close = max(CLOSE, std or 0.0)
    return "**no**" if apart < -close else "above" if apart > close else "yes"


def rows(place: Path, other_splits: bool) -> Iterator[tuple[str, ...]]:
    """The lines of all tables. A run of another split than its cell's is a reading, no result."""
    for paper, table in tables(place):
        grids = Grids(paper, table)
        for line in read(grids, place):
            for path in line.runs:
                stored, seed = read_yaml(path / "config.yaml"), int(path.name.removeprefix("seed-"))
                if set(differences(stored, grids.expected(line.entry, seed))) & set(grids.grid.by) and not other_splits:
                    raise SystemExit(f"{path} has another split than its cell; it belongs into {place}/readings")
            if line.runs:
                yield row(grids, line)


def markdown(lines: list[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (TITLE, ("---",) * len(TITLE), *lines))


def replaced(text: str, mark: str, by: str) -> str:
    start, end = f"<!-- {mark} -->\n", "<!-- end -->"
    before, _, rest = text.partition(start)
    return before + start + by + "\n" + end + rest.partition(end)[2]


def page(place: Path) -> str:
    """The text of README.md with its tables made anew."""
    named = [(reading.name, line) for reading in sorted((place / "readings").glob("*")) for line in rows(reading, True)]
    others = [(f"{name}: {cell}", *more) for name, (cell, *more) in named]
    text = replaced((place / "README.md").read_text(), "cells", markdown(list(rows(place, False))))
    return replaced(text, "readings", markdown(others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("results"))
    args = parser.parse_args()
    text = page(args.dir)
    (args.dir / "README.md").write_text(text)
    print(text[text.index("<!-- cells") : text.rindex("<!-- end")])


if __name__ == "__main__":
    main()
