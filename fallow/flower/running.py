"""A deployed run from the server's command line: submitted to Flower, followed in its folder, its end told truly."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fallow import disk
from fallow.errors import UserError
from fallow.flower import deployed
from fallow.flower.deployed import ENDED, Order
from fallow.flower.federation import Federation
from fallow.flower.terms import Terms
from fallow.runs.folder import Busy, RunFolder
from fallow.runs.nodes import JOURNAL, ORDER

ASK = 15.0  # seconds between questions to Flower, each of which costs seconds of its own
SILENT = 5.0  # seconds after which a server that has let go of its run and says nothing has died
LAST = 60.0  # seconds for Flower to notice that a run has ended


def begin(fed: Federation, recipe: str | None, keys: Mapping[str, Any], name: str | None = None) -> Path:
    """The folder of a new run, with its order."""
    check_up(fed)
    _, rest = Terms.parted(keys)  # complains now
    terms = {k: v for k, v in keys.items() if k not in rest}
    return deployed.begin(fed.folder / "runs", name or "run", recipe, rest, terms, fed.folder / "server" / "server.yaml", fed.clients)


def check_up(fed: Federation) -> None:
    if not fed.processes.alive("superlink"):
        raise UserError("the federation is not up", f"start it with `fallow federation up {fed.folder}`")


def with_terms(folder: Path, keys: Mapping[str, Any]) -> None:
    """A run that is gone on with may have other terms, and no other settings."""
    order, (_, rest) = Order.read(folder), Terms.parted(keys)
    if rest:
        raise UserError(f"{next(iter(rest))} cannot be changed on resume", "start a new run for other keys")
    disk.write(folder / ORDER, json.dumps(asdict(replace(order, terms=order.terms | dict(keys))), indent=1) + "\n")


def go(fed: Federation, folder: Path, tell: Callable[[str], None]) -> None:
    """Submits a run and tells its rounds; Ctrl-C has it write a checkpoint and end."""
    from fallow.progress import words

    journal = folder / JOURNAL
    seen, done = len(journal.read_text().splitlines()) if journal.exists() else 0, RunFolder(folder).committed()
    disk.remove(folder / ENDED)  # of an earlier try
    there = len(_rows(RunFolder(folder)))
    number = fed.submit(folder)

    def row(new: dict[str, Any]) -> None:
        nonlocal seen
        tell(f"round {new['round']}  {words(new)}")
        for line in map(json.loads, journal.read_text().splitlines()[seen:]):
            if line["round"] > new["round"]:
                break
            seen += 1
            for client, why in line["absent"].items():
                tell(f"round {line['round']}: client {client} is left out: {why}")

    try:
        follow(fed, folder, number, row, done, there)
    except KeyboardInterrupt:
        fed.flwr("stop", number, "fed")
        tell(f"stopped; go on with: fallow federation run {fed.folder} --resume {folder.name}")
        raise


def follow(fed: Federation, folder: Path, number: str, row: Callable[[dict[str, Any]], None], seen: int = 0, there: int = 0) -> None:
    """Until the run has ended, with each row after the first `seen` ones; a UserError where it has not ended well.

    `there`: the rows before the run was submitted, of which the server removes those after its checkpoint as it begins.
    """
    run, asked, tries, gone, begun = RunFolder(folder), time.monotonic(), 0, None, False
    again = f"go on with `fallow federation run {fed.folder} --resume {folder.name}`"
    while True:
        ended, rows = (folder / ENDED).exists(), _rows(run)
        begun = begun or ended or len(rows) != there
        for new in rows[seen:] if begun else ():
            row(new)
            seen += 1
        if ended:
            break
        if time.monotonic() - asked > ASK:
            asked, status = time.monotonic(), _status(fed, number)
            tries = tries + 1 if status[0].startswith("finished") else 0
            if tries > 1:
                raise UserError(f"the run ended as {status[0]} ({status[1]})", again)
        gone = None if not begun or _is_held(run) else gone or time.monotonic()
        if gone and time.monotonic() - gone > SILENT:
            raise UserError("the server's process has died", again)
        time.sleep(0.3)
    end = json.loads(disk.read(folder / ENDED))
    if not end["ok"]:
        raise UserError(end["cause"], end["remedy"])
    until = time.monotonic() + LAST
    while not (status := _status(fed, number))[0].startswith("finished") and time.monotonic() < until:
        time.sleep(1.0)
    if status[0] != "finished:completed":
        raise UserError(f"Flower says that the run ended as {status[0]} ({status[1]})", "look into logs/superlink.log")


def _rows(run: RunFolder) -> list[dict[str, Any]]:
    return run.rows() if run.metrics.exists() else []


def _is_held(run: RunFolder) -> bool:
    """Whether the server is at work: asked only once it has begun, since to ask is to hold the run for a moment."""
    try:
        with run.locked():
            return False
    except Busy:
        return True


def _status(fed: Federation, number: str) -> tuple[str, str]:
    found = fed.runs(number)
    return (str(found[0].get("status")), str(found[0].get("status-details") or "no more is known")) if found else ("unknown", "")
