"""A device whose memory is full: how to know, and what to say."""

from __future__ import annotations

import torch

from fallow.errors import UserError


def out_of_memory(error: BaseException | None) -> bool:
    """Torch has a type for its allocator's complaint; the driver's own, of graphs and handles, is known by its words.

    Ending a capture that it has spoilt raises another error in its place.
    """
    if error is None:
        return False
    said = str(error).lower()
    here = isinstance(error, torch.OutOfMemoryError) or "out of memory" in said or "alloc_failed" in said
    return here or out_of_memory(error.__context__)


def too_little(where: str = "") -> UserError:
    return UserError(f"the device is out of memory{where}", "take smaller batches or a smaller model; the rounds before are kept")
