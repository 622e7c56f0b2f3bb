"""Losses that methods share. All take logits; masked forms never look at values to choose shapes."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Reduction = Literal["all", "selected"]
Divergence = Literal["log-softmax", "eps"]


def ce(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy per sample; `target` holds classes or probabilities."""
    return F.cross_entropy(logits, target, reduction="none")


def cross_entropy(logits: Tensor, target: Tensor, rows: Tensor | None = None) -> Tensor:
    """Mean cross-entropy over the batch, or over the true entries of `rows`."""
    if rows is None:
        return F.cross_entropy(logits, target)
    return masked_mean(ce(logits, target), rows, "selected")


def masked_mean(values: Tensor, mask: Tensor, over: Reduction = "all", rows: Tensor | None = None) -> Tensor:
    """Mean of the masked values over all samples, or over the selected ones (at least 1)."""
    if rows is not None:
        mask = mask & rows
    kept = torch.where(mask, values, torch.zeros_like(values))
    if over == "selected":
        return kept.sum() / mask.sum().clamp_min(1)
    return kept.mean() if rows is None else kept.sum() / rows.sum().clamp_min(1)


def kl(target: Tensor, logits: Tensor, form: Divergence = "log-softmax") -> Tensor:
    """KL(target || softmax(logits)) per sample; the form `eps` has 1e-8 in its quotient and in its logarithm."""
    if form == "eps":
        return (target * (target / (logits.softmax(1) + 1e-8) + 1e-8).log()).sum(1)
    log_target = target.clamp_min(torch.finfo(target.dtype).tiny).log()
    return (target * (log_target - logits.log_softmax(1))).sum(1)


def smoothed_kl(target: Tensor, logits: Tensor, by: float = 1e-10) -> Tensor:
    """The divergence of target from softmax(logits) per sample, with `by` added to every probability of both."""
    t, q = target + by, logits.softmax(1) + by
    return (t * (t.log() - q.log())).sum(1)


def entropy(probabilities: Tensor) -> Tensor:
    """Entropy per sample, in nats."""
    each: Tensor = torch.special.entr(probabilities)
    return each.sum(1)


def certainty(entropies: Tensor, classes: int) -> Tensor:
    """Entropies as confidences between 0 (even over the classes) and 1 (one class)."""
    return 1 - entropies / math.log(max(2, classes))
