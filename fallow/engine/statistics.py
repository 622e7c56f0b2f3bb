"""Static batch normalisation: inference statistics made afresh for a model from data (methods chapter 13.6)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from fallow import draws
from fallow.engine.nets import NetHandle
from fallow.engine.world import World
from fallow.errors import UserError
from fallow.methods.state import State


def data_order(world: World, active: list[int]) -> np.ndarray:
    """Rows of the training set that statistics are made of, in order (13.6.2)."""
    o, f = world.options, world.federation
    listed = [f.server.labelled]
    if o.sbn_data == "all":
        rest = np.setdiff1d(np.arange(len(world.images)), f.server.labelled)
        listed.append(rest)
    elif o.sbn_data == "active":
        listed += [np.concatenate([f.clients[k].labelled, f.clients[k].unlabelled]) for k in sorted(active)]
    rows = np.concatenate(listed)
    if o.sbn_order == "shuffled":
        rows = rows[draws.permutation(world.key("sbn"), len(rows)).numpy()]
    return rows


def _batches(world: World, rows: np.ndarray, size: int = 250) -> Iterator[Tensor]:
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        yield world.view("plain", part, torch.zeros(len(part), dtype=torch.int64))


def _norms(net: NetHandle) -> list[nn.modules.batchnorm._BatchNorm]:
    return [m for m in net.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


@torch.no_grad()
def static(world: World, net: NetHandle, state: State, active: list[int]) -> State:
    """`state` with statistics: the key `sbn` says how."""
    net.load(state.only("parameters"))
    rows = data_order(world, active)
    if not len(rows):
        raise UserError("static statistics have no data to be made of", "use sbn_data=all, or statistics=batch")
    (cumulative if world.options.sbn == "cumulative" else pooled)(world, net, rows)
    return State(state.layout, state.groups | {"statistics": net.flat.groups["statistics"].clone()})


def cumulative(world: World, net: NetHandle, rows: np.ndarray) -> None:
    """Each batch weighs 1/J; layers normalise batch by batch (what the authors ran)."""
    norms = _norms(net)
    momenta = [m.momentum for m in norms]
    net.flat.groups["statistics"].zero_()
    tracks, net.modes.tracks = net.modes.tracks, True
    for number, x in enumerate(_batches(world, rows), start=1):
        for m in norms:
            m.momentum = 1.0 / number
        net(x, stats="update")
    net.modes.tracks = tracks
    for m, momentum in zip(norms, momenta):
        m.momentum = momentum


def pooled(world: World, net: NetHandle, rows: np.ndarray) -> None:
    """Exact self-consistent statistics: layer by layer, earlier layers already normalised by theirs (13.6.3)."""
    norms = _norms(net)
    for layer in _execution_order(world, net, rows):
        count, mean, m2 = 0, None, None
        for x in _batches(world, rows):
            seen = _input_of(net, norms[layer], x).double()
            n = seen.numel() // seen.shape[1]
            axes = [0, *range(2, seen.dim())]
            mu = seen.mean(axes)
            spread = ((seen - mu.view(1, -1, *[1] * (seen.dim() - 2))) ** 2).sum(axes)
            if mean is None or m2 is None:
                count, mean, m2 = n, mu, spread
            else:
                count, mean, m2 = merge_moments((count, mean, m2), (n, mu, spread))
        assert mean is not None and m2 is not None
        norms[layer].running_mean.copy_(mean)  # type: ignore[union-attr]
        norms[layer].running_var.copy_(m2 / count)  # type: ignore[union-attr]


def merge_moments(a: tuple[int, Tensor, Tensor], b: tuple[int, Tensor, Tensor]) -> tuple[int, Tensor, Tensor]:
    """Counts, means and sums of squared deviations of two sets as those of their union (13.6.4)."""
    n = a[0] + b[0]
    mu = (a[0] * a[1] + b[0] * b[1]) / n
    m2 = a[2] + a[0] * (a[1] - mu) ** 2 + b[2] + b[0] * (b[1] - mu) ** 2
    return n, mu, m2


class _Reached(Exception):
    pass


def _input_of(net: NetHandle, norm: nn.Module, x: Tensor) -> Tensor:
    caught: list[Tensor] = []

    def catch(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        caught.append(inputs[0])
        raise _Reached

    handle = norm.register_forward_pre_hook(catch)
    try:
        net(x, stats="running")
    except _Reached:
        pass
    finally:
        handle.remove()
    return caught[0]


def _execution_order(world: World, net: NetHandle, rows: np.ndarray) -> list[int]:
    norms, order = _norms(net), []
    handles = [m.register_forward_pre_hook(lambda m, _, i=i: order.append(i)) for i, m in enumerate(norms)]
    net(next(_batches(world, rows[:2])), stats="batch")
    for h in handles:
        h.remove()
    return list(dict.fromkeys(order))
