"""All that the page shows, as plain data: runs in columns, groups of runs that differ only in seed, federations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fallow.data.holdings import ClassCounts, measured
from fallow.errors import UserError
from fallow.keys.section import Keys
from fallow.report.naming import method_name, named, typed
from fallow.report.reading import Run, counting, families, finite, readable
from fallow.report.scored import scores as scores_of
from fallow.runs.folder import Row, RunFolder
from fallow.runs.nodes import nodes
from fallow.runs.warned import stored
from fallow.tables.cells import Place, places

ROUNDS, VECTOR_ROUNDS, CLIENTS = 1000, 60, 400  # drawn at most, of each run and federation

Columns = dict[str, list[Any]]


def payload(paths: Sequence[Path], live: bool = False) -> Keys:
    """All that the page shows; `aside` are the runs that enter no mean, unless one switches them on."""
    runs, damaged = readable(paths)
    counted = counting(runs, damaged, going=live, alone=True)
    in_means = {run.path for run in counted.runs}
    together = list(families(runs).values())
    groups = [members[0] for members in together]
    number_of = {run.path: number for number, members in enumerate(together) for run in members}
    federations: dict[str, Keys] = {}
    told, left_out = [], [sentence.removesuffix(".") for sentence in damaged]
    for run in runs:
        try:
            held = federation(run.path)
        except UserError as e:
            held = None
            left_out.append(f"{e.cause}; the page says nothing of who held what in that run")
        if held:
            federations.setdefault(held["fingerprint"], held)
        told.append(_run_summary(run) | {"group": number_of[run.path], "federation": held and held["fingerprint"], "aside": run.path not in in_means})
    names = named([g.config for g in groups], [places(g.config, g.path) for g in groups])
    return {
        "runs": told,
        "groups": [{"name": n, "method": method_name(g.config), "config": typed(g.config)} for n, g in zip(names, groups)],
        "federations": list(federations.values()),
        "left_out": left_out,
        "notes": counted.notes,
    }


def _run_summary(run: Run) -> Keys:
    scores, s = run.scores(), run.summary
    best = max(scores, key=lambda x: (x[0], -x[1]), default=(None, None))
    columns, vectors = columned(run.rows)
    scored = scores_of(run.summary) if run.status != "running" else {}
    if scored.get("test") and "class_accuracy" not in vectors:  # with the key `measure` it is there for rounds before, too
        vectors["class_accuracy"] = {"round": [run.done], "values": [scored["test"]["by_class"]]}
    return {
        "path": str(run.path),
        "seed": run.seed,
        "status": run.status,
        "done": run.done,
        "rounds": plain(run.config.get("rounds")),
        "last": scores[-1][0] if scores else None,
        "best": best[0],
        "best_round": best[1],
        "seconds": plain(sum(_seconds(row) for row in run.rows)),
        "columns": columns,
        "vectors": vectors,
        "scores": scored,
        "warnings": stored(run.path, s, run.status != "running"),
        "nodes": nodes(run.path),
        "published": [_published(p) for p in places(run.config, run.path)],
        "made": {k: str(s[k]) for k in ("device", "commit", "config_hash", "fingerprint") if s.get(k)} | _versions(s),
    }


def _versions(summary: Keys) -> Keys:
    versions = summary.get("versions")
    return {k: str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}


def _seconds(row: Row) -> float:
    seconds = row.get("seconds")
    return seconds["round"] if isinstance(seconds, dict) and finite(seconds.get("round")) else 0.0


def _published(place: Place) -> Keys:
    f = place.figure
    table = f.table.removeprefix("table") if f.table.startswith("table") else f.table
    return {
        "paper": f.paper, "table": table, "data": f.data, "setting": f.setting, "row": f.method, "mean": f.mean,
        "std": f.std, "statistic": place.statistic, "other": ", ".join(f"{k}={v}" for k, v in place.other.items()),
    }  # fmt: skip


# -- columns -----------------------------------------------------------------------------------------------------------
def plain(value: Any) -> Any:
    """A number in six digits, or None where there is none."""
    if not finite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def columned(rows: Sequence[Row]) -> tuple[Columns, dict[str, Columns]]:
    """Rows as columns of numbers, `seconds.test` for what is in sections; lists of numbers by class apart."""
    kept = thinned(rows, ROUNDS)
    columns: Columns = {"round": [row["round"] for row in kept]}
    for i, row in enumerate(kept):
        for name, value in numbers(row):
            columns.setdefault(name, [None] * len(kept))[i] = plain(value)
    vectors: dict[str, Columns] = {}
    for name in ("class_accuracy", "prior"):
        having = [row for row in rows if isinstance(row.get(name), list)]
        if having:
            having = thinned(having, VECTOR_ROUNDS)
            values = [[plain(v) for v in row[name]] for row in having]
            vectors[name] = {"round": [row["round"] for row in having], "values": values}
    return {k: v for k, v in columns.items() if any(x is not None for x in v)}, vectors


def thinned(rows: Sequence[Row], most: int) -> list[Row]:
    """At most so many rows and one: evenly spaced rounds, the same ones for runs of one length, and the last."""
    if len(rows) <= most:
        return list(rows)
    step = math.ceil(rows[-1]["round"] / most)
    return [row for row in rows[:-1] if row["round"] % step == 0] + [rows[-1]]


def numbers(row: Row) -> Iterable[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{k}", v) for k, v in value.items())
        elif name != "round":
            yield name, value


# -- federations -------------------------------------------------------------------------------------------------------
def federation(run: Path) -> Keys | None:
    """Who holds what in a run, or None where no file says so; a UserError where it is not the run's, or damaged."""
    path = run / "federation.npz"
    if not path.exists():
        return None
    return _federation(path, path.stat().st_mtime_ns)


@lru_cache(64)
def _federation(path: Path, _: int) -> Keys:
    RunFolder(path.parent).verified(path.name)
    held, fingerprint = ClassCounts.load(path)
    step = math.ceil(len(held.clients) / CLIENTS)
    sides = {"labelled": held.labelled, "unlabelled": held.unlabelled}
    known = len(held.classes) - (held.classes[-1] == "unknown")
    return {
        "fingerprint": fingerprint,
        "clients": list(held.clients[::step]),
        "all_clients": len(held.clients),
        "classes": list(held.classes),
        "server": held.server.tolist(),
        **{side: counts[::step].tolist() for side, counts in sides.items()},
        "totals": {side: int(counts.sum()) for side, counts in sides.items()},
        "skew": {side: plain(measured(counts[:, :known])) for side, counts in sides.items() if known > 1},
    }
