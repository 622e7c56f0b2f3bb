"""docs/deploy.md followed step by step, with network namespaces in place of machines: a server behind nginx, and three nodes that reach nothing but it.

    python -m bench.namespaces [--folder DIR]

Needs the extra `flower`, Linux, root, iproute2 and nginx. The server's machine is a namespace with a bridge, each node's one with a cable to it; all share
the disk, so a node's folder is copied as to another machine. nginx has the configuration that docs/deploy.md prints. It is shown that nodes' traffic comes
through and nothing else does; that a run has the bits of its simulation; that a node whose cable is pulled in a round is absent from it and comes back; and
what both sides are told of a node with another federation's authority. Ends with 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fallow
from bench.kills import KEYS, absences, weights, without
from fallow.flower import needed, pki, standing
from fallow.flower.processes import end
from fallow.runs.nodes import JOURNAL
from fallow.trees import read_yaml

HOST, NETWORK, SERVER, NODES, CUT = "fl.example.org", "10.77.0", "fallow-server", 3, 1
FALLOW = sys.executable, "-m", "fallow"
PAGE = Path(__file__).parents[1] / "docs" / "deploy.md"
ROUNDS = 40  # of the run in which a cable is pulled: enough for the node to come back in
DOOR = str(Path(__file__).with_name("door.py"))
CLOSED = (
    "/v1/control/list-runs", "/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/health", "/docs", "/",
    "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "/v1/fleet/..%2fcontrol/list-runs", "//v1/control/list-runs", "/v1//control/list-runs",
)  # fmt: skip
FLEET = "/v1/fleet/activate-node"


def block(first: str) -> str:
    """An indented block of docs/deploy.md, by its first line."""
    lines = PAGE.read_text().splitlines()
    start = next(k for k, line in enumerate(lines) if line.strip() == first)
    stop = next((k for k in range(start, len(lines)) if lines[k] and not lines[k].startswith("    ")), len(lines))
    return "\n".join(line[4:] for line in lines[start:stop]).strip() + "\n"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def machine(node: int) -> str:
    return f"fallow-node-{node}"


class Lab:
    """Namespaces, a bridge in the server's, cables; what was started is ended by its id."""

    def __init__(self, folder: Path):
        self.folder, self.started = folder, list[subprocess.Popen[bytes]]()
        self.names = [SERVER, *map(machine, range(NODES))]

    def __enter__(self) -> Lab:
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            Path(f"/etc/netns/{name}").mkdir(parents=True)
            Path(f"/etc/netns/{name}/hosts").write_text(f"127.0.0.1 localhost\n{NETWORK}.1 {HOST}\n")
        ip("-n", SERVER, "link", "add", "bridge", "type", "bridge")
        ip("-n", SERVER, "address", "add", f"{NETWORK}.1/24", "dev", "bridge")
        ip("-n", SERVER, "link", "set", "bridge", "up")
        for node in range(NODES):
            ip("link", "add", f"cable-{node}", "netns", SERVER, "type", "veth", "peer", "name", "eth0", "netns", machine(node))
            ip("-n", SERVER, "link", "set", f"cable-{node}", "master", "bridge", "up")
            ip("-n", machine(node), "address", "add", f"{NETWORK}.{10 + node}/24", "dev", "eth0")
            ip("-n", machine(node), "link", "set", "eth0", "up")
        return self

    def __exit__(self, *_: object) -> None:
        end([p.pid for p in self.started], 12.0, lambda: [p.poll() for p in self.started])
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)

    def say(self, name: str, *words: str, where: str = "server") -> str:
        """A command on a machine; its words."""
        print(f"{name}$ {' '.join(words).replace(sys.executable + ' -m ', '')}", flush=True)
        done = subprocess.run(["ip", "netns", "exec", name, *words], cwd=self.folder / where, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            raise RuntimeError(f"exit {done.returncode}: {done.stdout}")
        return done.stdout

    def start(self, name: str, *words: str, where: str = "server") -> Path:
        """A process on a machine, and the file of its words."""
        print(f"{name}$ {' '.join(words).replace(sys.executable + ' -m ', '')} &", flush=True)
        log = self.folder / f"{name}-{len(self.started)}.log"
        with log.open("wb") as file:
            self.started.append(subprocess.Popen(["ip", "netns", "exec", name, *words], cwd=self.folder / where, stdout=file, stderr=file))
        return log


def until(there: Callable[[], bool], what: str, patience: float = 180.0) -> None:
    last = time.monotonic() + patience
    while not there():
        if time.monotonic() > last:
            raise RuntimeError(f"{what}: not within {patience:g} s")
        time.sleep(0.2)


def walk(lab: Lab) -> None:
    """The steps of the page, by its numbers."""
    server, fed = lab.folder / "server", lab.folder / "server" / "fed"
    server.mkdir()
    simulated = fallow.run(out=server, name="small", quiet=True, **KEYS | {"method": "fixmatch", "norm": "bn", "rounds": 2}).path
    lab.say(SERVER, *FALLOW, "federation", "init", "fed", "--clients", str(NODES), "--host", HOST, "--share", "small")  # steps 1 to 3
    link = str(read_yaml(fed / "federation.yaml")["link"])
    for node in range(NODES):
        shutil.copytree(fed / "nodes" / f"node-{node}", lab.folder / machine(node) / f"node-{node}")
    site = block("server {").replace("FED", str(fed)).replace("LINK", link)  # step 4
    (server / "nginx.conf").write_text(f"pid {server}/nginx.pid;\nerror_log {server}/nginx-error.log;\nevents {{}}\nhttp {{\naccess_log {server}/nginx-access.log;\n{site}}}\n")
    lab.start(SERVER, "nginx", "-c", str(server / "nginx.conf"), "-g", "daemon off;")
    lab.say(SERVER, *FALLOW, "federation", "up", "fed")  # step 5
    logs = [lab.start(machine(node), *FALLOW, "node", "start", f"node-{node}", where=machine(node)) for node in range(NODES)]
    for log in logs:
        until(lambda: "the node is in" in log.read_text(), f"{log} says that the node is in")
    try:
        told = lab.say(machine(0), sys.executable, DOOR, HOST, link, *CLOSED, FLEET, where=f"{machine(0)}/node-0")
        print(told, end="")
        assert told.splitlines() == [*(f"403 {path}" for path in CLOSED), f"401 {FLEET}", "400 in plain text", f"refused {link}"], "the door"
        lab.say(SERVER, *FALLOW, "federation", "run", "fed", "small", "--name", "plain")
        stranger(lab, fed)
        same = weights(fed / "runs" / "plain") == weights(simulated)
        print(f"the run's bits are {'the same as the simulation' if same else 'OTHERS'}")
        assert same, "the same bits"
        pull(lab, fed)
        print(told := lab.say(SERVER, *FALLOW, "federation", "status", "fed"), end="")
        assert all(words in told for words in standing.REFUSED["door"].values()), "the server is told who was refused"
    finally:
        lab.say(SERVER, *FALLOW, "federation", "down", "fed")


def stranger(lab: Lab, fed: Path) -> None:
    """A node that was given another federation's authority."""
    folder = lab.folder / machine(0) / "stranger"
    shutil.copytree(fed / "nodes" / "node-0", folder)
    pki.make_authority(folder)
    log = lab.start(machine(0), *FALLOW, "node", "start", "stranger", where=machine(0))
    until(lambda: lab.started[-1].poll() is not None, "the end of a stranger")
    print(log.read_text(), end="")
    assert "is not of this federation's authority" in log.read_text(), "a stranger is told why"


def pull(lab: Lab, fed: Path) -> None:
    """A cable is pulled in round 2, and put in again when the round has gone on without its node."""
    keys = KEYS | {"rounds": ROUNDS}
    simulated = fallow.run(out=lab.folder / "server", name="keeping", quiet=True, **keys).path
    log = lab.start(SERVER, *FALLOW, "federation", "run", "fed", "keeping", "--name", "cut", "round_timeout=120")
    run, journal = fed / "runs" / "cut", fed / "runs" / "cut" / JOURNAL

    def rows() -> list[dict[str, Any]]:
        return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []

    until(lambda: len(rows()) >= 1, "round 1")
    ip("-n", SERVER, "link", "set", f"cable-{CUT}", "down")
    print(f"the cable of node {CUT} is pulled after round {len(rows())}", flush=True)
    until(lambda: any(row["absent"] for row in rows()), "a round without the node")
    ip("-n", SERVER, "link", "set", f"cable-{CUT}", "up")
    print(f"it is put in again after round {len(rows())}", flush=True)
    until(lambda: lab.started[-1].poll() is not None, "the end of the run", 600)
    print(log.read_text(), end="")
    found = absences(run)
    rounds = sorted(number for number, _ in found)
    same = weights(run) == without(lab.folder / "without", simulated, tuple(sorted(found)), keys)
    print(f"absent in rounds {rounds} ({'; '.join(sorted(set(found.values())))}); the bits are {'those of a run in which it was not there in these' if same else 'OTHERS'}")
    assert {client for _, client in found} == {CUT} and rounds[-1] < ROUNDS and same, "absent, and back"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    needed.check()
    if os.geteuid() or not (shutil.which("ip") and shutil.which("nginx")):
        sys.exit("needs root, iproute2 and nginx")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(asked.folder or tempfile.mkdtemp(prefix="fallow-namespaces-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with Lab(folder) as lab:
            walk(lab)
    except (RuntimeError, AssertionError) as e:
        sys.exit(f"does not hold: {e}")


if __name__ == "__main__":
    main()
