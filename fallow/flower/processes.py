"""Processes that Fallow starts for a federation, noted by id and start time, so that each is ended by its own id and no other ever is."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fallow import disk

BIN = Path(sys.executable).parent
LOG = "node.log"  # in a node's folder: what its SuperNode and its worker say
LONGEST = 10_000_000  # bytes of a log
KERNEL = ctypes.CDLL(None)
QUIET = {  # nothing looks outside: no usage events, no look for newer versions, no packages fetched
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPERGRID_API_URL": "http://127.0.0.1:9",
    "FLWR_SUPERGRID_ADDRESS": "127.0.0.1:9",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}


def environment(home: Path) -> dict[str, str]:
    """Flower's settings lie in `home`, not in the user's."""
    path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"  # where Flower looks for its own helpers
    return os.environ | QUIET | {"FLWR_HOME": str(home), "NO_PROXY": "127.0.0.1,localhost", "PATH": path}


def with_parent() -> None:
    """In a child, before its program begins: it is asked to end when its parent has ended, however that ended."""
    KERNEL.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def bounded(log: Path) -> None:
    """Puts what a long log says aside, over what was put aside before; who writes to it appends."""
    if log.exists() and log.stat().st_size > LONGEST:
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def started(pid: int) -> str | None:
    """When the kernel started a process, so that its id in another's hands is not taken for it; None where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] == "Z" else fields[19]


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                children.setdefault(int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.append(child)
            waiting.append(child)
    return found


def end(tops: Sequence[int], grace: float, reap: Callable[[], object]) -> None:
    """Asks processes to end, then all that they have started, then kills those who are left. `reap` waits for one's own children."""
    family = {pid: started(pid) for top in tops for pid in [top, *descendants(top)]}

    def left() -> list[int]:
        return [pid for pid, since in family.items() if since is not None and started(pid) == since]

    for sent, targets, patience in ((signal.SIGTERM, list(tops), grace), (signal.SIGTERM, list(family), 6.0), (signal.SIGKILL, list(family), 5.0)):
        for pid in targets:
            if pid in left():
                with suppress(ProcessLookupError):
                    os.kill(pid, sent)
        until = time.monotonic() + patience
        while left() and time.monotonic() < until:
            reap()
            time.sleep(0.1)
        if not left():
            return


def said_since(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


class Processes:
    """Those of one folder, by name; another process may end them."""

    def __init__(self, folder: Path, tell: Callable[[str], None] = lambda _: None):
        self.folder, self.file, self.tell = folder, folder / "pids.json", tell
        self._own: dict[str, subprocess.Popen[bytes]] = {}
        self._begun: dict[str, int] = {}  # where in its log what a process says begins

    def noted(self) -> dict[str, tuple[int, str]]:
        """Those that are alive."""
        try:
            found = {name: (int(pid), str(since)) for name, (pid, since) in json.loads(self.file.read_text()).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}
        return {name: (pid, since) for name, (pid, since) in found.items() if started(pid) == since}

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        """In a session of its own; what it prints goes to logs/NAME.log."""
        self.tell(" ".join(command))
        (self.folder / "logs").mkdir(exist_ok=True)
        bounded(self.log_file(name))
        with self.log_file(name).open("ab") as log:
            self._begun[name] = log.tell()
            made = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=dict(env), cwd=self.folder, start_new_session=True)
        self._own[name] = made
        self._note({**self.noted(), name: (made.pid, started(made.pid) or "")})

    def _note(self, rows: Mapping[str, tuple[int, str]]) -> None:
        disk.write(self.file, json.dumps({name: list(row) for name, row in rows.items()}))

    def log_file(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def log(self, name: str) -> str:
        path = self.log_file(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def said(self, name: str) -> str:
        """What a process has said since it was started here."""
        return said_since(self.log_file(name), self._begun.get(name, 0))

    def last_words(self, name: str) -> str:
        said = [line for line in self.log(name).splitlines() if line.strip()]
        return said[-1].strip()[:300] if said else "it said nothing"

    def alive(self, name: str) -> bool:
        return name in self.noted()

    def kill(self, name: str, with_children: bool = True) -> None:
        """At once, as a machine that fails."""
        pid, _ = self.noted()[name]
        for one in [pid, *(descendants(pid) if with_children else [])]:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        self._reap(name, 5.0)

    def stop(self, *names: str, grace: float = 12.0) -> None:
        """Asks them to end, with all that they started, side by side; who does not is killed."""
        noted = self.noted()
        ours = [name for name in names if name in noted]

        def reap() -> None:
            for name in ours:
                self._reap(name, 0.0)

        end([noted[name][0] for name in ours], grace, reap)
        self._note(self.noted())

    def _reap(self, name: str, patience: float) -> None:
        """One's own children stay in the table until they are waited for."""
        if name in self._own:
            with suppress(subprocess.TimeoutExpired):
                self._own[name].wait(patience or 0.001)
