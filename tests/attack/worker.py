"""Runs commands one by one, each in a fork of a process that has everything imported, under limits of time and memory.

    python -m attack.worker < lines of JSON {"cwd": ..., "words": [...]}

answers each line with one: {"code": exit code or null, "signal": ..., "out": ..., "err": ..., "seconds": of CPU}.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from typing import IO, Any

SECONDS, HANGS = 10, 60  # of CPU that a command may take; of the clock until it counts as hanging
MEMORY = 3 * 2**30  # beyond what the imports take


def child(cwd: str, words: list[str], out: int, err: int, memory: int) -> None:
    from fallow import cli

    os.chdir(cwd)
    os.dup2(out, 1)
    os.dup2(err, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    sys.argv = ["fallow", *words]
    code: Any = 1
    try:
        cli.main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


def ended(pid: int) -> tuple[int, Any]:
    """The status and what was used; what hangs is killed. Time in which the whole machine stood still does not count."""
    waited, before = 0.0, time.monotonic()
    while waited < HANGS:
        found, status, used = os.wait4(pid, os.WNOHANG)
        if found:
            return status, used
        time.sleep(0.005)
        now = time.monotonic()
        waited, before = waited + min(now - before, 0.1), now
    os.kill(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    return status, used


def run(cwd: str, words: list[str], memory: int) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if not pid:
            try:
                child(cwd, words, out.fileno(), err.fileno(), memory)
            finally:
                os._exit(3)
        status, used = ended(pid)

        def text(file: IO[bytes]) -> str:
            file.seek(0)
            return file.read(100_000).decode("utf-8", "backslashreplace")

        return {
            "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            "out": text(out), "err": text(err), "seconds": used.ru_utime + used.ru_stime,
        }  # fmt: skip


def main() -> None:
    import conftest  # noqa: F401  (few-digits)

    from fallow.methods import REGISTERED, find

    for name in REGISTERED:
        find(name)
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
    memory = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        case = json.loads(line)
        answers.write(json.dumps(run(case["cwd"], case["words"], memory)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
