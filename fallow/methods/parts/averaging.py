"""Means of updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fallow.methods.state import State


def mean(items: Sequence[Any], name: str = "model", weights: Sequence[float] | Tensor | None = None) -> Any:
    """Weighted mean of updates' entries `name`, of States, or of tensors.

    Multiplies, then adds, in float64, one after the other in the given order, and rounds once. Counters: maximum.
    """
    values: list[Any] = [item if isinstance(item, State | Tensor) else item[name] for item in items]
    if weights is None:
        weights = [1.0 if isinstance(item, State | Tensor) else item.weight for item in items]
    given = torch.as_tensor(weights, dtype=torch.float64)
    shares = (given / given.sum()).tolist()
    first = values[0]
    if isinstance(first, Tensor):
        return _mean(values, shares)
    groups = {}
    for group in first.groups:
        tensors = [v.groups[group] for v in values]
        groups[group] = torch.stack(tensors).amax(0) if group == "counters" else _mean(tensors, shares)
    return State(first.layout, groups)


def _mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    wide = torch.empty_like(total)  # one for all: new memory costs more than the sums
    for tensor, share in zip(tensors, shares):
        total += wide.copy_(tensor).mul_(share)
    return total.to(tensors[0].dtype)
