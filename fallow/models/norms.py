"""Normalisation: which layer a name means, and how a net's BN and dropout layers behave in each call.

`adopt` turns every batch norm and dropout of a module, ours or a user's, into one that asks a shared `Modes`
what to do; parameters, buffers and their names stay as they are.

>>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
>>> modes = adopt(net)
>>> with modes.using(stats="batch"):
...     _ = net(torch.zeros(2, 1, 5, 5))
>>> int(net[1].num_batches_tracked)
0
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fallow.errors import UserError, suggest
from fallow.models import dropout, fused

NORMS = ("bn", "gn", "none", "bn-batch", "sbn")

Stats = Literal["update", "batch", "running"]


def norm_layer(norm: str, channels: int, groups: int) -> nn.Module:
    """The layer that `norm` means for a feature map; `bn-batch` and `sbn` are `bn` under another policy."""
    if norm in ("bn", "bn-batch", "sbn"):
        return nn.BatchNorm2d(channels)
    if norm == "none":
        return nn.Identity()
    if norm != "gn":
        raise UserError(f"there is no norm {norm!r}", suggest(norm, NORMS))
    if channels % groups:
        raise UserError(
            f"{channels} channels cannot be split into {groups} groups",
            "choose widths that are multiples of the groups",
        )
    return nn.GroupNorm(groups, channels)


@dataclass
class Modes:
    """How the adopted layers of one module behave in the calls to come."""

    stats: Stats = "update"
    """`update`: batch statistics, running ones move; `batch`: running ones untouched; `running`: eval, dropout off."""
    rows: Tensor | None = None
    """Bool [B]: rows whose entry is false are left out of the statistics; their output is the norm's bias."""
    parts: tuple[int, ...] | None = None
    """Sizes: each part of the concatenated batch is a batch of its own for BN."""
    updates_running: bool = True
    """False: running statistics never move, `update` is `batch` (`statistics=batch` and `static`)."""
    fused: bool = True
    """On CUDA, norm and ReLU in our own kernels; false: torch's, the reference."""
    has_running: bool = True
    """False: there are no running statistics worth using, `running` normalises by the batch's own (`statistics=batch`)."""
    key: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    """The step's key for dropout: an int64 scalar on the net's device, which the engine overwrites in place."""
    calls: int = 0
    """How many dropout masks this step has drawn."""

    def begin_step(self) -> None:
        self.calls = 0

    @contextmanager
    def using(self, **fields: Any) -> Iterator[Modes]:
        """These fields inside the block, the earlier ones after it."""
        before = {name: getattr(self, name) for name in fields}
        try:
            for name, value in fields.items():
                setattr(self, name, value)
            yield self
        finally:
            for name, value in before.items():
                setattr(self, name, value)


class BatchNorm(_BatchNorm):
    """torch's batch norm, told by `modes` which statistics to use; `train()` and `eval()` mean nothing to it."""

    modes: Modes

    def fuses(self, x: Tensor) -> bool:
        """Whether this call is going to use batch statistics and our kernels."""
        modes = self.modes
        running = modes.stats == "running" and modes.has_running and self.running_mean is not None
        return modes.fused and not running and fused.available(x)

    def forward(self, x: Tensor, relu: bool = False, bias: Tensor | None = None) -> Tensor:
        """`bias` is one that belongs to `x` and was not added."""
        self._check_input_dim(x)
        modes, tracked = self.modes, self.running_mean is not None
        if modes.stats == "running" and modes.has_running and tracked:
            y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
            return F.relu(y) if relu else y
        moves = modes.stats == "update" and modes.updates_running and tracked
        if modes.fused and fused.usable(x, self.weight, self.bias):
            return self._fused(x, relu, moves, bias)
        x = x if bias is None else x + bias.view(1, -1, 1, 1)
        if modes.parts is None:
            y = self._one_batch(x, modes.rows, moves)
        else:
            rows = [None] * len(modes.parts) if modes.rows is None else modes.rows.split(modes.parts)
            y = torch.cat([self._one_batch(part, r, moves) for part, r in zip(x.split(modes.parts), rows)])
        return F.relu(y) if relu else y

    def _fused(self, x: Tensor, relu: bool, moves: bool, added: Tensor | None) -> Tensor:
        rows, sizes, eps = self.modes.rows, self.modes.parts or (len(x),), self.eps

        def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            kept = torch.ones(len(x), dtype=torch.bool, device=x.device) if rows is None else rows
            pieces = zip(x.split(sizes), kept.split(sizes))
            y = torch.cat([masked_batch_norm_plain(part, weight, bias, r, eps)[0] for part, r in pieces])
            return F.relu(y) if relu else y

        y, moments = fused.norm(x, self.weight, self.bias, sizes, eps, relu, rows, plain=plain)
        if moves:
            assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
            fused.move(moments, self.running_mean, self.running_var, self.num_batches_tracked, self.momentum, added)
        return y

    def _one_batch(self, x: Tensor, rows: Tensor | None, moves: bool) -> Tensor:
        alone = x.numel() == x.shape[1]  # one position per channel: torch refuses it, we take its variance as 0
        if rows is None and not alone:
            if not moves:
                return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
            if self.momentum is not None:
                self._count(1)
                return F.batch_norm(
                    x, self.running_mean, self.running_var, self.weight, self.bias, True, self.momentum, self.eps
                )
            mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)  # type: ignore[arg-type]
            y = F.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)
            self._move(mean, var, 1)
            return y
        if rows is None:
            rows = torch.ones(len(x), dtype=torch.bool, device=x.device)
        y, mean, var, count = masked_batch_norm(x, self.weight, self.bias, rows, self.eps)
        if moves:
            self._move(mean, var * count / (count - 1).clamp(min=1), count > 0)
        return y

    def _count(self, batches: int | Tensor) -> None:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(batches)

    @torch.no_grad()
    def _move(self, mean: Tensor, var: Tensor, batches: int | Tensor) -> None:
        """Running statistics towards these; not at all where `batches` is 0."""
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self._count(batches)
        factor: float | Tensor
        if self.momentum is None:
            factor = 1.0 / self.num_batches_tracked.clamp(min=1).to(mean.dtype)
        else:
            factor = self.momentum
        if not isinstance(batches, int):
            factor = factor * batches.to(mean.dtype)
        for running, batch in ((self.running_mean, mean), (self.running_var, var)):
            running.copy_(factor * batch + (1 - factor) * running)


class BatchNorm1d(BatchNorm, nn.BatchNorm1d):
    pass


class BatchNorm2d(BatchNorm, nn.BatchNorm2d):
    pass


class BatchNorm3d(BatchNorm, nn.BatchNorm3d):
    pass


class GroupNorm(nn.GroupNorm):
    """torch's group norm, fused with a ReLU where it can be."""

    modes: Modes

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        groups, pooled, eps = self.num_groups, self.num_channels // self.num_groups, self.eps

        def plain(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            y = F.group_norm(x, groups, weight, bias, eps)
            return F.relu(y) if relu else y

        if self.modes.fused and fused.usable(x, self.weight, self.bias, pooled):
            return fused.norm(x, self.weight, self.bias, (1,) * len(x), eps, relu, None, pooled, plain)[0]
        return plain(x, self.weight, self.bias)


def activated(norm: nn.Module, x: Tensor) -> Tensor:
    """ReLU of what a norm makes of `x`."""
    return norm(x, relu=True) if isinstance(norm, (BatchNorm, GroupNorm)) else F.relu(norm(x))


class Chain(nn.Sequential):
    """Layers one after the other, with what belongs together made in one: norm and ReLU, and a convolution's bias.

    A batch norm takes away a bias before it: its output does not depend on it, so the bias is left out, its gradient is
    0 as in exact arithmetic, and only the running mean gets it.
    """

    def forward(self, x: Tensor) -> Tensor:
        before: nn.Module | None = None
        bias: Tensor | None = None
        for layer, after in zip(self, [*self][1:] + [None]):
            if isinstance(layer, nn.Conv2d) and isinstance(after, BatchNorm) and after.fuses(x):
                x, bias = layer._conv_forward(x, layer.weight, None), layer.bias
            elif isinstance(layer, BatchNorm):
                x, bias = layer(x, isinstance(after, nn.ReLU), bias), None
            elif isinstance(layer, GroupNorm):
                x = layer(x, isinstance(after, nn.ReLU))
            elif not (isinstance(layer, nn.ReLU) and isinstance(before, (BatchNorm, GroupNorm))):
                x = layer(x)
            before = layer
        return x


_OURS: dict[type, type] = {
    nn.GroupNorm: GroupNorm,
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
    **dropout.OURS,
}


def adopt(module: nn.Module) -> Modes:
    """Makes every batch norm and dropout of `module` obey one `Modes`, which it returns.

    A module adopted before, or a deep copy of one, gives the `Modes` it has.
    """
    layers = [m for m in module.modules() if type(m) in _OURS or isinstance(m, (BatchNorm, GroupNorm, dropout.Dropout))]
    modes = next((m.__dict__["modes"] for m in layers if "modes" in m.__dict__), None) or Modes()
    drops = 0
    for layer in layers:
        layer.__class__ = _OURS.get(type(layer), type(layer))
        layer.__dict__["modes"] = modes
        if isinstance(layer, dropout.Dropout):
            layer.number = drops
            drops += 1
    return modes


def masked_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batch norm over the rows whose entry is true: output, mean, biased variance, positions counted.

    A row left out comes out as the bias and gets no gradient, so whatever it holds stays finite. If all are left
    out, mean and variance are 0. No shape depends on `rows`, nothing is read by the host.
    """
    with torch.autocast(x.device.type, enabled=False):
        return _MaskedBatchNorm.apply(x, weight, bias, rows, eps)


def masked_batch_norm_plain(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same in tensor code that autograd differentiates: the reference, and the way to second derivatives."""
    wide = x.to(_statistics_dtype(x))
    kept = _per_row(rows, x)
    space = [d for d in range(x.dim()) if d != 1]
    count = rows.sum() * _positions(x)
    n = count.clamp(min=1)
    mean = wide.where(kept, 0).sum(space) / n
    centred = wide - _per_channel(mean, x)
    var = centred.square().where(kept, 0).sum(space) / n
    y = centred * _per_channel((var + eps).rsqrt(), x)
    if weight is not None:
        y = y * _per_channel(weight.to(y.dtype), x)
    shift = torch.zeros_like(mean) if bias is None else bias.to(y.dtype)
    y = (y + _per_channel(shift, x)).where(kept, _per_channel(shift.detach(), x))
    return y.to(x.dtype), mean.detach(), var.detach(), count


class _MaskedBatchNorm(torch.autograd.Function):
    """Three passes over memory forward, eleven back (plain autograd: fifty); everything else is [rows, channels]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Tensor, eps: float) -> Any:
        wide = x.to(_statistics_dtype(x))
        kept = rows.to(wide.dtype)[:, None]
        row_var, row_mean = torch.var_mean(wide.flatten(2), 2, correction=0) if x.dim() > 2 else (wide * 0, wide)
        count = rows.sum() * _positions(x)
        share = kept / kept.sum().clamp(min=1)
        mean = (row_mean * share).sum(0)
        var = ((row_var + (row_mean - mean).square()) * share).sum(0)  # Chan's merge of the rows' moments
        inverse = (var + eps).rsqrt()
        gain = inverse if weight is None else inverse * weight.to(wide.dtype)
        scale = kept * gain
        shift = -mean * scale if bias is None else bias.to(wide.dtype) - mean * scale
        y = torch.addcmul(_per_row_channel(shift, x), wide, _per_row_channel(scale, x)).to(x.dtype)
        ctx.save_for_backward(x, weight, bias, rows, mean, inverse)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, var, count)
        return y, mean, var, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, weight, bias, rows, mean, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_plain_gradients(ctx, grad), None, None
        with torch.autocast(x.device.type, enabled=False):
            kept = rows.to(mean.dtype)[:, None]
            n = (kept.sum() * _positions(x)).clamp(min=1)
            to_unit = kept * inverse
            unit = torch.addcmul(
                _per_row_channel(-mean * to_unit, x), x.to(mean.dtype), _per_row_channel(to_unit, x)
            )  # x standardised, 0 in the rows left out
            wide = grad.to(mean.dtype)
            total = (_over_space(wide) * kept).sum(0)
            along = _over_space(wide * unit).sum(0)
            gain = to_unit if weight is None else to_unit * weight.to(mean.dtype)
            centre = torch.addcmul(_per_row_channel(-gain * total / n, x), unit, _per_row_channel(-gain * along / n, x))
            dx = torch.addcmul(centre, wide, _per_row_channel(gain, x)).to(x.dtype)
        dweight = None if weight is None else along.to(weight.dtype)
        dbias = None if bias is None else total.to(bias.dtype)
        return dx, dweight, dbias, None, None


def _plain_gradients(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    x, weight, bias, rows, _, _ = ctx.saved_tensors
    with torch.autocast(x.device.type, enabled=False):
        y = masked_batch_norm_plain(x, weight, bias, rows, ctx.eps)[0]
    wanted = [t if needed and t is not None else None for t, needed in zip((x, weight, bias), ctx.needs_input_grad)]
    found = iter(torch.autograd.grad(y, [t for t in wanted if t is not None], grad, create_graph=True))
    return [None if t is None else next(found) for t in wanted]


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _positions(x: Tensor) -> int:
    return x[0, 0].numel()


def _per_row(t: Tensor, x: Tensor) -> Tensor:
    return t.view(-1, *[1] * (x.dim() - 1))


def _per_channel(t: Tensor, x: Tensor) -> Tensor:
    return t.view(-1, *[1] * (x.dim() - 2))


def _per_row_channel(t: Tensor, x: Tensor) -> Tensor:
    return t.view(*t.shape, *[1] * (x.dim() - 2))


def _over_space(t: Tensor) -> Tensor:
    return t.flatten(2).sum(2) if t.dim() > 2 else t
