"""A real federation on loopback: a SuperLink, three SuperNodes, TLS and node keys; everything is ended by process id."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE, weights

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fallow[flower]')")

import fallow
from fallow.flower import running, share
from fallow.flower.federation import Federation
from fallow.flower.processes import descendants, started
from fallow.runs import prepare

KEYS: dict[str, Any] = {
    "data": "digits", "clients": 3, "label_count": 60, "batch": 16, "steps": 2, "rounds": 2, "device": "cpu", "slots": 1, "defaults": "paper",
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "fixmatch": {"method": "fixmatch", "labels": "clients", "active": 3},
    "semifl": {"method": "semifl", "labels": "server", "active": 2, "sbn": "federated"},
}


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Federation]:
    root = str(HERE.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE / "guard"), root, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FALLOW_NET_LOG", str(tmp_path / "outside.log"))
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a time-out of CI must not leave anything running
    fed = Federation.init(tmp_path / "fed", 3, tell=lambda _: None)
    try:
        yield fed
    finally:
        fed.down()
        signal.signal(signal.SIGTERM, before)


def test_two_methods_on_real_nodes_have_the_bits_of_the_simulation(up: Federation, tmp_path: Path) -> None:
    times: dict[str, float] = {}
    ids: dict[int, str | None] = {}
    for number, (name, keys) in enumerate(RUNS.items()):
        simulated = fallow.run(out=tmp_path, name=name, quiet=True, **KEYS | keys).path
        _, _, source, federation = prepare(None, KEYS | keys)
        for client in range(3):
            share.write_client(up.node_folder(client), client, source, federation)
        share.write_server(up.folder / "server", source, federation)
        start = time.monotonic()
        if not number:
            up.up(here=True)
            times["up"] = time.monotonic() - start
        start = time.monotonic()
        run = running.begin(up, str(simulated), {"round_timeout": 120}, name)
        told: list[dict[str, Any]] = []
        running.follow(up, run, up.submit(run), told.append)
        times[name] = time.monotonic() - start
        assert weights(run) == weights(simulated)
        assert [row["round"] for row in told] == [1, 2] and told[-1]["accuracy"] is not None
        journal = [json.loads(line) for line in (run / "nodes.jsonl").read_text().splitlines()]
        assert [row["absent"] for row in journal] == [{}, {}] and all(row["online"] == [0, 1, 2] for row in journal)
        ids |= {pid: started(pid) for top, _ in up.processes.noted().values() for pid in [top, *descendants(top)]}
    start = time.monotonic()
    up.up(here=True)  # again: nothing new is started
    assert set(up.processes.noted()) == {"superlink", "node-0", "node-1", "node-2"}
    secrets = [up.pki / "ca.key", up.pki / "server.key", *(up.node_folder(k) / "node.key" for k in range(3))]
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    assert len(ids) >= 4
    up.down()
    times["down"] = time.monotonic() - start
    assert [pid for pid, since in ids.items() if since and started(pid) == since] == []
    assert not (tmp_path / "outside.log").exists()
    print({name: round(seconds, 1) for name, seconds in times.items()})
