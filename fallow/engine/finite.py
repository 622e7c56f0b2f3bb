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
    device = next((t.device for t in states + others if t.device.type != "cpu"), torch.device("cpu"))
    numbers = not any(isinstance(x, float) and math.isnan(x) for x in leaves)
    verdicts = [torch.full((), numbers, dtype=torch.bool, device=device)]  # a copy of a host value would wait for the device
    if states:
        verdicts.append(torch.isfinite(_extremes(states, device)).all())
    if others:
        verdicts.append(~torch.isnan(_extremes(others, device)).any())
    return torch.stack(verdicts).all()


def _extremes(tensors: list[Tensor], device: torch.device) -> Tensor:
    """The least and the greatest entry of each; NaN if one is."""
    reals = (torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in tensors)
    return torch.stack([e.float().to(device) for t in reals for e in torch.aminmax(t)])


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
