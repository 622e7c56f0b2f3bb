"""Runs logged to TensorBoard, Weights & Biases and MLflow (the key `track`), beside the run and never in its way.

A thread hands on each round's row. A tracker that is resumed gets the rounds it has not had, and none twice: TensorBoard's
files and W&B's offline ones are written anew from metrics.jsonl, the others are asked what they have.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import ModuleType
from typing import Any, Protocol
from uuid import uuid4

from fallow import disk
from fallow.errors import UserError, first_line
from fallow.trees import flat

Row = dict[str, Any]


class Tracker(Protocol):
    """Something that is told of a run's rounds."""

    def begin(self, rows: Sequence[Row]) -> None:
        """Opens or goes on; `rows` are the rounds that are done."""

    def log(self, row: Row) -> None: ...

    def end(self, summary: Row | None) -> None:
        """Closes; no summary: the run was cut off."""


class Tracking:
    """A watcher of a run that passes on what it sees, on a thread of its own."""

    def __init__(self, path: Path, names: Sequence[str], about: Row):
        self.path = path
        self._trackers: dict[str, Tracker] = {name: KINDS[name](path, about) for name in names}
        self._queue: SimpleQueue[Row | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._summary: Row | None = None

    def __enter__(self) -> Tracking:
        return self

    def __call__(self, event: str, what: Any) -> None:
        if event == "start" and self._trackers:
            for name, tracker in self._trackers.items():
                self._begin(name, tracker, what.folder.rows())
            self._thread = Thread(target=self._work, name="fallow-tracking", daemon=True)
            self._thread.start()
        elif event == "round":
            self._queue.put(what)
        elif event == "end":
            self._summary = what

    def __exit__(self, *_: Any) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _begin(self, name: str, tracker: Tracker, rows: Sequence[Row]) -> None:
        try:
            tracker.begin(rows)
        except Exception as error:
            remedy = f"mend it, or take {name} out of `track` in {self.path}/config.yaml, then `fallow resume {self.path}`"
            raise UserError(f"{name} cannot be opened ({first_line(error)})", remedy) from error

    def _work(self) -> None:
        while (row := self._queue.get()) is not None:
            for name in list(self._trackers):
                self._try(name, lambda: self._trackers[name].log(row))
        for name in list(self._trackers):
            self._try(name, lambda: self._trackers[name].end(self._summary))

    def _try(self, name: str, call: Any) -> None:
        """A tracker that fails is left out from then on; the run goes on."""
        try:
            call()
        except Exception as error:
            del self._trackers[name]
            print(f"tracking by {name} has ended ({first_line(error)}); the run goes on", file=sys.stderr)


def check(names: Sequence[str]) -> None:
    """One sentence where a tracker's package is not there."""
    for name in names:
        try:
            _package(name)
        except ImportError:
            remedy = "install fallow[tracking], or leave it out of `track`"
            raise UserError(f"track={name} needs the package {name}, which is not installed", remedy) from None


def _package(name: str) -> ModuleType:
    found = importlib.import_module(name)
    if getattr(found, "__file__", None) is None:  # a folder that a tracker has left where one works is no package
        raise ImportError(name)
    return found


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """The numbers of a row by name, those of lists and sections as `name/part`; what lies deeper is left to metrics.jsonl.

    >>> dict(scalars({"round": 3, "loss": 0.5, "test_loss": None, "seconds": {"test": 1}, "class_accuracy": [0.5, 1.0]}))
    {'loss': 0.5, 'seconds/test': 1.0, 'class_accuracy/0': 0.5, 'class_accuracy/1': 1.0}
    """
    for name, value in row.items():
        parts = dict(enumerate(value)) if isinstance(value, list) else value
        found = {f"{name}/{k}": v for k, v in parts.items()} if isinstance(parts, dict) else {name: value}
        for key, number in found.items():
            if isinstance(number, int | float) and not isinstance(number, bool) and key != "round":
                yield key, float(number)


class TensorBoard:
    """Event files in RUN/tensorboard, written anew from metrics.jsonl when a run goes on."""

    def __init__(self, path: Path, about: Row):
        self.folder, self.about = path / "tensorboard", about

    def begin(self, rows: Sequence[Row]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for old in self.folder.glob("events.out.tfevents.*"):
            old.unlink()
        self.writer = SummaryWriter(str(self.folder), purge_step=1 if rows else None)  # type: ignore[no-untyped-call]
        lines = "\n".join(f"| {k} | {v} |" for k, v in flat(self.about).items())
        self.writer.add_text("settings", f"| key | value |\n|---|---|\n{lines}", 0)  # type: ignore[no-untyped-call]
        clock = time.time() - sum(r["seconds"]["round"] for r in rows)
        for row in rows:
            clock += row["seconds"]["round"]
            self._add(row, clock)
        self.writer.flush()  # type: ignore[no-untyped-call]

    def log(self, row: Row) -> None:
        self._add(row, time.time())
        self.writer.flush()  # type: ignore[no-untyped-call]

    def _add(self, row: Row, clock: float) -> None:
        for name, value in scalars(row):
            self.writer.add_scalar(name, value, row["round"], walltime=clock)  # type: ignore[no-untyped-call]

    def end(self, summary: Row | None) -> None:
        self.writer.close()  # type: ignore[no-untyped-call]


class WandB:
    """A run of the project `fallow` (or WANDB_PROJECT), its files in RUN/wandb; WANDB_MODE is heeded.

    Where W&B is reached it says which step comes next. Offline nobody does, and a kill takes what was not yet on disk: the
    earlier sessions' folders make way for one that has all rounds.
    """

    def __init__(self, path: Path, about: Row):
        self.path, self.about, self.note = path, about, Note(path, "wandb")

    def begin(self, rows: Sequence[Row]) -> None:
        wandb = _package("wandb")
        self.id = self.note.read().get("id") or uuid4().hex[:8]
        earlier = list(self.path.glob(f"wandb/offline-run-*-{self.id}"))
        self.run = wandb.init(
            project=None if "WANDB_PROJECT" in os.environ else "fallow", id=self.id, resume="allow", name=self.path.name,
            dir=str(self.path), config=self.about, settings=wandb.Settings(console="off", quiet=True),
        )  # fmt: skip
        self.note.write(id=self.id)
        self.last = self.run.step - 1
        for row in rows:
            self.log(row)
        for folder in earlier if self.run.offline else ():
            shutil.rmtree(folder, ignore_errors=True)

    def log(self, row: Row) -> None:
        if row["round"] > self.last:
            self.run.log(dict(scalars(row)), step=row["round"])
            self.last = row["round"]

    def end(self, summary: Row | None) -> None:
        for name in ("last", "best", "best_round", "status") if summary else ():
            self.run.summary[name] = summary[name]  # type: ignore[index]
        self.run.finish()


class MLflow:
    """A run of the experiment `fallow` (or MLFLOW_EXPERIMENT_NAME) where MLFLOW_TRACKING_URI points."""

    def __init__(self, path: Path, about: Row):
        self.path, self.about, self.note = path, about, Note(path, "mlflow")

    def begin(self, rows: Sequence[Row]) -> None:
        self.client = _package("mlflow").MlflowClient()
        known = self.note.read().get("id")
        self.id = known or self._new()
        self.note.write(id=self.id)
        if known:
            self.client.update_run(known, status="RUNNING")
        self.last = max((m.step for m in self.client.get_metric_history(self.id, "round")), default=0)
        for row in rows:
            self.log(row)

    def _new(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fallow")
        experiment = self.client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self.client.create_experiment(name)
        new = self.client.create_run(number, run_name=self.path.name).info.run_id
        for key, value in flat(self.about).items():
            self.client.log_param(new, key, str(value))
        return str(new)

    def log(self, row: Row) -> None:
        if row["round"] <= self.last:
            return
        entities, now = importlib.import_module("mlflow.entities"), int(1000 * time.time())
        found = {re.sub(r"[^\w\-. /]", "_", k): v for k, v in scalars(row) if math.isfinite(v)}
        metrics = [entities.Metric(k, v, now, row["round"]) for k, v in found.items()]
        self.client.log_batch(self.id, metrics=metrics)
        self.client.log_batch(self.id, metrics=[entities.Metric("round", row["round"], now, row["round"])])  # it is complete
        self.last = row["round"]

    def end(self, summary: Row | None) -> None:
        done = summary is not None and summary["status"] == "finished"
        self.client.set_terminated(self.id, "FINISHED" if done else "KILLED")


KINDS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


class Note:
    """What a tracker must know to go on, in the run's tracking.json."""

    def __init__(self, path: Path, name: str):
        self.file, self.name = path / "tracking.json", name

    def _all(self) -> Row:
        try:
            return dict(json.loads(disk.read(self.file)))
        except (UserError, ValueError, TypeError, RecursionError):
            return {}

    def read(self) -> Row:
        return dict(self._all().get(self.name, {}))

    def write(self, **known: Any) -> None:
        disk.write(self.file, json.dumps(self._all() | {self.name: known}))
