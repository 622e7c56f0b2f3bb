"""A node's worker: the process that keeps torch, the client's data and its nets from one message to the next.

Its starter talks to it over a pair of sockets that nobody else has. Killed at any moment it is started anew and given the same
order once more, which harms nothing (records.py). Another run, or other sources on the disk, get a fresh one: runs share nothing.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fallow.errors import UserError
from fallow.flower.parcel import Parcel, hand_over, take
from fallow.flower.processes import LOG, with_parent

TRIES = 2  # of an order whose worker ends in the middle


class Worker:
    """Started at once; `over` says that the node is to end, and no answer is waited for any more."""

    def __init__(self, folder: Path, over: Callable[[], bool] = lambda: False):
        self.folder, self.over = folder, over
        self._start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> None:
        mine, its = socket.socketpair()
        command = [sys.executable, "-m", "fallow.flower.worker", str(self.folder), str(its.fileno())]
        with its, (self.folder / LOG).open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[its.fileno()], start_new_session=True, preexec_fn=with_parent
            )
        self._line = Connection(mine.detach())
        self._run: str | None = None  # which it has worked for
        self._sources = _sources(self.folder)

    def end(self) -> None:
        self._line.close()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def check(self) -> None:
        """A UserError where the node's data cannot be read."""
        told = self._asked(None, math.inf)
        if told is None and not self.over():
            raise UserError("the node's worker ended as it began", f"look into {self.folder / LOG}")
        if told is not None and (why := json.loads(told.head)):
            raise UserError(*why)

    def answer(self, order: Parcel, until: float = math.inf) -> Parcel | None:
        """None: it ended in the middle, twice, or had not done it at the time `until` (time.time), and is no longer waited for."""
        run = _run_of(order)
        if self._run not in (None, run) or self._sources != _sources(self.folder):
            self.end()
        return self._asked(order, until, run)

    def _asked(self, order: Parcel | None, until: float, run: str | None = None) -> Parcel | None:
        for _ in range(TRIES):
            if self._process.poll() is not None:
                self.end()
                self._start()
            self._run = run
            try:
                hand_over(self._line, order)
                while not self._line.poll(0.2):
                    if self.over() or time.time() > until:
                        self.end()
                        return None
                return take(self._line)
            except (EOFError, OSError):
                self.end()
        return None


def _run_of(order: Parcel) -> str | None:
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(order.about)["run"])
    return None


def _sources(folder: Path) -> list[Any]:
    """What a process that is running does not see change."""
    torch = importlib.util.find_spec("torch")
    found: list[Any] = []
    for file in (folder / "node.yaml", Path(str(torch and torch.origin)), *sorted(Path(__file__).parents[1].rglob("*.py"))):
        with suppress(OSError):
            stat = file.stat()
            found.append((file, stat.st_mtime_ns, stat.st_size))
    return found


# -- in the worker's own process ---------------------------------------------------------------------------------------
def serve(folder: Path, line: Connection) -> None:
    """Answers orders until the one who gives them is gone; no order asks whether the node's data can be read."""
    from fallow.flower.node import Node

    node: Node | None = None
    while True:
        try:
            order = take(line)
        except EOFError:
            return
        if order is None:
            hand_over(line, Parcel(json.dumps(_unfit(folder)), {}))
        else:
            node = node or Node(folder)
            hand_over(line, node.answer(order))


def _unfit(folder: Path) -> list[str] | None:
    from fallow.flower import share
    from fallow.flower.node import Node

    try:
        Node(folder)
        share.read(folder / "node.yaml")
    except UserError as e:
        return [e.cause, e.remedy]
    return None


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Connection(int(sys.argv[2])))
