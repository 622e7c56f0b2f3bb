"""Gradient diversity in 16 definitions: how far the parties of a round pull apart (FedRGD).

Delta = sum_k ||v_k||^a / ||sum_k v_k||^a, with the L2 or the L1 norm, squared (a = 2) or not (a = 1); of gradients or
of updates; over the users, or the users and the server. Pure functions of vectors; wherever they come from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fallow.methods.state import State

Scale = Literal["paper", "times-n"]

FORMS: dict[str, tuple[int, int]] = {"l2-squared": (2, 2), "l2": (2, 1), "l1-squared": (1, 2), "l1": (1, 1)}
"""(norm, exponent) of Eqs. 1, 9, 10, 11."""


def diversity(vectors: Sequence[Tensor], form: str = "l2-squared", scale: Scale = "paper") -> float:
    """Delta of some vectors; nan if all are zero, inf if only their sum is.

    `times-n` is mean ||v||^a / ||mean v||^a, which the released code plots: Delta where a = 1, n Delta where a = 2.

    >>> diversity([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])])
    1.0
    """
    p, a = FORMS[form]
    norm = lambda v: torch.linalg.vector_norm(v, p) ** a
    over = sum(norm(v.detach().double()) for v in vectors)
    under = norm(sum(v.detach().double() for v in vectors))  # one after the other: many models need not fit at once
    return float(over / under) * (len(vectors) ** (a - 1) if scale == "times-n" else 1)


def per_group(groups: Sequence[Sequence[Tensor]], form: str = "l2-squared") -> float:
    """What the released code measures under grouping: ||v||^a / ||mean of its group||^a, averaged over all users."""
    members = [(len(g), diversity(g, form, "times-n")) for g in groups if len(g)]
    return sum(n * d for n, d in members) / sum(n for n, _ in members)


def every(
    gradients: Sequence[Tensor],
    updates: Sequence[Tensor],
    server: tuple[Tensor, Tensor] | None = None,
    scale: Scale = "paper",
) -> dict[str, float]:
    """All definitions by name, such as `update/users/l2-squared`: 16 with the server's (gradient, update), 8 without."""
    found: dict[str, float] = {}
    for of, users, own in zip(("gradient", "update"), (gradients, updates), server or (None, None)):
        for who, vectors in (("users", [*users]), ("all", [*users, own] if own is not None else [])):
            found |= {f"{of}/{who}/{form}": diversity(vectors, form, scale) for form in FORMS if vectors}
    return found


# -- where the vectors come from ---------------------------------------------------------------------------------------
def vector(parameters: State | Mapping[str, Tensor], without: Collection[str] = ()) -> Tensor:
    """The parameters as one vector, some names left out."""
    if isinstance(parameters, State):
        parameters = parameters.only("parameters").tensors()
    return torch.cat([t.reshape(-1) for name, t in parameters.items() if name not in without])


def norm_parameters(module: nn.Module) -> set[str]:
    """Names of the parameters of norm layers, to leave out."""
    norms = (nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._NormBase)
    return {
        f"{path}.{leaf}" if path else leaf
        for path, layer in module.named_modules()
        if isinstance(layer, norms)
        for leaf, _ in layer.named_parameters(recurse=False)
    }
