"""Whether numbers are still numbers: cheap questions to tensors, answered on their device without waiting for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fallow.methods.state import State


def sound(*trees: Any) -> Tensor:
    """A bool on the device: no weight or statistic of a State is NaN or infinite, and no other number is NaN.

    A method's own tensors and numbers may be infinite: "no limit", "never seen".
    """
    leaves = list(_leaves(trees))
    states = [t.detach() for thing in leaves if isinstance(thing, State) for t in thing.groups.values() if _counts(t)]
    others = [thing.detach() for thing in leaves if isinstance(thing, Tensor) and _counts(thing)]
    on_host = not any(isinstance(x, float) and math.isnan(x) for x in leaves)
    verdicts = []  # of devices. Nothing of the host's is sent there: that would wait for all the work before it
    for device in {t.device for t in states + others}:
        of_states, of_others = (_extremes(tensors, device) for tensors in (states, others))
        verdict = torch.isfinite(of_states).all() & ~torch.isnan(of_others).any()
        if device.type == "cpu":
            on_host = on_host and bool(verdict)
        else:
            verdicts.append(verdict)
    return torch.stack(verdicts).all() if on_host and verdicts else torch.tensor(on_host)


def _extremes(tensors: list[Tensor], device: torch.device) -> Tensor:
    """The least and the greatest entry of each that is on the device; NaN if one is."""
    reals = (torch.view_as_real(t) if t.is_complex() else t for t in tensors if t.device == device)
    found = [e.float() for t in reals for e in torch.aminmax(t)]
    return torch.stack(found) if found else torch.zeros(0, device=device)


def _counts(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 0


def _leaves(tree: Any) -> Iterator[State | Tensor | float]:
    if isinstance(tree, State | Tensor | float):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)


def defined(tree: Any) -> Any:
    """Metrics whose numbers are numbers: what is NaN or infinite is None."""
    if isinstance(tree, dict):
        return {k: defined(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [defined(v) for v in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def too_large(error: BaseException) -> bool:
    """Whether Python, or torch, could not put a number into the type it computes with."""
    return isinstance(error, OverflowError) or (isinstance(error, RuntimeError) and "without overflow" in str(error))
