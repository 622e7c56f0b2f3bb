"""Sorts finished runs, wherever they lie, into the layout of `results/`, thinned and without weights.

    python -m bench.collect PAPER TABLE RUN... --to results [--only key=value ...] [--set key=value ...] [--anyway]

A run goes to the entry whose settings it has (keys that differ from the recipe are told); `--only method=ROW` decides
where several would do, `--set` names keys that all these runs were given. `--anyway` takes the one entry that `--only`
leaves, though the run has another split: a further reading of that cell (`--to results/readings/NAME`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fallow.errors import UserError
from fallow.keys.section import Keys
from fallow.runs.settings import differences
from fallow.tables.grids import Entry, Grids
from fallow.tables.thinning import thin
from fallow.trees import read_yaml


def forced(grids: Grids, run: Path) -> tuple[Entry, int, Keys]:
    if len(grids.entries) != 1:
        raise UserError(f"{len(grids.entries)} entries agree with --only", "narrow it to one")
    stored = read_yaml(run / "config.yaml")
    entry, seed = grids.entries[0], int(stored["seed"])
    return entry, seed, differences(stored, grids.expected(entry, seed))


def place_of(grids: Grids, run: Path) -> tuple[Entry, int, Keys]:
    """The entry and seed that a run is of, wherever it lies, and in which settings it differs from the recipe."""
    stored = read_yaml(run / "config.yaml")
    seed = int(stored["seed"])
    found = []
    for entry in grids.entries:
        if not entry.missing and entry.keys.get("method") == stored.get("method"):
            expected = grids.expected(entry, seed)
            found.append((differences(stored, expected), entry))
    told = [f for f in found if not set(f[0]) & set(grids.grid.by)]
    if not told:
        raise UserError(f"{run} is no run of {grids.recipe}", "name the table it belongs to")
    fewest = min(len(d) for d, _ in told)
    nearest = [f for f in told if len(f[0]) == fewest]
    if len(nearest) > 1:
        raise UserError(
            f"{run} may be any of {', '.join(e.name for _, e in nearest)}", "say which with --only method=ROW"
        )
    return nearest[0][1], seed, nearest[0][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper")
    parser.add_argument("table")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, default=Path("results"))
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--set", action="append", default=[], dest="given")
    parser.add_argument("--anyway", action="store_true")
    args = parser.parse_args()
    grids = Grids(args.paper, args.table, args.only, args.given)
    for run in args.runs:
        try:
            entry, seed, other = forced(grids, run) if args.anyway else place_of(grids, run)
            target = thin(run, args.to / entry.folder / f"seed-{seed}")
        except UserError as e:
            print(f"{run}: {e}")
            continue
        print(
            f"{run} -> {target}" + (f" (differs: {', '.join(f'{k}={v}' for k, v in other.items())})" if other else "")
        )


if __name__ == "__main__":
    main()
