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
    triton = None

SMALL = 16384  # positions of a part that one program per channel block takes alone
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def usable(x: Tensor, weight: Tensor | None, bias: Tensor | None, pooled: int = 1) -> bool:
    """Whether the kernels can take this map."""
    return (
        triton is not None
        and x.is_cuda
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


def move(moments: Tensor, mean: Tensor, var: Tensor, tracked: Tensor, momentum: float | None) -> None:
    """Running statistics follow the parts' moments, one part after the other."""
    parts, _, channels = moments.shape
    _move[(1,)](
        moments, mean, var, tracked, parts, channels, momentum or 0.0,
        CUMULATIVE=momentum is None, BC=triton.next_power_of_2(channels),
    )  # fmt: skip


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, sizes: tuple[int, ...], eps: float, relu: bool,
        rows: Tensor | None, pooled: int, plain: Any,
    ) -> Any:  # fmt: skip
        grid, shape, tiles = _tiling(x, sizes, pooled)
        y = torch.empty_like(x)
        moments = torch.empty(len(sizes), 4, x.shape[1], device=x.device)
        starts, partial = _starts(sizes, x.device), _partial(grid, x, 3)
        for phase in (1, 2) if grid[2] > 1 else (0,):
            _forward[grid](
                x, y, weight, bias, x if rows is None else rows, starts, partial, moments, *shape, eps,
                RELU=relu, ROWS=rows is not None, PHASE=phase, G=pooled, SPLITS=grid[2], **tiles,
            )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, moments, rows)
        ctx.sizes, ctx.eps, ctx.relu, ctx.pooled, ctx.plain = sizes, eps, relu, pooled, plain
        ctx.mark_non_differentiable(moments)
        return y, moments

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        x, weight, bias, moments, rows = ctx.saved_tensors
        none = (None,) * 6
        if torch.is_grad_enabled():
            y = ctx.plain(x, weight, bias)
            return *torch.autograd.grad(y, (x, weight, bias), grad, create_graph=True), *none
        grid, shape, tiles = _tiling(x, ctx.sizes, ctx.pooled)
        grad = grad.to(x.dtype).contiguous(memory_format=torch.channels_last)
        dx = torch.empty_like(x)
        sums = torch.empty(len(ctx.sizes), 2, x.shape[1], device=x.device)
        starts, partial = _starts(ctx.sizes, x.device), _partial(grid, x, 2)
        for phase in (1, 2) if grid[2] > 1 else (0,):
            _backward[grid](
                x, grad, dx, weight, bias, x if rows is None else rows, starts, partial, moments, sums, *shape,
                RELU=ctx.relu, ROWS=rows is not None, PHASE=phase, G=ctx.pooled, SPLITS=grid[2], **tiles,
            )  # fmt: skip
        dbias, dweight = sums[0] if len(sums) == 1 else sums.sum(0)
        return dx, dweight.to(weight.dtype), dbias.to(bias.dtype), *none


def _tiling(x: Tensor, sizes: tuple[int, ...], pooled: int) -> tuple[tuple[int, int, int], tuple[int, int], dict[str, int]]:
    """Programs by (part, channel block, split); positions per row and channels; tile sizes."""
    _, channels, height, width = x.shape
    positions = max(sizes) * height * width
    splits = 1 if positions <= SMALL else 8 if positions <= 2 * SMALL else 32 if positions <= 8 * SMALL else 128
    block = max(pooled, 8 if splits == 1 else 16)
    length = (256 if positions <= 256 else 1024) * 8 // block if splits == 1 else 4096 // block
    warps = max(1, min(16, length * block // 512))
    grid = (len(sizes), triton.cdiv(channels, block), splits)
    return grid, (height * width, channels), {"BP": length, "BC": block, "num_warps": warps}


def _partial(grid: tuple[int, int, int], x: Tensor, kinds: int) -> Tensor:
    if grid[2] == 1:
        return x  # not looked at
    return torch.empty(grid[0] * grid[2] * kinds * x.shape[1], device=x.device)


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
        """Offsets of a tile, which of its entries are there, which positions count."""
        pos = p + tl.arange(0, BP)
        there = pos < high
        kept = there
        if ROWS:
            kept = there & (tl.load(rows + pos // hw, mask=there, other=0) != 0)
        at = pos.to(tl.int64)[:, None] * channels + c[None, :]
        real = (c < channels)[None, :]
        return at, there[:, None] & real, kept[:, None] & real

    @triton.jit
    def _summed(partial, part, c, kind, KINDS: tl.constexpr, channels, SPLITS: tl.constexpr):
        s = tl.arange(0, SPLITS)
        at = partial + ((part * SPLITS + s)[:, None] * KINDS + kind) * channels + c[None, :]
        return tl.sum(tl.load(at, mask=(c < channels)[None, :], other=0.0), 0)

    @triton.jit(do_not_specialize=["hw"])
    def _forward(
        x, y, weight, bias, rows, starts, partial, moments, hw, channels, eps,
        RELU: tl.constexpr, ROWS: tl.constexpr, PHASE: tl.constexpr, G: tl.constexpr, SPLITS: tl.constexpr,
        BP: tl.constexpr, BC: tl.constexpr,
    ):  # fmt: skip
        """PHASE 0: statistics and output; 1: sums of this split; 2: output from the splits' sums."""
        part, split = tl.program_id(0), tl.program_id(2)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        real = c < channels
        low, high = _range(starts, hw, part, split, SPLITS, BP)
        first = tl.load(starts + part) * hw
        shift = tl.load(x + first.to(tl.int64) * channels + c, mask=real, other=0.0).to(tl.float32)
        shift = tl.where(tl.abs(shift) < 1e30, shift, 0.0)  # sums around a value near the mean lose no digits
        one = tl.zeros([BC], tl.float32)
        two = tl.zeros([BC], tl.float32)
        count = tl.zeros([BC], tl.float32)
        if PHASE != 2:
            sums = tl.zeros([BP, BC], tl.float32)
            squares = tl.zeros([BP, BC], tl.float32)
            number = tl.zeros([BP, BC], tl.float32)
            for p in range(low, high, BP):
                at, there, kept = _tile(high, p, c, rows, hw, channels, ROWS, BP)
                v = tl.load(x + at, mask=kept, other=0.0).to(tl.float32)
                d = tl.where(kept, v - shift[None, :], 0.0)
                sums += d
                squares += d * d
                number += kept.to(tl.float32)
            one, two, count = tl.sum(sums, 0), tl.sum(squares, 0), tl.sum(number, 0)
        if PHASE == 1:
            out_at = partial + (part * SPLITS + split) * 3 * channels + c
            tl.store(out_at, one, mask=real)
            tl.store(out_at + channels, two, mask=real)
            tl.store(out_at + 2 * channels, count, mask=real)
        else:
            if PHASE == 2:
                one = _summed(partial, part, c, 0, 3, channels, SPLITS)
                two = _summed(partial, part, c, 1, 3, channels, SPLITS)
                count = _summed(partial, part, c, 2, 3, channels, SPLITS)
            n = tl.maximum(count, 1.0)
            own = tl.where(count > 0, shift + one / n, 0.0)
            spread = tl.maximum(two - one * one / n, 0.0)
            mean = _pool(own, G, BC) / G
            var = _pool(spread + count * (own - mean) * (own - mean), G, BC) / (n * G)
            inverse = 1.0 / tl.sqrt(var + eps)
            if split == 0:
                out_at = moments + part * 4 * channels + c
                tl.store(out_at, mean, mask=real)
                tl.store(out_at + channels, var, mask=real)
                tl.store(out_at + 2 * channels, inverse, mask=real)
                tl.store(out_at + 3 * channels, count * G, mask=real)
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
        total = tl.zeros([BC], tl.float32)
        along = tl.zeros([BC], tl.float32)
        if PHASE != 2:
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
            out_at = partial + (part * SPLITS + split) * 2 * channels + c
            tl.store(out_at, total, mask=real)
            tl.store(out_at + channels, along, mask=real)
        else:
            if PHASE == 2:
                total = _summed(partial, part, c, 0, 2, channels, SPLITS)
                along = _summed(partial, part, c, 1, 2, channels, SPLITS)
            if split == 0:
                out_at = sums + part * 2 * channels + c
                tl.store(out_at, total, mask=real)
                tl.store(out_at + channels, along, mask=real)
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
    def _move(moments, mean, var, tracked, parts, channels, momentum, CUMULATIVE: tl.constexpr, BC: tl.constexpr):
        c = tl.arange(0, BC)
        real = c < channels
        m = tl.load(mean + c, mask=real, other=0.0)
        v = tl.load(var + c, mask=real, other=0.0)
        seen = tl.load(tracked)
        for part in range(parts):
            at = moments + part * 4 * channels + c
            n = tl.load(at + 3 * channels, mask=real, other=1.0)
            batch_var = tl.load(at + channels, mask=real, other=0.0) * n / tl.maximum(n - 1.0, 1.0)
            batch_mean = tl.load(at, mask=real, other=0.0)
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
