"""Batch and group norm with ReLU in one or two CUDA kernels each way; norms.py and torch are the reference.

A small net's training step is hundreds of kernels of a few microseconds, and how many there are decides its time.
torch's batch norm, ReLU, parts (each a batch of its own) and masks are a dozen kernels a layer; here they are one
forward and one back, or two each way where a layer's batch is so large that many programs must share its statistics.

Memory is channels-last: a map is [positions, channels]. A part is a range of rows with statistics of its own. Batch
norm has one part, or the parts of `apart`; group norm has a part per row and pools `G` neighbouring channels.
Everything is added up in float32 in a fixed order, so a result has the same bits every time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = tl = None

SMALL = 2048  # positions of a part that one program per channel block takes alone
ALONE = (8, 8192, 16)  # channels and entries of its tile, entries of a thread
SHARED = (16, 2048, 8)  # the same where several programs share a block
LARGE, WIDE = 65536, (16, 4096, 16)  # the same from so many positions on
PIECE, SPLITS = 1024, 128  # positions that are worth a program of their own; at most so many
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def available(x: Tensor) -> bool:
    return triton is not None and x.is_cuda


def usable(x: Tensor, weight: Tensor | None, bias: Tensor | None, pooled: int = 1) -> bool:
    """Whether the kernels can take this map."""
    return (
        available(x)
        and x.dim() == 4
        and x.dtype in TYPES
        and weight is not None
        and bias is not None
        and pooled in (1, 2, 4, 8, 16, 32)
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def norm(
    x: Tensor, weight: Tensor, bias: Tensor, sizes: tuple[int, ...], eps: float, relu: bool,
    rows: Tensor | None = None, pooled: int = 1, plain: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The normalised map, and each part's moments [parts, 4, channels]: mean, variance, 1 / deviation, count.

    `rows` (bool) leaves rows out of the statistics; they come out as the bias. `plain` is the same in tensor code, for
    derivatives of the gradient.
    """
    return _Norm.apply(x, weight, bias, sizes, eps, relu, rows, pooled, plain)


def move(
    moments: Tensor, mean: Tensor, var: Tensor, tracked: Tensor, momentum: float | None, offset: Tensor | None = None
) -> None:
    """Running statistics follow the parts' moments, one part after the other; `offset` is added to every mean."""
    parts, _, channels = moments.shape
    _move[(1,)](
        moments, mean, var, tracked, mean if offset is None else offset, parts, channels, momentum or 0.0,
        CUMULATIVE=momentum is None, OFFSET=offset is not None, BC=triton.next_power_of_2(channels),
    )  # fmt: skip


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, sizes: tuple[int, ...], eps: float, relu: bool,
        rows: Tensor | None, pooled: int, plain: Any,
    ) -> Any:  # fmt: skip
        t = _Tiling(x, sizes, pooled)
        y = torch.empty_like(x)
        moments = torch.empty(len(sizes), 4, t.channels, device=x.device)
        starts, partial = _starts(sizes, x.device), t.partial(x, 3)

        for phase in t.phases:
            _forward[(len(sizes), *t.grid)](
                x, y, weight, bias, x if rows is None else rows, starts, partial, moments, t.area, t.channels, eps,
                RELU=relu, ROWS=rows is not None, PHASE=phase, G=pooled, **t.tile,
            )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, moments, rows)
        ctx.tiling, ctx.sizes, ctx.relu, ctx.pooled, ctx.plain = t, sizes, relu, pooled, plain
        ctx.mark_non_differentiable(moments)
        return y, moments

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        x, weight, bias, moments, rows = ctx.saved_tensors
        none = (None,) * 6
        if torch.is_grad_enabled():
            y = ctx.plain(x, weight, bias)
            return *torch.autograd.grad(y, (x, weight, bias), grad, create_graph=True), *none
        t, parts = ctx.tiling, len(ctx.sizes)
        grad = grad.to(x.dtype).contiguous(memory_format=torch.channels_last)
        dx = torch.empty_like(x)
        sums = torch.empty(parts, 2, t.channels, device=x.device)
        starts, partial = _starts(ctx.sizes, x.device), t.partial(x, 2)

        for phase in t.phases:
            _backward[(parts, *t.grid)](
                x, grad, dx, weight, bias, x if rows is None else rows, starts, partial, moments, sums, t.area, t.channels,
                RELU=ctx.relu, ROWS=rows is not None, PHASE=phase, G=ctx.pooled, **t.tile,
            )  # fmt: skip
        dbias, dweight = sums[0] if parts == 1 else sums.sum(0)
        return dx, dweight.to(weight.dtype), dbias.to(bias.dtype), *none


class _Tiling:
    """How a map is shared out: programs by (part, channel block, split), each going over tiles [BP, BC]."""

    def __init__(self, x: Tensor, sizes: tuple[int, ...], pooled: int):
        _, self.channels, height, width = x.shape
        self.area, self.parts = height * width, len(sizes)
        positions = max(sizes) * self.area
        least, entries, each = ALONE if positions <= SMALL else SHARED if positions < LARGE else WIDE
        block = max(pooled, min(least, triton.next_power_of_2(self.channels)))
        length = min(entries // block, max(256, triton.next_power_of_2(positions)))
        splits = 1 if positions <= SMALL else min(SPLITS, triton.next_power_of_2(triton.cdiv(positions, PIECE)))
        self.grid = (triton.cdiv(self.channels, block), splits)
        self.phases = (0,) if splits == 1 else (1, 2)
        self.tile = {"SPLITS": splits, "BP": length, "BC": block, "num_warps": max(1, min(16, length * block // each // 32))}

    def partial(self, x: Tensor, kinds: int) -> Tensor:
        """Room for the sums of every split, laid out [part, split, kind, channel]."""
        splits = self.grid[1]
        return x if splits == 1 else torch.empty(self.parts * splits * kinds * self.channels, device=x.device)


_KNOWN: dict[Any, Tensor] = {}


def _starts(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """The parts' first rows on the device. A shape is run eagerly before it is captured, so no capture copies."""
    if (sizes, device) not in _KNOWN:
        _KNOWN[sizes, device] = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(device)
    return _KNOWN[sizes, device]


if triton is not None:

    @triton.jit
    def _pool(v, G: tl.constexpr, BC: tl.constexpr):
        """Sums of G neighbouring channels, at each of them."""
        if G == 1:
            return v
        else:
            total = tl.sum(tl.reshape(v, (BC // G, G)), 1)
            return tl.reshape(tl.broadcast_to(total[:, None], (BC // G, G)), (BC,))

    @triton.jit
    def _range(starts, hw, part, split, SPLITS: tl.constexpr, BP: tl.constexpr):
        """This program's positions."""
        first = tl.load(starts + part) * hw
        last = tl.load(starts + part + 1) * hw
        chunk = tl.cdiv(last - first, SPLITS * BP) * BP
        low = first + split * chunk
        return low, tl.minimum(low + chunk, last)

    @triton.jit
    def _tile(high, p, c, rows, hw, channels, ROWS: tl.constexpr, BP: tl.constexpr):
        """Offsets of a tile, which of its entries are there, which of them count."""
        pos = p + tl.arange(0, BP)
        there = pos < high
        kept = there
        if ROWS:
            kept = there & (tl.load(rows + pos // hw, mask=there, other=0) != 0)
        at = pos.to(tl.int64)[:, None] * channels + c[None, :]
        real = (c < channels)[None, :]
        return at, there[:, None] & real, kept[:, None] & real

    @triton.jit
    def _shift(x, starts, part, c, hw, channels):
        """A value near each channel's mean: sums around it lose no digits."""
        first = (tl.load(starts + part) * hw).to(tl.int64)
        shift = tl.load(x + first * channels + c, mask=c < channels, other=0.0).to(tl.float32)
        return tl.where(tl.abs(shift) < 1e30, shift, 0.0)

    @triton.jit
    def _added(partial, part, c, kind, channels, KINDS: tl.constexpr, SPLITS: tl.constexpr):
        """The splits' sums of one kind, added up."""
        at = ((part * SPLITS + tl.arange(0, SPLITS))[:, None] * KINDS + kind) * channels + c[None, :]
        return tl.sum(tl.load(partial + at, mask=(c < channels)[None, :], other=0.0), 0)

    @triton.jit
    def _moments(moments, part, split, c, shift, one, two, count, channels, eps, G: tl.constexpr, BC: tl.constexpr):
        """From sums around the shift: mean and 1 / deviation; the first split writes all moments down."""
        n = tl.maximum(count, 1.0)
        own = tl.where(count > 0, shift + one / n, 0.0)
        spread = tl.maximum(two - one * one / n, 0.0)
        mean = _pool(own, G, BC) / G
        var = _pool(spread + count * (own - mean) * (own - mean), G, BC) / (n * G)
        inverse = 1.0 / tl.sqrt(var + eps)
        to = moments + part * 4 * channels + c
        first = (c < channels) & (split == 0)
        tl.store(to, mean, mask=first)
        tl.store(to + channels, var, mask=first)
        tl.store(to + 2 * channels, inverse, mask=first)
        tl.store(to + 3 * channels, count * G, mask=first)
        return mean, inverse

    @triton.jit(do_not_specialize=["hw"])
    def _forward(
        x, y, weight, bias, rows, starts, partial, moments, hw, channels, eps,
        RELU: tl.constexpr, ROWS: tl.constexpr, PHASE: tl.constexpr, G: tl.constexpr, SPLITS: tl.constexpr,
        BP: tl.constexpr, BC: tl.constexpr,
    ):  # fmt: skip
        """PHASE 0: statistics and output; 1: the sums of this split; 2: output from the splits' sums."""
        part, split = tl.program_id(0), tl.program_id(2)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        real = c < channels
        low, high = _range(starts, hw, part, split, SPLITS, BP)
        shift = _shift(x, starts, part, c, hw, channels)
        if PHASE == 2:
            one = _added(partial, part, c, 0, channels, 3, SPLITS)
            two = _added(partial, part, c, 1, channels, 3, SPLITS)
            count = _added(partial, part, c, 2, channels, 3, SPLITS)
        else:
            sums = tl.zeros([BP, BC], tl.float32)
            squares = tl.zeros([BP, BC], tl.float32)
            number = tl.zeros([BP, BC], tl.float32)
            for p in range(low, high, BP):
                at, there, kept = _tile(high, p, c, rows, hw, channels, ROWS, BP)
                v = tl.load(x + at, mask=kept, other=0.0).to(tl.float32)
                d = tl.where(kept, v - shift[None, :], 0.0)
                sums += d
                squares += d * d
                if ROWS:
                    number += kept.to(tl.float32)
            one, two = tl.sum(sums, 0), tl.sum(squares, 0)
            if ROWS:
                count = tl.sum(number, 0)
            else:
                count = tl.zeros([BC], tl.float32) + tl.maximum(high - low, 0).to(tl.float32)
        if PHASE == 1:
            to = partial + (part * SPLITS + split) * 3 * channels + c
            tl.store(to, one, mask=real)
            tl.store(to + channels, two, mask=real)
            tl.store(to + 2 * channels, count, mask=real)
        else:
            mean, inverse = _moments(moments, part, split, c, shift, one, two, count, channels, eps, G, BC)
            w = tl.load(weight + c, mask=real, other=0.0).to(tl.float32)
            b = tl.load(bias + c, mask=real, other=0.0).to(tl.float32)
            for p in range(low, high, BP):
                at, there, kept = _tile(high, p, c, rows, hw, channels, ROWS, BP)
                v = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
                out = (v - mean[None, :]) * inverse[None, :] * w[None, :] + b[None, :]
                if ROWS:
                    out = tl.where(kept, out, b[None, :])
                if RELU:
                    out = tl.where(out < 0.0, 0.0, out)  # NaN stays
                tl.store(y + at, out.to(y.dtype.element_ty), mask=there)

    @triton.jit(do_not_specialize=["hw"])
    def _backward(
        x, grad, dx, weight, bias, rows, starts, partial, moments, sums, hw, channels,
        RELU: tl.constexpr, ROWS: tl.constexpr, PHASE: tl.constexpr, G: tl.constexpr, SPLITS: tl.constexpr,
        BP: tl.constexpr, BC: tl.constexpr,
    ):  # fmt: skip
        """dx = (g w - mean(g w) - unit mean(g w unit)) / deviation, with g cut where ReLU was; phases as forward."""
        part, split = tl.program_id(0), tl.program_id(2)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        real = c < channels
        low, high = _range(starts, hw, part, split, SPLITS, BP)
        own = moments + part * 4 * channels + c
        mean = tl.load(own, mask=real, other=0.0)
        inverse = tl.load(own + 2 * channels, mask=real, other=0.0)
        n = tl.maximum(tl.load(own + 3 * channels, mask=real, other=1.0), 1.0)
        w = tl.load(weight + c, mask=real, other=0.0).to(tl.float32)
        b = tl.load(bias + c, mask=real, other=0.0).to(tl.float32)
        if PHASE == 2:
            total = _added(partial, part, c, 0, channels, 2, SPLITS)
            along = _added(partial, part, c, 1, channels, 2, SPLITS)
        else:
            totals = tl.zeros([BP, BC], tl.float32)
            alongs = tl.zeros([BP, BC], tl.float32)
            for p in range(low, high, BP):
                at, there, kept = _tile(high, p, c, rows, hw, channels, ROWS, BP)
                v = tl.load(x + at, mask=kept, other=0.0).to(tl.float32)
                g = tl.load(grad + at, mask=kept, other=0.0).to(tl.float32)
                unit = (v - mean[None, :]) * inverse[None, :]
                if RELU:
                    g = tl.where(unit * w[None, :] + b[None, :] > 0.0, g, 0.0)
                totals += g
                alongs += tl.where(kept, g * unit, 0.0)
            total, along = tl.sum(totals, 0), tl.sum(alongs, 0)
        if PHASE == 1:
            to = partial + (part * SPLITS + split) * 2 * channels + c
            tl.store(to, total, mask=real)
            tl.store(to + channels, along, mask=real)
        else:
            to = sums + part * 2 * channels + c
            tl.store(to, total, mask=real & (split == 0))
            tl.store(to + channels, along, mask=real & (split == 0))
            level = _pool(w * total, G, BC) / n
            slope = _pool(w * along, G, BC) / n
            for p in range(low, high, BP):
                at, there, kept = _tile(high, p, c, rows, hw, channels, ROWS, BP)
                v = tl.load(x + at, mask=kept, other=0.0).to(tl.float32)
                g = tl.load(grad + at, mask=kept, other=0.0).to(tl.float32)
                unit = (v - mean[None, :]) * inverse[None, :]
                if RELU:
                    g = tl.where(unit * w[None, :] + b[None, :] > 0.0, g, 0.0)
                d = inverse[None, :] * (g * w[None, :] - level[None, :] - unit * slope[None, :])
                if ROWS:
                    d = tl.where(kept, d, 0.0)
                tl.store(dx + at, d.to(dx.dtype.element_ty), mask=there)

    @triton.jit(do_not_specialize=["parts", "momentum"])
    def _move(
        moments, mean, var, tracked, offset, parts, channels, momentum,
        CUMULATIVE: tl.constexpr, OFFSET: tl.constexpr, BC: tl.constexpr,
    ):  # fmt: skip
        c = tl.arange(0, BC)
        real = c < channels
        m = tl.load(mean + c, mask=real, other=0.0)
        v = tl.load(var + c, mask=real, other=0.0)
        seen = tl.load(tracked)
        for part in range(parts):
            own = moments + part * 4 * channels + c
            n = tl.load(own + 3 * channels, mask=real, other=1.0)
            batch_var = tl.load(own + channels, mask=real, other=0.0) * n / tl.maximum(n - 1.0, 1.0)
            batch_mean = tl.load(own, mask=real, other=0.0)
            if OFFSET:
                batch_mean += tl.load(offset + c, mask=real, other=0.0).to(tl.float32)
            there = tl.load(moments + part * 4 * channels + 3 * channels) > 0
            seen += there.to(tl.int64)
            if CUMULATIVE:
                factor = 1.0 / tl.maximum(seen, 1).to(tl.float32)
            else:
                factor = momentum
            factor = tl.where(there, factor, 0.0)
            m = factor * batch_mean + (1.0 - factor) * m
            v = factor * batch_var + (1.0 - factor) * v
        tl.store(mean + c, m, mask=real)
        tl.store(var + c, v, mask=real)
        tl.debug_barrier()
        tl.store(tracked, seen)
