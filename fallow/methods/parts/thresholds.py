"""Thresholds that adapt: by how well classes are learnt (FlexMatch), by how sure a net is (FreeMatch), and soft ones (SoftMatch)."""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-6  # keeps alignment from dividing by 0


# -- FlexMatch -----------------------------------------------------------------------------------------------------------
def learnt(last: Tensor, size: Tensor, classes: int, warmup: bool = True) -> Tensor:
    """beta: how well each class is learnt, from every sample's last accepted label (-1: none yet); `size` samples there are.

    With `warmup` the samples without one count as a class of their own in the maximum.
    """
    counts = (last[:, None] == torch.arange(classes, device=last.device)).to(last.dtype).sum(0)
    most = counts.amax()
    most = torch.maximum(most, size - counts.sum()) if warmup else most
    return counts / most.clamp_min(1)


def latest(known: Tensor, label: Tensor, sure: Tensor, index: Tensor) -> Tensor:
    """What is known of a batch's samples after it: of one that is there twice the last sure label, at both places."""
    place = torch.arange(1, len(label) + 1, device=label.device)
    last = ((index[:, None] == index) & sure).mul(place).amax(1)                        # from 1; 0: none
    return torch.where(last > 0, label[(last - 1).clamp_min(0)].to(known.dtype), known)


def convex(beta: Tensor, threshold: float) -> Tensor:
    """A class's threshold."""
    return threshold * beta / (2 - beta)


# -- FreeMatch, (FL)2 ----------------------------------------------------------------------------------------------------
def by_class(tau: Tensor, mean: Tensor) -> Tensor:
    """Each class's threshold: the mean confidence, less where the class is predicted less; of the most predicted one exactly it."""
    return tau * (mean / mean.amax())


def fairness(ps: Tensor, mask: Tensor, prior: Tensor, shares: Tensor) -> Tensor:
    """sum_c A_c log B_c over the masked samples; 0 if there are none.  A = prior / shares, B = mean p / shares of their labels, normalised."""
    count = mask.sum()
    labels = (ps.detach().argmax(1)[:, None] == torch.arange(ps.shape[1], device=ps.device)) & mask[:, None]
    found = labels.to(ps.dtype).sum(0) / count.clamp_min(1)
    mean = torch.where(mask[:, None], ps, 0.0).sum(0) / count.clamp_min(1)
    A, B = normalised(over(prior, shares)), normalised(over(mean, found))
    return torch.where(count > 0, (A * (B + 1e-12).log()).sum(), 0.0)


def over(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b > 0, a / torch.where(b > 0, b, 1.0), 0.0)


def normalised(p: Tensor) -> Tensor:
    """With the sum 1 along the last axis."""
    return p / p.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)


# -- SoftMatch, ReMixMatch -----------------------------------------------------------------------------------------------
def aligned(p: Tensor, wanted: Tensor, found: Tensor) -> Tensor:
    """Predictions whose mean, `found` so far, is brought to the one that is wanted."""
    return normalised(p * (wanted + TINY) / (found + TINY))


def truncated(confidence: Tensor, mu: Tensor, var: Tensor, n: float) -> Tensor:
    """1 from mu on, a Gaussian's flank below it."""
    return torch.where(confidence >= mu, 1.0, (-((confidence - mu) ** 2) / (2 * var / n**2)).exp())


# -- averages that go on -------------------------------------------------------------------------------------------------
@torch.no_grad()
def moved(average: Tensor, new: Tensor, momentum: float) -> None:
    """average <- m average + (1 - m) new."""
    average.copy_(momentum * average + (1 - momentum) * new)


@torch.no_grad()
def moved_from_first(average: Tensor, new: Tensor, momentum: float) -> None:
    """The same, but a fresh one (all zeros) begins with the first that comes."""
    average.copy_(torch.where(average.sum() > 0, momentum * average + (1 - momentum) * new, new))
