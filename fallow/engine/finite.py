"""Whether numbers are still numbers: cheap questions to tensors, answered on their device without waiting for it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fallow.methods.state import State

Once = dict[int, Tensor]  # by identity


def sound(*trees: Any) -> Tensor:
    """A bool on the device: no weight or statistic of a State is NaN or infinite, and no other number is NaN.

    A method's own tensors and numbers may be infinite: "no limit", "never seen".
    """
    states: Once = {}
    others: Once = {}
    numbers = _collect(trees, states, others)
    verdicts = {device: _verdict(states, others, device) for device in {t.device for both in (states, others) for t in both.values()}}
    here = verdicts.pop(torch.device("cpu"), None)
    if not numbers or (verdicts and here is not None and not here):  # nothing of the host's is sent: that would wait for all work before it
        return torch.full((), False)
    return torch.stack(list(verdicts.values())).all() if verdicts else torch.full((), True) if here is None else here


def _collect(tree: Any, states: Once, others: Once) -> bool:
    """Finds the tensors of a tree that have numbers which may be none; whether its plain numbers are numbers."""
    if isinstance(tree, State):
        states |= {id(t): t for t in tree.groups.values() if _can_be_none(t)}
    elif isinstance(tree, Tensor):
        others |= {id(tree): tree} if _can_be_none(tree) else {}
    elif isinstance(tree, float):
        return not math.isnan(tree)
    elif isinstance(tree, dict | list | tuple):
        return all([_collect(value, states, others) for value in (tree.values() if isinstance(tree, dict) else tree)])
    return True


def _can_be_none(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 0


def _verdict(states: Once, others: Once, device: torch.device) -> Tensor:
    """On those that are on the device."""
    of_states, of_others = ([e for t in tensors.values() if t.device == device for e in _extremes(t)] for tensors in (states, others))
    found = torch.stack(of_states + of_others)
    weights = found[: len(of_states)] if of_others else found
    weights.sub_(weights)  # what is infinite becomes NaN
    return (found == found).all()


def _extremes(tensor: Tensor) -> list[Tensor]:
    """The least and the greatest entry; NaN if one is."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return [e.float() for e in torch.aminmax(real.detach())]


def defined(tree: Any) -> Any:
    """Metrics whose numbers are numbers: what is NaN or infinite is None, which JSON has a word for."""
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else None
    if isinstance(tree, dict):
        return {k: defined(v) for k, v in tree.items()}
    return [v if type(v) is int else defined(v) for v in tree] if isinstance(tree, list | tuple) else tree


def too_large(error: BaseException) -> bool:
    """Whether Python, or torch, could not put a number into the type it computes with."""
    return isinstance(error, OverflowError) or (isinstance(error, RuntimeError) and "without overflow" in str(error))
