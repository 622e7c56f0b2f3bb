"""One FedAvg workload in Fallow, pfl-research and, on CPU, Flower's simulation: seconds per round in one run.

    python -m bench.peers [--peers-python PYTHON] [--only fallow pfl flower] [--rounds 8] [--tiny] [--out FILE.json]

CIFAR-10's shapes with random pixels, 1000 clients of 50 images, 50 of them a round, batch 10, one epoch, plain SGD, a
CNN with two convolutions and 1.6 million parameters; nothing is evaluated. Each framework is a process of its own and
is measured `--passes` times in turn. The peers may live in an environment of their own (`--peers-python`):

    python3 -m venv /tmp/peers && /tmp/peers/bin/pip install torch pfl 'flwr[simulation]'

A peer that cannot be imported is left out, with a word. pfl gets its images as float32, ready for the model, Flower's
clients likewise; Fallow makes them from uint8 as it always does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import report

LR, BATCH, HELD = 0.05, 10, 50


class CNN(nn.Module):
    """Two 5x5 convolutions and two linear layers: 1,630,794 parameters."""

    def __init__(self, classes: int = 10, channels: int = 3):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, 32, 5, padding=2), nn.Conv2d(32, 64, 5, padding=2)
        self.hidden, self.head = nn.Linear(64 * 8 * 8, 384), nn.Linear(384, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv1(x).relu(), 2)
        x = F.max_pool2d(self.conv2(x).relu(), 2)
        return self.head(self.hidden(x.flatten(1)).relu())


def images_of(client: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    return torch.randn(HELD, 3, 32, 32, generator=generator), torch.randint(0, 10, (HELD,), generator=generator)


# -- the three ---------------------------------------------------------------------------------------------------------
def in_fallow(clients: int, active: int, rounds: int, device: str) -> list[float]:
    import fallow
    from bench.round import random_source

    keys: dict[str, Any] = dict(
        method="fedavg", labels="all", partition="iid", clients=clients, active=active, epochs=1, batch=BATCH, lr=LR, momentum=0.0,
        nesterov=False, model="bench.peers:CNN", augment={"labelled": "plain"}, eval_every=rounds + 1, checkpoint_every=rounds + 1,
        rounds=rounds + 1, device=device, defaults="paper",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        rows = fallow.run(data=random_source(clients * HELD, 250), out=out, **keys).metrics
    return [r["seconds"]["round"] for r in rows[:-1]]  # the last round evaluates


def in_pfl(clients: int, active: int, rounds: int, device: str) -> list[float]:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Model(CNN):
        def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
            return F.cross_entropy(self(x), y.long())

        def metrics(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {}

    class Clock(TrainingProcessCallback):
        def __init__(self) -> None:
            self.times = [time.perf_counter()]

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())
            return False, Metrics()

    if device == "cpu":
        torch.cuda.is_available = lambda: False  # pfl takes a GPU wherever there is one
    held = {c: tuple(t.numpy() for t in images_of(c)) for c in range(clients)}
    data = FederatedDataset.from_slices(held, get_user_sampler("minimize_reuse", list(held)))
    net, clock = Model(), Clock()
    model = PyTorchModel(net, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(rounds, 10**9, active, 0),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=LR),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
    )
    return _between(clock.times)


def in_flower(clients: int, active: int, rounds: int, device: str) -> list[float]:
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(msg: Message, context: Context) -> Message:
        from bench.peers import BATCH, CNN, HELD, LR, images_of  # found anew in the worker process

        torch.set_num_threads(1)
        net = CNN()
        net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        x, y = images_of(int(context.node_config["partition-id"]))
        for batch in torch.randperm(HELD).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": HELD})}
        return Message(content=RecordDict(content), reply_to=msg)

    times: list[float] = []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_train=active / clients, fraction_evaluate=0.0, min_available_nodes=clients)
        strategy.start(grid, ArrayRecord(CNN().state_dict()), rounds, evaluate_fn=lambda *_: times.append(time.perf_counter()))

    cores = len(os.sched_getaffinity(0))
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": cores}}
    run_simulation(server, client, clients, backend_config=resources)  # type: ignore[arg-type]
    return _between(times)


def _between(times: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


WAYS = {"fallow": in_fallow, "pfl": in_pfl, "flower": in_flower}
MODULES = {"fallow": "fallow", "pfl": "pfl", "flower": "flwr"}


# -- side by side --------------------------------------------------------------------------------------------------------
def apart(name: str, args: argparse.Namespace) -> list[float] | None:
    """A framework's rounds in a process of its own; None if it is not there."""
    python = sys.executable if name == "fallow" else args.peers_python
    if subprocess.run([python, "-c", f"import {MODULES[name]}"], capture_output=True).returncode:
        print(f"{name} is left out: {python} cannot import {MODULES[name]}", flush=True)
        return None
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    command = [python, "-m", "bench.peers", "--one", name, "--rounds", str(args.rounds), "--device", args.device] + ["--tiny"] * args.tiny
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    if ended.returncode or not lines:
        print(f"{name} failed:\n{ended.stderr[-3000:]}", flush=True)
        return None
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(WAYS), choices=list(WAYS), metavar="NAME")
    parser.add_argument("--peers-python", default=sys.executable, help="the interpreter that has pfl and flwr")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--passes", type=int, default=2, help="how often each framework is run")
    parser.add_argument("--tiny", action="store_true", help="100 clients, 10 a round, to try the script")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=list(WAYS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    clients, active = (100, 10) if args.tiny else (1000, 50)
    if args.one:
        print(json.dumps(WAYS[args.one](clients, active, args.rounds, args.device)))
        return
    names = [n for n in args.only if n != "flower" or args.device == "cpu"]
    settled: dict[str, list[float]] = {}
    for _ in range(args.passes):
        for name in names:
            if times := apart(name, args):
                settled.setdefault(name, []).extend(times[len(times) // 2 :])  # imports, workers and graphs come first
    results: list[dict[str, Any]] = [{"framework": n, "seconds": statistics.median(t), "fastest": min(t), "slowest": max(t)} for n, t in settled.items()]
    own = next((r["seconds"] for r in results if r["framework"] == "fallow"), None)
    rows = []
    for r in results:
        ratio = f"{r['seconds'] / own:.2f}x" if own else "-"
        rows.append((r["framework"], f"{r['seconds']:.3f}", f"{r['fastest']:.3f}", f"{r['slowest']:.3f}", ratio))
    print(f"{clients} clients, {active} a round, on {args.device}")
    print(report.table(("framework", "s a round (median)", "fastest", "slowest", "of Fallow's time"), rows))
    report.write(args.out, results, bench="peers", tiny=args.tiny, clients=clients, active=active)


if __name__ == "__main__":
    main()
