"""Processes that make runs one after another, so that what a run does to its process costs no other run.

A worker imports torch once. It ends with its parent, and after a run on a GPU, whose memory it would keep.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fallow import disk
from fallow.errors import UserError
from fallow.runs.jobs import Job
from fallow.runs.room import memory_of

CHILD = "from fallow.runs.workers import serve; serve()"
PATIENCE = 60.0  # seconds that a run has for its last checkpoint
POLL = 0.1  # seconds between two looks at the processes
INTERRUPTED = 130


@dataclass(frozen=True)
class Ended:
    """How a run ended: an exit code, and the last word if it is not 0."""

    code: int
    said: str = ""


@dataclass
class Tail:
    """What is appended to a run's metrics, read as it comes."""

    path: Path
    rounds: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    _at: int = 0

    def read(self) -> int:
        """Rounds so far; a file that was cut is read anew."""
        with suppress(OSError):
            if self.path.stat().st_size < self._at:
                self.rounds, self._at = 0, 0
            with open(self.path, "rb") as file:
                file.seek(self._at)
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                lines = whole.splitlines()
                self._at += len(whole) + 1
                self.rounds += len(lines)
                with suppress(ValueError):
                    self.last = json.loads(lines[-1])
        return self.rounds


class Hands(Protocol):
    """Who makes runs."""

    pause: float  # seconds between two looks at how they go

    def take(self, job: Job, begun: bool) -> Work: ...

    def rest(self) -> None: ...


@dataclass
class Work:
    """A run that is being made."""

    job: Job
    begun: bool
    before: int  # the round of the last checkpoint when it was taken up
    started: float = field(default_factory=time.monotonic)
    tail: Tail = field(init=False)
    _rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.tail = Tail(self.job.folder.metrics)
        self._rows = self.tail.read() if self.begun else 0

    @property
    def made(self) -> int:
        return max(0, self.tail.read() - self._rows)

    @property
    def peak(self) -> int | None:
        return None

    @property
    def held(self) -> int | None:
        return None

    def poll(self) -> Ended | None:
        raise NotImplementedError

    def interrupt(self) -> None:
        """Asks it to write a checkpoint and end."""

    def end(self, patience: float) -> None:
        """Waits for its end, and kills it after that."""


# -- in this process ---------------------------------------------------------------------------------------------------
@dataclass
class Done(Work):
    ended: Ended = field(default_factory=lambda: Ended(0))

    def poll(self) -> Ended:
        return self.ended


class Here:
    """Makes a run when it is taken, in this process."""

    pause = 0.0

    def take(self, job: Job, begun: bool) -> Work:
        work = Done(job, begun, job.folder.committed())
        try:
            make(job, begun)
        except UserError as e:
            work.ended = Ended(2, str(e))
        except Exception as e:  # a bug in one run must not cost the others
            work.ended = Ended(1, f"{type(e).__name__}: {e}")
        return work

    def rest(self) -> None:
        pass


def make(job: Job, begun: bool) -> None:
    from fallow import runs

    if begun:
        runs.resume(job.path, trust=bool(job.more.get("trust")))
    else:
        runs.run(job.recipe, out=job.path.parent, name=job.path.name, **job.more, **job.keys)


# -- in others ---------------------------------------------------------------------------------------------------------
class Worker:
    """A process that makes runs."""

    def __init__(self, log: Path) -> None:
        answers, theirs = os.pipe()
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(theirs), str(os.getpid())],
                stdin=subprocess.PIPE, stdout=file, stderr=file, pass_fds=[theirs], start_new_session=True, text=True,
            )  # fmt: skip
        os.close(theirs)
        os.set_blocking(answers, False)
        self.answers = os.fdopen(answers, "rb", buffering=0)
        self._heard = b""

    def ask(self, job: Job, begun: bool, log: Path) -> None:
        task = {"begun": begun, "path": str(job.path), "recipe": job.recipe, "keys": job.keys, "more": job.more, "expected": {}}
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has died, which is seen when it is asked how it goes
            self.process.stdin.write(json.dumps({"job": task, "log": str(log)}) + "\n")
            self.process.stdin.flush()

    def answer(self) -> Ended | None:
        self._heard += self.answers.read() or b""
        line, newline, self._heard = self._heard.partition(b"\n")
        if newline:
            return Ended(**json.loads(line))
        self._heard = line
        return None

    def close(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.answers.close()


@dataclass
class Apart(Work):
    """A run in a worker."""

    worker: Worker = field(kw_only=True)
    log: Path = field(kw_only=True)
    idle: list[Worker] = field(kw_only=True)  # where the worker waits for its next run

    @property
    def peak(self) -> int | None:
        found = memory_of(self.worker.process.pid)
        return found and found[1]

    @property
    def held(self) -> int | None:
        found = memory_of(self.worker.process.pid)
        return found and found[0]

    def poll(self) -> Ended | None:
        code = self.worker.process.poll()  # before the answer, which may come just before the end
        ended = self.worker.answer()
        if ended is None and code is None:
            return None
        if ended is None:
            ended = Ended(code or 1, last_line(self.log) or _signal(code or 1))
        if code is None:
            self.idle.append(self.worker)
        else:
            self.worker.close()
        self._forget()
        return ended

    def _forget(self) -> None:
        """A log in which nothing stands."""
        if self.log.exists() and not self.log.stat().st_size:
            self.log.unlink()

    def interrupt(self) -> None:
        self.worker.process.send_signal(signal.SIGINT)

    def end(self, patience: float) -> None:
        try:
            self.worker.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.worker.process.kill()
            self.worker.process.wait()
        self.worker.close()
        self._forget()


class Workers:
    """Makes runs in processes of their own."""

    pause = POLL

    def __init__(self, logs: Path):
        self.logs = logs
        self.idle: list[Worker] = []

    def take(self, job: Job, begun: bool) -> Work:
        with disk.errors_as_user_errors(self.logs):
            self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{job.name.replace('/', '--')}.log"
        while self.idle and self.idle[-1].process.poll() is not None:
            self.idle.pop().close()
        worker = self.idle.pop() if self.idle else Worker(log)
        work = Apart(job, begun, job.folder.committed(), worker=worker, log=log, idle=self.idle)
        worker.ask(job, begun, log)
        return work

    def rest(self) -> None:
        for worker in self.idle:
            worker.close()
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(5)
                continue
            worker.process.kill()
        self.idle.clear()
        with suppress(OSError):
            self.logs.rmdir()  # nobody had anything to say


def last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].removeprefix("error: ") if lines else ""


def _signal(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return "it was killed, as systems do where memory runs out" if code == -signal.SIGKILL else f"it was ended by signal {-code}"


# -- the worker's side -------------------------------------------------------------------------------------------------
def serve() -> None:
    """Makes the runs that come on standard input, a line each, until it is closed."""
    answers, parent = os.fdopen(int(sys.argv[1]), "w"), int(sys.argv[2])
    _end_with(parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where a shell put the parent into the background
    try:
        for line in sys.stdin:
            task = json.loads(line)
            ended = _make(Job(name="", **{k: v for k, v in task["job"].items() if k != "begun"}), task["job"]["begun"], Path(task["log"]))
            print(json.dumps({"code": ended.code, "said": ended.said}), file=answers, flush=True)
            if _on_gpu():
                break
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(INTERRUPTED)  # nothing is left to be done, and Python's own end takes time


def _end_with(parent: int) -> None:
    """Is interrupted when the parent dies, and so writes a checkpoint."""
    import ctypes

    getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)(1, signal.SIGINT)
    if os.getppid() != parent:
        os._exit(INTERRUPTED)


def _make(job: Job, begun: bool, log: Path) -> Ended:
    job.path = Path(job.path)
    with open(log, "ab", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        make(job, begun)
        return Ended(0)
    except UserError as e:
        return Ended(2, str(e))
    except Exception as e:
        traceback.print_exc()
        return Ended(1, f"{type(e).__name__}: {e} (the traceback is in {log})")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()


def _on_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()
