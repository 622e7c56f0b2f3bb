"""Each case ends with 0 or 2, without a traceback, in bounded time and memory, and never with another result and 0.

A case is drawn from its group, number and FALLOW_ATTACK_SEED, and so comes again: FALLOW_ATTACK_CASE=words-17 runs that one
alone. The long dose (`make test-slow`) has FALLOW_ATTACK cases, 5000 unless told.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attack.cases import GROUPS, Base, Case

SHORT = {"folders": 40, "recipes": 50, "data": 40, "words": 60}
SEED = os.environ.get("FALLOW_ATTACK_SEED", "0")
ONE = os.environ.get("FALLOW_ATTACK_CASE", "")
LONG = int(os.environ.get("FALLOW_ATTACK", "5000"))


class Worker:
    def __init__(self) -> None:
        here = Path(__file__).resolve().parents[1]
        paths = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        more = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "FALLOW_DATA": "/nonexistent/fallow-data"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "attack.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | more
        )

    def __call__(self, here: Path, words: list[str]) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({"cwd": str(here), "words": words}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.end()


def wrong(case: Case, told: dict[str, Any]) -> str | None:
    """What is wrong with how a case ended; None if it ended well."""
    if told["code"] is None:
        return f"ended by signal {told['signal']} after {told['seconds']:.1f} s of CPU"
    if "Traceback" in told["err"] + told["out"]:
        return "a traceback"
    if told["code"] not in (0, 2):
        failed = case.words[0] in ("table", "check") and told["code"] == 1  # some of its runs failed, or a problem was found
        return None if failed else f"exit code {told['code']}"
    if told["code"] == 2:
        *_, last = told["err"].splitlines() or [""]  # words on what was left out may stand before it
        return None if last.startswith("error: ") and told["err"].count("error: ") == 1 else "no sentence"
    return case.check()


def attack(group: str, numbers: range, base: Base, worker: Worker, place: Path) -> list[str]:
    found = []
    for number in numbers:
        name, here = f"{group}-{number}", place / f"{group}-{number}"
        if ONE and name != ONE:
            continue
        here.mkdir()
        case = GROUPS[group](base, here, random.Random(f"{SEED} {name}"))
        told = worker(here, case.words)
        if bad := wrong(case, told):
            lines = told["err"].strip().splitlines()[-4:]
            done = "\n  ".join([*case.told, f"fallow {' '.join(map(ascii, case.words))}"[:1500], *lines])
            found.append(f"{name} (seed {SEED}): {bad}\n  {done}")
            print(found[-1], flush=True)  # a long dose (-s) tells each as it is found
        if not ONE:
            shutil.rmtree(here, ignore_errors=True)
    return found


@pytest.mark.parametrize("group", GROUPS)
def test_a_short_dose(group: str, base: Base, worker: Worker, tmp_path: Path) -> None:
    found = attack(group, range(SHORT[group]), base, worker, tmp_path)
    assert not found, f"{len(found)} cases:\n" + "\n".join(found[:20])


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_a_long_dose(group: str, base: Base, worker: Worker, tmp_path: Path) -> None:
    found = attack(group, range(LONG // len(GROUPS)), base, worker, tmp_path)
    assert not found, f"{len(found)} cases:\n" + "\n".join(found[:40])
