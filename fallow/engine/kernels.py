"""The local optimiser in two CUDA kernels: gradients gathered and measured, then the step; optim.py is the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fallow.engine.optim import BETA2, EPSILON, Optimizer
from fallow.models.fused import available, tl, triton

BLOCK = 4096
MOST_CALLS = 3


def usable(w: Tensor, heavy: Sequence[Tensor]) -> bool:
    return available(w) and len(heavy) <= MOST_CALLS


def step(
    optimizer: Optimizer, w: Tensor, heavy: Sequence[Tensor], rest: Tensor | None, lr: Tensor, when: Tensor | None,
    pull: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """One step on the flat weights `w`.

    The gradient is the sum of `heavy`, for the first entries, and `rest` behind them; `pull` is a strength and a
    reference: strength * (w - reference) is added before clipping.
    """
    o, n = optimizer.o, w.numel()
    programs = triton.cdiv(n, BLOCK)
    g, partial = torch.empty_like(w), torch.empty(programs, device=w.device)
    some = [*heavy, *[w] * (MOST_CALLS - len(heavy))]
    strength, reference = pull or (w, w)
    _gather[(programs,)](
        *some, w if rest is None else rest, w, strength, reference, g, partial, len(heavy[0]) if heavy else 0, n,
        o.clip_value or 0.0, CALLS=len(heavy), PULL=pull is not None, VALUE=o.clip_value is not None,
        NORM=o.clip is not None, B=BLOCK,
    )  # fmt: skip
    t = optimizer.tensors
    common = (g, partial, lr, w if when is None else when, n, programs, o.clip or 0.0, o.weight_decay)
    sizes: dict[str, Any] = {"NORM": o.clip is not None, "WHEN": when is not None, "P": triton.next_power_of_2(programs), "B": BLOCK}
    if optimizer.kind == "adam":
        made = t["step"].double() + 1
        powers = torch.stack([1 - o.momentum**made, 1 - BETA2**made]).float()
        _adam[(programs,)](w, t["mean"], t["square"], powers, *common, o.momentum, BETA2, EPSILON, **sizes)
        t["step"].add_(1.0 if when is None else when.to(t["step"].dtype))
    else:
        momentum = t.get("momentum", w)
        _sgd[(programs,)](
            w, momentum, *common, o.momentum, MOMENTUM=bool(o.momentum), NESTEROV=bool(o.nesterov), **sizes
        )


if triton is not None:

    @triton.jit(do_not_specialize=["limit"])
    def _gather(
        first, second, third, rest, w, strength, reference, g, partial, heavy, n, limit,
        CALLS: tl.constexpr, PULL: tl.constexpr, VALUE: tl.constexpr, NORM: tl.constexpr, B: tl.constexpr,
    ):  # fmt: skip
        i = tl.program_id(0) * B + tl.arange(0, B)
        v = tl.load(rest + i - heavy, mask=(i >= heavy) & (i < n), other=0.0).to(tl.float32)
        if CALLS > 0:
            v += tl.load(first + i, mask=i < heavy, other=0.0).to(tl.float32)
        if CALLS > 1:
            v += tl.load(second + i, mask=i < heavy, other=0.0).to(tl.float32)
        if CALLS > 2:
            v += tl.load(third + i, mask=i < heavy, other=0.0).to(tl.float32)
        if PULL:
            own, other = tl.load(w + i, mask=i < n, other=0.0), tl.load(reference + i, mask=i < n, other=0.0)
            v += tl.load(strength) * (own - other)
        if VALUE:
            v = tl.where(v > limit, limit, tl.where(v < -limit, -limit, v))  # NaN stays
        tl.store(g + i, v, mask=i < n)
        if NORM:
            tl.store(partial + tl.program_id(0), tl.sum(v * v, 0))

    @triton.jit
    def _direction(w, g, partial, i, n, programs, clip, decay, NORM: tl.constexpr, P: tl.constexpr):
        """Weights, and their gradient clipped, with weight decay."""
        x = tl.load(w + i, mask=i < n, other=0.0)
        v = tl.load(g + i, mask=i < n, other=0.0)
        if NORM:
            p = tl.arange(0, P)
            norm = tl.sqrt(tl.sum(tl.load(partial + p, mask=p < programs, other=0.0), 0))
            v *= tl.minimum(clip / (norm + 1e-6), 1.0)
        return x, v + decay * x

    @triton.jit(do_not_specialize=["clip", "decay", "mu"])
    def _sgd(
        w, momentum, g, partial, lr, when, n, programs, clip, decay, mu,
        MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, NORM: tl.constexpr, WHEN: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
    ):  # fmt: skip
        i = tl.program_id(0) * B + tl.arange(0, B)
        x, d = _direction(w, g, partial, i, n, programs, clip, decay, NORM, P)
        moved = i < n
        if WHEN:
            moved = moved & (tl.load(when) != 0)
        if MOMENTUM:
            m = tl.load(momentum + i, mask=i < n, other=0.0) * mu + d
            tl.store(momentum + i, m, mask=moved)
            if NESTEROV:
                d += mu * m
            else:
                d = m
        tl.store(w + i, x - tl.load(lr) * d, mask=moved)

    @triton.jit(do_not_specialize=["clip", "decay", "beta1", "beta2", "eps"])
    def _adam(
        w, mean, square, powers, g, partial, lr, when, n, programs, clip, decay, beta1, beta2, eps,
        NORM: tl.constexpr, WHEN: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
    ):  # fmt: skip
        i = tl.program_id(0) * B + tl.arange(0, B)
        x, d = _direction(w, g, partial, i, n, programs, clip, decay, NORM, P)
        moved = i < n
        if WHEN:
            moved = moved & (tl.load(when) != 0)
        m = beta1 * tl.load(mean + i, mask=i < n, other=0.0) + (1.0 - beta1) * d
        s = beta2 * tl.load(square + i, mask=i < n, other=0.0) + (1.0 - beta2) * d * d
        tl.store(mean + i, m, mask=moved)
        tl.store(square + i, s, mask=moved)
        move = (m / tl.load(powers)) / (tl.sqrt(s / tl.load(powers + 1)) + eps)
        tl.store(w + i, x - tl.load(lr) * move, mask=moved)
