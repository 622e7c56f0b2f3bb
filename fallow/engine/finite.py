"""Whether numbers are still numbers: cheap questions to tensors, answered on their device without waiting for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fallow.methods.state import State


def sound(*trees: Any) -> Tensor:
    """A bool on the device: no weight or statistic of a State is NaN or infinite, and no other number is NaN.

    A method's own tensors and numbers may be infinite: "no limit", "never seen".
    """
    leaves = list(_leaves(trees))
    states = _once(t for thing in leaves if isinstance(thing, State) for t in thing.groups.values())
    others = _once(thing for thing in leaves if isinstance(thing, Tensor))
    numbers = not any(isinstance(x, float) and math.isnan(x) for x in leaves)
    verdicts = {device: _verdict(states, others, device) for device in {t.device for t in states + others}}
    here = verdicts.pop(torch.device("cpu"), None)
    if not numbers or (verdicts and here is not None and not here):  # nothing of the host's is sent: that would wait for all work before it
        return torch.full((), False)
    return torch.stack(list(verdicts.values())).all() if verdicts else torch.full((), True) if here is None else here


def _verdict(states: list[Tensor], others: list[Tensor], device: torch.device) -> Tensor:
    """On those that are on the device."""
    of_states, of_others = ([e for t in tensors if t.device == device for e in _extremes(t)] for tensors in (states, others))
    found = torch.stack(of_states + of_others)
    found[: len(of_states)].mul_(0.0)  # what is infinite becomes NaN
    return (found == found).all()


def _extremes(tensor: Tensor) -> list[Tensor]:
    """The least and the greatest entry; NaN if one is."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return [e.float() for e in torch.aminmax(real.detach())]


def _once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that have numbers which may be none, each of them once."""
    return list({id(t): t for t in tensors if (t.is_floating_point() or t.is_complex()) and t.numel() > 0}.values())


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
