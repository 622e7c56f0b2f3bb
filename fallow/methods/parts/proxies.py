"""Proxies: the rows of a classifier as one point per class, tuned at the server and contrasted with at clients (ProxyFL)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor, nn

from fallow.errors import UserError
from fallow.methods.parts.labelling import one_hot

Anchor = Literal["client", "server"]
LEAST = 1e-6  # similarity of a negative


class Heads(nn.Module):
    """A layer for features and one for proxies, as wide as the model's features."""

    def __init__(self, classes: int, model: nn.Module):
        super().__init__()
        head = getattr(model, "head", None)
        if not isinstance(head, nn.Linear):
            raise UserError(f"{type(model).__name__} has no linear layer called head, whose rows are the proxies", "use another model")
        self.features = nn.Linear(head.in_features, head.in_features)
        self.proxies = nn.Linear(head.in_features, head.in_features, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.features(h)
        return out


def unit(x: Tensor) -> Tensor:
    """Rows of length 1."""
    length: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return x / length.clamp_min(1e-12)


def contrast(v: Tensor, omega: Tensor, classes: Tensor, weights: Tensor) -> Tensor:
    """Of each row of v, -ln of its share e^pos among itself and the rows that have no class in common with it.

    `classes` says which ones a row may be of, `weights` by how much each proxy pulls.
    """
    positive = (v @ omega.T * weights).sum(1)
    similar, could = v @ v.T, classes.to(v.dtype)
    negative = (could @ could.T == 0) & (similar >= LEAST)
    return torch.cat([positive[:, None], similar.masked_fill(~negative, -torch.inf)], 1).logsumexp(1) - positive


# -- at the server -----------------------------------------------------------------------------------------------------
def nearest(proxies: Tensor) -> Tensor:
    """How far each proxy is from the next one."""
    return torch.cdist(proxies, proxies).fill_diagonal_(torch.inf).amin(1)


def tuned(sent: Tensor, start: Tensor, rng: Generator, epochs: int, lr: float, batch: int, margin: float, anchor: Anchor) -> Tensor:
    """Proxies [K, D] moved by SGD from `start` to where the clients' [M, K, D] are nearest to their own; float64.

    `client`: a sent row among all proxies; `server`: a proxy among the rows of the client that sent it (Eq. 2).
    """
    rows, proxies = sent.double().cpu(), start.double().cpu().clone()
    clients, classes, _ = rows.shape
    apart = min(float(nearest(proxies).max()), margin) if classes > 1 else 0.0
    for _ in range(epochs):
        order = rng.permutation(clients * classes)
        for first in range(0, len(order), batch):
            m, c = (torch.from_numpy(x) for x in np.divmod(order[first : first + batch], classes))
            proxies -= lr * gradient(rows, proxies, m, c, apart, anchor)[1]
    return proxies


def gradient(rows: Tensor, proxies: Tensor, m: Tensor, c: Tensor, margin: float, anchor: Anchor) -> tuple[Tensor, Tensor]:
    """The mean loss CE(-distances, c) of the rows c of clients m, the right distance made longer by the margin; its gradient."""
    way = proxies - rows[m, c][:, None] if anchor == "client" else proxies[c][:, None] - rows[m]
    d = torch.linalg.vector_norm(way, dim=2)
    right = one_hot(c, d)
    z = -(d + margin * right)
    pull = (right - z.softmax(1)) / len(c)
    along = (pull / torch.where(d > 0, d, torch.inf))[:, :, None] * way
    out = along.sum(0) if anchor == "client" else torch.zeros_like(proxies).index_add_(0, c, along.sum(1))
    return -(z.log_softmax(1) * right).sum(1).mean(), out
