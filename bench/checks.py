"""What a change costs a round: this tree beside an older one, round by round in turn on the same machine.

    mkdir -p .gpu/before; git archive bc92597 fallow bench | tar -x -C .gpu/before
    python -m bench.checks --before .gpu/before [--rounds N] [--setting semifl fedloke feddb | digits] [--set key=value ...]

Both trees run in processes of their own that live side by side, and only one of them computes at a time: each makes a round
with its commit, then waits for the other. A round's ratio is thus of two rounds that ran within a moment of each other;
what is given is the median ratio. Who goes first changes every round. `digits` is digits at clients on a CPU; the other
settings are those of bench.round, with random images of CIFAR-10's size.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
DIGITS: dict[str, Any] = {"data": "digits", "device": "cpu"}


class Tree:
    """A tree's run in a process of its own, a round at a time."""

    def __init__(self, tree: Path, setting: str, keys: dict[str, Any]):
        paths = [str(tree.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        words = [sys.executable, "-P", str(HERE), "--child", setting, json.dumps(keys)]  # -P: bench/queue.py is no stdlib module
        self.process = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def round(self) -> tuple[float, float]:
        """Seconds of the next round with its commit: of the clock, and of CPU."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        told = json.loads(self.process.stdout.readline() or "null")
        if told is None:
            raise SystemExit("a tree's run has ended; its error stands above")
        return told["wall"], told["cpu"]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def child(setting: str, keys: dict[str, Any]) -> None:
    """Makes a round whenever a line comes in, and says how long it took."""
    import torch

    import fallow
    from bench.round import SETTINGS, random_source

    data = {} if setting == "digits" else SETTINGS[setting] | {"data": random_source(50_000, 10_000)}
    if importlib.util.find_spec("fallow.runs.automatic"):  # older trees fit nothing, and both must do the same
        data |= {"defaults": "paper"}
    mark: list[float] = []

    def waited() -> None:
        if not sys.stdin.readline():
            os._exit(0)
        mark[:] = time.perf_counter(), time.process_time()

    def watch(event: str, what: Any) -> None:
        if event == "round":
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            wall, cpu = time.perf_counter() - mark[0], time.process_time() - mark[1]
            print(json.dumps({"wall": wall, "cpu": cpu}), flush=True)
        if event in ("start", "round"):
            waited()

    with tempfile.TemporaryDirectory() as out:
        fallow.run(out=out, name="run", watch=watch, **data | keys)


def compare(setting: str, before: Path, rounds: int, warm: int, keys: dict[str, Any]) -> str:
    keys = (DIGITS if setting == "digits" else {}) | {"rounds": rounds + warm + 1} | keys
    trees = [Tree(before, setting, keys), Tree(HERE.parents[1], setting, keys)]
    times: list[list[tuple[float, float]]] = [[], []]
    try:
        for number in range(rounds + warm):
            for which in (0, 1) if number % 2 else (1, 0):
                times[which].append(trees[which].round())
    finally:
        for tree in trees:
            tree.end()
    old, new = (t[warm:] for t in times)
    told = [f"{k}={v}" for k, v in keys.items() if k not in DIGITS]
    return "\n  ".join([" ".join([setting, *told]), *ratios(old, new)])


def ratios(old: list[tuple[float, float]], new: list[tuple[float, float]]) -> list[str]:
    """Of each kind of seconds the medians of both, and of the ratio of the two rounds of a pair."""
    said = []
    for kind, name in enumerate(("of the clock", "of CPU")):
        before, now = ([t[kind] for t in times] for times in (old, new))
        low, middle, high = (100 * (q - 1) for q in statistics.quantiles([b / a for a, b in zip(before, now, strict=True)], n=4))
        said.append(
            f"seconds {name}: {statistics.median(before):.4f} before, {statistics.median(now):.4f} now, {middle:+.2f} % "
            f"(median of {len(now)} pairs; quarter to quarter {low:+.1f} to {high:+.1f} %)"
        )
    return said


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2], json.loads(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a folder with the older tree's fallow/ and bench/")
    parser.add_argument("--setting", nargs="+", default=["digits"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warm", type=int, default=4, help="first rounds that are not counted: graphs are captured in them")
    parser.add_argument("--set", nargs="*", default=[], help="further key=value")
    args = parser.parse_args()
    from fallow.trees import parse_pairs

    for setting in args.setting:
        print(compare(setting, args.before, args.rounds, args.warm, parse_pairs(args.set)), flush=True)


if __name__ == "__main__":
    main()
