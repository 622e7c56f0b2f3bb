"""Static batch normalisation: inference statistics made afresh for a model from data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fallow import draws
from fallow.engine.clients import SERVER, Request
from fallow.engine.nets import NetHandle
from fallow.engine.simulation import Simulation
from fallow.errors import UserError
from fallow.methods.state import State

BATCH = 250
AT_ONCE = 4  # batches in one pass on CUDA
Moments = tuple[int, Tensor, Tensor]  # how many, mean, sum of squared deviations, by channel
Found = dict[int, Moments]  # by layer, in the order in which a pass comes to them


Ask = Callable[..., list[Any]]  # Clients.ask


@torch.no_grad()
def static(simulation: Simulation, net: NetHandle, state: State, round: int, active: list[int], ask: Ask) -> State:
    """`state` with statistics: the key `sbn` says how. Only `federated` leaves images where they are."""
    o = simulation.kit.options
    net.load(state.only("parameters"))
    if _norms(net):  # else: buffers of the model's own
        if o.sbn == "federated":
            parties = [p for p, rows in _rows(simulation, active).items() if len(rows)]
            if not parties:
                raise _no_data()
            layerwise(net, order(net, simulation.kit.blank(2)), o.sbn_passes, partial(_asked, net, ask, round, parties))
        else:
            at_once = AT_ONCE if o.sbn == "cumulative" and simulation.kit.device.type == "cuda" else 1
            batches = Batches(simulation.plain, data_order(simulation, active), at_once)
            if o.sbn == "cumulative":
                cumulative(net, batches)
            else:
                norms = order(net, simulation.kit.blank(2))
                layerwise(net, norms, "exact", lambda done, end: [moments_between(net, norms, done, end, batches)])
    return State(state.layout, state.groups | {"statistics": net.flat.groups["statistics"].clone()})


def _asked(net: NetHandle, ask: Ask, round: int, parties: list[int], done: int, end: int) -> list[Found]:
    """What the parties answer about some layers, where those below are done; who does not answer takes no part."""
    sent = net.flat.clone()
    requests = [Request(p, round, {"model": sent, "number": n}) for n, p in enumerate(parties)]
    found = [answer for answer in ask("moments", requests, done=done, end=end) if answer]
    if not found:
        raise _no_data()
    return found


# -- whose images, in which order --------------------------------------------------------------------------------------
def data_order(simulation: Simulation, active: list[int]) -> np.ndarray:
    """Rows of the training set for a single pass: the server's list, then all other images in file order."""
    o, server = simulation.kit.options, simulation.federation.server.labelled
    if o.sbn_data == "all":
        rows = np.concatenate([server, np.setdiff1d(np.arange(len(simulation.images)), server)])
    else:
        rows = np.concatenate([np.zeros(0, np.int64), *_rows(simulation, active).values()])
    if not len(rows):
        raise _no_data()
    return rows[draws.permutation(simulation.kit.key("sbn"), len(rows)).numpy()] if o.sbn_order == "shuffled" else rows


def _rows(simulation: Simulation, active: list[int]) -> dict[int, np.ndarray]:
    """What the parties of `sbn_data` hold, the server first."""
    o = simulation.kit.options
    who = {"all": range(len(simulation.federation.clients)), "active": sorted(active), "server": ()}[o.sbn_data]
    return {party: simulation.site(party).rows for party in (SERVER, *who)}


def _no_data() -> UserError:
    return UserError("static statistics have no data to be made of", "use sbn_data=all, or statistics=batch")


class Batches:
    """Plain views of some rows, in batches or several of them joined, as often as one likes."""

    def __init__(self, plain: Callable[[np.ndarray], Tensor], rows: np.ndarray, at_once: int = 1):
        self.plain, self.rows, self.size = plain, rows, BATCH * at_once

    def __iter__(self) -> Iterator[Tensor]:
        for start in range(0, len(self.rows), self.size):
            yield self.plain(self.rows[start : start + self.size])


# -- how ---------------------------------------------------------------------------------------------------------------
def cumulative(net: NetHandle, batches: Iterable[Tensor]) -> None:
    """What the authors ran: layers normalise batch by batch, every batch weighs the same, variances are unbiased.

    `batches` may come several at once, joined: every `BATCH` images are one.
    """
    norms, counters = _norms(net), net.flat.groups["counters"]
    momenta, updates, counts = [m.momentum for m in norms], net.modes.updates_running, counters.clone()
    net.modes.updates_running = True
    counters.zero_()
    for m in norms:
        m.momentum = None  # the mean over all batches so far
    for x in batches:
        net.replayed("update", BATCH)(x)
    counters.copy_(counts)
    net.modes.updates_running = updates
    for m, momentum in zip(norms, momenta):
        m.momentum = momentum


def layerwise(net: NetHandle, norms: list[_BatchNorm], passes: int | str, ask: Callable[[int, int], list[Found]]) -> None:
    """Exact moments of every layer's input over all parties' images, in some passes.

    In each pass the layers done so far normalise by their final statistics, the others by the batch; a share of the
    layers is then fixed. As many passes as layers (`exact`) give self-consistent statistics that depend on no order,
    batching or partition; fewer are exact in the first layer only. `ask` gives each party's moments of layers first .. end - 1.
    """
    count = len(norms)
    total = count if passes == "exact" else min(int(passes), count)
    ends = [round(count * q / total) for q in range(total + 1)]
    for done, end in pairwise(ends):
        found = ask(done, end)
        for layer in range(done, end):
            n, mean, m2 = reduce(merge_moments, (f[layer] for f in found))
            for running, value in ((norms[layer].running_mean, mean), (norms[layer].running_var, m2 / n)):
                assert running is not None
                running.copy_(value)


def moments_between(net: NetHandle, norms: list[_BatchNorm], done: int, end: int, batches: Iterable[Tensor]) -> Found:
    """Moments of the inputs of layers done .. end - 1 over these images; layers below `done` are final."""
    found: Found = {}

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
    """Counts, means and sums of squared deviations of two sets as those of their union."""
    n = a[0] + b[0]
    mu = (a[0] * a[1] + b[0] * b[1]) / n
    m2 = a[2] + a[0] * (a[1] - mu) ** 2 + b[2] + b[0] * (b[1] - mu) ** 2
    return n, mu, m2


class _Reached(Exception):
    pass


def _norms(net: NetHandle) -> list[_BatchNorm]:
    return [m for m in net.module.modules() if isinstance(m, _BatchNorm)]


def order(net: NetHandle, x: Tensor) -> list[_BatchNorm]:
    """Batch norm layers in the order in which a pass comes to them."""
    found: list[_BatchNorm] = []
    handles = [m.register_forward_pre_hook(lambda m, _: found.append(m)) for m in _norms(net)]
    net(x, stats="batch")
    for h in handles:
        h.remove()
    return list(dict.fromkeys(found))
