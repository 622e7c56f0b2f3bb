"""Static batch normalisation: inference statistics made afresh for a model from data (methods chapter 13.6)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fallow import draws
from fallow.engine.nets import NetHandle
from fallow.engine.world import World
from fallow.errors import UserError
from fallow.methods.state import State

BATCH = 250
AT_ONCE = 4  # batches in one pass on CUDA
Moments = tuple[int, Tensor, Tensor]  # how many, mean, sum of squared deviations, by channel


@torch.no_grad()
def static(world: World, net: NetHandle, state: State, active: list[int]) -> State:
    """`state` with statistics: the key `sbn` says how."""
    o = world.options
    net.load(state.only("parameters"))
    if not _norms(net):  # buffers of the model's own
        return State(state.layout, state.groups | {"statistics": net.flat.groups["statistics"].clone()})
    if o.sbn == "federated":
        parties = [_Batches(world, rows) for rows in party_rows(world, active)]
        layerwise(net, parties, o.sbn_passes)
    else:
        rows = data_order(world, active)
        if o.sbn == "cumulative":
            cumulative(net, _Batches(world, rows, AT_ONCE if world.device.type == "cuda" else 1))
        else:
            layerwise(net, [_Batches(world, rows)], "exact")
    return State(state.layout, state.groups | {"statistics": net.flat.groups["statistics"].clone()})


# -- whose images, in which order --------------------------------------------------------------------------------------
def data_order(world: World, active: list[int]) -> np.ndarray:
    """Rows of the training set for a single pass: the server's list, then all other images in file order (13.6.2)."""
    o, server = world.options, world.federation.server.labelled
    if o.sbn_data == "all":
        rows = np.concatenate([server, np.setdiff1d(np.arange(len(world.images)), server)])
    else:
        rows = np.concatenate([np.zeros(0, np.int64), *_holdings(world, active)])
    if not len(rows):
        raise _no_data()
    return rows[draws.permutation(world.key("sbn"), len(rows)).numpy()] if o.sbn_order == "shuffled" else rows


def party_rows(world: World, active: list[int]) -> list[np.ndarray]:
    """Rows by party, each party's shuffled once (13.6.4). Images that nobody holds take no part."""
    parties = [rows for rows in _holdings(world, active) if len(rows)]
    if not parties:
        raise _no_data()
    return [rows[draws.permutation(world.key("sbn", number), len(rows)).numpy()] for number, rows in enumerate(parties)]


def _holdings(world: World, active: list[int]) -> list[np.ndarray]:
    """What the parties of `sbn_data` hold, the server first; a sample that is labelled and unlabelled counts once."""
    o, f = world.options, world.federation
    who = {"all": range(len(f.clients)), "active": sorted(active), "server": ()}[o.sbn_data]
    held = [f.server, *(f.clients[k] for k in who)]
    return [np.concatenate([h.labelled, h.unlabelled[~np.isin(h.unlabelled, h.labelled)]]) for h in held]


def _no_data() -> UserError:
    return UserError("static statistics have no data to be made of", "use sbn_data=all, or statistics=batch")


class _Batches:
    """Plain views of some rows, in batches or several of them joined, as often as one likes."""

    def __init__(self, world: World, rows: np.ndarray, at_once: int = 1):
        self.world, self.rows, self.size = world, rows, BATCH * at_once

    def __iter__(self) -> Iterator[Tensor]:
        for start in range(0, len(self.rows), self.size):
            part = self.rows[start : start + self.size]
            yield self.world.view("plain", part, torch.zeros(len(part), dtype=torch.int64))


# -- how ---------------------------------------------------------------------------------------------------------------
def cumulative(net: NetHandle, batches: Iterable[Tensor]) -> None:
    """What the authors ran: layers normalise batch by batch, every batch weighs the same, variances are unbiased.

    `batches` may come several at once, joined: every `BATCH` images are one.
    """
    norms, counters = _norms(net), net.flat.groups["counters"]
    momenta, tracks, counts = [m.momentum for m in norms], net.modes.tracks, counters.clone()
    net.modes.tracks = True
    counters.zero_()
    for m in norms:
        m.momentum = None  # the mean over all batches so far
    for x in batches:
        net.replayed("update", BATCH)(x)
    counters.copy_(counts)
    net.modes.tracks = tracks
    for m, momentum in zip(norms, momenta):
        m.momentum = momentum


def layerwise(net: NetHandle, parties: Sequence[Iterable[Tensor]], passes: int | str) -> None:
    """Exact moments of every layer's input over all parties' images, in some passes.

    In each pass the layers done so far normalise by their final statistics, the others by the batch; a share of the
    layers is then fixed. As many passes as layers (`exact`) give self-consistent statistics that depend on no order,
    batching or partition; fewer are exact in the first layer only.
    """
    norms = _execution_order(net, next(iter(parties[0])))
    count = len(norms)
    total = count if passes == "exact" else min(int(passes), count)
    ends = [round(count * q / total) for q in range(total + 1)]
    for done, end in pairwise(ends):
        found = [_moments(net, norms, done, end, batches) for batches in parties]
        for layer in range(done, end):
            n, mean, m2 = reduce(merge_moments, (f[layer] for f in found))
            for running, value in ((norms[layer].running_mean, mean), (norms[layer].running_var, m2 / n)):
                assert running is not None
                running.copy_(value)


def _moments(net: NetHandle, norms: list[_BatchNorm], done: int, end: int, batches: Iterable[Tensor]) -> dict[int, Moments]:
    """One party's moments of the inputs of layers done .. end - 1; layers below `done` are final."""
    found: dict[int, Moments] = {}

    def before(layer: int, x: Tensor) -> None:
        net.modes.stats = "running" if layer < done else "batch"
        if done <= layer < end:
            new = moments_of(x)
            found[layer] = merge_moments(found[layer], new) if layer in found else new
        if layer == end - 1:
            raise _Reached

    def after() -> None:
        net.modes.stats = "running"  # dropout stays off

    handles = [m.register_forward_pre_hook(lambda _, x, i=i: before(i, x[0])) for i, m in enumerate(norms)]
    handles += [m.register_forward_hook(lambda *_: after()) for m in norms]
    try:
        for x in batches:
            with suppress(_Reached):
                net(x, stats="running")
    finally:
        for h in handles:
            h.remove()
    return found


def moments_of(x: Tensor) -> Moments:
    """Of the values of each channel, axis 1."""
    wide = x.double().transpose(0, 1).flatten(1)
    mean = wide.mean(1)
    return wide.shape[1], mean, (wide - mean[:, None]).square().sum(1)


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Counts, means and sums of squared deviations of two sets as those of their union (13.6.4)."""
    n = a[0] + b[0]
    mu = (a[0] * a[1] + b[0] * b[1]) / n
    m2 = a[2] + a[0] * (a[1] - mu) ** 2 + b[2] + b[0] * (b[1] - mu) ** 2
    return n, mu, m2


class _Reached(Exception):
    pass


def _norms(net: NetHandle) -> list[_BatchNorm]:
    return [m for m in net.module.modules() if isinstance(m, _BatchNorm)]


def _execution_order(net: NetHandle, x: Tensor) -> list[_BatchNorm]:
    """Batch norm layers in the order in which a pass comes to them."""
    order: list[_BatchNorm] = []
    handles = [m.register_forward_pre_hook(lambda m, _: order.append(m)) for m in _norms(net)]
    net(x[:2], stats="batch")
    for h in handles:
        h.remove()
    return list(dict.fromkeys(order))
