"""Round time and peak memory for 100 to 100,000 clients, ten of them in each round.

    python -m bench.scale [--clients 100 1000 ...] [--methods fedavg fedloke] [--rounds 12] [--tiny] [--out FILE.json]

Each client has 50 of 50,000 random images, for FedAvg all labelled, else 5; clients overlap. What clients keep goes to disk
(`keep_memory=0`). Every size is a process of its own, so that its peak memory is its own; the sizes are gone through
several times in turn, and the fastest round counts, since other work on the machine only ever adds time.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import report
from bench.round import random_source
from fallow import draws, runs
from fallow.data.dealing import EMPTY
from fallow.data.holdings import Federation, Holding
from fallow.runs.folder import RunFolder
from fallow.runs.settings import resolve

SIZES = (100, 1_000, 10_000, 100_000)
HELD, LABELLED, STRIDE = 50, 5, 7919  # the stride has no factor in common with 50,000: a client's images differ


def overlapping(clients: int, images: int, labelled: int = LABELLED) -> Federation:
    """Clients with 50 images each, from a start of their own through the whole set."""
    start = draws.integers(draws.key("scale"), torch.arange(clients), images).numpy()
    held = (start[:, None] + STRIDE * np.arange(HELD)) % images
    holdings = tuple(Holding(rows[:labelled], rows[labelled:]) for rows in held)
    return Federation(Holding(EMPTY, EMPTY), holdings, EMPTY, tuple(map(str, range(clients))), {})


def one(method: str, clients: int, rounds: int, tiny: bool, device: str) -> dict[str, Any]:
    """Seconds of a settled round, seconds until the first, peak memory."""
    keys = dict(
        method=method, clients=clients, active=10, rounds=rounds, batch=10, epochs=1, model="small-cnn", device=device,
        label_ratio=LABELLED / HELD, keep_memory=0.0, eval_every=rounds,
    )  # fmt: skip
    kind, options = resolve({}, keys)
    source = random_source(1_000 if tiny else 50_000, 250, 16 if tiny else 32)
    begun = time.perf_counter()
    federation = overlapping(clients, len(source.train.labels), HELD if method == "fedavg" else LABELLED)
    with tempfile.TemporaryDirectory() as out:
        folder = RunFolder.new(Path(out), "run")
        federation.save(folder.federation)
        at_work = runs.Run(folder, kind, options, source, federation)
        ready = time.perf_counter() - begun
        worked = time.process_time()
        at_work.go()
        worked = time.process_time() - worked
        rows = folder.rows()
        kept = sum(p.stat().st_size for p in folder.kept.glob("*")) if folder.kept.is_dir() else 0
    times = [r["seconds"]["round"] for r in rows[2:-1]]  # graphs are captured first, the test set comes last
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {"method": method, "clients": clients, "round": statistics.median(times), "fastest": min(times), "cpu": worked / rounds, "start": ready, "peak": peak, "kept": kept}
    if at_work.kit.device.type == "cuda":
        found["device_peak"] = torch.cuda.max_memory_allocated()
    return found


def apart(method: str, clients: int, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.scale", "--one", method, str(clients), "--rounds", str(args.rounds), "--device", args.device]
    ended = subprocess.run(command + ["--tiny"] * args.tiny, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    return json.loads(ended.stdout.splitlines()[-1])


def least(several: list[dict[str, Any]]) -> dict[str, Any]:
    """The smallest of each figure."""
    return {k: v if isinstance(v, str) else min(r[k] for r in several) for k, v in several[0].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--methods", nargs="*", default=["fedavg", "fixmatch", "fedloke"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--passes", type=int, default=2, help="how often each size is run")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="fewer and smaller images, to try the script")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one[0], int(args.one[1]), args.rounds, args.tiny, args.device)))
        return
    results, rows = [], []
    for method in args.methods:
        found: dict[int, list[dict[str, Any]]] = {clients: [] for clients in args.clients}
        for _ in range(args.passes):
            for clients in args.clients:
                found[clients].append(apart(method, clients, args))
                print(f"{method}, {clients:,} clients: {found[clients][-1]['fastest']:.3f} s a round", flush=True)
        best: list[dict[str, Any]] = [least(several) for several in found.values()]
        results += best
        for r in best:
            ratios = (f"{r[k] / best[0][k]:.2f}" for k in ("fastest", "cpu", "peak"))
            sizes = (f"{r['peak'] / 2**20:.0f}", f"{r['kept'] / 2**20:.0f}")
            rows.append((method, f"{r['clients']:,}", f"{r['fastest']:.3f}", f"{r['round']:.3f}", f"{r['cpu']:.3f}", *sizes, *ratios, f"{r['start']:.1f}"))
    title = ("method", "clients", "s a round", "median", "CPU s", "peak MiB", "MiB kept", "time ratio", "CPU ratio", "memory ratio", "s to start")
    print(report.table(title, rows))
    report.write(args.out, results, bench="scale", tiny=args.tiny)


if __name__ == "__main__":
    main()
