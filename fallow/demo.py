"""`make demo`: what five clients' unlabelled digits add to fifty labels at the server; three methods, three seeds, two minutes."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.progress import Progress
from rich.table import Table

import fallow
from fallow.runs import Result
from fallow.said import Speaker

SEEDS = (0, 1, 2)
METHODS = {"labels alone": "fedavg", "FixMatch": "fixmatch", "SemiFL": "semifl"}
FEDERATION: dict[str, Any] = {"labels": "server", "label_count": 50, "label_per_class": None}


def main() -> None:
    console = Speaker()
    console.print("A server has 50 labelled images of digits; five clients hold 1,450 unlabelled ones between them, non-IID.")
    results: dict[str, list[Result]] = {name: [] for name in METHODS}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=None)

        def watch(event: str, what: Any) -> None:
            if event == "start":
                bar.update(task, total=len(SEEDS) * len(results) * what.options.rounds)
            elif event == "round":
                bar.advance(task)

        for name, method in METHODS.items():
            for seed in SEEDS:
                results[name].append(fallow.run("demo", method=method, seed=seed, watch=watch, **FEDERATION))
    table = Table("method", *[f"seed {s}" for s in SEEDS], "mean", "unlabelled images it used")
    for name, found in results.items():
        scores = [100 * r.accuracy for r in found]
        ratio = found[-1].metrics[-1]["label_ratio"]
        used = "none" if ratio is None else f"{100 * ratio:.0f} %"
        table.add_row(name, *[f"{s:.1f}" for s in scores], f"{statistics.mean(scores):.1f}", used)
    console.print(table)
    console.print("Test accuracy in %, last round. The runs:")
    for found in results.values():
        for result in found:
            console.say(f"  {result.path}")
    typed = command()
    console.print("Next:")
    for words in ("run demo method=semifl labels=server label_count=50", "compare runs", "list methods"):
        console.say(f"  {typed} {words}")


def command() -> str:
    """`fallow` as one can type it here: the one beside this Python, where the shell finds none."""
    beside = Path(sys.executable).with_name("fallow")
    if shutil.which("fallow") or not beside.exists():
        return "fallow"
    here = os.path.relpath(beside)
    return str(beside) if here.startswith("..") else here


if __name__ == "__main__":
    main()
