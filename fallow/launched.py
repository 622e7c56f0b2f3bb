"""Whether torchrun started this process as one of several: what the environment says of it."""

from __future__ import annotations

import os
import sys

from fallow.errors import UserError

REMEDY = "start all of them with torchrun, or unset RANK and WORLD_SIZE for a run of one process"


class Misplaced(UserError):
    """This process does not know its place among others, or cannot reach them."""

    unspoken = True  # rank 0 may know its own


def count() -> int:
    """How many processes there are; 1 where torchrun did not start this one."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return 1
    found = _whole("WORLD_SIZE", 1)
    if found > 1 and not _met():
        _whole("MASTER_PORT", 1, 65535)
        if not os.environ.get("MASTER_ADDR"):
            raise Misplaced(f"RANK and WORLD_SIZE say that this is one of {found} processes, and MASTER_ADDR does not say where they meet", REMEDY)
    return found


def rank() -> int:
    """This process's place; 0 where torchrun did not start it."""
    return _whole("RANK", 0, count() - 1) if count() > 1 else 0


def of_this_machine() -> int:
    """How many of them share it."""
    return _whole("LOCAL_WORLD_SIZE", 1) if "LOCAL_WORLD_SIZE" in os.environ else 1


def is_mute() -> bool:
    """Under torchrun rank 0 speaks for all; who does not know his place speaks for himself."""
    try:
        return rank() > 0
    except Misplaced:
        return False


def meeting_place() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], _whole("MASTER_PORT", 1, 65535)


def _met() -> bool:
    """Whether whoever calls Fallow has brought the processes together himself."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _whole(name: str, least: int, most: int = 10**6) -> int:
    text = os.environ.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 8 and least <= int(text) <= most):
        raise Misplaced(f"the environment says {name}={text!r}, where torchrun would say a whole number from {least} to {most}", REMEDY)
    return int(text)
