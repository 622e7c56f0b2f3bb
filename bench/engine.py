"""Client-steps per second: eager one by one, one graph, slots, and the bound, as ratios in one run.

    python -m bench.engine [--only wrn:10x10 ...] [--tiny] [--out FILE.json]

FedAvg's supervised step in Fallow's own slots: SGD 0.9 Nesterov, bf16 on CUDA. The bound is one model and one batch as
large as all the clients' together, which no way of running separate clients can beat by much. Eager steps are made of
torch's own kernels (`fused=false`), which are launched faster one by one than ours. On CPU there are no graphs; "slots"
are then clients on threads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.round import random_source
from fallow import runs
from fallow.engine.eager import Eager
from fallow.engine.feed import Step
from fallow.engine.party import Job, run_step, work
from fallow.engine.replay import CAPTURE_AT
from fallow.engine.simulation import Simulation
from fallow.engine.slot import Slot
from fallow.engine.slots import CapturedSlot
from fallow.machine import spread

CASES = {
    "wrn:10x10": ("wrn-28-2", 10, 10),
    "wrn:10x50": ("wrn-28-2", 10, 50),
    "wrn:10x500": ("wrn-28-2", 10, 500),
    "resnet9:10x10": ("resnet9", 10, 10),
    "resnet9:20x32": ("resnet9", 20, 32),
}


def simulation_of(model: str, clients: int, batch: int, device: str, fused: bool = True) -> Simulation:
    """Each client has exactly one batch of images."""
    keys = dict(
        method="fedavg", labels="all", clients=clients, batch=batch, epochs=1, model=model, device=device, lr=0.03,
        augment={"labelled": "plain"}, fused=fused, defaults="paper",
    )  # fmt: skip
    method, options, source, federation = runs.prepare(None, keys, random_source(clients * batch, 10))
    return Simulation(options, method(options, 10), source, federation)


def first_step(simulation: Simulation, slot: Slot, client: int) -> Step:
    """Loads a client into a slot; its first step."""
    return next(s for s in work(simulation.site(client), slot, Job(client, 0, {"model": simulation.kit.initial()})) if isinstance(s, Step))


def seconds(function: Callable[[], Any], repeats: int, cuda: bool) -> float:
    """Best of three means."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        if cuda:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def measure(model: str, clients: int, batch: int, device: str, repeats: int) -> dict[str, float | None]:
    """Seconds for one step of every client, by way."""
    many = simulation_of(model, clients, batch, device)
    bound = simulation_of(model, 1, clients * batch, device)
    if many.kit.device.type == "cuda":
        return on_cuda(many, bound, simulation_of(model, clients, batch, device, fused=False), repeats)
    threads = Eager(many).workers
    pairs = [(slot := Slot(many.kit), first_step(many, slot, c)) for c in range(clients)]
    whole = Slot(bound.kit)
    one = first_step(bound, whole, 0)
    run_step(*pairs[0])

    def side_by_side(workers: int) -> None:
        spread(lambda pair: run_step(*pair), pairs, workers)

    return {
        "eager": seconds(lambda: side_by_side(1), repeats, False),
        "one graph": None,
        "slots": seconds(lambda: side_by_side(threads), repeats, False),
        "bound": seconds(lambda: run_step(whole, one), repeats, False),
    }


def on_cuda(many: Simulation, bound: Simulation, torchs: Simulation, repeats: int) -> dict[str, float | None]:
    clients = many.kit.options.clients
    plain = [(slot := Slot(torchs.kit), first_step(torchs, slot, c)) for c in range(clients)]
    slots = [CapturedSlot(many.kit, torch.cuda.Stream()) for _ in range(clients)]
    steps = [first_step(many, s.slot, c) for c, s in enumerate(slots)]
    whole = CapturedSlot(bound.kit, torch.cuda.Stream())
    one = first_step(bound, whole.slot, 0)
    torch.cuda.synchronize()

    def make(slot: CapturedSlot, step: Step) -> None:
        with torch.cuda.stream(slot.stream):
            slot.make(step)

    def side_by_side() -> None:
        for slot, step in zip(slots, steps):
            make(slot, step)

    def eagerly() -> None:
        for slot, step in plain:
            run_step(slot, step)

    def one_by_one() -> None:
        for step in steps:
            make(slots[0], step)

    eagerly()
    torch.cuda.synchronize()
    found: dict[str, float | None] = {"eager": seconds(eagerly, max(2, repeats // 5), True)}
    for _ in range(CAPTURE_AT + 1):
        side_by_side()
        make(whole, one)
    torch.cuda.synchronize()
    assert all(s.graphs for s in [*slots, whole]), "a step was not captured"
    found["one graph"] = seconds(one_by_one, repeats, True)
    found["slots"] = seconds(side_by_side, repeats, True)
    found["bound"] = seconds(lambda: make(whole, one), repeats, True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results, rows = [], []
    for name in args.only:
        model, clients, batch = CASES[name]
        if args.tiny:
            model, clients, batch = "small-cnn", min(clients, 4), min(batch, 8)
        found = measure(model, clients, batch, args.device, 2 if args.tiny else args.repeats)
        eager, bound = found["eager"], found["bound"]
        assert eager and bound
        results.append(
            {"case": name, "model": model, "clients": clients, "batch": batch, "seconds": found}
            | {"client_steps_per_second": {w: t and clients / t for w, t in found.items()}}
            | {"eager_over": {w: t and eager / t for w, t in found.items()}, "over_bound": {w: t and t / bound for w, t in found.items()}}
        )
        for way, t in found.items():
            if t is not None:
                rows.append((name, way, f"{1e3 * t:.2f}", f"{clients / t:.0f}", f"{eager / t:.1f}x", f"{t / bound:.2f}x"))
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()
    print(report.table(("case", "way", "ms per step of all", "client-steps/s", "faster than eager", "over the bound"), rows))
    report.write(args.out, results, bench="engine", tiny=args.tiny)


if __name__ == "__main__":
    main()
