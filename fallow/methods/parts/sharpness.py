"""Sharpness-aware steps: the weights near the present ones at which a loss is worst."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def ascent(weights: Mapping[str, Tensor], grads: Mapping[str, Tensor], rho: float, floor: float = 0.01) -> dict[str, Tensor]:
    """Weights moved up a gradient by rho, measured in units of their own size: ASAM (Kwon et al., ICML 2021).

    Tensors named weight have the size |w| + floor, all others 1. What is added is a constant for the gradient.
    """
    with torch.no_grad():
        sizes = {n: w.abs() + floor if n.endswith("weight") else torch.ones_like(w) for n, w in weights.items()}
        norm = torch.stack([torch.linalg.vector_norm(sizes[n] * g) for n, g in grads.items()]).norm()
        added = {n: rho / (norm + 1e-16) * sizes[n] ** 2 * g for n, g in grads.items()}
    return {n: w + added[n] if n in added else w for n, w in weights.items()}
