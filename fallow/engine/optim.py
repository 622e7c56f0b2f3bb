"""Local optimisers on flat tensors: the same code eagerly and captured; everything that changes is a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from fallow.config import Config
from fallow.methods.state import State

BETA2, EPSILON = 0.999, 1e-8  # Adam's; its beta1 is `momentum`


class Optimizer:
    """SGD (momentum, Nesterov, weight decay; PyTorch's convention) or Adam over one flat parameter tensor."""

    def __init__(self, options: Config, like: Tensor, decayed: Tensor | None = None):
        """`decayed`: 1 for each number that weight decay acts on; None: all of them."""
        self.o, self.kind, self.decayed = options, options.optimizer, decayed
        names = ("mean", "square") if self.kind == "adam" else ("momentum",) if options.momentum else ()
        self.tensors: dict[str, Tensor] = {n: torch.zeros_like(like) for n in names}
        if self.kind == "adam":
            self.tensors["step"] = torch.zeros((), device=like.device)

    def reset(self) -> None:
        for tensor in self.tensors.values():
            tensor.zero_()

    def load(self, stored: dict[str, State | Tensor]) -> None:
        for name, tensor in self.tensors.items():
            value = stored[name]
            tensor.copy_(value.groups["parameters"] if isinstance(value, State) else value)

    @torch.no_grad()
    def step(self, w: Tensor, g: Tensor, lr: Tensor, when: Tensor | None = None) -> None:
        """w <- w - lr * direction(g), in place; `when` false leaves weights and moments as they are."""
        if self.o.weight_decay:
            g = g.add(w if self.decayed is None else w * self.decayed, alpha=self.o.weight_decay)
        new = dict(self.tensors)
        direction = self._adam(g, new) if self.kind == "adam" else self._sgd(g, new)
        if when is None:
            w.sub_(lr * direction)
        else:
            w.copy_(torch.where(when, w - lr * direction, w))
            new = {n: torch.where(when, t, self.tensors[n]) for n, t in new.items()}
        for name, tensor in new.items():
            if tensor is not self.tensors[name]:
                self.tensors[name].copy_(tensor)

    def _sgd(self, g: Tensor, new: dict[str, Tensor]) -> Tensor:
        if not self.o.momentum:
            return g
        new["momentum"] = self.tensors["momentum"] * self.o.momentum + g
        return g + self.o.momentum * new["momentum"] if self.o.nesterov else new["momentum"]

    def _adam(self, g: Tensor, new: dict[str, Tensor]) -> Tensor:
        beta1, beta2 = self.o.momentum, BETA2
        new["step"] = self.tensors["step"] + 1
        new["mean"] = torch.lerp(g, self.tensors["mean"], beta1)
        new["square"] = self.tensors["square"] * beta2 + (1 - beta2) * g * g
        step = new["step"].double()  # in float32, 1 - beta2 has four digits left
        mean = new["mean"] / (1 - beta1**step)
        square = new["square"] / (1 - beta2**step)
        return mean / (square.sqrt() + EPSILON)


def clip_(g: Tensor, norm: float | None, value: float | None) -> Tensor:
    """Entries cut to +-value, then the whole scaled to at most `norm`."""
    if value is not None:
        g = g.clamp(-value, value)
    if norm is not None:
        g = g * (norm / (torch.linalg.vector_norm(g) + 1e-6)).clamp(max=1.0)
    return g
