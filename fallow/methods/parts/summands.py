"""Weights in two summands, sigma + psi (FedMatch): their first values, their sum, what of them is another number than before."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fallow.methods.interface import NetHandle
from fallow.methods.sparse import kept
from fallow.methods.state import State

Weights = Mapping[str, Tensor]
CUT, SHRINKS = 2.0, 0.87962566103423978  # where a normal distribution is cut, and the standard deviation that is left of it


def by_fan_in(sigma: State, rng: np.random.Generator) -> State:
    """First weights of variance 1 / fan-in from a truncated normal distribution; biases and norm layers' parameters stay."""
    out = sigma.clone()
    for p in out.tensors().values():
        if p.dim() > 1:
            drawn = rng.standard_normal(tuple(p.shape))
            while (outside := np.abs(drawn) > CUT).any():
                drawn[outside] = rng.standard_normal(int(outside.sum()))
            p.copy_(torch.from_numpy(drawn / (SHRINKS * math.sqrt(p[0].numel()))))
    return out


def decomposed(sigma: State, factor: float) -> State:
    """psi's first values: a share of sigma's; none of biases and norm layers' parameters."""
    psi = sigma.map(torch.zeros_like)
    for name, p in psi.tensors().items():
        if p.dim() > 1:
            p.copy_(sigma[name] * factor)
    return psi


def fixed(net: NetHandle) -> dict[str, Tensor]:
    """A net's weights, through which no gradient flows."""
    return {name: p.detach() for name, p in net.weights.items()}


def total(sigma: Weights, psi: Weights) -> dict[str, Tensor]:
    """theta = sigma + psi."""
    return {name: c + psi[name] for name, c in sigma.items()}


def differing(new: State, old: State, delta: float, zero: float) -> Tensor:
    """Which numbers of the parameters have changed by more than `delta`, small ones counting as 0."""
    return (kept(new.groups["parameters"], zero) - kept(old.groups["parameters"], zero)).abs() > delta


def numbers(state: State) -> int:
    """How many parameters there are."""
    return sum(e.numel for e in state.layout.entries if e.group == "parameters")
