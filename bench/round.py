"""Seconds per round, with the share of each phase, in three papers' settings on CIFAR-10-sized data.

    python -m bench.round [--only semifl fedloke feddb] [--rounds 8] [--views] [--tiny] [--out FILE.json]

Images are random (time, not accuracy, is measured); every sample passes the threshold. Client sizes do not divide by
the batch, as in real splits. `--views` runs each setting a second time with images as they are in place of weak and
strong views; what the clients save by it is what their views cost.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

import fallow
from bench import report
from fallow.data.sources import ImageSet, Source

SETTINGS: dict[str, dict[str, Any]] = {
    "semifl": dict(
        method="semifl", model="wrn-28-2", labels="server", label_count=4040, clients=100, active=10, epochs=5, batch=10,
        server_batch=250, server_epochs=5, lr=0.03, weight_decay=5e-4, clip=1.0, schedule="cosine", threshold=0.0,
        augment={"strong": "ra-semifl"},
    ),
    "fedloke": dict(
        method="fedloke", model="resnet9", labels="clients", label_ratio=0.05, clients=50, active=20,
        partition="dirichlet-equal:0.5", batch=32, lr=0.01, augment={"strong": "ra-torchvision"},
    ),
    "feddb": dict(
        method="feddb", model="wrn-28-2", labels="clients", label_count=4000, clients=100, active=10, epochs=5,
        labelled_as_unlabelled=True, lr=0.03, weight_decay=5e-4, clip=1.0, schedule="cosine", threshold=0.0,
        augment={"strong": "ra-semifl"}, partition="iid",
    ),
}  # fmt: skip


PLAIN = {"labelled": "plain", "weak": "plain", "strong": "plain"}


def random_source(train: int, test: int, size: int = 32) -> Source:
    generator = torch.Generator().manual_seed(0)

    def split(n: int) -> ImageSet:
        images = torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=generator)
        return ImageSet(images, torch.arange(n) % 10)

    return Source("cifar10", tuple("0123456789"), split(train), split(test), True)


def measure(name: str, rounds: int, tiny: bool, **extra: Any) -> dict[str, Any]:
    keys = SETTINGS[name] | {"rounds": rounds, "checkpoint_every": 10**6, "defaults": "paper"} | extra
    if tiny:
        keys |= {"model": "small-cnn", "norm": "bn", "clients": 10, "active": 2}
        if "label_count" in keys:
            keys["label_count"] = 100
    source = random_source(1000, 200) if tiny else random_source(50_000, 10_000)
    with tempfile.TemporaryDirectory() as out:
        rows = fallow.run(data=source, out=out, **keys).metrics
    settled = rows[len(rows) // 2 :]  # graphs are captured in the first rounds
    phases = {k: sum(r["seconds"].get(k, 0.0) for r in settled) / len(settled) for k in settled[-1]["seconds"]}
    return {"setting": name, "seconds": phases.pop("round"), "phases": phases, "first": rows[0]["seconds"]["round"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--views", action="store_true", help="also what the views cost, by a second run without them")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--set", nargs="*", default=[], help="further key=value")
    args = parser.parse_args()
    from fallow.trees import parse_pairs

    results = []
    for name in args.only:
        try:
            given = parse_pairs(args.set)
            results.append(measure(name, args.rounds, args.tiny, **given))
            if args.views:
                without = measure(name, args.rounds, args.tiny, **given | {"augment": PLAIN})
                results[-1]["clients_without_views"] = without["phases"]["clients"]
        except Exception as e:  # a bench goes on with the next setting
            import traceback

            traceback.print_exc()
            print(f"{name}: {type(e).__name__}: {e}", flush=True)
            continue
        r = results[-1]
        shares = "  ".join(f"{k} {v:.3f}" for k, v in r["phases"].items())
        print(f"{name:8s} {r['seconds']:.3f} s a round ({shares}); first round {r['first']:.1f} s", flush=True)
        if args.views:
            steps = r["clients_without_views"]
            print(f"{'':8s} views: {r['phases']['clients'] - steps:.3f} s beside {steps:.3f} s of steps at the clients", flush=True)
    report.write(args.out, results, bench="round", tiny=args.tiny)


if __name__ == "__main__":
    main()
