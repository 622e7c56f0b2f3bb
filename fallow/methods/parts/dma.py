"""Debiased model aggregation: weights of clients whose mean predictions together come near uniform (FedDB).

P has a row per client, its mean prediction; u is uniform over classes; d(beta) = P^T beta - u. Every form starts from
equal weights and gives weights >= 0 that sum to 1. Float64 throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fallow.config import Config
from fallow.errors import UserError
from fallow.methods.interface import Message, Party, Server
from fallow.methods.parts.averaging import Averager, mean
from fallow.methods.update import Updates


class DMA(Averager):
    """Clients send their mean predictions; these make their weights. A server that trains beside them keeps its share."""

    @staticmethod
    def refuse(o: Config) -> None:
        """Raises a UserError where there is nothing to go by."""
        if (o.labels == "all" or not o.unlabelled_ratio) and not o.labelled_as_unlabelled:
            raise UserError(
                "average=dma goes by predictions on unlabelled data, and no client has any", "use average=mean, or labelled_as_unlabelled=true"
            )

    def end(self, party: Party) -> Message:
        """A client's mean prediction: as its method has measured it, else the received model's; without data a uniform one."""
        if party.is_server:
            return {}
        prior = getattr(party, "prior", None)
        if prior is None:
            z = party.predict(party.received["model"], party.unlabelled, "weak")
            prior = mean_prediction(z) if len(z) else z.new_full(z.shape[1:], 1 / z.shape[1])
        return {"prior": prior}

    def merge(self, server: Server, updates: Updates) -> None:
        clients = updates.clients
        if not clients:
            return super().merge(server, updates)
        if any("prior" not in u for u in clients):
            raise UserError(
                "the method's updates have no `prior`, which average=dma goes by", "let its end() call super(), or use average=mean"
            )
        P = torch.stack([u["prior"] for u in clients])
        beta = weights(P, self.o)  # Eq. 16, Algorithm 2
        self.move(server, updates, mean(updates, weights=self.beside_server(updates, beta)))  # Eq. 17
        report(server, P, beta)


def mean_prediction(z: Tensor) -> Tensor:
    """APP-U, the mean prediction over some samples.  FedDB, Eq. 8."""
    return z.softmax(1).mean(0)


def weights(priors: Tensor, o: Config) -> Tensor:
    """The clients' weights from their mean predictions, as the options say."""
    P = checked(priors.detach().double().cpu())
    if o.dma == "simplex":
        return simplex(P, o.dma_ridge, o.dma_floor)
    if o.dma == "code":
        return released(P, o.dma_steps, o.dma_lr)
    return printed(P, o.dma_steps, o.dma_lr, o.dma_momentum, inside=o.dma == "paper-loop")


def checked(P: Tensor) -> Tensor:
    """P with rows that are no distributions replaced by uniform ones, which neither attract nor repel weight."""
    good = torch.isfinite(P).all(1) & (P >= 0).all(1) & ((P.sum(1) - 1).abs() <= 1e-3)
    return torch.where(good[:, None], P, torch.full_like(P, 1 / P.shape[1]))


def distance(P: Tensor, beta: Tensor) -> Tensor:
    """d(beta), how far the weighted mean prediction is from uniform, by class."""
    return beta @ P - 1 / P.shape[1]


def report(server: Server, P: Tensor, beta: Tensor) -> None:
    """For the round's metrics: the weights, the mean prediction they make, and its distance from uniform."""
    P = checked(P.detach().double().cpu())
    server.log(beta=beta, prior=beta @ P, residual=float(distance(P, beta).norm()),
               residual_uniform=float(distance(P, equal(P)).norm()))  # fmt: skip


def equal(P: Tensor) -> Tensor:
    return torch.full((len(P),), 1 / len(P), dtype=P.dtype)


def released(P: Tensor, steps: int = 100, lr: float = 1.0) -> Tensor:
    """The authors' code: mean squared distance; an SGD made anew each step (Nesterov 0.9, decay 0.9); softmax."""
    beta = equal(P)
    for _ in range(steps):
        g = 2 / P.shape[1] * (P @ distance(P, beta)) + 0.9 * beta
        beta = (beta - lr * 1.9 * g).softmax(0)  # lr 1: softmax(-0.71 beta - 1.9 gradient)
    return beta


def printed(P: Tensor, steps: int = 100, lr: float = 1.0, momentum: float = 0.0, inside: bool = False) -> Tensor:
    """Eq. 16 and Algorithm 2: descent on the norm of the distance; softmax once at the end, or in each step."""
    beta, v = equal(P), torch.zeros(len(P), dtype=P.dtype)
    for _ in range(steps):
        d = distance(P, beta)
        r = d.norm()
        v = momentum * v + (P @ d / r if r >= 1e-12 else torch.zeros_like(v))
        beta = beta - lr * v
        if inside:
            beta = beta.softmax(0)
    return beta if inside else beta.softmax(0)


def simplex(P: Tensor, ridge: float = 1e-8, floor: float = 0.0) -> Tensor:
    """The exact minimum of |d|^2 + ridge |beta - 1/S|^2 over beta >= floor/S with sum 1, by an active set.

    Solves for the free weights; stops at the first bound it meets and holds it; at a minimum, frees the held weight
    that pulls hardest. Each face is left for good, so it ends.
    """
    S, least = len(P), floor / len(P)
    G = P @ P.T + ridge * torch.eye(S, dtype=P.dtype)
    h = P.mean(1) + ridge / S
    beta, free = equal(P), torch.ones(S, dtype=torch.bool)
    for _ in range(100 * S):
        target = _on_face(G, h, free, least)
        under = free & (target < least)
        if under.any():  # walk to the first bound on the way
            share = torch.where(under, (beta - least) / (beta - target), torch.ones_like(beta))
            first = int(share.argmin())
            beta = beta + share[first] * (target - beta)
            beta[first], free[first] = least, False
            continue
        beta = target
        gradient = G @ beta - h
        pull = torch.where(free, torch.inf, gradient - gradient[free].mean())
        if pull.min() >= -1e-13:
            break
        free[int(pull.argmin())] = True
    return beta


def _on_face(G: Tensor, h: Tensor, free: Tensor, least: float) -> Tensor:
    """The minimum with the weights that are not free held at `least`: one linear solve."""
    n = int(free.sum())
    A = torch.ones(n + 1, n + 1, dtype=G.dtype)
    A[:n, :n], A[n, n] = G[free][:, free], 0.0
    held = G[free][:, ~free].sum(1) * least
    b = torch.cat([h[free] - held, torch.tensor([1 - least * (len(h) - n)], dtype=G.dtype)])
    out = torch.full_like(h, least)
    out[free] = torch.linalg.solve(A, b)[:n]
    return out
