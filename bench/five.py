"""The five founding methods against the labels-only reference of their scenario: digits and Fashion-MNIST, on a CPU.

    python -m bench.five [--data-dir DIR] [--out results/bench] [--only semifl digits ...] [--seeds 0 1 2] [--go-on]

Settings, and the reason for every one that is not a method's default, are in `bench/five.yaml`. A reference is FedAvg
with every key it shares with the method (model, norm, rounds, steps, batch, optimiser, rates, views), so it makes as
many steps on the same labels; with labels at the server nobody but the server trains. `five.json` and `five.md` in
`--out` are written anew after each run, so an interrupt leaves the table so far; `--go-on` takes over what is there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml

import fallow
from bench.report import machine, table
from fallow.data import sources
from fallow.errors import UserError
from fallow.machine import cores
from fallow.methods.fedavg import FedAvg
from fallow.runs.settings import resolve
from fallow.trees import merge

SETTINGS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
METHODS, DATA = SETTINGS["methods"], SETTINGS["data"]
NOT_SHARED = {"method", "reading", "average", "labeller", "debias", "weights"}  # `weights`: FedAvg goes by labels, as many everywhere
TITLE = ["data", "method", "labels at", "accuracy", "labels only", "by seed", "strongest labels only", "labels used"]
Run = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run: a method, or its labels-only reference, on a data set with a seed."""

    data: str
    method: str
    reference: bool
    seed: int

    def __str__(self) -> str:
        return f"{self.data} {self.method}{', labels only' if self.reference else ''}, seed {self.seed}"

    def keys(self) -> dict[str, Any]:
        """What all runs share, then the federation of data set and scenario, then the method's own."""
        method, data = METHODS[self.method], DATA[self.data]
        parts = SETTINGS["all"], data["all"], data[method["labels"]], method["all"], method[self.data]
        keys = merge({"data": self.data, "method": self.method, "labels": method["labels"], "seed": self.seed}, *parts)
        return labels_only(keys) if self.reference else keys

    def digest(self) -> str:
        """Of all settings, so that `--go-on` never mixes two."""
        sizes = {k: DATA[self.data].get(k) for k in ("trained", "tested")}
        return hashlib.sha256(json.dumps(self.keys() | sizes, sort_keys=True).encode()).hexdigest()[:16]


def labels_only(keys: dict[str, Any]) -> dict[str, Any]:
    """FedAvg with everything it shares with the method of these keys, that method's defaults included."""
    complete = resolve({}, keys)[1].model_dump(mode="json")
    shared = {k: v for k, v in complete.items() if k in FedAvg.Options.model_fields and k not in NOT_SHARED}
    return shared | {"method": "fedavg"}


def cells(only: list[str], seeds: list[int]) -> Iterator[Cell]:
    """The longest runs first, so that no core idles at the end. `only` names data sets, methods or both."""
    methods = [m for m in METHODS if m in only] or list(METHODS)
    for data in [d for d in reversed(DATA) if d in only] or list(reversed(DATA)):
        for reference in (False, True):
            yield from (Cell(data, method, reference, seed) for method in methods for seed in seeds)


def source_of(data: str, data_dir: str | None) -> sources.Source:
    """The data set, cut to as many first images as the settings say."""
    source = sources.load(data, data_dir)
    n, m = DATA[data].get("trained"), DATA[data].get("tested")
    train = sources.ImageSet(source.train.images[:n], source.train.labels[:n])
    return replace(source, train=train, test=sources.ImageSet(source.test.images[:m], source.test.labels[:m]))


def carry_out(cell: Cell, data_dir: str | None) -> Run:
    """A run on one thread, in a folder that is thrown away; what is worth keeping of it."""
    started, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as out:
        keys = cell.keys() | {"data": source_of(cell.data, data_dir), "slots": 1, "device": "cpu", "checkpoint_every": 10**6}
        result = fallow.run(out=out, **keys)
        rows, fingerprint = result.metrics, result.summary["fingerprint"]
    return asdict(cell) | {
        "accuracy": rows[-1]["accuracy"],
        "curve": {r["round"]: r["accuracy"] for r in rows if r["accuracy"] is not None},
        "label_ratio": rows[-1]["label_ratio"],
        "label_accuracy": rows[-1]["label_accuracy"],
        "fingerprint": fingerprint,
        "digest": cell.digest(),
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


# -- the table ---------------------------------------------------------------------------------------------------------
def found(runs: list[Run], data: str, method: str, reference: bool) -> dict[int, Run]:
    """Runs by seed."""
    those = [r for r in runs if (r["data"], r["method"], r["reference"]) == (data, method, reference)]
    return {r["seed"]: r for r in sorted(those, key=lambda r: r["seed"])}


def percent(runs: dict[int, Run], seeds: list[int], key: str = "accuracy") -> list[float]:
    return [100 * (runs[s][key] or 0.0) for s in seeds]


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def strongest(runs: list[Run], data: str, labels: str, seeds: list[int]) -> str:
    """The best mean among the references of a data set and scenario, and whose reference it is."""
    rivals = {m: found(runs, data, m, True) for m in METHODS if METHODS[m]["labels"] == labels}
    means = {m: statistics.mean(percent(own, seeds)) for m, own in rivals.items() if set(seeds) <= set(own)}
    best = max(means, key=means.__getitem__)
    return f"{means[best]:.1f} ({METHODS[best]['name']}'s)"


def lines(runs: list[Run]) -> Iterator[list[str]]:
    """A line per data set and method, of the seeds for which both the method and its reference have run."""
    for data in DATA:
        for method, s in METHODS.items():
            ours, only = found(runs, data, method, False), found(runs, data, method, True)
            seeds = sorted(set(ours) & set(only))
            if not seeds:
                continue
            assert all(ours[i]["fingerprint"] == only[i]["fingerprint"] for i in seeds), "not the same federation"
            a, b = percent(ours, seeds), percent(only, seeds)
            ratio, right = (statistics.mean(percent(ours, seeds, k)) for k in ("label_ratio", "label_accuracy"))
            apart = " ".join(f"{x - y:+.1f}" for x, y in zip(a, b))
            used = f"{ratio:.0f} %, {right:.0f} % right"
            yield [data, s["name"], s["labels"], spread(a), spread(b), apart, strongest(runs, data, s["labels"], seeds), used]


def shown(keys: dict[str, Any]) -> str:
    """Keys as one would type them."""
    nested = {f"{k}.{n}": v for k, section in keys.items() if isinstance(section, dict) for n, v in section.items()}
    return "`" + " ".join(f"{k}={v}" for k, v in ({k: v for k, v in keys.items() if not isinstance(v, dict)} | nested).items()) + "`"


def markdown(runs: list[Run], facts: dict[str, Any]) -> str:
    """The table, and every setting with its reason."""
    text = [SETTINGS["about"].strip(), ""]
    text += ["| " + " | ".join(row) + " |" for row in (TITLE, ["---"] * len(TITLE), *lines(runs))]
    text += [
        "",
        f"{len(runs)} of {facts['planned']} runs, commit {facts['commit']}, torch {facts['torch']}: {facts['seconds'] / 60:.1f} minutes on "
        f"{facts['cores']} cores (load {facts['load']:.1f} before it began), {facts['cpu_seconds'] / 60:.1f} minutes of one core.",
        "", "## Settings", "", f"All: {shown(SETTINGS['all'])}. " + " ".join(SETTINGS["why"].split()), "",
    ]  # fmt: skip
    for data, d in DATA.items():
        scenarios = "; ".join(f"labels at {'the server' if w == 'server' else w}: {shown(d[w])}" for w in ("clients", "server"))
        text += [f"- **{data}**: {shown(d['all'])}; {scenarios}. " + " ".join(d["why"].split())]
    for s in METHODS.values():
        own = "".join(f"; {data}: {shown(s[data])}" for data in DATA if s[data])
        text += [f"- **{s['name']}**: {shown(s['all'])}{own}. " + " ".join(s["why"].split())]
    return "\n".join(text) + "\n"


def write(out: Path, runs: list[Run], facts: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "five.json").write_text(json.dumps(facts | {"runs": runs}, indent=1) + "\n")
    (out / "five.md").write_text(markdown(runs, facts))


def earlier(out: Path, planned: list[Cell]) -> tuple[list[Run], float]:
    """Runs of a call before this one that had the same settings, and the seconds it took."""
    if not (out / "five.json").exists():
        return [], 0.0
    facts, wanted = json.loads((out / "five.json").read_text()), {(str(c), c.digest()) for c in planned}
    same = [r for r in facts["runs"] if (str(Cell(r["data"], r["method"], r["reference"], r["seed"])), r["digest"]) in wanted]
    return same, facts["seconds"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="where fashion-mnist/ lies")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    parser.add_argument("--only", nargs="*", default=[], choices=[*DATA, *METHODS], help="data sets, methods or both")
    parser.add_argument("--seeds", nargs="*", type=int, default=SETTINGS["seeds"])
    parser.add_argument("--go-on", action="store_true", help="take over the runs that an interrupted call has finished")
    args = parser.parse_args()
    planned, started = list(cells(args.only, args.seeds)), time.perf_counter()
    facts = machine("cpu") | {"cores": cores(), "load": os.getloadavg()[0], "planned": len(planned)}
    runs, before = earlier(args.out, planned) if args.go_on else ([], 0.0)
    try:
        for data in {c.data for c in planned}:
            source_of(data, args.data_dir)  # fails here, with one sentence, rather than in the middle
    except UserError as e:
        print(e, file=sys.stderr)
        return 2
    done = {(r["data"], r["method"], r["reference"], r["seed"]) for r in runs}
    pool = ProcessPoolExecutor(cores(), get_context("spawn"))
    try:
        todo = {pool.submit(carry_out, c, args.data_dir): c for c in planned if (c.data, c.method, c.reference, c.seed) not in done}
        for future in as_completed(todo):
            runs.append(future.result())
            facts |= {"seconds": round(before + time.perf_counter() - started), "cpu_seconds": round(sum(r["cpu_seconds"] for r in runs))}
            write(args.out, runs, facts)
            print(f"[{facts['seconds']:5.0f} s] {len(runs)} of {len(planned)}: {todo[future]}: {100 * runs[-1]['accuracy']:.1f} %", flush=True)
    except KeyboardInterrupt:
        print(f"stopped; go on with --go-on, the table so far is {args.out / 'five.md'}", file=sys.stderr)
        return 130
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        print(table(TITLE, list(lines(runs))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
