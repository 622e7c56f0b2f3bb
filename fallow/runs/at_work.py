"""A run at work in its folder: rounds, commits, and what it came to."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from fallow import launched
from fallow.config import Config
from fallow.data.federate import Federation
from fallow.data.sources import Source
from fallow.engine.clients import Clients, Executor
from fallow.engine.debug import Debug
from fallow.engine.eager import Eager
from fallow.engine.evaluating import best_round, in_full
from fallow.engine.hooks import watched
from fallow.engine.keep import Keep
from fallow.engine.ranks import RankLost, Ranks
from fallow.engine.round import Federated
from fallow.engine.simulation import Simulation
from fallow.engine.slots import Slots
from fallow.errors import UserError
from fallow.methods import is_own
from fallow.methods.base import Method
from fallow.runs import origin as origins
from fallow.runs.folder import RunFolder
from fallow.runs.interrupts import Interrupts, Stopped
from fallow.runs.origin import Origin
from fallow.runs.preparing import Watcher
from fallow.runs.result import Result
from fallow.runs.settings import config_hash
from fallow.runs.warned import Health, facts

Seam = Callable[[Simulation, Executor, Keep], Clients]


def executor_for(simulation: Simulation, compared: dict[str, Any] | None = None) -> Executor:
    """Slots with captured steps on CUDA, threads on CPU; `capture=false` is the plain reference on either.

    Where torchrun started several processes, rank 0 shares the work with the others; they have what is `compared`.
    """
    kit, rank = simulation.kit, launched.rank()
    captured = kit.device.type == "cuda" and kit.options.capture
    own: Executor = (Debug if kit.debug else Slots if captured else Eager)(simulation)
    if rank or launched.count() == 1:
        return own
    federation = {name: torch.tensor(array) for name, array in simulation.federation.arrays().items()}
    compared = compared or origins.for_ranks(kit.options, simulation.source)
    begin = {"options": kit.options.model_dump(mode="json"), "federation": federation, "origin": compared}
    return Ranks(simulation, own, begin)


def simulation_of(options: Config, method: type[Method], source: Source, federation: Federation) -> Simulation:
    kind = method.algorithm(options)
    if (closely := options.backend == "debug") or is_own(options.method):
        kind = watched(kind, closely=closely)
    return Simulation(options, kind(options, len(source.classes)), source, federation)


class Run:
    """A run at work in its folder."""

    def __init__(
        self, folder: RunFolder, method: type[Method], options: Config, source: Source, federation: Federation, origin: Origin | None = None,
        away: Seam | None = None,
    ):  # fmt: skip
        """`away` makes the seam to clients who are elsewhere; without it they are simulated here."""
        self.folder, self.options, self.source, self.federation = folder, options, source, federation
        found = origins.located(options, Path(origin.started_in)) if origin else options
        self.simulation = simulation_of(found, method, source, federation)
        self.kit = self.simulation.kit
        self.layouts = self.kit.layouts()
        keep = Keep(folder.kept, options.keep_memory * 2**30, self.layouts, self.kit.device)
        executor = executor_for(self.simulation)
        self.federated = Federated(self.simulation, executor, keep, away(self.simulation, executor, keep) if away else None)
        self.done = 0
        self.health = Health(folder.path, facts(self.simulation), [])

    def restore(self) -> None:
        found = self.folder.restore(self.layouts, self.kit.device)
        if found is not None:
            origins.check_model(self.federated.server.entries.get("model"), found.entries.get("model"), self.folder.path)
            self.done, self.federated.server.entries = found.round, found.entries
            self.federated.validation.best = found.best
            self.federated.keep.restore(found.keep, found.records, self.folder.needed())

    def go(self, stop_after: int | None = None, watch: Watcher | None = None) -> Result:
        """Rounds until the end, or until `stop_after` (from 1); commits as it goes."""
        o, watch = self.options, watch or (lambda *_: None)
        stop = min(stop_after or o.rounds, o.rounds)
        self.health = Health(self.folder.path, self.health.facts, self.folder.rows())
        watch("start", self)
        committed, whole = self.done, True
        terminated = RankLost("another rank has ended, or the run was told to stop") if launched.count() > 1 else None
        with Interrupts(terminated) as interrupts:
            self.federated.finishing = interrupts.hold
            try:
                while self.done < stop:
                    started = time.perf_counter()
                    row = self.federated.round(self.done)
                    row["seconds"]["round"] = round(time.perf_counter() - started, 4)
                    whole = False  # until its row is written, the state is a round ahead of the metrics
                    self.folder.append(row)
                    self.done, whole = self.done + 1, True
                    if self.done % o.checkpoint_every == 0 or self.done == stop:
                        self.commit()
                        committed = self.done
                    watch("round", row)
                    for finding in self.health.take(row):
                        watch("warning", finding)
                    interrupts.release()  # a sentence that is cut in two would swallow those after it
            except BaseException as end:
                interrupts.hold()
                expected = isinstance(end, KeyboardInterrupt | Stopped | RankLost)
                with nullcontext() if expected else suppress(UserError, RuntimeError):  # the disk or memory may be what failed
                    if committed < self.done and whole and self.federated.whole:
                        self.commit()
                    self._conclude("interrupted" if expected else "failed")
                if isinstance(end, RankLost):
                    kept = f"the rounds up to {self.done} are kept, go on with `fallow resume {self.folder.path}`, with torchrun or without"
                    raise UserError(f"{end.cause} (in round {self.done + 1})", kept) from None
                raise
        summary = self._conclude("finished" if self.done == o.rounds else "stopped")
        watch("end", summary)
        return Result(self.folder.path)

    def commit(self) -> None:
        keep = self.federated.keep
        index = keep.commit()
        best = self.federated.validation.best
        self.folder.commit(self.done, self.federated.server.entries, index, self.layouts, keep.digests(), best)
        keep.clean(*self.folder.needed())

    def _conclude(self, status: str) -> dict[str, Any]:
        rows, o = self.folder.rows(), self.options
        scores = [(r["accuracy"], r["round"]) for r in rows if r["accuracy"] is not None]
        best = max(scores, key=lambda s: (s[0], -s[1]), default=(None, None))
        seconds = sum(r["seconds"]["round"] for r in rows)
        tail = [s for s, _ in scores[-10:]]
        validated = self.folder.write_best(self.federated.validation.best)
        summary = {
            "status": status,
            "last": scores[-1][0] if scores else None,
            "best": best[0],
            "best_round": best[1],
            "mean_last_10": sum(tail) / len(tail) if tail else None,
            "scores": in_full(self.federated) if self.done and status in ("finished", "stopped") else None,
            **({"validation": best_round(validated, rows)} if validated else {}),
            "rounds": self.done,
            "seconds": round(seconds, 3),
            "seconds_per_round": round(seconds / max(1, len(rows)), 4),
            "seed": o.seed,
            "method": o.method,
            "data": o.data,
            "classes": self.kit.classes,
            "channels": self.source.channels,
            "size": self.source.size,
            "class_names": list(self.source.classes),
            "decoded": list(self.source.decoded or self.source.train.images.shape[1:]),
            "skipped": self.source.skipped,
            "fingerprint": self.federation.fingerprint,
            "config_hash": config_hash(o),
            "device": _device_name(self.kit.device),
            "versions": {"fallow": _version(), "torch": torch.__version__, "python": platform.python_version()},
            "commit": commit(),
            "warnings": self.health.end(rows),
        }
        if self.done:
            self.folder.write_model(self.federated.model())
        self.folder.write_summary(summary)
        self.folder.write_manifest()
        return summary


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _version() -> str:
    from fallow import __version__

    return __version__


def commit() -> str | None:
    """The code's commit; a copy without its repository is told by FALLOW_COMMIT."""
    root, told = Path(__file__).resolve().parents[2], os.environ.get("FALLOW_COMMIT")
    if told or not (root / ".git").exists():
        return told
    try:
        return subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except OSError:
        return None
