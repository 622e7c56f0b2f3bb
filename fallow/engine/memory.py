"""A device whose memory is full: how to know, and what to say."""

from __future__ import annotations

from contextlib import suppress

import torch

from fallow.errors import UserError

OURS = 2**30  # what CUDA takes for a process beside the tensors, at most


def out_of_memory(error: BaseException | None) -> bool:
    """Torch has a type for its allocator's complaint; the driver's own, of graphs and handles, is known by its words.

    Ending a capture that it has spoilt raises another error in its place.
    """
    if error is None:
        return False
    said = str(error).lower()
    here = isinstance(error, torch.OutOfMemoryError) or "out of memory" in said or "alloc_failed" in said
    return here or out_of_memory(error.__context__)


def too_little(where: str = "", remedy: str = "take smaller batches or a smaller model; the rounds before are kept") -> UserError:
    """The out-of-memory error; mentions other processes that hold memory."""
    held = held_by_others()
    if held:
        where += f", and other processes hold {held:.0f} GiB of it"
        remedy = f"wait for them, choose another device, or {remedy}"
    return UserError(f"the device is out of memory{where}", remedy)


def held_by_others() -> float:
    """GiB of the CUDA device's memory that are not ours, where that is a tenth of it or more."""
    with suppress(RuntimeError):  # the device may answer nothing any more
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            others = total - free - torch.cuda.memory_reserved() - OURS
            return others / 2**30 if others > total / 10 else 0.0
    return 0.0
