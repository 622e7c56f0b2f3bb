"""A net as a method sees it: called with views, its weights one flat tensor at a fixed address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fallow.methods.state import Layout, State
from fallow.models.norms import adopt


class NetHandle:
    """Holds a module whose tensors are views of three flat ones, and calls it."""

    def __init__(self, module: nn.Module, device: torch.device, statistics: str = "average", autocast: Any = None):
        self.modes = adopt(module)
        self.module = module.to(device)
        self.statistics = statistics
        self.modes.tracks = statistics in ("average", "server")
        self.modes.known = statistics != "batch"
        self.modes.key = torch.zeros((), dtype=torch.int64, device=device)
        self.layout = Layout.of(self.module)
        self.flat = State.of(self.module, self.layout)
        self._autocast = autocast
        self._bind()
        self.params: list[nn.Parameter] = [p for _, p in self.module.named_parameters()]

    def _bind(self) -> None:
        owners = {name: (m, leaf) for name, m, leaf in _places(self.module)}
        for entry in self.layout.entries:
            view = entry.view(self.flat.groups[entry.group])
            owner, leaf = owners[entry.name]
            if entry.group == "parameters":
                owner._parameters[leaf].data = view  # type: ignore[union-attr]
            else:
                owner._buffers[leaf] = view

    # -- calling -----------------------------------------------------------------------------------------------------
    def __call__(
        self,
        x: Tensor,
        weights: Mapping[str, Tensor] | None = None,
        stats: str = "update",
        rows: Tensor | None = None,
        parts: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Logits, float32. Every call is a batch of its own for batch norm; `stats`: update, batch or running."""
        self.modes.stats, self.modes.rows, self.modes.parts = stats, rows, parts
        with self._autocast() if self._autocast else nullcontext():
            if weights is None:
                z = self.module(x)
            else:
                z = torch.func.functional_call(self.module, dict(weights), (x,))
        return z.float()

    def together(self, *parts: Tensor | None, stats: str = "update", rows: Tensor | None = None) -> list[Tensor | None]:
        """One call on the concatenation; an absent part stays None."""
        present = [p for p in parts if p is not None]
        out = iter(self(torch.cat(present), stats=stats, rows=rows).split([len(p) for p in present]))
        return [None if p is None else next(out) for p in parts]

    def apart(
        self, *parts: Tensor | None, stats: str = "update", rows: Sequence[Tensor | None] = ()
    ) -> list[Tensor | None]:
        """One pass in which each part is a batch of its own for batch norm; `rows` has a mask, or None, per part."""
        present = [p for p in parts if p is not None]
        sizes = tuple(len(p) for p in present)
        mask = None
        if any(r is not None for r in rows):
            kept = [(p, r) for p, r in zip(parts, rows) if p is not None]
            mask = torch.cat([torch.ones(len(p), dtype=torch.bool, device=p.device) if r is None else r for p, r in kept])
        out = iter(self(torch.cat(present), stats=stats, parts=sizes, rows=mask).split(list(sizes)))
        return [None if p is None else next(out) for p in parts]

    # -- weights -----------------------------------------------------------------------------------------------------
    @property
    def weights(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters())

    @property
    def state(self) -> State:
        """What travels: parameters, and running statistics where they are tracked. Live: the engine copies it."""
        return self.flat if self.modes.tracks else self.flat.only("parameters")

    @torch.no_grad()
    def load(self, state: State) -> None:
        for group, tensor in state.groups.items():
            if group in self.flat.groups:
                self.flat.groups[group].copy_(tensor)

    @torch.no_grad()
    def follow(self, other: NetHandle, decay: float) -> None:
        """EMA: self <- decay * self + (1 - decay) * other; statistics are copied."""
        for group, mine in self.flat.groups.items():
            theirs = other.flat.groups[group]
            mine.lerp_(theirs, 1 - decay) if group == "parameters" else mine.copy_(theirs)

    def flatten(self, grads: tuple[Tensor | None, ...] | list[Tensor | None]) -> Tensor:
        """Gradients as one flat tensor in the parameters' order; an unused parameter has gradient 0."""
        pieces = []
        for p, g in zip(self.params, grads):
            g = torch.zeros_like(p) if g is None else g
            pieces.append((g.permute(0, 2, 3, 1) if g.dim() == 4 else g).reshape(-1))
        return torch.cat(pieces).float()


def _places(module: nn.Module) -> Any:
    for prefix, sub in module.named_modules():
        for leaf in [*sub._parameters, *sub._buffers]:
            yield (f"{prefix}.{leaf}" if prefix else leaf), sub, leaf
