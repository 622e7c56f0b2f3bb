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
    tensors = states + others
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    numbers = not any(isinstance(x, float) and math.isnan(x) for x in leaves)
    if not tensors or not numbers:
        return torch.full((), numbers, dtype=torch.bool, device=device)  # a copy of a host value would wait for the device
    found = torch.stack([e for t in tensors for e in _extremes(t, device)])
    found[: 2 * len(states)].mul_(0.0)  # infinite: NaN
    return (found == found).all()


def _extremes(tensor: Tensor, device: torch.device) -> list[Tensor]:
    """The least and the greatest entry; NaN if one is."""
    tensor = tensor.detach()
    least, greatest = torch.aminmax(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    if tensor.dtype == torch.float32 and tensor.device == device:
        return [least, greatest]
    return [least.float().to(device), greatest.float().to(device)]


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
