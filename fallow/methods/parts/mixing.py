"""Mixup over a whole batch of labelled and unlabelled views, and sharpened guesses: MixMatch and ReMixMatch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fallow.methods.base import Party, Plan
from fallow.methods.parts.consistency import RampedBatch


class MixedBatch(RampedBatch):
    lam: Tensor  # Mixup's ratio of each view, or of all
    partner: Tensor  # a permutation of all the step's views


def sharpened(p: Tensor, temperature: float) -> Tensor:
    """p^(1/T), normalised."""
    q = p ** (1 / temperature)
    return q / q.sum(1, keepdim=True)


def planned(plan: Plan, party: Party, a: float, one_for_all: bool) -> Plan:
    """The plan with Mixup's draws for each step: `lam`, at least 1/2, and `partner`, a permutation of all the step's views."""
    if not len(plan):
        return plan
    streams = [(name, s) for name, s in plan.segments[0].streams.items() if s]
    images = sum(s.sizes(1)[0] * (1 if name == "x" else len(s.views)) for name, s in streams)
    rng, shape = party.rng("mixup"), (len(plan), images)
    lam = rng.beta(a, a, (len(plan), 1) if one_for_all else shape)
    return plan.having(lam=np.maximum(lam, 1 - lam), partner=rng.random(shape).argsort(1))


def mixed(views: list[Tensor], targets: list[Tensor], lam: Tensor, partner: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Every view and its target mixed with its partner's; in the parts that came."""
    X, Y, sizes = torch.cat(views), torch.cat(targets), [len(v) for v in views]
    of_images, of_targets = (lam.reshape(-1, *[1] * (t.dim() - 1)).to(t.dtype) for t in (X, Y))
    X = of_images * X + (1 - of_images) * X[partner]
    Y = of_targets * Y + (1 - of_targets) * Y[partner]
    return list(X.split(sizes)), list(Y.split(sizes))
