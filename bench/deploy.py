"""Seconds of a deployed round and its bytes beside the tensors' own, with the share that is Flower's; nodes, server and all on this machine.

    python -m bench.deploy [--nodes 3 10 20] [--rounds 3] [--method fedavg] [KEY=VALUE ...]

Needs the extra `flower`. A node's seconds are those of its own work, from the message read to the answer packed; the rest of a round, but for the server's own
phases, is Flower's: new processes with their imports, polling, transfer. On one machine the nodes share its cores, so many of them show those, not Flower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import fallow
from fallow.flower import needed, running
from fallow.flower.federation import Federation
from fallow.runs.folder import RunFolder
from fallow.trees import parse_pairs


def measure(folder: Path, count: int, rounds: int, method: str, keys: dict[str, Any]) -> dict[str, Any]:
    """One federation, from up to down."""
    settings = {"data": "digits", "label_count": 10 * count, "steps": 2, "batch": 16, "device": "cpu"} | keys
    settings |= {"method": method, "clients": count, "rounds": rounds}
    simulated = fallow.run(out=folder, name=f"simulated-{count}", quiet=True, **settings)
    fed = Federation.init(folder / f"nodes-{count}", count, tell=lambda _: None)
    fed.share(simulated.path)
    start = time.monotonic()
    try:
        fed.up(here=True, patience=300)
        up = time.monotonic() - start
        run = running.begin(fed, str(simulated.path), {"round_timeout": 900})
        running.follow(fed, run, fed.submit(run), lambda row: None)
    finally:
        fed.down()
    rows, journal = RunFolder(run).rows(), [json.loads(line) for line in (run / "nodes.jsonl").read_text().splitlines()]
    whole = [r["seconds"]["round"] for r in rows]
    own = [r["seconds"]["round"] - r["seconds"]["clients"] + max(j["seconds"].values()) for r, j in zip(rows, journal)]
    sent = [sum(j["bytes_up"].values()) + sum(j["bytes_down"].values()) for j in journal]
    tensors = [r["bytes_up"] + r["bytes_down"] for r in rows]
    return {
        "nodes": count, "up": up, "round": statistics.median(whole), "first": whole[0], "flower": 1 - statistics.median(own) / statistics.median(whole),
        "simulated": statistics.median(r["seconds"]["round"] for r in RunFolder(simulated.path).rows()),
        "bytes": statistics.median(sent), "tensors": statistics.median(tensors),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 10, 20])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_args()
    needed.check()
    print("nodes  up s  first round s  round s  simulated s  Flower's share  bytes a round  tensors' own")
    for count in asked.nodes:
        with tempfile.TemporaryDirectory(prefix="fallow-deploy-") as folder:
            m = measure(Path(folder), count, asked.rounds, asked.method, parse_pairs(asked.keys))
        print(
            f"{m['nodes']:5}  {m['up']:4.0f}  {m['first']:13.1f}  {m['round']:7.1f}  {m['simulated']:11.2f}  {100 * m['flower']:12.0f} %  {m['bytes']:13,.0f}  {m['tensors']:12,.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
