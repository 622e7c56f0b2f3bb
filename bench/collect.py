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
from fallow.report.collect import thin
from fallow.report.grid import Entry, Grids, differences, place_of
from fallow.runs.settings import Keys
from fallow.trees import read_yaml


def forced(grids: Grids, run: Path) -> tuple[Entry, int, Keys]:
    if len(grids.entries) != 1:
        raise UserError(f"{len(grids.entries)} entries agree with --only", "narrow it to one")
    stored = read_yaml(run / "config.yaml")
    entry, seed = grids.entries[0], int(stored["seed"])
    return entry, seed, differences(stored, grids.expected(entry, seed))


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
