"""What one gets who types a method's name and nothing else: every method against labels alone, with automatic settings.

    python -m bench.defaults [--data-dir DIR] [--out results/bench] [--sets digits ...] [--methods fixmatch ... | all]
                             [--seeds 0 1 2] [--jobs 2] [--minutes 40] [--labels clients server] [--try 'WHO: KEYS' ...]

A run is given its method, data and federation; all else is fitted to them (docs/defaults.md). Labels alone is FedAvg in
the same federation, as automatically and with as many steps. `defaults.json` in `--out` is written anew after each run,
and a call that was cut goes on where it was; `defaults.md` beside it is the table. Seeds 10 to 12 are there for choosing
the rule, 0 to 2 for showing it. `--try 'fixmatch,uda: threshold=0.6|0.8 lr=0.03|0.1'` adds runs with those keys
given, in all combinations, and a table of what each came to; `--try 'all: steps=40'` means labels alone too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import fallow
from bench.photographs import photographs
from bench.report import machine
from fallow import runs as running
from fallow.data import sources
from fallow.data.sources import ImageSet, Source
from fallow.errors import UserError
from fallow.methods import REGISTERED
from fallow.runs import automatic
from fallow.runs.settings import config_hash
from fallow.trees import merge, parse_pairs

ALONE = "fedavg"
METHODS = [name for name in REGISTERED if name != ALONE]
SHOWN = ["semifl", "feddb", "fedrgd", "fedloke", "feddure", "fixmatch", "uda", "fedprox"]  # on all sets; of the others, whether they learn at all
AT_SERVER = ["semifl", "fedrgd", "fixmatch"]  # with labels=server, beside a server that trains alone
SHOWING = (0, 1, 2)  # seeds; no rule is chosen by them
SETS: dict[str, dict[str, Any]] = {  # the last keys are of the set, not of a run
    "digits": {"few": 0.08, "some": 0.2, "trained": 900, "rest": True},
    "fashion-mnist": {"few": 0.08, "some": 0.2, "image": {"size": 12, "fit": "resize"}, "trained": 900, "tested": 2000},
    "photographs": {"few": 0.1, "some": 0.3, "image": {"size": 12, "fit": "resize"}},
    "cifar10": {"few": 0.1, "some": 0.3, "image": {"size": 12, "fit": "resize"}, "trained": 900, "tested": 2000},
}
PARTITIONS = {"IID": "iid", "Dirichlet": "dirichlet-capped:0.5"}
FEDERATIONS = list(itertools.product(PARTITIONS, ("few", "some")))
CLIENTS = 3
CLASSES = {"photographs": 5}  # the other sets have ten
Run = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run."""

    set: str
    partition: str
    amount: str  # of labels
    labels: str  # where they are
    method: str
    seed: int
    tried: str = ""  # keys that are given beside these, as typed

    def __str__(self) -> str:
        at = "" if self.labels == "clients" else f", labels at the {self.labels}"
        return f"{self.set} {self.partition} {self.amount}{at}: {self.method}{f' {self.tried}' if self.tried else ''}, seed {self.seed}"

    def keys(self) -> dict[str, Any]:
        one = SETS[self.set]
        own = {"image": one["image"]} if "image" in one else {}
        federation = {"clients": CLIENTS, "partition": PARTITIONS[self.partition], "labels": self.labels, "label_ratio": one[self.amount]}
        machine = {"device": "cpu", "slots": 1, "eval_every": 10**6, "checkpoint_every": 10**6}
        return merge({"method": self.method, "seed": self.seed}, federation, own, machine, parse_pairs(self.tried.split()))


@lru_cache(maxsize=8)
def source_of(name: str, data_dir: str | None) -> Source:
    """The data set, cut to as many first images as the settings say; photographs are made of CIFAR-10's test images."""
    if name == "photographs":
        with tempfile.TemporaryDirectory() as folder:
            photographs(official("cifar10", data_dir).test, Path(folder))
            return replace(sources.load(f"folder:{folder}", size=SETS[name]["image"]["size"]), name=name)
    source = official(name, data_dir)
    n, m, train, test = SETS[name].get("trained"), SETS[name].get("tested"), source.train, source.test
    if SETS[name].get("rest"):  # what is not trained on is tested on: a small test set says little
        test = ImageSet(torch.cat([test.images, train.images[n:]]), torch.cat([test.labels, train.labels[n:]]))
    source = replace(source, train=ImageSet(train.images[:n], train.labels[:n]), test=ImageSet(test.images[:m], test.labels[:m]))
    return sources.fit(source, **SETS[name].get("image", {}))


def official(name: str, data_dir: str | None) -> Source:
    """A set that lies in the data folder, or in one of its own there."""
    try:
        return sources.load(name, data_dir)
    except UserError:
        if data_dir is None or not (Path(data_dir) / name).is_dir():
            raise
        return sources.load(name, str(Path(data_dir) / name))


def settings(cell: Cell, data_dir: str | None) -> tuple[str, str]:
    """The hash of a run's settings, and what they are in a line."""
    _, options, _, federation = running.prepare(None, cell.keys() | {"data": source_of(cell.set, data_dir)})
    return config_hash(options), automatic.amounts(options, federation)


def carry_out(cell: Cell, data_dir: str | None) -> Run:
    """A run on one thread, in a folder that is thrown away; what is worth keeping of it."""
    started, cpu = time.perf_counter(), time.process_time()
    said = settings(cell, data_dir)
    with tempfile.TemporaryDirectory() as out:
        result = fallow.run(out=out, **cell.keys() | {"data": source_of(cell.set, data_dir)})
        row = result.metrics[-1]
    return vars(cell) | {
        "accuracy": row["accuracy"], "label_ratio": row["label_ratio"], "label_accuracy": row["label_accuracy"],
        "hash": said[0], "settings": said[1],
        "seconds": round(time.perf_counter() - started, 1), "cpu_seconds": round(time.process_time() - cpu, 1),
    }  # fmt: skip


def tries(words: list[str]) -> Iterator[tuple[list[str], str]]:
    """(methods, keys) of each combination of `--try`: `fixmatch,uda: threshold=0.6|0.8 lr=0.1`."""
    for word in words:
        who, colon, keys = word.partition(":")
        if not colon or "=" not in keys:
            raise UserError(f"--try {word!r} is not METHODS: KEY=VALUE", "write for example --try 'fixmatch: lr=0.03|0.1'")
        names = [ALONE, *METHODS] if who.strip() == "all" else [w.strip() for w in who.split(",")]
        choices = [[f"{pair.partition('=')[0]}={v}" for v in pair.partition("=")[2].split("|")] for pair in keys.split()]
        yield from ((names, " ".join(chosen)) for chosen in itertools.product(*choices))


def cells(args: argparse.Namespace) -> list[Cell]:
    """All runs of a call; one seed everywhere first."""
    out = []
    for seed, labels, name, (partition, amount) in itertools.product(args.seeds, args.labels, args.sets, FEDERATIONS):
        named = METHODS if "all" in args.methods else args.methods
        here = [ALONE, *(m for m in named if labels == "clients" or m in AT_SERVER)]
        given = [("", here)] if not args.only_tries else [("", [ALONE])]
        given += [(keys, [m for m in here if m in who]) for who, keys in tries(args.tries)]
        out += [Cell(name, partition, amount, labels, m, seed, keys) for keys, names in given for m in names]
    return out


# -- the table ---------------------------------------------------------------------------------------------------------
def gains(found: list[Run]) -> dict[tuple[str, ...], dict[int, float]]:
    """By (set, partition, amount, labels, method, tried): what each seed has over labels alone, in points.

    What was tried for all is compared with labels alone that had it too.
    """
    place = lambda r: (r["set"], r["partition"], r["amount"], r["labels"])
    alone = {(*place(r), r["tried"], r["seed"]): r for r in found if r["method"] == ALONE}
    out: dict[tuple[str, ...], dict[int, float]] = {}
    for r in found:
        other = alone.get((*place(r), r["tried"], r["seed"])) if r["method"] != ALONE else None
        other = other or alone.get((*place(r), "", r["seed"]))
        if other is not None and other is not r:
            out.setdefault((*place(r), r["method"], r["tried"]), {})[r["seed"]] = 100 * (r["accuracy"] - other["accuracy"])
    return out


def markdown(found: list[Run], facts: dict[str, Any]) -> str:
    text, gained = [HEAD.strip(), "", *_extent(found), ""], gains(found)
    for labels, name in itertools.product(("clients", "server"), SETS):
        here = [r for r in found if r["set"] == name and r["labels"] == labels]
        if not here:
            continue
        at = "" if labels == "clients" else ", labels at the server"
        text += [f"## {name}{at}", "", "| | " + " | ".join(f"{p}, {a}" for p, a in FEDERATIONS) + " | mean | seeds | settings |", "|---" * 8 + "|"]
        for method, tried in dict.fromkeys((r["method"], r["tried"]) for r in sorted(here, key=lambda r: ([ALONE, *METHODS].index(r["method"]), r["tried"]))):
            text.append(_line(here, gained, name, labels, method, tried))
        text += ["", _lowest(here), ""]
    text.append(
        f"{len(found)} runs, commit {facts['commit']}, torch {facts['torch']}: {facts['seconds'] / 60:.1f} minutes with {facts['jobs']} runs at a "
        f"time, {facts['cpu_seconds'] / 60:.1f} minutes of one core."
    )
    return "\n".join(text) + "\n"


HEAD = """
# Every method with automatic settings, beside labels alone
Gain in points of test accuracy over labels alone, mean over seeds (and by seed) after the last round; `python -m
bench.defaults`. Nothing is given but method, data and federation: three clients with 300 images each,
"few" and "some" labels (digits and Fashion-MNIST 8 and 20 %, CIFAR-10 and photographs 10 and 30 %), IID or Dirichlet (0.5). Digits,
Fashion-MNIST and CIFAR-10 are the first 900 training and 2,000 test images (digits: the 897 others); photographs are 900 files of
five classes and 1,500 to test on, PNG and JPEG of many sizes. Digits have 8x8 pixels, all others are made 12x12, so that this is cheap. The first line of a table has the accuracies of labels alone.
"mean" is over the four federations and the seeds that all four have (in brackets by seed); a seed in brackets is not in all four.
"""


def _extent(found: list[Run]) -> list[str]:
    """What of the showing has been run, and what has not."""
    shown = [r for r in found if r["seed"] in SHOWING and not r["tried"] and r["labels"] == "clients"]
    there = {(r["set"], r["seed"], r["method"], r["partition"], r["amount"]) for r in shown}
    lines = []
    for name in SETS:
        counts = {s: sum((name, s, m, *place) in there for m in (ALONE, *SHOWN) for place in FEDERATIONS) for s in SHOWING}
        whole = len(FEDERATIONS) * (1 + len(SHOWN))
        said = ", ".join(f"seed {s}: {'all' if n == whole else f'{n} of {whole} runs'}" for s, n in counts.items() if n)
        lines.append(f"- {name}: {said or 'not run'}{'; no other seed' if said and not all(counts.values()) else ''}.")
    others = {(r["set"], r["seed"]) for r in shown if r["method"] not in (ALONE, *SHOWN)}
    if others:
        lines.append(f"- The methods beside labels alone and {', '.join(SHOWN)}: {', '.join(f'{n} seed {s}' for n, s in sorted(others))}, as far as their lines go.")
    return ["What has been run:", "", *lines]


def _lowest(here: list[Run]) -> str:
    r = min(here, key=lambda r: r["accuracy"])
    who, classes = " ".join(filter(None, (r["method"], r["tried"]))), CLASSES.get(r["set"], 10)
    least = f"{100 * r['accuracy']:.1f} % ({who}, {r['partition']}, {r['amount']}, seed {r['seed']})"
    return f"The lowest accuracy of any run is {least}; guessing one of {classes} classes has {100 / classes:.0f} %."


def _line(here: list[Run], gained: dict[tuple[str, ...], dict[int, float]], name: str, labels: str, method: str, tried: str) -> str:
    by_place = []
    for place in FEDERATIONS:
        if method == ALONE and not tried:
            by_place.append({r["seed"]: 100 * r["accuracy"] for r in here if (r["method"], r["tried"], r["partition"], r["amount"]) == (method, tried, *place)})
        else:
            by_place.append(gained.get((name, *place, labels, method, tried), {}))
    sign = "" if method == ALONE and not tried else "+"
    everywhere = sorted(set.intersection(*map(set, by_place)))
    some = sorted(set.union(*map(set, by_place)) - set(everywhere))
    seeds = " ".join([*map(str, everywhere), *(f"({s})" for s in some)])
    by_seed = [statistics.mean(v[s] for v in by_place) for s in everywhere]
    total = _with_parts(statistics.mean(by_seed), by_seed, sign) if by_seed else ""
    entries = [_with_parts(statistics.mean(v.values()), list(v.values()), sign) if v else "" for v in by_place]
    title = "labels alone" if method == ALONE else method
    used = next(r["settings"] for r in here if (r["method"], r["tried"]) == (method, tried))
    return f"| {title}{f' `{tried}`' if tried else ''} | " + " | ".join(entries) + f" | {total} | {seeds} | {used} |"


def brief(found: list[Run]) -> str:
    """The means alone, a column for each set of which all four federations have been run: what docs/defaults.md has."""
    gained = gains(found)
    sets = [n for n in SETS if all(set.intersection(*(set(gained.get((n, *place, "clients", m, ""), ())) for place in FEDERATIONS)) for m in SHOWN)]
    lines = ["| | " + " | ".join(sets) + " |", "|---" * (1 + len(sets)) + "|"]
    for method in [ALONE, *SHOWN]:
        rows = (_line([r for r in found if (r["set"], r["labels"]) == (n, "clients")], gained, n, "clients", method, "") for n in sets)
        lines.append(f"| {'labels alone' if method == ALONE else method} | " + " | ".join(row.split(" | ")[5] for row in rows) + " |")
    return "\n".join(lines)


def _with_parts(mean: float, parts: list[float], sign: str) -> str:
    return f"{mean:{sign}.1f}" + (f" ({' '.join(f'{v:{sign}.1f}' for v in parts)})" if len(parts) > 1 else "")


# -- the call ----------------------------------------------------------------------------------------------------------
def earlier(path: Path) -> tuple[dict[Cell, Run], float]:
    """Runs of calls before this one."""
    if not path.exists():
        return {}, 0.0
    facts = json.loads(path.read_text())
    return {Cell(**{k: r[k] for k in Cell.__dataclass_fields__}): r for r in facts["runs"]}, facts["seconds"]


def write(out: Path, runs: dict[Cell, Run], facts: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    found = sorted(runs.values(), key=lambda r: (list(SETS).index(r["set"]), r["labels"], r["method"], r["tried"], r["partition"], r["amount"], r["seed"]))
    for file, text in (("defaults.json", json.dumps(facts | {"runs": found}, indent=1) + "\n"), ("defaults.md", markdown(found, facts))):
        part = out / f".{file}.part"
        part.write_text(text)
        part.replace(out / file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="where fashion-mnist/ and cifar10/ lie")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=SETS)
    parser.add_argument("--methods", nargs="*", default=SHOWN, choices=[*METHODS, "all"])
    parser.add_argument("--labels", nargs="*", default=["clients"], choices=["clients", "server"])
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SHOWING))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after so many")
    parser.add_argument("--try", dest="tries", nargs="*", default=[], metavar="METHODS: KEYS")
    parser.add_argument("--only-tries", action="store_true", help="nothing but these, and labels alone")
    args = parser.parse_args()
    try:
        return carry_out_all(args, cells(args))
    except UserError as e:
        print(e, file=sys.stderr)
        return 2


def carry_out_all(args: argparse.Namespace, planned: list[Cell]) -> int:
    began = time.perf_counter()
    runs, before = earlier(args.out / "defaults.json")
    hashes = {c: settings(c, args.data_dir)[0] for c in planned if c in runs}
    todo = [c for c in planned if c not in runs or runs[c]["hash"] != hashes[c]]
    facts = machine("cpu") | {"jobs": args.jobs}
    pool = ProcessPoolExecutor(args.jobs, get_context("spawn"))
    try:
        waiting, coming = iter(todo), {}
        for cell in itertools.islice(waiting, 2 * args.jobs):
            coming[pool.submit(carry_out, cell, args.data_dir)] = cell
        while coming:
            future = next(as_completed(coming))
            cell = coming.pop(future)
            runs[cell] = future.result()
            facts |= {"seconds": round(before + time.perf_counter() - began), "cpu_seconds": round(sum(r["cpu_seconds"] for r in runs.values()))}
            write(args.out, runs, facts)
            print(f"[{time.perf_counter() - began:5.0f} s] {len(runs)}, {len(todo)} to do: {cell}: {100 * runs[cell]['accuracy']:.1f} %", flush=True)
            following = next(waiting, None) if time.perf_counter() - began < 60 * args.minutes else None
            if following is not None:
                coming[pool.submit(carry_out, following, args.data_dir)] = following
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on, the table so far is {args.out / 'defaults.md'}", file=sys.stderr)
        return 130
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
