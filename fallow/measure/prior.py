"""How evenly a model serves the classes: accuracy by class, the bias it shows, and divergences of distributions (FedDB)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fallow.measure import scores


def class_accuracy(logits: Tensor, truth: Tensor, classes: int) -> list[float | None]:
    """The share of each class's samples that is classified rightly; None for a class without samples."""
    return scores.listed(scores.class_accuracy(scores.counts(logits.argmax(1), truth, classes)))


def bias(accuracy: Sequence[float | None]) -> Tensor:
    """Class accuracies as a distribution: what a model leans towards. Even where all are 0.

    >>> bias([0.9, 0.6, 0.3, 0.2]).tolist()
    [0.45, 0.3, 0.15, 0.1]
    """
    return share([a or 0.0 for a in accuracy])


def share(counts: Sequence[float] | Tensor) -> Tensor:
    """Counts as a distribution; an even one where all are 0."""
    c = torch.as_tensor(counts, dtype=torch.float64)
    return c / c.sum() if c.sum() > 0 else torch.full_like(c, 1 / len(c))


def js(p: Tensor, q: Tensor) -> float:
    """The Jensen-Shannon divergence of two distributions in nats (at most ln 2): the divergence, not its root.

    >>> round(js(torch.tensor([0.45, 0.30, 0.15, 0.10]), torch.tensor([0.5, 0.25, 0.15, 0.10])), 6)
    0.001796
    """
    p, q = p.double().cpu(), q.double().cpu()
    m = (p + q) / 2
    kl = lambda a: torch.where(a > 0, a * (a / m).log(), torch.zeros_like(a)).sum()
    return float((kl(p) + kl(q)) / 2)
