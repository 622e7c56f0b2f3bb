"""Whether one more run fits beside those that go on: by the memory that they were seen to take."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

GPU_RUNS = 6  # at a time by default: small models leave most of a GPU idle
SPARE = 2**30  # bytes that stay free on the machine
MARGIN = 1.2  # what a run may take beyond the largest that was seen
SETTLE = 90.0  # seconds after which a run has taken what it takes, if it has not made two rounds before


class Going(Protocol):
    """A run that goes on."""

    started: float

    @property
    def made(self) -> int: ...  # rounds since it was started

    @property
    def peak(self) -> int | None: ...  # bytes that its process has taken at most

    @property
    def held(self) -> int | None: ...  # bytes that it holds now


def usual(on_cpu: bool = False) -> int:
    """How many runs at a time by default: a run on a CPU keeps about two cores busy by itself."""
    if not on_cpu and gpu_memory() is not None:
        return GPU_RUNS
    return max(1, (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) // 2)


@dataclass
class Room:
    """What fits: one run always; one more if the largest that was seen would fit into what is free."""

    on_cpu: bool = False  # though there is a GPU
    peak: int = 0  # bytes, of all runs so far
    settle: float = SETTLE

    def fits(self, going: Sequence[Going]) -> bool:
        if not going:
            return True
        gpu = None if self.on_cpu else gpu_memory()
        return self._fits_gpu(going, *gpu) if gpu else self._fits_machine(going)

    def _fits_gpu(self, going: Sequence[Going], free: float, used: float) -> bool:
        """The newest has shown what it takes, and one more of the mean size would leave some room."""
        newest = max(going, key=lambda run: run.started)
        if newest.made < 2 and time.monotonic() - newest.started < self.settle:
            return False
        return free >= MARGIN * used / len(going)

    def _fits_machine(self, going: Sequence[Going]) -> bool:
        self.peak = max([self.peak, *(run.peak or 0 for run in going if run.made)])
        if not self.peak:  # nothing is known yet: the first shows it
            newest = max(going, key=lambda run: run.started)
            return time.monotonic() - newest.started > self.settle and free_of_machine() * 2**30 >= SPARE
        grows = sum(max(0, self.peak - (run.held or 0)) for run in going if not run.made)
        return free_of_machine() * 2**30 - grows >= MARGIN * self.peak + SPARE


@dataclass
class Spare:
    """What fits as somebody says it: one more while so many GiB of the GPU, or without one of the machine, are free."""

    free_gib: float
    settle: float = field(default=SETTLE)

    def fits(self, going: Sequence[Going]) -> bool:
        if not going:
            return True
        newest, gpu = max(going, key=lambda run: run.started), free_of_gpu()
        if gpu is not None and newest.made < 2 and time.monotonic() - newest.started < self.settle:
            return False
        return (free_of_machine() if gpu is None else gpu) >= self.free_gib


def gpu_memory() -> tuple[float, float] | None:
    """GiB of the first visible GPU that nobody holds, and that somebody does; None where there is none."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "--query-gpu=memory.free,memory.used", "--format=csv,noheader,nounits", "-i", first]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.replace(",", " ").split()
        free, used = (float(word) / 1024 for word in found[:2])
        return free, used
    return None


def free_of_gpu() -> float | None:
    """GiB of the first visible GPU that nobody holds; None where there is none."""
    found = gpu_memory()
    return None if found is None else found[0]


def free_of_machine() -> float:
    """GiB of memory that are not in use."""
    from fallow.limits import available

    return available() / 2**30


def memory_of(process: int) -> tuple[int, int] | None:
    """Bytes that a process holds, and has held at most; None where the system does not say."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        held, peak = (next(int(line.split()[1]) * 1024 for line in lines if line.startswith(word)) for word in ("VmRSS", "VmHWM"))
        return held, peak
    return None
