"""What the checksums and syncs of a run's state cost, as a share of its rounds, on digits.

    python -m bench.checks [--rounds N] [method=NAME key=value ...]

Every other commit goes without hashing and without syncing metrics and run folder, so that both kinds meet the same disk.
The server's entries were hashed before there was a manifest; here they count as new.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import fallow
from fallow import disk
from fallow.config import parse_pairs
from fallow.engine import keep
from fallow.runs import Run, manifest

NOTHING = SimpleNamespace(hexdigest=lambda: "0" * 64)
commit, sync = Run.commit, disk.sync
seconds: dict[bool, list[float]] = {True: [], False: []}


def some(path: Path) -> None:
    if path.name not in ("metrics.jsonl", "run"):
        sync(path)


def measured(run: Run) -> None:
    checked = run.done % 2 == 0
    hashed = patch.object(manifest, "sha256", lambda _: "0" * 64), patch.object(keep, "hashlib", SimpleNamespace(sha256=lambda _: NOTHING))
    start = time.perf_counter()
    if checked:
        commit(run)
    else:
        with hashed[0], hashed[1], patch.object(disk, "sync", some):
            commit(run)
    seconds[checked].append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("words", nargs="*", default=["method=fedloke"])
    args = parser.parse_args()
    keys: dict[str, Any] = parse_pairs(args.words)
    with tempfile.TemporaryDirectory() as out, patch.object(Run, "commit", measured):
        rows = fallow.run(out=Path(out), name="run", data="digits", device="cpu", rounds=args.rounds, **keys).metrics
    round = statistics.median(r["seconds"]["round"] for r in rows)
    plain, checked = (statistics.median(seconds[kind]) for kind in (False, True))
    share = 100 * (checked - plain) / (round + plain)
    print(f"{' '.join(args.words)}: round {1000 * round:.1f} ms, commit {1000 * plain:.2f} ms, with checks {1000 * checked:.2f} ms: {share:+.2f} %")


if __name__ == "__main__":
    main()
