"""A real federation on loopback: a SuperLink, three SuperNodes, TLS and node keys; everything is ended by process id."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import HERE, weights

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fallow[flower]')")

import fallow
from fallow import UserError
from fallow.flower import pki, running, share, standing, starting
from fallow.flower.federation import Federation
from fallow.flower.processes import descendants, started
from fallow.runs import prepare

KEYS: dict[str, Any] = {
    "data": "digits", "clients": 3, "label_count": 60, "batch": 16, "steps": 2, "rounds": 2, "device": "cpu", "slots": 1, "defaults": "paper",
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "fixmatch": {"method": "fixmatch", "labels": "clients", "active": 3},
    "semifl": {"method": "semifl", "labels": "server", "active": 2, "norm": "sbn", "sbn": "federated", "threshold": 0.1},
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

        def row(new: dict[str, Any], told: list[dict[str, Any]] = told) -> None:
            told.append(new)
            if len(told) == 1:  # whatever it is doing now, it is done again by another one
                os.kill(process(up, "node-0", "fallow.flower.worker"), signal.SIGKILL)

        running.follow(up, run, up.submit(run), row)
        times[name] = time.monotonic() - start
        assert weights(run) == weights(simulated)
        assert [row["round"] for row in told] == [1, 2] and told[-1]["accuracy"] is not None
        journal = [json.loads(line) for line in (run / "nodes.jsonl").read_text().splitlines()]
        assert [row["absent"] for row in journal] == [{}, {}] and all(sum(row["bytes_up"].values()) > 100_000 for row in journal) and all(row["online"] == [0, 1, 2] for row in journal)
        ids |= {pid: started(pid) for top, _ in up.processes.noted().values() for pid in [top, *descendants(top)]}
    start = time.monotonic()
    a_stranger_is_refused(up, tmp_path)
    times["stranger"] = time.monotonic() - start
    start = time.monotonic()
    up.up()  # again: nothing new is started
    assert set(up.processes.noted()) == {"superlink", "node-0", "node-1"}
    secrets = [up.pki / "ca.key", up.pki / "server.key", *(up.node_folder(k) / "node.key" for k in range(3))]
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    assert len(ids) >= 10  # of each node its command, its SuperNode and its worker
    orphans = {pid: started(pid) for pid in descendants(up.processes.noted()["node-1"][0])}
    up.processes.kill("node-1", with_children=False)
    until = time.monotonic() + 60
    while any(started(pid) == since for pid, since in orphans.items()) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(orphans) == 2 and all(started(pid) != since for pid, since in orphans.items())
    up.down()
    times["down"] = time.monotonic() - start
    assert [pid for pid, since in ids.items() if since and started(pid) == since] == []
    assert not (tmp_path / "outside.log").exists()
    print({name: round(seconds, 1) for name, seconds in times.items()})


def process(up: Federation, name: str, program: str) -> int:
    """Of a node's processes the one that runs this program."""
    return next(pid for pid in descendants(up.processes.noted()[name][0]) if program.encode() in Path(f"/proc/{pid}/cmdline").read_bytes())


def a_stranger_is_refused(up: Federation, tmp_path: Path) -> None:
    """A node whose key nobody has let in, and one that was given another federation's authority; both sides are told."""
    up.processes.stop("node-2")  # never more than three nodes
    stranger = tmp_path / "stranger"
    shutil.copytree(up.node_folder(2), stranger, ignore=shutil.ignore_patterns("home", "state", "node.log"))
    pki.make_node(stranger)
    with pytest.raises(UserError, match="the server does not know this node's key"):
        starting.keep_up(stranger, lambda _: None, patience=1.0)
    assert any(line.startswith("a node with an unknown key") for line in standing.lines(up))
    pki.make_authority(stranger)
    with pytest.raises(UserError, match="the server's certificate is not of this federation's authority"):
        starting.keep_up(stranger, lambda _: None, patience=1.0)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node's folder, of a federation whose server is not up."""
    fed = Federation.init(tmp_path / "fed", 1, tell=lambda _: None)
    np.savez(fed.node_folder(0) / "share.npz", images=np.zeros((2, 8, 8), np.uint8))
    _says(fed.node_folder(0), data="share.npz")
    return fed.node_folder(0)


def _says(folder: Path, **keys: Any) -> None:
    there = yaml.safe_load((folder / "node.yaml").read_text())
    (folder / "node.yaml").write_text(yaml.safe_dump(there | keys))


def test_a_node_does_not_speak_to_a_server_in_plain_text(node: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        _says(node, server=f"127.0.0.1:{server.getsockname()[1]}")

        def plain() -> None:
            with server.accept()[0] as one:
                one.recv(64)
                one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        answering = threading.Thread(target=plain, daemon=True)
        answering.start()
        with pytest.raises(UserError, match="does not speak TLS"):
            starting.greet(node)
        answering.join(5)


def test_a_node_s_folder_that_lacks_something_ends_in_a_sentence(node: Path) -> None:
    with pytest.raises(UserError, match="cannot be reached"):
        starting.keep_up(node, lambda _: None, patience=0.1)
    (node / "node.key").chmod(0o644)
    with pytest.raises(UserError, match="others may read"):
        starting.greet(node)
    (node / "node.key").chmod(0o600)
    _says(node, server="nowhere")
    with pytest.raises(UserError, match="does not say where the server is"):
        starting.greet(node)
    (node / "ca.pem").unlink()
    with pytest.raises(UserError, match=r"has no ca\.pem"):
        starting.greet(node)


def test_init_changes_no_key_and_up_refuses_a_public_address(tmp_path: Path) -> None:
    fed = Federation.init(tmp_path / "fed", 2, host="fl.example.org", tell=lambda _: None)
    before = {p: p.read_bytes() for p in fed.folder.rglob("*") if p.is_file()}
    again = Federation.init(tmp_path / "fed", 2, tell=lambda _: None)
    assert {p: p.read_bytes() for p in fed.folder.rglob("*") if p.is_file()} == before
    assert (again.host, again.port, again.bind) == ("fl.example.org", 443, "127.0.0.1") and again.link != 443
    with pytest.raises(UserError, match="has 2 nodes, not 3"):
        Federation.init(tmp_path / "fed", 3, tell=lambda _: None)
    settings = yaml.safe_load((fed.folder / "federation.yaml").read_text())
    (fed.folder / "federation.yaml").write_text(yaml.safe_dump(settings | {"bind": "0.0.0.0"}))
    with pytest.raises(UserError, match=r"0\.0\.0\.0 can be reached from outside"):
        Federation(fed.folder, lambda _: None).up()
    again.down()  # nothing is up: no mistake


def test_commands_of_a_federation_that_is_down(fallow_cli: Any, tmp_path: Path) -> None:
    assert "there is no federation in fed" in fallow_cli("federation", "status", "fed").sentence
    told = fallow_cli("federation", "init", "fed", "--clients", "2")
    assert told.code == 0 and "node 1: copy" in told.out
    told = fallow_cli("federation", "status", "fed")
    assert told.code == 0 and "the federation is down" in told.out
    assert "the federation is not up" in fallow_cli("federation", "run", "fed", "method=fedavg").sentence
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.yaml").write_text("method: fedavg\n")  # a simulated run's folder
    assert "the federation is not up" in fallow_cli("federation", "run", "fed", "small").sentence
    assert "there is no recipe 'smal'" in fallow_cli("federation", "run", "fed", "smal").sentence
    assert list((tmp_path / "fed" / "runs").iterdir()) == []
    assert fallow_cli("federation", "down", "fed").code == 0
    assert "does not say where its images are" in fallow_cli("node", "start", "fed/nodes/node-0").sentence


def test_without_flower_a_sentence_says_how_to_get_it(fallow_cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fallow.flower.needed.WANTED", "1.99.")
    assert "Fallow is made for 1.99.*" in fallow_cli("federation", "init", "fed").sentence


def test_status_tells_who_was_refused_at_the_door(tmp_path: Path) -> None:
    """In nginx's words of its log (`error_log ... info`), as bench/namespaces.py has them from a real one."""
    fed = Federation.init(tmp_path / "fed", 1, tell=lambda _: None)
    said = "2026/11/19 20:55:01 [info] 7#7: *3 SSL_do_handshake() failed (SSL: error:0A000418:SSL routines::tlsv1 alert unknown ca:SSL alert number 48) while SSL handshaking, client: 10.77.0.10"
    plain = "2026/11/19 20:55:02 [info] 7#7: *4 client sent plain HTTP request to HTTPS port while reading client request headers, client: 10.77.0.10"
    fed.processes.log_file("door").write_text(f"{said}\n{said}\n{plain}\n")
    told = list(standing.refused(fed))
    assert len(told) == 2 and told[0].startswith("somebody did not take this server's certificate") and told[0].endswith("(2 times)") and "plain text" in told[1]


def test_nodes_are_let_in_anew_where_the_superlink_s_database_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed, asked = Federation.init(tmp_path / "fed", 2, tell=lambda _: None), list[int]()
    monkeypatch.setattr(fed, "_start_link", lambda patience: (fed.folder / "superlink.db").touch())
    monkeypatch.setattr(fed, "_register_one", lambda client: str(asked.append(client)))
    for expected in ([0, 1], []):
        fed.up()
        assert asked == expected
        asked.clear()
    (fed.folder / "superlink.db").unlink()
    fed.up()
    assert asked == [0, 1]
