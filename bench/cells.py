"""Runs many cells at once on one device, by priority, within a time limit; brings back metrics, no weights.

    python -m bench.cells JOBS.txt --parallel 6 --limit 1200 --out DIR --pack FILE.tar.gz [--set key=value ...]

A line of JOBS.txt is `NAME RECIPE key=value ...`. Small cells leave a large GPU mostly idle, so several processes share
it. Finished runs, and the metrics so far of the others, are packed on every poll.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path


def pack(out: Path, target: Path) -> None:
    part = target.with_suffix(".part")
    with tarfile.open(part, "w:gz") as tar:
        for pattern in ("*/config.yaml", "*/metrics.jsonl", "*/summary.json", "*.log"):
            for path in sorted(out.glob(pattern)):
                tar.add(path, path.relative_to(out))
    part.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds; what runs then is stopped")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    waiting = [shlex.split(line) for line in args.jobs.read_text().splitlines() if line.strip() and not line.startswith("#")]
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    started = time.time()
    while (waiting or running) and time.time() - started < args.limit:
        while waiting and len(running) < args.parallel:
            name, *words = waiting.pop(0)
            command = [sys.executable, "-m", "fallow", "run", *words, *args.set, "--out", str(args.out), "--name", name]
            with open(args.out / f"{name}.log", "wb") as log:
                running[name] = (subprocess.Popen(command, stdout=log, stderr=log, env=os.environ), time.time())
        for name, (process, since) in list(running.items()):
            if process.poll() is not None:
                print(f"{name}: exit {process.returncode} after {time.time() - since:.0f} s", flush=True)
                del running[name]
        time.sleep(2)
    for name, (process, _) in running.items():
        process.terminate()
        print(f"{name}: stopped", flush=True)
    pack(args.out, args.pack)


if __name__ == "__main__":
    main()
