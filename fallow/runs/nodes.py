"""The nodes of a deployed run: its journal, nodes.jsonl in the run's folder, has a line per round, of which this makes a row per node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fallow import disk
from fallow.errors import UserError

JOURNAL = "nodes.jsonl"
ORDER = "order.json"  # what a deployed run is to be; no other run has one
SUMS = ("seconds", "bytes_up", "bytes_down")  # of each client
MOST = 1e18  # of what is summed in a round


def nodes(path: Path) -> list[dict[str, Any]]:
    """Of each node whether it is online, when it was last seen, its rounds, seconds and bytes; nothing of a simulated run.

    A round that was made again after a kill has two lines, of which the later counts; one that was cut off is none.
    """
    try:
        text = disk.read(path / JOURNAL).decode(errors="replace")
    except UserError:
        return []
    by_round: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if _is_row(row):
            by_round = {k: v for k, v in by_round.items() if k < row["round"]} | {row["round"]: row}
    return _rows(list(by_round.values())) if by_round else []


def _is_row(row: Any) -> bool:
    """Whether a line has what `Nodes.settle` writes."""
    if not isinstance(row, dict) or type(row.get("round")) is not int or not isinstance(row.get("at"), str):
        return False
    if not all(isinstance(row.get(name), list) and all(type(client) is int for client in row[name]) for name in ("asked", "online")):
        return False
    if not all(isinstance(row.get(name), dict) and all(client.isdecimal() for client in row[name]) for name in ("absent", *SUMS)):
        return False
    if not all(isinstance(why, str) for why in row["absent"].values()):
        return False
    return all(isinstance(n, int | float) and 0 <= n <= MOST for name in SUMS for n in row[name].values())


def _rows(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    clients = sorted({c for row in rounds for c in (*row["asked"], *row["online"], *map(int, row["absent"]))})
    made = []
    for client in clients:
        took = [row for row in rounds if client in row["asked"] and str(client) not in row["absent"]]
        made.append({
            "client": client, "online": client in rounds[-1]["online"], "seen": max((r["at"] for r in rounds if client in r["online"]), default=None),
            "rounds": len(took), "absent": sum(str(client) in r["absent"] for r in rounds),
            "why": next((r["absent"][str(client)] for r in reversed(rounds) if str(client) in r["absent"]), None),
            **{name: sum(r[name].get(str(client), 0) for r in rounds) for name in SUMS},
        })  # fmt: skip
    return made
