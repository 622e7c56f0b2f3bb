"""A slot: what a party holds while it works, at fixed addresses, and the operations of a training step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fallow.config import Config
from fallow.engine import judging, kernels, logs
from fallow.engine.held import check_names
from fallow.engine.kit import Kit
from fallow.engine.nets import NetHandle
from fallow.engine.optim import Optimizer, clip_
from fallow.engine.replay import Pool
from fallow.engine.strict import relaxed
from fallow.errors import UserError
from fallow.methods.base import Net, Value
from fallow.methods.state import State


class Slot:
    """Knows its held things by name and nothing that tells one party from another."""

    def __init__(self, kit: Kit):
        self.kit, self.o = kit, kit.options
        self.pool: Pool | None = None  # of captured graphs, where predictions are captured
        self.nets: dict[str, NetHandle] = {}
        self.values: dict[str, Tensor] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.lr: dict[str, Tensor] = {}
        self.logs: dict[str, Tensor] = {}
        self.descended, self.looked_at = False, set[str]()  # of the party at work: whether a net was trained, what was used
        self._class_numbers = torch.arange(kit.classes, device=kit.device)[:, None]
        self._one = torch.ones((), dtype=torch.float64, device=kit.device)
        self._levels = judging.levels(kit.device)[:, None]
        self.prox = torch.zeros((), device=kit.device)
        self.reference: Tensor | None = None
        self._scratch: NetHandle | None = None
        for name, spec in kit.held.items():
            if isinstance(spec, Value):
                self.values[name] = torch.zeros(kit.value_shape(spec), device=kit.device)
                continue
            net = self.nets[name] = kit.net(spec)
            if spec.train:
                self.optimizers[name] = Optimizer(own_options(self.o, spec), net.flat.groups["parameters"], self._decayed(net))
                self.lr[name] = torch.zeros((), device=kit.device)
        if self.o.prox and "model" in self.nets:
            self.reference = torch.zeros_like(self.nets["model"].flat.groups["parameters"])
        check_names(kit.held, self)

    def _decayed(self, net: NetHandle) -> Tensor | None:
        """1 for each number of a parameter of two axes and more; None where weight decay acts on all."""
        if self.o.decayed == "all":
            return None
        mask = torch.zeros_like(net.flat.groups["parameters"])
        for e in net.layout.entries:
            if e.group == "parameters" and len(e.shape) > 1:
                e.view(mask).fill_(1.0)
        return mask

    def __getattr__(self, name: str) -> Any:
        things = self.__dict__
        for kind in ("nets", "values"):
            if name in things.get(kind, {}):
                things["looked_at"].add(name)
                return things[kind][name]
        raise AttributeError(f"this method holds no {name!r}; `holds()` says what it holds")

    def scratch(self, state: State) -> NetHandle:
        """A net for inference with given weights."""
        if self._scratch is None:
            with relaxed():  # the weights that a module is made with are drawn, and then written over
                self._scratch = self.kit.net()
        self._scratch.load(state)
        return self._scratch

    def name_of(self, net: NetHandle) -> str:
        return next(n for n, v in self.nets.items() if v is net)

    # -- the operations of a step ------------------------------------------------------------------------------------
    def descend(self, loss: Tensor, *nets: NetHandle, when: Tensor | None = None, retain: bool = False) -> None:
        """Gradient of the loss for these nets (default: all trained ones), then prox, clip, optimiser step."""
        chosen = nets or tuple(self.nets[n] for n in self.optimizers)
        if not chosen:
            raise UserError("`descend` has no net to train: the method holds none without train=False", "hold one, or leave out `descend`")
        leaves = [net.leaves for net in chosen]
        grads = torch.autograd.grad(loss, [p for ps in leaves for p in ps], retain_graph=retain, allow_unused=True)
        start = 0
        for net, own in zip(chosen, leaves):
            self._apply(net, grads[start : start + len(own)], when)
            start += len(own)

    def gradient(self, loss: Tensor, net: NetHandle, create_graph: bool = False, retain: bool = False) -> dict[str, Tensor]:
        """The gradient by name; on request with a graph of its own (virtual steps), or keeping the loss's."""
        # In autograd's own threads the new graph's nodes would be numbered by what the process did before, and sums of theirs ordered by it.
        with torch.autograd.set_multithreading_enabled(False) if create_graph else nullcontext():
            grads = torch.autograd.grad(loss, net.leaves, create_graph=create_graph, retain_graph=retain or create_graph, allow_unused=True)
        return dict(zip(net.names, net.combine(grads)))

    def accumulate(self, losses: Iterable[Tensor], net: NetHandle) -> Tensor:
        """One step on the sum of these losses, each of which is let go before the next is made; the sum."""
        grads: dict[str, Tensor] = {}
        total = torch.zeros((), device=self.kit.device)
        for loss in losses:
            grads = {k: g if not grads else grads[k] + g for k, g in self.gradient(loss, net).items()}
            total = total + loss.detach()
        self.apply(net, grads)
        return total

    def apply(self, net: NetHandle, grads: dict[str, Tensor], when: Tensor | None = None) -> None:
        """The optimiser's step with given gradients."""
        calls, net.calls = net.calls, []
        self._apply(net, [grads[n].detach() for n in net.names], when)
        net.calls = calls

    @torch.no_grad()
    def _apply(self, net: NetHandle, grads: Sequence[Tensor | None], when: Tensor | None) -> None:
        name, w = self.name_of(net), net.flat.groups["parameters"]
        self.descended = True
        optimizer, lr, pieces = self.optimizers[name], self.lr[name], net.pieces(grads)
        reference = self.reference if name == "model" else None
        decoupled = reference is not None and self.o.prox_mode == "decoupled"
        pull = None if reference is None or decoupled else (self.prox, reference)
        if self.o.fused and not decoupled and optimizer.decayed is None and kernels.usable(w, pieces[0]):
            kernels.step(optimizer, w, *pieces, lr, when, pull)
        else:
            g = net.flatten(*pieces)
            g = g if pull is None else g + pull[0] * (w - pull[1])
            optimizer.step(w, clip_(g, optimizer.o.clip, optimizer.o.clip_value), lr, when)
        if decoupled and reference is not None:
            back = lr * self.prox * (w - reference)
            w.sub_(back if when is None else torch.where(when, back, torch.zeros_like(back)))
        net.touched()

    @torch.no_grad()
    def log(self, rows: Tensor | None = None, **values: Any) -> None:
        """Sums a number, or (values, mask), on the device; the round's metrics have the means."""
        for name, given in values.items():
            value = logs.of_party(name, given)
            if isinstance(value, tuple):
                value, mask = value
                mask = mask if rows is None else mask & rows
                self._count(name, (value * mask).sum(), mask.sum())
            elif isinstance(value, Tensor) and value.dim():
                kept = torch.ones_like(value, dtype=torch.bool) if rows is None else rows
                self._count(name, (value * kept).sum(), kept.sum())
            else:
                value = value if isinstance(value, Tensor) else torch.full((), value, device=self.kit.device)
                self._count(name, value.to(self.kit.device), self._one)

    def _count(self, name: str, total: Tensor, count: Tensor) -> None:
        if name not in self.logs:
            self.logs[name] = torch.zeros(2, dtype=torch.float64, device=self.kit.device)
        self.logs[name] += torch.stack([total.double(), count.double()])

    @torch.no_grad()
    def judge(
        self, part: Any, label: Tensor, sure: Tensor | None = None, name: str = "label", confidence: Tensor | None = None
    ) -> None:
        """Compares labels with the hidden true ones, where there are any; logs `name`_ratio and such, never returns.

        Counts the accepted labels by class, and by how confident they are, where a `confidence` between 0 and 1 is given.
        """
        truth, rows = part._truth, part.rows
        rows = torch.ones_like(label, dtype=torch.bool) if rows is None else rows
        sure = rows if sure is None else sure & rows
        right, known = (torch.zeros_like(rows),) * 2 if truth is None else (label == truth, rows & (truth >= 0))
        known_sure = sure & known
        shares = torch.stack([rows, sure, known_sure, right & known_sure, known, right & known])
        by_class = (label == self._class_numbers) & sure
        self._add(f"{name}{judging.COUNTS}", torch.cat([shares, by_class]).sum(1))
        if confidence is not None:
            self._add(f"{name}{judging.LEVELS}", ((confidence >= self._levels) & rows).sum(1))

    def _add(self, name: str, counts: Tensor) -> None:
        if name not in self.logs:
            self.logs[name] = torch.zeros_like(counts)
        self.logs[name] += counts

    # -- filling and emptying ------------------------------------------------------------------------------------------
    @torch.no_grad()
    def load(self, things: dict[str, State | Tensor], optimizers: dict[str, dict[str, Any]], prox: float) -> None:
        """Takes in a party: its nets and values, its optimisers (absent: fresh ones)."""
        self.descended, self.looked_at = False, set()
        for name, thing in things.items():
            if isinstance(thing, State):
                self.nets[name].load(thing)
            else:
                value = self.values[name]
                value.zero_()
                value[tuple(slice(n) for n in thing.shape)].copy_(thing)
        for name, optimizer in self.optimizers.items():
            if name in optimizers:
                optimizer.load(optimizers[name])
            else:
                optimizer.reset()
        for log in self.logs.values():
            log.zero_()
        self.prox.fill_(prox)
        if self.reference is not None:
            self.reference.copy_(self.nets["model"].flat.groups["parameters"])

    def record(self, name: str) -> State | Tensor:
        """A copy of a held thing, for the client's record."""
        return self.nets[name].flat.clone() if name in self.nets else self.values[name].clone()


def own_options(o: Config, spec: Net) -> Config:
    """The run's settings, with those that a net has of its own."""
    return o.model_copy(update=dict(spec.options or {}))
