"""Kill -9 of the real processes of a federation on this machine: what the round did, and what the run came to.

    python -m bench.kills [--only MOMENT ...] [--folder DIR]

Needs the extra `flower`. Each case is a run of three rounds of FedLoKe on digits, whose clients keep a net, with three nodes. What is to be killed stops
itself at its moment in round 2 (pauses.py) and is then killed; what a supervisor would start anew is started anew, and a run whose server is gone is resumed.
The end weights are compared with those of the simulated run or, where a node was absent from a round, with those of a run in which it was absent there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fallow
from bench.pauses import VICTIM, Pauses
from fallow.flower import deployed, needed, share
from fallow.flower.federation import Federation
from fallow.flower.here import Answers, Here
from fallow.flower.messages import Parcel
from fallow.flower.node import Node
from fallow.flower.processes import descendants
from fallow.runs import prepare
from fallow.runs.nodes import JOURNAL

KEYS: dict[str, Any] = {
    "data": "digits", "clients": 3, "active": 3, "label_count": 60, "batch": 16, "steps": 2, "rounds": 3, "device": "cpu", "slots": 1,
    "defaults": "paper", "method": "fedloke", "norm": "gn",
}  # fmt: skip
NODE = f"node-{VICTIM}"


@dataclass(frozen=True)
class Case:
    victim: str  # for people
    moment: str  # of pauses.py
    words: str
    strike: Callable[[Trial, int], None]  # what is done once a process stands at the moment
    terms: Mapping[str, Any]


class Trial:
    """One federation that is up, in which one run after the other is disturbed."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.pauses = Pauses(folder / "paused")
        self.env = os.environ | {"PYTHONPATH": str(self.pauses.folder)}
        self.simulated = fallow.run(out=folder, name="simulated", quiet=True, **KEYS).path
        self.run_command("init", "fed", "--clients", str(KEYS["clients"]), "--share", "simulated")
        self.fed = Federation(folder / "fed", lambda _: None)
        self.known: dict[tuple[tuple[int, int], ...], bytes] = {(): weights(self.simulated)}

    def run_command(self, *words: str) -> str:
        """A command of `fallow federation`, with its exit code where that is not 0."""
        done = subprocess.run([sys.executable, "-m", "fallow", "federation", *words], cwd=self.folder, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.stdout if not done.returncode else f"{done.stdout}\nexit {done.returncode}"

    def up(self) -> None:
        told = self.run_command("up", "fed", "--here")
        if "exit " in told.rpartition("\n")[2]:
            raise RuntimeError(told)

    def process(self, name: str, program: str) -> int:
        """Of the processes below one of the federation's that which runs a program."""
        return next(pid for pid in descendants(self.fed.processes.noted()[name][0]) if program.encode() in Path(f"/proc/{pid}/cmdline").read_bytes())

    def case(self, case: Case) -> str:
        """A row of the table."""
        self.up()
        self.pauses.arm(case.moment)
        name, start = f"{case.moment}-{len(list((self.fed.folder / 'runs').iterdir()))}", time.monotonic()
        words = [f"{k}={v}" for k, v in ({"round_timeout": 120, "node_timeout": 120} | dict(case.terms)).items()]
        command = [sys.executable, "-m", "fallow", "federation", "run", "fed", "simulated", *words, "--name", name]
        with (self.folder / f"{name}.log").open("w") as log:
            running = subprocess.Popen(command, cwd=self.folder, env=self.env, stdout=log, stderr=log)
            try:
                case.strike(self, self.pauses.wait(case.moment))
                code = running.wait(600)
            finally:  # the next case has the nodes for itself
                running.send_signal(signal.SIGINT)
                running.wait(120)
        told, path = (self.folder / f"{name}.log").read_text(), self.fed.folder / "runs" / name
        ended = [line.removeprefix("error: ").partition("; ")[0] for line in told.splitlines() if line.startswith("error: ")]
        if code:
            self.up()
            told = self.run_command("run", "fed", "--resume", name)
            (self.folder / f"{name}-resumed.log").write_text(told)
        absent = absences(path)
        reasons = sorted({f"round {r}: client {c}: {why}" for (r, c), why in absent.items()})
        did = "; ".join([*(f"{e} (exit {code}); resumed" for e in ended), *(reasons or ["all answered"])])
        return f"| {case.victim} | {case.words} | {terms(case)} | {did} | {self.end(path, tuple(sorted(absent)))} | {time.monotonic() - start:.0f} |"

    def end(self, path: Path, absent: tuple[tuple[int, int], ...]) -> str:
        if not (path / "summary.json").exists():
            return "not finished"
        if absent not in self.known:
            self.known[absent] = without(self.folder / f"without-{len(self.known)}", self.simulated, absent, KEYS)
        if weights(path) != self.known[absent]:
            return "OTHER BITS"
        return "without" if absent else "same"


def terms(case: Case) -> str:
    return ", ".join(f"`{k}={v}`" for k, v in case.terms.items())


def weights(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


def absences(path: Path) -> dict[tuple[int, int], str]:
    """By round (from 1) and client; of a round that was made again the later line counts."""
    rows = {row["round"]: row for row in map(json.loads, (path / JOURNAL).read_text().splitlines())}
    return {(number, int(client)): why for number, row in rows.items() for client, why in row["absent"].items()}


class Lacking(Here):
    """Nodes in this process, of which some are not there in some rounds."""

    def __init__(self, nodes: Mapping[int, Node], absent: tuple[tuple[int, int], ...]):
        super().__init__(nodes)
        self.absent, self.round = absent, 0

    def send(self, orders: Mapping[int, Parcel], kind: str, patience: float) -> Answers:
        self.round += kind == "train"
        gone = {client for number, client in self.absent if kind == "train" and number == self.round}
        sent = super().send({n: order for n, order in orders.items() if n not in gone}, kind, patience)
        sent.found += [(n, "it is not there") for n in gone]  # type: ignore[misc]
        return sent


def without(folder: Path, simulated: Path, absent: tuple[tuple[int, int], ...], keys: dict[str, Any]) -> bytes:
    """The weights of a run in which some clients were absent from some rounds."""
    _, options, source, federation = prepare(None, keys)
    for client in range(options.clients):
        share.write_client(folder / f"node-{client}", client, source, federation)
    share.write_server(folder / "server", source, federation)
    run = deployed.begin(folder, "run", str(simulated), {}, {}, folder / "server" / "server.yaml", options.clients)
    deployed.carry_out(run, Lacking({c: Node(folder / f"node-{c}") for c in range(options.clients)}, absent), lambda _: None)
    return weights(run)


# -- what is killed ----------------------------------------------------------------------------------------------------
def kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def a_node(trial: Trial, pid: int) -> None:
    """All of it, as a machine that fails; it comes back before round 3."""
    trial.pauses.also("in-effect")
    trial.fed.processes.kill(NODE)
    trial.up()
    trial.pauses.go_on(trial.pauses.wait("in-effect"))


def a_node_for_longer(trial: Trial, pid: int) -> None:
    """It does not come back before the end."""
    trial.fed.processes.kill(NODE)


def a_node_in_time(trial: Trial, pid: int) -> None:
    """The round waits for it."""
    trial.fed.processes.kill(NODE)
    trial.up()


def a_node_between(trial: Trial, pid: int) -> None:
    """While the server stands between two rounds."""
    trial.pauses.also("in-effect")
    trial.fed.processes.kill(NODE)
    trial.pauses.go_on(pid)
    trial.up()
    trial.pauses.go_on(trial.pauses.wait("in-effect"))


def its(program: str, held: bool = False) -> Callable[[Trial, int], None]:
    """One process of the node alone, which its supervisor starts anew."""

    def strike(trial: Trial, pid: int) -> None:
        if held:
            trial.pauses.also("in-effect")
        kill(trial.process(NODE, program))
        trial.pauses.go_on(pid)
        if held:
            wait_in(trial)
            trial.pauses.go_on(trial.pauses.wait("in-effect"))

    return strike


def wait_in(trial: Trial, patience: float = 150.0) -> None:
    """Until the node's supervisor has said once more that it is in."""
    log, until = trial.fed.processes.log_file(NODE), time.monotonic() + patience
    said = log.read_text().count("the node is in")
    while log.read_text().count("the node is in") == said and time.monotonic() < until:
        time.sleep(0.5)


def the_supervisor(trial: Trial, pid: int) -> None:
    trial.pauses.also("in-effect")
    trial.fed.processes.kill(NODE, with_children=False)
    trial.pauses.go_on(pid)
    trial.up()
    trial.pauses.go_on(trial.pauses.wait("in-effect"))


def who_stands_there(trial: Trial, pid: int) -> None:
    kill(pid)


def the_link(trial: Trial, pid: int) -> None:
    """With all that it has started, the server of the run among it; the node goes on."""
    trial.fed.processes.kill("superlink")
    trial.pauses.go_on(pid)


def the_link_alone(trial: Trial, pid: int) -> None:
    trial.fed.processes.kill("superlink", with_children=False)
    trial.pauses.go_on(pid)


def the_link_and_its_database(trial: Trial, pid: int) -> None:
    the_link(trial, pid)
    for file in trial.fed.folder.glob("superlink.db*"):
        file.unlink()


def everything(trial: Trial, pid: int) -> None:
    """As by a power cut: all nodes and the server."""
    for name in list(trial.fed.processes.noted()):
        trial.fed.processes.kill(name)


def cases() -> Iterator[Case]:
    one, all_ = {"min_replies": 1}, {"min_replies": 3}
    yield Case("a node", "begins-to-train", "as it begins to train", a_node, one)
    yield Case("a node", "begins-to-train", "as it begins to train", a_node_for_longer, one | {"round_timeout": 20})
    yield Case("a node", "writes", "while it writes what it keeps", a_node, one)
    yield Case("a node", "writes", "while it writes what it keeps", a_node_in_time, all_)
    yield Case("a node", "has-kept", "when it has kept it and not answered", a_node, one)
    yield Case("a node", "sends-its-answer", "as it sends its answer", a_node, one)
    yield Case("a node", "between-rounds", "between rounds 1 and 2", a_node_between, one)
    yield Case("its worker", "begins-to-train", "as it begins to train", its("fallow.flower.worker"), one)
    yield Case("its worker", "writes", "while it writes what it keeps", its("fallow.flower.worker"), one)
    yield Case("its worker", "has-kept", "when it has kept it and not answered", its("fallow.flower.worker"), one)
    yield Case("its SuperNode", "begins-to-train", "as the worker begins to train", its("fallow.flower.supernode", held=True), one)
    yield Case("its supervisor", "writes", "while the worker writes what it keeps", the_supervisor, one)
    yield Case("the server", "has-sent", "when it has sent", who_stands_there, one)
    yield Case("the server", "second-answer", "when the second answer has come", who_stands_there, one)
    yield Case("the server", "in-effect", "when the round is in effect", who_stands_there, one)
    yield Case("the server", "writes-its-checkpoint", "in the middle of its checkpoint", who_stands_there, one)
    yield Case("the server", "has-its-checkpoint", "when the checkpoint stands", who_stands_there, one)
    yield Case("the SuperLink and the server", "begins-to-train", "as a node begins to train", the_link, one)
    yield Case("the SuperLink and the server", "writes-its-checkpoint", "in the middle of the checkpoint", the_link, one)
    yield Case("the SuperLink alone", "has-trained", "when a node has trained", the_link_alone, one)
    yield Case("the SuperLink, the server and the database", "has-kept", "when a node has kept what it keeps", the_link_and_its_database, one)
    yield Case("everything", "has-kept", "when a node has kept what it keeps", everything, one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of cases, from 1")
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    needed.check()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(asked.folder or tempfile.mkdtemp(prefix="fallow-kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    trial = Trial(folder.absolute())
    print("| killed | moment | terms | what the run said | end weights | s |\n|---|---|---|---|---|---|", flush=True)
    try:
        for number, case in enumerate(cases(), start=1):
            if asked.only and number not in asked.only:
                continue
            try:
                print(trial.case(case), flush=True)
            except (TimeoutError, RuntimeError, subprocess.TimeoutExpired) as e:
                print(f"| {case.victim} | {case.words} | {terms(case)} | {str(e)[-300:]} | FAILED | |", flush=True)
    finally:
        trial.run_command("down", "fed")
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main()
