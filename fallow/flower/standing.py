"""How a federation stands: its processes, its nodes, its runs with a row for each node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from fallow import disk
from fallow.errors import UserError
from fallow.flower.federation import Federation
from fallow.runs.nodes import nodes

REFUSED = {  # by the log, and what stands there
    "superlink": {"[ApiError:2004]": "a node with an unknown key, or one that is still taken for alive, was refused", "[ApiError:2001]": "a node without a key was refused"},
    "door": {  # the reverse proxy's, as docs/deploy.md sets it up
        "SSL alert number": "somebody did not take this server's certificate (another federation's ca.pem, or another name in `server:`)",
        "plain HTTP request": "somebody who spoke in plain text was refused",
    },
}


def lines(fed: Federation) -> Iterator[str]:
    alive = fed.processes.noted()
    for name in sorted(alive):
        yield f"{name}: process {alive[name][0]}"
    if "superlink" not in alive:
        yield f"the federation is down; start it with `fallow federation up {fed.folder}`"
        return
    known = fed.known()
    client = {number: k for k in range(fed.clients) if (number := known.get(fed.public(k)))}
    for told in fed.online():
        number = str(told.get("node-id"))
        yield f"node {client.get(number, '?')}: {told.get('status')} (id {number})"
    yield from refused(fed)
    for run in sorted((fed.folder / "runs").iterdir()) if (fed.folder / "runs").is_dir() else ():
        yield from _run(run)


def refused(fed: Federation) -> Iterator[str]:
    for name, signs in REFUSED.items():
        log = fed.processes.log(name)
        yield from (f"{words} ({count} times)" for sign, words in signs.items() if (count := log.count(sign)))


def _run(path: Path) -> Iterator[str]:
    found = nodes(path)
    if not found:
        return
    yield f"run {path.name}: {_ended(path)}"
    for row in found:
        yield (
            f"  client {row['client']}: {'online' if row['online'] else 'away'}, last seen {row['seen'] or 'never'}, {row['rounds']} rounds, {row['seconds']:.1f} s, "
            f"{row['bytes_up']:,} bytes up, {row['bytes_down']:,} down{', left out ' + str(row['absent']) + ' times' if row['absent'] else ''}"
        )


def _ended(path: Path) -> str:
    try:
        end = json.loads(disk.read(path / "ended.json"))
    except (UserError, ValueError, RecursionError):
        return "not ended"
    if not isinstance(end, dict):
        return "not ended"
    return "finished" if end.get("ok") else f"ended: {end.get('cause')}"
