"""Seconds of a deployed round and its bytes beside the tensors' own, with the share that is Flower's; nodes, server and all on this machine.

    python -m bench.deploy [--nodes 3 10 20] [--rounds 3] [--method fedavg] [KEY=VALUE ...]
    python -m bench.deploy --methods [semifl fedrgd fedloke feddure feddb] [--rounds 2]

The first makes a federation of each size. The second runs method after method on three nodes, with the settings of bench/five.yaml on digits, and compares the
bits at the end with the simulation's. Needs the extra `flower`. A node's seconds are those of its own work, from the message read to the answer packed; the rest
of a round, but for the server's own phases, is Flower's: polling, transfer, its processes. On one machine the nodes share its cores, so many of them show those,
not Flower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fallow
from bench import five
from fallow.flower import needed, running
from fallow.flower.federation import Federation
from fallow.runs.folder import RunFolder
from fallow.trees import parse_pairs

HERE = {"device": "cpu", "slots": 1}
REMOTE = "statistics", "clients", "measure"  # phases of a round in which the server waits for nodes
Measures = dict[str, Any]


@contextmanager
def federation(folder: Path, count: int, first: Path) -> Iterator[tuple[Federation, float]]:
    """Up, with what the nodes hold in a run, and the seconds that took; down at the end."""
    fed = Federation.init(folder, count, tell=lambda _: None)
    fed.share(first)
    start = time.monotonic()
    try:
        fed.up(here=True, patience=300)
        yield fed, time.monotonic() - start
    finally:
        fed.down()


def simulated(folder: Path, name: str, keys: dict[str, Any]) -> Path:
    return fallow.run(out=folder, name=name, quiet=True, **keys | HERE).path


def deployed(fed: Federation, simulation: Path) -> Path:
    run = running.begin(fed, str(simulation), {"round_timeout": 900})
    running.follow(fed, run, fed.submit(run), lambda row: None)
    return run


def measures(run: Path, simulation: Path) -> Measures:
    """Of a deployed run beside its simulation."""
    rows, journal = RunFolder(run).rows(), [json.loads(line) for line in (run / "nodes.jsonl").read_text().splitlines()]
    whole = [r["seconds"]["round"] for r in rows]
    own = [r["seconds"]["round"] - sum(r["seconds"].get(phase, 0) for phase in REMOTE) + max(j["seconds"].values()) for r, j in zip(rows, journal)]
    sent = [sum(j["bytes_up"].values()) + sum(j["bytes_down"].values()) for j in journal]
    tensors = [r["bytes_up"] + r["bytes_down"] for r in rows]
    return {
        "first": whole[0], "round": statistics.median(whole), "flower": 1 - statistics.median(own) / statistics.median(whole),
        "simulated": statistics.median(r["seconds"]["round"] for r in RunFolder(simulation).rows()),
        "bytes": statistics.median(sent), "tensors": statistics.median(tensors),
        "absent": sum(len(j["absent"]) for j in journal),  # whoever is, the bits are others
        "same": (run / "model.safetensors").read_bytes() == (simulation / "model.safetensors").read_bytes(),
    }  # fmt: skip


def sizes(folder: Path, counts: list[int], rounds: int, method: str, keys: dict[str, Any]) -> Iterator[Measures]:
    """One federation of each size, from up to down."""
    for count in counts:
        settings = {"data": "digits", "label_count": 10 * count, "steps": 2, "batch": 16} | keys | {"method": method, "clients": count, "rounds": rounds}
        simulation = simulated(folder, f"simulated-{count}", settings)
        with federation(folder / f"nodes-{count}", count, simulation) as (fed, up):
            run = deployed(fed, simulation)
        yield {"nodes": count, "up": up} | measures(run, simulation)


def methods(folder: Path, names: list[str], rounds: int, keys: dict[str, Any]) -> Iterator[Measures]:
    """One federation for all."""
    own = {"clients": 3, "rounds": rounds, "eval_every": 1, "sbn": "federated"} | keys
    settings = {name: five.Cell("digits", name, False, 0).keys() | own for name in names}
    settings = {name: of | ({"groups": own["clients"]} if "groups" in of else {}) for name, of in settings.items()}
    simulations = {name: simulated(folder, name, of) for name, of in settings.items()}
    with federation(folder / "nodes", own["clients"], next(iter(simulations.values()))) as (fed, _):
        for name, simulation in simulations.items():
            fed.share(simulation)
            yield {"method": name, "labels": settings[name]["labels"]} | measures(deployed(fed, simulation), simulation)


COLUMNS = {  # of the table: what it says, and how
    "nodes": ("nodes", "{}"), "up": ("up, s", "{:.0f}"), "method": ("method", "{}"), "labels": ("labels at", "{}"), "same": ("bits", "{}"), "absent": ("absent", "{}"),
    "first": ("first round, s", "{:.1f}"), "round": ("round (median), s", "{:.1f}"), "simulated": ("simulated, s", "{:.2f}"),
    "flower": ("Flower's share", "{:.0%}"), "bytes": ("bytes a round", "{:,.0f}"), "tensors": ("the tensors' own", "{:,.0f}"),
}  # fmt: skip


def show(rows: Iterator[Measures]) -> None:
    before = os.getloadavg()[0]
    for number, row in enumerate(rows):
        shown = {k: v for k, v in COLUMNS.items() if k in row}
        if not number:
            print(f"| {' | '.join(title for title, _ in shown.values())} |\n|{' --- |' * len(shown)}")
        row["same"] = "the simulation's" if row["same"] else "OTHERS"
        print(f"| {' | '.join(form.format(row[k]) for k, (_, form) in shown.items())} |", flush=True)
    print(f"\nload {before:.1f} at the start, {os.getloadavg()[0]:.1f} at the end, {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 10, 20])
    parser.add_argument("--methods", nargs="*", choices=list(five.METHODS))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_args()
    needed.check()
    keys = parse_pairs(asked.keys)
    with tempfile.TemporaryDirectory(prefix="fallow-deploy-") as folder:
        if asked.methods is not None:
            show(methods(Path(folder), asked.methods or list(five.METHODS), asked.rounds or 2, keys))
        else:
            show(sizes(Path(folder), asked.nodes, asked.rounds or 3, asked.method, keys))


if __name__ == "__main__":
    main()
